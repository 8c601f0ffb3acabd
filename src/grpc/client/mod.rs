//! The channel of clients.

mod builder;
mod error;

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use http::{Request, Response};
use tonic::Status;
use tonic::body::Body;
use tonic::transport::{Channel, Endpoint};
use tower_service::Service;

use crate::endpoint::RdmaConnectInfo;
use crate::transport::RdmaConnector;
use crate::transport::balance::{BalancedChannel, EndpointState, EndpointStatus};

pub use builder::RdmaChannelBuilder;
pub use error::ChannelError;

/// A channel for generated clients. Its calls go over RDMA without HTTP/2 if the server is an [`RdmaServer`](crate::RdmaServer) that is
/// within reach of an RDMA device, and over HTTP/2 elsewhere: over RDMA to other servers of this crate, and over TCP to
/// stock servers.
///
/// ```
/// # use tonic::transport::Server;
/// # use tonic_rdma::RdmaIncoming;
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let incoming = RdmaIncoming::bind("127.0.0.1:0").await?;
/// # let uri = format!("http://{}", incoming.local_addr());
/// # let (_reporter, service) = tonic_health::server::health_reporter();
/// # tokio::spawn(Server::builder().add_service(service).serve_with_incoming(incoming));
/// use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient}; // generated code, as it is
/// use tonic_rdma::RdmaChannel;
///
/// let channel = RdmaChannel::connect(uri).await?; // such as "http://ps0:50051"
/// let mut client = HealthClient::new(channel.clone());
/// let reply = client.check(HealthCheckRequest::default()).await?;
/// # drop(reply);
///
/// let info = channel.last_connection().expect("a connection was made");
/// println!("{} because {}", info.verdict(), info.reason());
/// # Ok(())
/// # }
/// ```
///
/// Clones are cheap and share the connections. A clone may have many calls in flight. Interceptors and tower layers take
/// the channel as they take tonic's `Channel`. Connections end when the last clone is dropped and the calls in flight are over.
///
/// # When a connection ends
///
/// A channel connects again when the next call needs a connection. Calls wait for a dial that is under way; the wait is a part of
/// their deadline. After a dial that failed, the next dial waits for a back-off, at first 100 ms, at last 10 s. Calls that come before
/// it fail at once with UNAVAILABLE and the reason of the last failure. A call that was in flight when its connection ended
/// fails with UNAVAILABLE, unless the server said that it has not begun the call (GOAWAY): such a call is sent once more, on a new
/// connection.
#[derive(Clone)]
pub struct RdmaChannel {
    inner: Inner,
}

#[derive(Clone)]
enum Inner {
    One { channel: Channel, connector: RdmaConnector, endpoint: Endpoint },
    Several(BalancedChannel),
}

