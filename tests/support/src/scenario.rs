//! Runs one server and one client over each transport, and compares the outcomes.

use std::fmt::Debug;
use std::future::Future;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use tokio::net::TcpSocket;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::body::Body;
use tonic::service::Routes;
use tonic::transport::server::{Router, TcpIncoming};
use tonic::transport::{Channel, Endpoint, Error, Server};
use tonic_rdma::{Policy, RdmaConnector, RdmaIncoming, Verdict};
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;
use tonic_rdma_proto::greeter::greeter_server::GreeterServer;
use tower::{Layer, Service};

use crate::{Runtime, ScriptedGreeter, config};

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The transport that a scenario runs over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Over {
    /// tonic's own TCP at both ends. The outcomes over the other transports must equal the outcome over this
    /// one.
    Stock,
    /// RDMA.
    Rdma,
    /// TCP between two of our ends.
    Fallback,
}

/// Runs a scenario over each transport, checks that each outcome equals the outcome over stock TCP, and
/// returns that outcome.
pub fn unchanged<T: PartialEq + Debug, F: Future<Output = T>>(scenario: impl Fn(Over) -> F) -> T {
    let control = Runtime::CurrentThread.run(scenario(Over::Stock));
    for (over, runtime) in [
        (Over::Rdma, Runtime::Idle),
        (Over::Rdma, Runtime::MultiThread),
        (Over::Fallback, Runtime::CurrentThread),
    ] {
        let outcome = runtime.run(scenario(over));
        assert_eq!(outcome, control, "{over:?}, {runtime:?}: left; over stock TCP: right");
    }
    control
}

/// A port that the kernel gives to no other socket, and on which no server listens yet.
pub struct Port {
    /// Bound, but not listening: the kernel refuses connections, and a server may listen on the same port.
    _socket: TcpSocket,
    /// The address with the port.
    pub address: SocketAddr,
}

impl Port {
    /// Reserves a port of 127.0.0.1.
    pub fn reserve() -> Self {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_reuseaddr(true).unwrap();
        socket.bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let address = socket.local_addr().unwrap();
        Self { _socket: socket, address }
    }

    /// Returns the endpoint by which clients reach this address.
    pub fn endpoint(&self) -> Endpoint {
        Endpoint::from_shared(format!("http://{}", self.address)).unwrap()
    }
}

/// A running server. After a drop of this handle the server runs on until its runtime ends.
pub struct RunningServer {
    /// The address that the server listens on.
    pub address: SocketAddr,
    stop: oneshot::Sender<()>,
    server: JoinHandle<Result<(), Error>>,
}

impl RunningServer {
    /// Begins a graceful shutdown. The server has ended when the returned task has.
    pub fn shut_down(self) -> JoinHandle<Result<(), Error>> {
        self.stop.send(()).unwrap();
        self.server
    }

    /// Shuts down gracefully, and waits for the end.
    pub async fn end(self) {
        self.shut_down().await.unwrap().unwrap();
    }

    /// Returns the endpoint by which clients reach this address.
    pub fn endpoint(&self) -> Endpoint {
        Endpoint::from_shared(format!("http://{}", self.address)).unwrap()
    }
}

impl Over {
    /// Finds a transport by the name that `Debug` prints.
    pub fn named(name: &str) -> Self {
        let all = [Self::Stock, Self::Rdma, Self::Fallback];
        all.into_iter().find(|over| format!("{over:?}") == name).expect("the name of a transport")
    }

    /// Serves `router` on `address`.
    pub async fn serve_at<L, B>(self, address: &str, router: Router<L>) -> RunningServer
    where
        L: Layer<Routes> + Clone + Send + 'static,
        L::Service: Service<Request<Body>, Response = Response<B>> + Clone + Send + 'static,
        <L::Service as Service<Request<Body>>>::Future: Send,
        <L::Service as Service<Request<Body>>>::Error: Into<BoxError> + Send,
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let (stop, stopped) = oneshot::channel::<()>();
        let signal = async {
            // If the handle was dropped, the server runs on.
            if stopped.await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        match self {
            Self::Stock => {
                let incoming = TcpIncoming::bind(address.parse().unwrap()).unwrap().with_nodelay(Some(true));
                let address = incoming.local_addr().unwrap();
                let server = tokio::spawn(router.serve_with_incoming_shutdown(incoming, signal));
                RunningServer { address, stop, server }
            }
            Self::Rdma | Self::Fallback => {
                let incoming = RdmaIncoming::builder().config(self.config()).bind(address).await.unwrap();
                let address = incoming.local_addr();
                let server = tokio::spawn(router.serve_with_incoming_shutdown(incoming, signal));
                RunningServer { address, stop, server }
            }
        }
    }

    /// Serves `greeter` on a free port, with the server changed by `settings`.
    pub async fn serve(
        self,
        greeter: &ScriptedGreeter,
        settings: impl FnOnce(Server) -> Server,
    ) -> RunningServer {
        let router = settings(Server::builder()).add_service(GreeterServer::new(greeter.clone()));
        self.serve_at("127.0.0.1:0", router).await
    }

    /// Serves `greeter` on a reserved port.
    pub async fn serve_on(self, port: &Port, greeter: &ScriptedGreeter) -> RunningServer {
        let router = Server::builder().add_service(GreeterServer::new(greeter.clone()));
        self.serve_at(&port.address.to_string(), router).await
    }

    /// Connects, and checks that the connection goes over the expected transport.
    pub async fn connect(self, endpoint: Endpoint) -> Result<Channel, Error> {
        if self == Self::Stock {
            return endpoint.connect().await;
        }
        let connector = self.connector();
        let channel = endpoint.connect_with_connector(connector.clone()).await?;
        let info = connector.last_connection().unwrap();
        let expected = if self == Self::Rdma { Verdict::Rdma } else { Verdict::Tcp };
        assert_eq!(info.verdict(), expected, "{}", info.reason());
        Ok(channel)
    }

    /// Returns a channel that connects with its first call.
    pub fn connect_lazily(self, endpoint: &Endpoint) -> Channel {
        match self {
            Self::Stock => endpoint.connect_lazy(),
            Self::Rdma | Self::Fallback => endpoint.connect_with_connector_lazy(self.connector()),
        }
    }

    /// Connects a client to a running server.
    pub async fn client(self, running: &RunningServer) -> GreeterClient<Channel> {
        GreeterClient::new(self.connect(running.endpoint()).await.unwrap())
    }

    /// Returns a connector with the settings of this transport.
    pub fn connector(self) -> RdmaConnector {
        RdmaConnector::new().config(self.config())
    }

    /// Returns settings without our own pings, so that only HTTP/2's pings can find a peer that hangs.
    fn config(self) -> tonic_rdma::Config {
        const NEVER: Duration = Duration::from_secs(3600);
        let config = config().ping_interval(NEVER).ping_timeout(NEVER);
        if self == Self::Fallback { config.policy(Policy::TcpOnly) } else { config }
    }
}
