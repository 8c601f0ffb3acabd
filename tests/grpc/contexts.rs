//! A handler runs in no other call's context: whatever a caller sets for the time of its polls (a task-local,
//! a span, an OpenTelemetry context, a lock), no handler of another call begins within it.

use std::cell::Cell;
use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};

use tokio_stream::StreamExt as _;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::server::NamedService;
use tonic::{Request, Response, Status, Streaming};
use tonic_rdma::gather::{self, GatherCodec};
use tonic_rdma::{CallConfig, RdmaChannel, RdmaIncoming, RdmaServer};
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;
use tower::Layer as _;

use crate::gather_support::{self, Depot, Parcel};
use crate::server_acts::{Acts, in_every_runtime, serve};
use support::{Runtime, config, say, within};

/// Calls of each test.
const CALLS: u64 = 1000;

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Returns whether this thread polls a future of [`Marked`].
pub(crate) fn is_inside() -> bool {
    INSIDE.get()
}

/// A future whose polls have a context of their own.
pub(crate) struct Marked<F>(Pin<Box<F>>);

pub(crate) fn marked<F: Future>(future: F) -> Marked<F> {
    Marked(Box::pin(future))
}

impl<F: Future> Future for Marked<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let before = INSIDE.replace(true);
        let polled = self.0.as_mut().poll(context);
        INSIDE.set(before);
        polled
    }
}

/// A server and its callers share a runtime, and so the queue at which callers look.
#[test]
fn a_caller_that_looks_for_its_answer_runs_no_handler() {
    in_every_runtime(|| async {
        let running = serve(&Acts::default(), CallConfig::default()).await;
        let client = running.client().await;
        let call = |mut client: GreeterClient<RdmaChannel>| async move { say(&mut client, "inside").await };
        let calls = tokio::spawn(async move {
            for number in 0..CALLS {
                let (other, call) = (tokio::spawn(call(client.clone())), marked(call(client.clone())));
                assert_eq!(call.await.unwrap(), "false", "call {number}");
                assert_eq!(other.await.unwrap().unwrap(), "false", "call {number}, beside a marked one");
            }
        });
        calls.await.unwrap();
    });
}

/// Serves in a runtime of its own, until the returned value is dropped.
fn elsewhere<F: Future<Output = SocketAddr> + Send + 'static>(
    runtime: Runtime,
    serve: impl FnOnce() -> F + Send + 'static,
) -> (SocketAddr, tokio::sync::oneshot::Sender<()>) {
    let (give, take) = std::sync::mpsc::channel();
    let (end, ended) = tokio::sync::oneshot::channel::<()>();
    std::thread::spawn(move || {
        runtime.run_for_ever(async {
            give.send(serve().await).unwrap();
            let _ = ended.await;
        });
    });
    (take.recv().unwrap(), end)
}

/// Serves `acts` on a free port, for ever.
async fn serve_acts(acts: Acts) -> SocketAddr {
    let running = serve(&acts, CallConfig::default()).await;
    let address = running.address;
    tokio::spawn(async move {
        let _running = running;
        std::future::pending::<()>().await;
    });
    address
}

async fn client_of(address: SocketAddr) -> GreeterClient<RdmaChannel> {
    GreeterClient::new(gather_support::connect(address, CallConfig::default()).await)
}

/// A server whose handlers call another server, each in a context of its own, while calls of other clients
/// arrive.
#[test]
fn a_handler_that_calls_another_server_runs_no_handler() {
    for runtime in Runtime::ALL {
        let (backend, _backend) = elsewhere(Runtime::Idle, || serve_acts(Acts::default()));
        let (address, _front) = elsewhere(runtime, move || async move {
            let acts = Acts::default();
            acts.calls(gather_support::connect(backend, CallConfig::default()).await);
            serve_acts(acts).await
        });
        Runtime::MultiThread.run(within(async {
            let ended = Arc::new(AtomicBool::new(false));
            let mut asking = Vec::new();
            for _ in 0..3 {
                let (mut client, ended) = (client_of(address).await, Arc::clone(&ended));
                asking.push(tokio::spawn(async move {
                    while !ended.load(Ordering::Relaxed) {
                        assert_eq!(say(&mut client, "inside").await.unwrap(), "false", "{runtime:?}");
                    }
                }));
            }
            let mut client = client_of(address).await;
            for _ in 0..CALLS {
                assert_eq!(say(&mut client, "call now").await.unwrap(), "now");
            }
            ended.store(true, Ordering::Relaxed);
            for task in asking {
                task.await.unwrap();
            }
        }));
    }
}