impl RdmaChannel {
    /// Connects to one endpoint: a URI, or an [`Endpoint`] with settings.
    ///
    /// ```no_run
    /// # async fn example() -> Result<(), tonic_rdma::ChannelError> {
    /// use tonic_rdma::RdmaChannel;
    ///
    /// let channel = RdmaChannel::connect("http://ps0:50051").await?;
    /// # drop(channel);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The argument is no endpoint, or the endpoint can't be connected to.
    pub async fn connect<E>(endpoint: E) -> Result<Self, ChannelError>
    where
        E: TryInto<Endpoint>,
        E::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        Self::builder(builder::endpoint(endpoint)?).connect().await
    }

    /// Makes a channel to one endpoint. The first call connects.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tonic_rdma::ChannelError> {
    /// use tonic_rdma::RdmaChannel;
    ///
    /// let channel = RdmaChannel::connect_lazy("http://ps0:50051")?;
    /// assert!(channel.last_connection().is_none());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The argument is no endpoint.
    ///
    /// # Panics
    /// Outside a tokio runtime, as tonic's method does.
    pub fn connect_lazy<E>(endpoint: E) -> Result<Self, ChannelError>
    where
        E: TryInto<Endpoint>,
        E::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        Ok(Self::builder(builder::endpoint(endpoint)?).connect_lazy())
    }

    /// Returns a builder of a channel to one endpoint.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// use tonic::transport::Endpoint;
    /// use tonic_rdma::{Config, Policy, RdmaChannel};
    ///
    /// let endpoint = Endpoint::from_static("http://ps0:50051");
    /// let channel = RdmaChannel::builder(endpoint).config(Config::default().policy(Policy::Require)).connect_lazy();
    /// # drop(channel);
    /// # }
    /// ```
    pub fn builder(endpoint: Endpoint) -> RdmaChannelBuilder {
        RdmaChannelBuilder::new(builder::Target::One(endpoint))
    }

    /// Returns a builder of a channel that spreads its calls over several endpoints. An endpoint that is down gets no calls, and is dialled
    /// again by back-off, at first after 100 ms, at last every 10 s.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// use tonic::transport::Endpoint;
    /// use tonic_rdma::RdmaChannel;
    ///
    /// let endpoints = ["http://ps0:50051", "http://ps1:50051"].map(Endpoint::from_static);
    /// let channel = RdmaChannel::balance(endpoints).connect_lazy();
    /// assert_eq!(channel.endpoints().len(), 2);
    /// # }
    /// ```
    pub fn balance(endpoints: impl IntoIterator<Item = Endpoint>) -> RdmaChannelBuilder {
        RdmaChannelBuilder::new(builder::Target::Several(endpoints.into_iter().collect()))
    }

    /// Returns what was negotiated for the last connection; `None` before the first one. The counters in it are live.
    pub fn last_connection(&self) -> Option<RdmaConnectInfo> {
        match &self.inner {
            Inner::One { connector, .. } => connector.last_connection(),
            Inner::Several(channel) => {
                let up = |status: EndpointStatus| match status.state {
                    EndpointState::Up(info) => Some(info),
                    _ => None,
                };
                channel.endpoints().into_iter().find_map(up)
            }
        }
    }

    /// Returns the state of each endpoint, in the order in which they were given.
    pub fn endpoints(&self) -> Vec<EndpointStatus> {
        match &self.inner {
            Inner::One { endpoint, connector, .. } => {
                let state = connector.last_connection().map_or(EndpointState::Connecting, EndpointState::Up);
                vec![EndpointStatus { uri: endpoint.uri().clone(), state, calls: 0 }]
            }
            Inner::Several(channel) => channel.endpoints(),
        }
    }
}

impl fmt::Debug for RdmaChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RdmaChannel").field("endpoints", &self.endpoints()).finish()
    }
}

/// The response of a call on an [`RdmaChannel`].
#[must_use = "a call is not sent unless its future is polled"]
pub struct RdmaResponseFuture {
    inner: Pin<Box<dyn Future<Output = Result<Response<Body>, Status>> + Send>>,
}

impl fmt::Debug for RdmaResponseFuture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RdmaResponseFuture").finish_non_exhaustive()
    }
}

impl Future for RdmaResponseFuture {
    type Output = Result<Response<Body>, Status>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.inner.as_mut().poll(context)
    }
}

impl Service<Request<Body>> for RdmaChannel {
    type Response = Response<Body>;
    type Error = Status;
    type Future = RdmaResponseFuture;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Status>> {
        match &mut self.inner {
            Inner::One { channel, .. } => {
                channel.poll_ready(context).map_err(|error| Status::from_error(error.into()))
            }
            Inner::Several(channel) => {
                channel.poll_ready(context).map_err(|error| Status::from_error(error.into()))
            }
        }
    }

    fn call(&mut self, request: Request<Body>) -> RdmaResponseFuture {
        let inner: Pin<Box<dyn Future<Output = Result<Response<Body>, Status>> + Send>> =
            match &mut self.inner {
                Inner::One { channel, .. } => {
                    let response = channel.call(request);
                    Box::pin(async move { response.await.map_err(|error| Status::from_error(error.into())) })
                }
                Inner::Several(channel) => {
                    let response = channel.call(request);
                    Box::pin(async move { response.await.map_err(|error| Status::from_error(error.into())) })
                }
            };
        RdmaResponseFuture { inner }
    }
}
