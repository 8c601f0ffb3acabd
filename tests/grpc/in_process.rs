//! Calls that stay in the process: where handlers run, what each end may refuse, how servers and runtimes end.

use std::error::Error as _;
use std::future::{Future, poll_fn};
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};

use tokio::sync::{mpsc, oneshot};
use tokio_stream::StreamExt as _;
use tonic::codegen::BoxStream;
use tonic::transport::Endpoint;
use tonic::transport::channel::Change;
use tonic::{Code, Request, Response, Status, Streaming};
use tonic_rdma::{
    CallConfig, Config, EndpointState, RdmaChannel, RdmaError, RdmaErrorKind, RdmaIncoming,
    RdmaRequestExt as _, RdmaServer, Verdict,
};
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;
use tonic_rdma_proto::greeter::greeter_server::{Greeter, GreeterServer};
use tonic_rdma_proto::greeter::{HelloReply, HelloRequest};

use crate::gather_support::{Depot, Parcel, both, get, put, serve_with};
use support::{Port, Runtime, ScriptedGreeter, say, until, within};

fn config(in_process: bool) -> Config {
    support::config().in_process(in_process)
}

/// Serves until the returned sender is used or dropped.
async fn serve<G: Greeter>(
    greeter: G,
    address: SocketAddr,
    config: Config,
) -> (SocketAddr, oneshot::Sender<()>, tokio::task::JoinHandle<()>) {
    serve_within(CallConfig::default(), greeter, address, config).await
}

/// Serves with these limits of calls.
async fn serve_within<G: Greeter>(
    limits: CallConfig,
    greeter: G,
    address: SocketAddr,
    config: Config,
) -> (SocketAddr, oneshot::Sender<()>, tokio::task::JoinHandle<()>) {
    let incoming = RdmaIncoming::builder().config(config).bind(address).await.unwrap();
    let (address, (stop, stopped)) = (incoming.local_addr(), oneshot::channel::<()>());
    let server = RdmaServer::new().calls(limits).add_service(GreeterServer::new(greeter));
    let server = server.serve_with_incoming_shutdown(incoming, async { drop(stopped.await) });
    (address, stop, tokio::spawn(async { server.await.unwrap() }))
}

fn any() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

async fn connect(address: SocketAddr, config: Config) -> RdmaChannel {
    let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
    within(RdmaChannel::builder(endpoint).config(config).connect()).await.unwrap()
}

fn is_in_process(channel: &RdmaChannel) -> bool {
    channel.last_connection().unwrap().is_in_process()
}

tokio::task_local! {
    static OF_THE_CALLER: ();
}

/// Says what the handler sees: the caller's task-local, and the connection. Has the thread that polls the
/// caller.
#[derive(Clone, Debug, Default)]
struct Looks(Arc<Mutex<Option<ThreadId>>>);

#[tonic::async_trait]
impl Greeter for Looks {
    async fn say_hello(&self, request: Request<HelloRequest>) -> Result<Response<HelloReply>, Status> {
        let info = request.connection().unwrap();
        let sees = OF_THE_CALLER.try_with(|()| ()).is_ok();
        assert_ne!(*self.0.lock().unwrap(), Some(thread::current().id()), "the caller is in its poll");
        let message = format!("{sees} {} {}", info.is_in_process(), info.is_native());
        Ok(Response::new(HelloReply { message }))
    }
}

#[test]
fn a_handler_never_runs_inside_of_the_callers_poll() {
    for runtime in Runtime::ALL {
        runtime.run(async {
            let looks = Looks::default();
            let (address, _stop, _server) = serve(looks.clone(), any(), config(true)).await;
            let channel = connect(address, config(true)).await;
            assert!(is_in_process(&channel));
            let mut client = GreeterClient::new(channel);
            // A handler inside of a poll would find its own thread.
            let call = OF_THE_CALLER.scope((), async {
                let mut call = pin!(say(&mut client, ""));
                poll_fn(|context| {
                    *looks.0.lock().unwrap() = Some(thread::current().id());
                    let polled = call.as_mut().poll(context);
                    *looks.0.lock().unwrap() = None;
                    polled
                })
                .await
            });
            assert_eq!(call.await.unwrap(), "false true true");
        });
    }
}

