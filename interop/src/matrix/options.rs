//! The command line.

use std::path::PathBuf;

use clap::Parser;

use crate::Failure;
use crate::direction::Direction;
use crate::peer::Peer;

/// Runs stock gRPC peers against our transport, in all directions. Started by `interop/matrix`, which installs the peers;
/// from the repository's root.
#[derive(Debug, Parser)]
#[command(name = "interop-matrix", version)]
pub(crate) struct Options {
    /// Peers, of: tonic, python, node, ruby, go, cpp, cpp-official [default: all]
    #[arg(long, value_name = "NAME[,NAME...]", value_delimiter = ',')]
    pub(crate) peers: Vec<Peer>,
    /// Directions [default: all]; the controls that belong to them run as well
    #[arg(long, value_name = "NAME[,NAME...]", value_delimiter = ',')]
    pub(crate) directions: Vec<Direction>,
    /// Run nothing that was not asked for: what is n/a, or known to fail, passes for that without a look at the control, and
    /// peers are not asked for their versions
    #[arg(long)]
    pub(crate) no_controls: bool,
    /// Cases [default: all that `interop client --list` names; with TLS those that it can change]
    #[arg(long, value_name = "NAME[,NAME...]", value_delimiter = ',')]
    pub(crate) cases: Vec<String>,
    /// What carries RDMA: soft, or a device of the feature ibverbs, such as rxe0 (rxe and siw: the first of the kind)
    #[arg(long, default_value = "soft")]
    pub(crate) provider: String,
    /// Write every single result to this file
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Combinations of peer and direction at once
    #[arg(long, value_name = "NUMBER", default_value = "2", value_parser = jobs)]
    pub(crate) jobs: usize,
    /// Folder with the installed peers
    #[arg(long, value_name = "DIR", default_value = "target/interop")]
    pub(crate) stock: PathBuf,
}

fn jobs(text: &str) -> Result<usize, Failure> {
    match text.parse()? {
        jobs @ 1..=64 => Ok(jobs),
        other => Err(format!("{other} jobs; the program takes 1 to 64").into()),
    }
}
