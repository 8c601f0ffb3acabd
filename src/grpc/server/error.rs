//! The reasons why a server can't serve.

use std::io;

use crate::endpoint::ConfigError;

/// The error of a service or of a body.
pub(super) type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The reason why an [`RdmaServer`](super::RdmaServer) could not serve, or stopped.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// use tonic_rdma::{CallConfig, RdmaServer, ServeError};
///
/// let server = RdmaServer::new().calls(CallConfig::default().max_concurrent_streams(0));
/// let error = server.serve("127.0.0.1:0").await.unwrap_err();
/// assert!(matches!(error, ServeError::Config(_)), "{error}");
/// # }
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// A setting has a value that can't be used.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The address can't be listened on.
    #[error(transparent)]
    Listen(#[from] io::Error),
    /// tonic's server, which serves the HTTP/2 peers, failed.
    #[error(transparent)]
    Http2(#[from] tonic::transport::Error),
}