#[test]
fn each_end_may_keep_calls_on_the_device() {
    Runtime::Idle.run(async {
        for (server, client) in [(true, false), (false, true), (false, false), (true, true)] {
            let (address, _stop, _server) = serve(Looks::default(), any(), config(server)).await;
            let channel = connect(address, config(client)).await;
            let info = channel.last_connection().unwrap();
            assert_eq!(info.is_in_process(), server && client, "{}", info.reason());
            assert_eq!(info.reason().contains("in this process"), server && client);
            assert_eq!((info.verdict(), info.is_native()), (Verdict::Rdma, true));
            let seen = say(&mut GreeterClient::new(channel), "").await.unwrap();
            assert_eq!(seen, format!("false {} true", server && client));
        }
    });
}

/// A server that shuts down answers all calls that have begun, and refuses others with UNAVAILABLE.
#[test]
fn the_end_of_a_server_under_load_loses_no_call() {
    for runtime in Runtime::ALL {
        runtime.run(async {
            let greeter = ScriptedGreeter::new();
            let (address, stop, server) = serve(greeter.clone(), any(), config(true)).await;
            let channel = connect(address, config(true)).await;
            let answered = Arc::new(AtomicUsize::new(0));
            let callers: Vec<_> = (0..16)
                .map(|_| {
                    let (mut client, answered) = (GreeterClient::new(channel.clone()), Arc::clone(&answered));
                    tokio::spawn(async move {
                        loop {
                            match say(&mut client, "x").await {
                                Ok(reply) => assert_eq!(reply, "x"),
                                Err(status) => return status.code(),
                            }
                            answered.fetch_add(1, Ordering::SeqCst);
                            tokio::task::yield_now().await;
                        }
                    })
                })
                .collect();
            until(|| answered.load(Ordering::SeqCst) > 500).await;
            stop.send(()).unwrap();
            server.await.unwrap();
            for caller in callers {
                assert_eq!(caller.await.unwrap(), Code::Unavailable);
            }
            assert_eq!(greeter.calls(), answered.load(Ordering::SeqCst));
        });
    }
}

/// The call that has begun is answered. Those that wait for room are sent again, but nobody listens.
#[test]
fn a_server_that_shuts_down_waits_for_calls_that_have_begun() {
    for runtime in Runtime::ALL {
        runtime.run(async {
            let (greeter, limits) = (ScriptedGreeter::new(), CallConfig::default().max_concurrent_streams(1));
            let (address, stop, server) = serve_within(limits, greeter.clone(), any(), config(true)).await;
            let channel = connect(address, config(true)).await;
            assert!(is_in_process(&channel));
            let call = || {
                let mut client = GreeterClient::new(channel.clone());
                tokio::spawn(async move { say(&mut client, "hold").await })
            };
            let begun = call();
            until(|| greeter.held() == 1).await;
            let waiting = [call(), call()];
            stop.send(()).unwrap();
            for waiting in waiting {
                let refused = within(waiting).await.unwrap().unwrap_err();
                let reason = refused.source().unwrap().downcast_ref::<RdmaError>().unwrap();
                assert_eq!((refused.code(), reason.kind()), (Code::Unavailable, RdmaErrorKind::Unreachable));
            }
            assert!(!server.is_finished());
            greeter.release(1);
            assert!(within(begun).await.unwrap().is_ok());
            within(server).await.unwrap();
            assert_eq!((greeter.calls(), greeter.most_held()), (1, 1));
        });
    }
}

#[test]
fn a_call_that_waits_for_room_begins_when_another_has_ended_or_is_cancelled() {
    for runtime in Runtime::ALL {
        runtime.run(async {
            let (greeter, limits) = (ScriptedGreeter::new(), CallConfig::default().max_concurrent_streams(1));
            let (address, _stop, _server) = serve_within(limits, greeter.clone(), any(), config(true)).await;
            let channel = connect(address, config(true)).await;
            let call = |name: &'static str| {
                let mut client = GreeterClient::new(channel.clone());
                tokio::spawn(async move { say(&mut client, name).await })
            };
            let first = call("hold");
            until(|| greeter.held() == 1).await;
            let (given_up, waiting) = (call("hold"), call("waits"));
            tokio::task::yield_now().await;
            given_up.abort();
            assert!(given_up.await.unwrap_err().is_cancelled());
            first.abort();
            assert_eq!(within(waiting).await.unwrap().unwrap(), "waits");
            assert_eq!((greeter.dropped(), greeter.most_held()), (1, 1));
        });
    }
}