/// Passes on the parcels of the depot.
#[derive(Clone)]
struct Relay(RdmaChannel);

impl NamedService for Relay {
    const NAME: &'static str = "test.Relay";
}

impl Service<http::Request<Body>> for Relay {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<http::Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let channel = self.0.clone();
        Box::pin(async move {
            let service = tower::service_fn(move |request: Request<Streaming<Parcel>>| {
                let channel = channel.clone();
                async move {
                    let parcels = request.into_inner().map_while(Result::ok);
                    Ok::<_, Status>(Response::new(gather_support::echo(channel, parcels).await?))
                }
            });
            let codec = GatherCodec::<Parcel, Parcel>::default();
            Ok(tonic::server::Grpc::new(codec).streaming(service, request).await)
        })
    }
}

/// One service is under the layer of gather, and one beside it is not: no message of one call reaches, or
/// lacks, a byte of another call.
#[test]
fn a_gathered_reply_gets_no_field_of_another_call() {
    const LENGTHS: [usize; 4] = [10, 200, 40_000, 1000];
    for runtime in Runtime::ALL {
        let plain =
            || async { gather_support::serve(&Depot::new(1 << 20), None, CallConfig::default()).await };
        let (backend, _backend) = elsewhere(Runtime::Idle, plain);
        let (address, _front) = elsewhere(runtime, move || async move {
            let relay = Relay(gather_support::connect(backend, CallConfig::default()).await);
            let incoming = RdmaIncoming::builder().config(config()).bind("127.0.0.1:0").await.unwrap();
            let address = incoming.local_addr();
            let server = RdmaServer::new()
                .add_service(gather::GatherBothLayer::new().layer(relay))
                .add_service(Depot::new(1 << 20));
            tokio::spawn(server.serve_with_incoming(incoming));
            address
        });
        Runtime::MultiThread.run(within(async {
            let (relayed, mut tasks) = (Arc::new(AtomicU64::new(0)), Vec::new());
            for caller in 0..3_u64 {
                let channel = gather_support::connect(address, CallConfig::default()).await;
                let relayed = Arc::clone(&relayed);
                tasks.push(tokio::spawn(async move {
                    let mut seed = caller << 32;
                    while relayed.load(Ordering::Relaxed) < CALLS {
                        let parcel = gather_support::get(channel.clone(), seed, 100_000).await.unwrap();
                        assert_eq!((parcel.seed, parcel.first.len()), (seed, 100_000), "{runtime:?}");
                        parcel.check();
                        seed += 1;
                    }
                }));
            }
            let channel = gather_support::connect(address, CallConfig::default()).await;
            let parcels = (0..CALLS).map(|seed| Parcel::new(seed, LENGTHS[seed as usize % 4], &[], None));
            let mut replies = gather_support::stream_to(
                gather_support::path_of("test.Relay", "Echo"),
                channel,
                tokio_stream::iter(parcels),
            )
            .await
            .unwrap();
            for seed in 0..CALLS {
                let parcel = gather_support::next(&mut replies).await.unwrap().unwrap();
                assert_eq!((parcel.seed, parcel.first.len()), (seed, LENGTHS[seed as usize % 4]));
                parcel.check();
                relayed.fetch_add(1, Ordering::Relaxed);
            }
            for task in tasks {
                task.await.unwrap();
            }
        }));
    }
}
