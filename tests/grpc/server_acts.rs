//! A server whose handlers do what the name in the request says, and clients of it.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use tokio::sync::{Semaphore, oneshot};
use tokio::task::JoinHandle;
use tokio_stream::StreamExt as _;
use tonic::codegen::BoxStream;
use tonic::transport::Endpoint;
use tonic::{Request, Response, Status, Streaming};
use tonic_rdma::{CallConfig, RdmaChannel, RdmaError, RdmaIncoming, RdmaRequestExt as _, RdmaServer};
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;
use tonic_rdma_proto::greeter::greeter_server::{Greeter, GreeterServer};
use tonic_rdma_proto::greeter::{HelloReply, HelloRequest};

use crate::contexts::{is_inside, marked};
use support::{Runtime, config, say, until, within};

/// A client of the service.
pub(crate) type Client = GreeterClient<RdmaChannel>;

/// The service. Clones share the counts.
#[derive(Clone, Debug, Default)]
pub(crate) struct Acts {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    /// Handlers that wait.
    waiting: AtomicUsize,
    /// Handlers that were dropped while they waited.
    dropped: AtomicUsize,
    releases: Semaphore,
    /// The server that a handler calls.
    next: OnceLock<RdmaChannel>,
}

impl Default for Shared {
    fn default() -> Self {
        let [waiting, dropped] = [const { AtomicUsize::new(0) }; 2];
        Self { waiting, dropped, releases: Semaphore::new(0), next: OnceLock::new() }
    }
}

impl Acts {
    pub(crate) fn waiting(&self) -> usize {
        self.shared.waiting.load(Ordering::SeqCst)
    }

    pub(crate) fn dropped(&self) -> usize {
        self.shared.dropped.load(Ordering::SeqCst)
    }

    /// Lets so many waiting handlers go on.
    pub(crate) fn release(&self, handlers: usize) {
        self.shared.releases.add_permits(handlers);
    }

    /// Makes a call whose handler waits, once it waits.
    pub(crate) async fn held(&self, client: &Client) -> JoinHandle<Result<String, Status>> {
        let (mut client, before) = (client.clone(), self.waiting());
        let held = tokio::spawn(async move { say(&mut client, "wait").await });
        until(|| self.waiting() > before).await;
        held
    }

    /// Sets the server that handlers call.
    pub(crate) fn calls(&self, next: RdmaChannel) {
        self.shared.next.set(next).unwrap();
    }

    async fn wait(&self) {
        let mut waiting = Waiting { shared: &self.shared, released: false };
        self.shared.waiting.fetch_add(1, Ordering::SeqCst);
        self.shared.releases.acquire().await.unwrap().forget();
        waiting.released = true;
    }

    async fn act(&self, name: &str) -> Result<String, Status> {
        let (act, argument) = name.split_once(' ').unwrap_or((name, ""));
        match act {
            "wait" => self.wait().await,
            "panic" => panic!("as the test asked"),
            "yield" => tokio::task::yield_now().await,
            "sleep" => tokio::time::sleep(Duration::from_millis(argument.parse().unwrap())).await,
            "spin" => {
                let end = Instant::now() + Duration::from_micros(argument.parse().unwrap());
                while Instant::now() < end {
                    std::hint::spin_loop();
                }
            }
            "fail" => return Err(Status::data_loss(argument)),
            // A handler of a program that was not written for tasks.
            "block" => {
                let (mut client, name) = (GreeterClient::new(self.next()), argument.to_owned());
                let call = async move { say(&mut client, name).await };
                return tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(call));
            }
            "call" => {
                let mut client = GreeterClient::new(self.next());
                return marked(async move { say(&mut client, argument).await }).await;
            }
            "inside" => return Ok(is_inside().to_string()),
            "span" => {
                let span = tracing::Span::current();
                return Ok(span.metadata().map_or("none", |metadata| metadata.name()).into());
            }
            "spawn" => tokio::spawn(std::future::ready(())).await.unwrap(),
            _ => {}
        }
        Ok(name.into())
    }

    fn next(&self) -> RdmaChannel {
        self.shared.next.get().unwrap().clone()
    }
}