/// It is sent to another server then. A call that has begun fails.
#[test]
fn a_call_that_waits_for_room_outlives_its_connection() {
    Runtime::MultiThread.run(async {
        let [greeter, other] = [(); 2].map(|()| ScriptedGreeter::new());
        let limits = CallConfig::default().max_concurrent_streams(1);
        let (elsewhere, served) =
            (Elsewhere::new(), serve_within(limits, greeter.clone(), any(), config(true)));
        let (first, _stop, _server) = elsewhere.run(served).await;
        let (second, _stop, _server) = serve(other.clone(), any(), config(true)).await;
        let builder = RdmaChannel::balance([]).config(config(true));
        let (channel, changes) = builder.balance_channel(2);
        let insert = async |address| {
            let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
            changes.send(Change::Insert(address, endpoint)).await.unwrap();
        };
        insert(first).await;
        let call = |name: &'static str| {
            let mut client = GreeterClient::new(channel.clone());
            tokio::spawn(async move { say(&mut client, name).await })
        };
        let begun = call("hold");
        until(|| greeter.held() == 1).await;
        let waiting = call("waits");
        until(|| channel.endpoints()[0].calls == 2).await;
        insert(second).await;
        let is_up = |state: &EndpointState| matches!(state, EndpointState::Up(_));
        until(|| channel.endpoints().into_iter().filter(|it| is_up(&it.state)).count() == 2).await;
        drop(elsewhere);
        assert_eq!(within(begun).await.unwrap().unwrap_err().code(), Code::Unavailable);
        assert_eq!(within(waiting).await.unwrap().unwrap(), "waits");
        assert_eq!((greeter.calls(), other.calls()), (1, 1));
    });
}

/// Answers when it has the first message. A task reads on, and passes on how the request ends.
struct AnswersEarly(mpsc::UnboundedSender<Option<Status>>);

#[tonic::async_trait]
impl Greeter for AnswersEarly {
    async fn chat(
        &self,
        request: Request<Streaming<HelloRequest>>,
    ) -> Result<Response<BoxStream<HelloReply>>, Status> {
        let (mut names, end) = (request.into_inner(), self.0.clone());
        assert!(names.message().await?.is_some());
        tokio::spawn(async move {
            end.send(loop {
                match names.message().await {
                    Ok(Some(_)) => {}
                    other => break other.err(),
                }
            })
        });
        Ok(Response::new(Box::pin(tokio_stream::empty())))
    }
}

/// tonic takes CANCELLED of a request for its end.
#[test]
fn a_task_that_reads_on_after_the_answer_sees_that_the_request_was_cut_short() {
    for (runtime, in_process) in Runtime::ALL.into_iter().zip([true, false].into_iter().cycle()) {
        runtime.run(async {
            let (sender, mut ends) = mpsc::unbounded_channel();
            let (address, _stop, _server) = serve(AnswersEarly(sender), any(), config(in_process)).await;
            let mut client = GreeterClient::new(connect(address, config(in_process)).await);
            let names = tokio_stream::once(HelloRequest::default()).chain(tokio_stream::pending());
            let mut replies = within(client.chat(names)).await.unwrap().into_inner();
            assert!(within(replies.message()).await.unwrap().is_none());
            let end = within(ends.recv()).await.unwrap();
            assert_eq!(end.expect("the request has no end").code(), Code::Internal);
        });
    }
}

/// A runtime of its own, on a thread of its own, that ends when this is dropped.
struct Elsewhere(Option<tokio::runtime::Runtime>);

impl Elsewhere {
    fn new() -> Self {
        Self(Some(
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap(),
        ))
    }

    async fn run<T: Send + 'static>(&self, task: impl Future<Output = T> + Send + 'static) -> T {
        within(self.0.as_ref().unwrap().spawn(task)).await.unwrap()
    }
}

impl Drop for Elsewhere {
    fn drop(&mut self) {
        let runtime = self.0.take().unwrap();
        // In a thread of its own, because a task may not wait for the end of a runtime.
        thread::spawn(|| drop(runtime)).join().unwrap();
    }
}

