//! The same server and the same client over each transport, and a comparison of what they came to.

use std::fmt::Debug;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::{PoisonError, RwLock};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use socket2::{Domain, Socket, Type};
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

use super::service::Habits;
use super::support::{Runtime, config};

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// What a scenario runs over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Over {
    /// tonic's own TCP, at both ends: what the others have to equal.
    Stock,
    /// RDMA.
    Rdma,
    /// Our two ends over TCP.
    Fallback,
}

/// Tests that count what the whole process holds run alone, all others side by side.
static PROCESS: RwLock<()> = RwLock::new(());

/// Runs a test beside others.
pub(crate) fn run<T>(runtime: Runtime, test: impl Future<Output = T>) -> T {
    let _beside = PROCESS.read().unwrap_or_else(PoisonError::into_inner);
    runtime.run(test)
}

/// Runs a test with the process to itself.
pub(crate) fn alone<T>(test: impl Future<Output = T>) -> T {
    let _alone = PROCESS.write().unwrap_or_else(PoisonError::into_inner);
    Runtime::Idle.run(test)
}

/// Runs a scenario over each transport, and demands that it comes out as over stock TCP. Gives back how that is.
pub(crate) fn unchanged<T: PartialEq + Debug, F: Future<Output = T>>(scenario: impl Fn(Over) -> F) -> T {
    let control = run(Runtime::CurrentThread, scenario(Over::Stock));
    for (over, runtime) in [
        (Over::Rdma, Runtime::Idle),
        (Over::Rdma, Runtime::MultiThread),
        (Over::Fallback, Runtime::CurrentThread),
    ] {
        let outcome = run(runtime, scenario(over));
        assert_eq!(outcome, control, "{over:?}, {runtime:?}: left; over stock TCP: right");
    }
    control
}

/// Waits until something is so; the test's own limit ends the waiting.
pub(crate) async fn until(mut so: impl FnMut() -> bool) {
    while !so() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// A port that nobody else is given, and where nobody listens yet.
pub(crate) struct Port {
    /// Bound, and not listening: connecting to it is refused, and a server may listen beside it.
    _socket: Socket,
    pub(crate) address: SocketAddr,
}

impl Port {
    pub(crate) fn reserve() -> Self {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.set_reuse_address(true).unwrap();
        socket.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
        let address = socket.local_addr().unwrap().as_socket().unwrap();
        Self { _socket: socket, address }
    }

    pub(crate) fn endpoint(&self) -> Endpoint {
        Endpoint::from_shared(format!("http://{}", self.address)).unwrap()
    }
}

/// A server; dropping it leaves it running until its runtime ends.
pub(crate) struct Running {
    pub(crate) address: SocketAddr,
    stop: oneshot::Sender<()>,
    server: JoinHandle<Result<(), Error>>,
}

impl Running {
    /// Begins a graceful shutdown; the server is gone when what this gives back is over.
    pub(crate) fn shut_down(self) -> JoinHandle<Result<(), Error>> {
        self.stop.send(()).unwrap();
        self.server
    }

    /// Shuts down gracefully, to the end.
    pub(crate) async fn end(self) {
        self.shut_down().await.unwrap().unwrap();
    }

    pub(crate) fn endpoint(&self) -> Endpoint {
        Endpoint::from_shared(format!("http://{}", self.address)).unwrap()
    }
}

impl Over {
    /// Serves `router` on `address`.
    pub(crate) async fn serve_at<L, B>(self, address: &str, router: Router<L>) -> Running
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
            // Runs on if nobody ever says so.
            if stopped.await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        match self {
            Self::Stock => {
                let incoming = TcpIncoming::bind(address.parse().unwrap()).unwrap().with_nodelay(Some(true));
                let address = incoming.local_addr().unwrap();
                let server = tokio::spawn(router.serve_with_incoming_shutdown(incoming, signal));
                Running { address, stop, server }
            }
            Self::Rdma | Self::Fallback => {
                let incoming = RdmaIncoming::bind_with(address, self.config()).await.unwrap();
                let address = incoming.local_addr();
                let server = tokio::spawn(router.serve_with_incoming_shutdown(incoming, signal));
                Running { address, stop, server }
            }
        }
    }

    /// Serves `habits` as `settings` say, on a free port.
    pub(crate) async fn serve(self, habits: &Habits, settings: impl FnOnce(Server) -> Server) -> Running {
        let router = settings(Server::builder()).add_service(GreeterServer::new(habits.clone()));
        self.serve_at("127.0.0.1:0", router).await
    }

    /// Serves `habits` on a port that was reserved.
    pub(crate) async fn serve_on(self, port: &Port, habits: &Habits) -> Running {
        let router = Server::builder().add_service(GreeterServer::new(habits.clone()));
        self.serve_at(&port.address.to_string(), router).await
    }

    /// Connects, and sees to it that the connection is what it is meant to be.
    pub(crate) async fn connect(self, endpoint: Endpoint) -> Result<Channel, Error> {
        if self == Self::Stock {
            return endpoint.connect().await;
        }
        let connector = self.connector();
        let channel = endpoint.connect_with_connector(connector.clone()).await?;
        let info = connector.last_connection().unwrap();
        let meant = if self == Self::Rdma { Verdict::Rdma } else { Verdict::Tcp };
        assert_eq!(info.verdict(), meant, "{}", info.reason());
        Ok(channel)
    }

    /// A channel that connects with its first call.
    pub(crate) fn connect_lazily(self, endpoint: &Endpoint) -> Channel {
        match self {
            Self::Stock => endpoint.connect_lazy(),
            Self::Rdma | Self::Fallback => endpoint.connect_with_connector_lazy(self.connector()),
        }
    }

    /// A client of a running server.
    pub(crate) async fn client(self, running: &Running) -> GreeterClient<Channel> {
        GreeterClient::new(self.connect(running.endpoint()).await.unwrap())
    }

    pub(crate) fn connector(self) -> RdmaConnector {
        RdmaConnector::with_config(self.config())
    }

    /// Without our own pings, so that only HTTP/2's can find out about a peer that hangs.
    fn config(self) -> tonic_rdma::Config {
        const NEVER: Duration = Duration::from_secs(3600);
        let config = config().ping(NEVER, NEVER);
        if self == Self::Fallback { config.policy(Policy::TcpOnly) } else { config }
    }
}
