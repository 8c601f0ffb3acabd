//! The options of `devices`.

use clap::Args;

/// The options of `devices`.
#[derive(Debug, Args)]
pub(crate) struct DevicesOptions {
    /// Test each usable device: SEND, WRITE and READ between two queue pairs of this process
    #[arg(long)]
    pub(crate) check: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}