#[test]
fn a_server_whose_runtime_ends_fails_its_calls_and_another_takes_its_place() {
    Runtime::MultiThread.run(async {
        let (port, greeter) = (Port::reserve(), ScriptedGreeter::new());
        let (mut address, mut channel) = (port.address, None);
        for _ in 0..3 {
            let elsewhere = Elsewhere::new();
            let served = greeter.clone();
            let (at, _stop, _server) =
                elsewhere.run(async move { serve(served, address, config(true)).await }).await;
            address = at;
            if channel.is_none() {
                channel = Some(connect(address, config(true)).await);
            }
            let channel = channel.as_ref().unwrap();
            let client = &mut GreeterClient::new(channel.clone());
            // The channel sees the end of the old connection soon.
            while say(client, "hello").await.is_err() {
                tokio::task::yield_now().await;
            }
            assert!(is_in_process(channel));
            let mut other = client.clone();
            let held = tokio::spawn(async move { say(&mut other, "hold").await });
            until(|| greeter.held() == 1).await;
            drop(elsewhere);
            let ended = within(held).await.unwrap().unwrap_err();
            assert_eq!(ended.code(), Code::Unavailable, "{ended}");
            until(|| greeter.held() == 0).await;
        }
        assert_eq!(greeter.dropped(), 3);
    });
}

#[test]
fn a_client_whose_runtime_ends_lets_go_of_the_handler() {
    Runtime::MultiThread.run(async {
        let greeter = ScriptedGreeter::new();
        let (address, _stop, _server) = serve(greeter.clone(), any(), config(true)).await;
        let elsewhere = Elsewhere::new();
        let channel = elsewhere.run(async move { connect(address, config(true)).await }).await;
        assert!(is_in_process(&channel));
        // One call lives in that runtime, and one here.
        let calls = [0, 1].map(|place| {
            let mut client = GreeterClient::new(channel.clone());
            let call = async move { say(&mut client, "hold").await };
            if place == 0 { elsewhere.0.as_ref().unwrap().spawn(call) } else { tokio::spawn(call) }
        });
        until(|| greeter.held() == 2).await;
        drop(elsewhere);
        let [there, here] = calls;
        assert!(within(there).await.unwrap_err().is_cancelled());
        assert_eq!(within(here).await.unwrap().unwrap_err().code(), Code::Unavailable);
        until(|| greeter.held() == 0).await;
    });
}

#[test]
fn large_fields_arrive_whole_and_aligned_both_ways() {
    const LIMIT: usize = 64 << 20;
    for runtime in Runtime::ALL {
        runtime.run(async {
            let depot = Depot::new(LIMIT);
            let address = serve_with(&depot, Some(LIMIT), CallConfig::default(), config(true)).await;
            let channel = connect(address, config(true)).await;
            assert!(is_in_process(&channel));
            for (length, seed) in [0, 1, 4096, 70_000, 262_145, (8 << 20) + 1].into_iter().zip(1..) {
                let receipt =
                    put(both(&channel, LIMIT), Parcel::new(seed, length, &[5000], None)).await.unwrap();
                assert_eq!(receipt.seed, seed);
                assert!(length < 4096 || (receipt.misaligned, receipt.together) == (0, true), "{receipt:?}");
                let parcel = get(both(&channel, LIMIT), seed, length).await.unwrap();
                assert_eq!((parcel.seed, parcel.first.len()), (seed, length));
                parcel.check();
            }
            // The limits of the layer and of the wrapper hold, too.
            let refused = put(both(&channel, LIMIT), Parcel::new(1, LIMIT + 1, &[], None)).await.unwrap_err();
            assert_eq!(refused.code(), Code::OutOfRange, "{refused}");
            let refused = get(both(&channel, 50_000), 3, 50_000).await.unwrap_err();
            assert_eq!(refused.code(), Code::OutOfRange, "{refused}");
            get(both(&channel, 50_000), 3, 49_900).await.unwrap().check();
        });
    }
}

/// The sender of a stream waits for room while replies go the other way.
#[test]
fn streams_longer_than_the_window_go_on_in_both_directions() {
    const COUNT: usize = 300;
    for runtime in Runtime::ALL {
        runtime.run(async {
            let (address, _stop, _server) = serve(ScriptedGreeter::new(), any(), config(true)).await;
            let mut client = GreeterClient::new(connect(address, config(true)).await);
            let names = (0..COUNT).map(|number| HelloRequest { name: format!("{number:060000}") });
            let mut replies = client.chat(tokio_stream::iter(names)).await.unwrap().into_inner();
            for number in 0..COUNT {
                let reply = within(replies.message()).await.unwrap().unwrap();
                assert_eq!(reply.message, format!("{number:060000}"));
            }
            assert!(replies.message().await.unwrap().is_none());
        });
    }
}