/// A handler that waits.
struct Waiting<'a> {
    shared: &'a Shared,
    released: bool,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.shared.waiting.fetch_sub(1, Ordering::SeqCst);
        self.shared.dropped.fetch_add(usize::from(!self.released), Ordering::SeqCst);
    }
}

#[tonic::async_trait]
impl Greeter for Acts {
    async fn say_hello(&self, request: Request<HelloRequest>) -> Result<Response<HelloReply>, Status> {
        if request.get_ref().name == "peer" {
            let native = request.connection().map(tonic_rdma::RdmaConnectInfo::is_native);
            let verdict = request.connection().map(|info| info.verdict().to_string());
            let message = format!(
                "{native:?} {verdict:?} {} {}",
                request.connection().unwrap().peer_addr() == request.remote_addr().unwrap(),
                request.local_addr().unwrap()
            );
            return Ok(Response::new(HelloReply { message }));
        }
        let message = self.act(&request.into_inner().name).await?;
        Ok(Response::new(HelloReply { message }))
    }

    /// Answers each name when its act is done. The first name may be `count N`: then N replies follow,
    /// whatever else comes. With `only N` the call ends after N names.
    async fn chat(
        &self,
        request: Request<Streaming<HelloRequest>>,
    ) -> Result<Response<BoxStream<HelloReply>>, Status> {
        let most =
            request.metadata().get("only").map_or(usize::MAX, |only| only.to_str().unwrap().parse().unwrap());
        if let Some(count) = request.metadata().get("count") {
            let count: usize = count.to_str().unwrap().parse().unwrap();
            let reply = |number: usize| Ok(HelloReply { message: number.to_string() });
            return Ok(Response::new(Box::pin(tokio_stream::iter((0..count).map(reply)))));
        }
        let acts = self.clone();
        let replies = request.into_inner().take(most).then(move |name| {
            let acts = acts.clone();
            async move { Ok(HelloReply { message: acts.act(&name?.name).await? }) }
        });
        Ok(Response::new(Box::pin(replies)))
    }
}

/// A running server.
pub(crate) struct Running {
    pub(crate) address: SocketAddr,
    stop: oneshot::Sender<()>,
    server: JoinHandle<Result<(), RdmaError>>,
}

impl Running {
    /// Begins the shutdown. The server has ended when the returned task has.
    pub(crate) fn shut_down(self) -> JoinHandle<Result<(), RdmaError>> {
        self.stop.send(()).unwrap();
        self.server
    }

    pub(crate) fn endpoint(&self) -> Endpoint {
        Endpoint::from_shared(format!("http://{}", self.address)).unwrap()
    }

    /// Connects a channel, and checks that its calls are native.
    pub(crate) async fn channel(&self) -> RdmaChannel {
        let channel = RdmaChannel::builder(self.endpoint()).config(config()).connect().await.unwrap();
        let info = channel.last_connection().unwrap();
        assert!(info.is_native(), "{}", info.reason());
        channel
    }

    pub(crate) async fn client(&self) -> Client {
        GreeterClient::new(self.channel().await)
    }
}

/// Serves `acts` on a free port.
pub(crate) async fn serve(acts: &Acts, limits: CallConfig) -> Running {
    serve_as(RdmaServer::new().calls(limits).add_service(GreeterServer::new(acts.clone()))).await
}

/// Serves `server` on a free port.
pub(crate) async fn serve_as(server: RdmaServer) -> Running {
    let incoming = RdmaIncoming::builder().config(config()).bind("127.0.0.1:0").await.unwrap();
    let address = incoming.local_addr();
    let (stop, stopped) = oneshot::channel::<()>();
    let signal = async {
        // If the handle was dropped, the server runs on.
        if stopped.await.is_err() {
            std::future::pending::<()>().await;
        }
    };
    let server = tokio::spawn(server.serve_with_incoming_shutdown(incoming, signal));
    Running { address, stop, server }
}

/// Runs `test` in each kind of runtime.
pub(crate) fn in_every_runtime<F: Future<Output = ()>>(test: impl Fn() -> F) {
    for runtime in Runtime::ALL {
        eprintln!("{runtime:?}");
        runtime.run(within(test()));
    }
}
