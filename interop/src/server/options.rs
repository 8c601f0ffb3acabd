//! Options of the command `server`.

use clap::Args;

use crate::tls::ServerTlsOptions;
use crate::transport::Transport;

/// Options of `server`.
#[derive(Debug, Args)]
pub(crate) struct ServerOptions {
    /// Port to listen on; 0 picks a free one
    #[arg(long, default_value_t = 0)]
    pub(crate) port: u16,
    /// Address to listen on
    #[arg(long, default_value = "127.0.0.1")]
    pub(crate) host: String,
    /// Transport of the calls: ours, ours with native calls, or tonic's own TCP as a control
    #[arg(long, default_value = "rdma")]
    pub(crate) transport: Transport,
    #[command(flatten)]
    pub(crate) tls: ServerTlsOptions,
}
