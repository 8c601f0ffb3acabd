//! The stream of connections for servers, which `tonic::transport::Server` takes.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::net::{TcpListener, ToSocketAddrs};
use tokio_stream::Stream;
use tonic::transport::server::Connected;

use crate::endpoint::{Config, EndpointStream, Listener, RdmaConnectInfo};

/// Connections of RDMA peers and of stock gRPC clients, on one port.
///
/// ```no_run
/// # async fn example(service: tonic::service::Routes) -> Result<(), Box<dyn std::error::Error>> {
/// use tonic::transport::Server;
/// use tonic_rdma::RdmaIncoming;
///
/// let incoming = RdmaIncoming::bind("0.0.0.0:50051").await?;
/// Server::builder().add_routes(service).serve_with_incoming(incoming).await?;
/// # Ok(())
/// # }
/// ```
///
/// tonic's graceful shutdown works as over TCP: `serve_with_incoming_shutdown` drops this stream, which closes the
/// port, and lets the connections finish.
#[derive(Debug)]
pub struct RdmaIncoming {
    listener: Listener,
}

impl RdmaIncoming {
    /// Listens on `address` with the configuration of the environment ([`Config::from_env`]).
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> std::io::Result<()> {
    /// use tonic_rdma::RdmaIncoming;
    ///
    /// let incoming = RdmaIncoming::bind("127.0.0.1:0").await?; // port 0 takes a free one
    /// println!("listening on {}", incoming.local_addr());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The address does not resolve, is in use, or needs a right that this user lacks, or a variable has a value that can't be used. The error
    /// names the cause, and says what to do.
    pub async fn bind(address: impl ToSocketAddrs) -> io::Result<Self> {
        let config =
            Config::from_env().map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        Self::bind_with(address, config).await
    }

    /// Listens on `address` with this configuration. The environment does not change it.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use tonic_rdma::{Config, Policy, RdmaIncoming};
    ///
    /// let config = Config::default().policy(Policy::Require);
    /// let incoming = RdmaIncoming::bind_with("127.0.0.1:0", config).await?;
    /// # drop(incoming);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The address can't be listened on, as for [`bind`](Self::bind), or the configuration has a value that can't be used.
    pub async fn bind_with(address: impl ToSocketAddrs, config: Config) -> io::Result<Self> {
        Self::from_listener(TcpListener::bind(address).await.map_err(explain)?, config)
    }

    /// Takes over a listening socket, such as a socket from systemd or a socket with options of your own.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> std::io::Result<()> {
    /// use tokio::net::TcpSocket;
    /// use tonic_rdma::{Config, RdmaIncoming};
    ///
    /// let socket = TcpSocket::new_v4()?;
    /// socket.set_reuseaddr(true)?;
    /// socket.bind("127.0.0.1:0".parse().expect("an address"))?;
    /// let incoming = RdmaIncoming::from_listener(socket.listen(1024)?, Config::default())?;
    /// # drop(incoming);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The configuration has a value that can't be used, or the socket has no local address.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn from_listener(listener: TcpListener, config: Config) -> io::Result<Self> {
        Ok(Self { listener: Listener::new(listener, config)? })
    }

    /// Returns the listener, whose connections may carry native calls.
    pub(crate) fn into_listener(self) -> Listener {
        self.listener
    }

    /// Returns the address that the listener listens on.
    pub fn local_addr(&self) -> SocketAddr {
        self.listener.local_addr()
    }
}

impl Stream for RdmaIncoming {
    type Item = io::Result<EndpointStream>;

    fn poll_next(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<io::Result<EndpointStream>>> {
        Pin::new(&mut self.listener).poll_next(context).map(|next| next.map(Ok))
    }
}

impl Connected for EndpointStream {
    type ConnectInfo = RdmaConnectInfo;

    fn connect_info(&self) -> RdmaConnectInfo {
        self.info().clone()
    }
}

/// An address that the listener could not take, with advice. The source is the system's error.
#[derive(Debug, thiserror::Error)]
#[error("{advice}")]
struct BindError {
    advice: &'static str,
    source: io::Error,
}

/// Adds advice to the error of a socket that could not be bound.
fn explain(error: io::Error) -> io::Error {
    let advice = match error.kind() {
        io::ErrorKind::AddrInUse => {
            "the address is in use: another process listens there; stop it or take another port (0 picks a free one)"
        }
        io::ErrorKind::PermissionDenied => {
            "permission denied: ports below 1024 need CAP_NET_BIND_SERVICE; take a higher port or grant the capability"
        }
        io::ErrorKind::AddrNotAvailable => {
            "the address is not available: no interface of this machine has that address"
        }
        _ => return error,
    };
    io::Error::new(error.kind(), BindError { advice, source: error })
}
