//! Measures a small native call: without generated code and with it, beside a stream without a reader, and
//! beside a large transfer.
//!
//! ```sh
//! cargo bench --bench native                              # all
//! cargo bench --bench native -- rungs --seconds 3         # a call without generated code, and with it
//! cargo bench --bench native -- together                  # the same, one caller, client and server on one thread
//! cargo bench --bench native -- in-process                # calls that stay in the process, beside calls that don't
//! cargo bench --bench native -- blocked --rounds 9        # 31 callers, alone and beside a blocked stream
//! cargo bench --bench native -- beside                    # one caller, alone and beside transfers of 64 MiB
//! ```
//!
//! All calls of a measurement go over one connection. The bench starts itself once more as the server
//! process. Each process has a core of its own, and a runtime that polls when it is idle. What the
//! device takes of a call, a message and its answer, is measured by
//! `cargo bench -p tonic-rdma-verbs --bench soft_device -- perf send 64`.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a bench that can't run says so by stopping")]
#![allow(clippy::panic, clippy::print_stdout, missing_docs, reason = "the same")]

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use tokio::task::JoinSet;
use tokio_stream::StreamExt as _;
use tonic::body::Body;
use tonic::codegen::BoxStream;
use tonic::server::NamedService;
use tonic::transport::Endpoint;
use tonic::{Request, Response, Status, Streaming};
use tower_service::Service;

use tonic_rdma::gather::{self, GatherBoth};
use tonic_rdma::memory::Pool;
use tonic_rdma::{Config, RdmaChannel, RdmaIncoming, RdmaServer};
use tonic_rdma_commands::clap::{self, Parser, ValueEnum};
use tonic_rdma_commands::cores::{self, Cores};
use tonic_rdma_commands::process::{self, Child};
use tonic_rdma_commands::statistics::{median, quantile};
use tonic_rdma_commands::{Flavour, bench_options};
use tonic_rdma_proto::transfer::transfer_client::TransferClient;
use tonic_rdma_proto::transfer::transfer_server::{Transfer, TransferServer};
use tonic_rdma_proto::transfer::{PutReply, PutRequest};

/// Length of small payloads, in bytes.
const LENGTH: usize = 64;
/// Length of large payloads, in bytes.
const LARGE: usize = 64 << 20;
/// Callers beside a blocked stream.
const CALLERS: usize = 31;

#[derive(Debug, Parser)]
struct Options {
    #[arg(value_enum, default_value = "all")]
    what: What,
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    #[arg(long, default_value_t = 0.5)]
    seconds: f64,
    /// Measures everything once, for a moment.
    #[arg(long)]
    test: bool,
    /// The core of this process.
    #[arg(long, hide = true)]
    core: Option<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum What {
    All,
    Rungs,
    Together,
    InProcess,
    Blocked,
    Beside,
    #[value(hide = true)]
    Server,
}

fn main() {
    let Options { what, mut rounds, mut seconds, test, core } = bench_options();
    if what == What::Server {
        return serve(core);
    }
    if test {
        (rounds, seconds) = (1, 0.01);
    }
    let length = Duration::from_secs_f64(seconds);
    let cores = Cores::choose();
    let core = cores.map(|cores| cores.client);
    let does = |which| what == which || what == What::All;
    if does(What::InProcess) {
        println!("in a runtime with several workers, as tokio builds it:");
        // Before this thread gets a core of its own.
        Flavour::multi_thread().build().unwrap().block_on(in_process(None, rounds, length));
        println!("on one thread, which polls when it is idle:");
        let (_server, uri) = start(cores.map(|cores| cores.server));
        run(core, in_process(Some(&uri), rounds, length));
    }
    if does(What::Together) {
        run(core, together(rounds, length));
    }
    if matches!(what, What::Together | What::InProcess) {
        return;
    }
    let (_server, uri) = start(cores.map(|cores| cores.server));
    run(core, async {
        let client = Client::connect(&uri).await;
        if does(What::Rungs) {
            rungs(&client, &[1, 32], rounds, length).await;
        }
        if does(What::Blocked) {
            blocked(&client, rounds, length).await;
        }
        if does(What::Beside) {
            beside(&client, rounds, length).await;
        }
    });
}

/// Runs `future` on a core, in a runtime that polls when it is idle. On a machine with one core both
/// processes stay there.
fn run<T>(core: Option<usize>, future: impl Future<Output = T>) -> T {
    if let Some(core) = core {
        cores::pin(core).unwrap();
    }
    Flavour::IdlePolling.build().unwrap().block_on(future)
}

/// Measures calls of this thread to itself. Nothing waits for another core, so these times are the work of
/// both sides.
async fn together(rounds: usize, length: Duration) {
    let (uri, server) = bind().await;
    tokio::spawn(server);
    println!("client and server on one thread:");
    rungs(&Client::connect(&uri).await, &[1], rounds, length).await;
}

/// Measures calls that stay in the process, in turns with calls over the software device: to this process, and
/// to the server process at `other`.
async fn in_process(other: Option<&str>, rounds: usize, length: Duration) {
    let mut clients = Vec::new();
    for (name, allowed) in [("in the process", true), ("over the device, to this process", false)] {
        let (uri, server) = bind_with(Config::default().in_process(allowed)).await;
        tokio::spawn(server);
        clients.push((name, Client::with(&uri, Config::default().in_process(allowed)).await));
    }
    if let Some(uri) = other {
        clients.push(("over the device, to another process", Client::connect(uri).await));
    }
    let mut alone = Vec::new();
    for kind in [CallKind::Plain, CallKind::Generated] {
        let mut figures: Vec<Vec<Figures>> = clients.iter().map(|_| Vec::new()).collect();
        for _ in 0..rounds {
            if kind == CallKind::Generated {
                alone.push(Figures::of(without_a_channel(length).await, length));
            }
            for ((_, client), figures) in clients.iter().zip(&mut figures) {
                figures.push(Figures::of(client.calls(kind, 1, length).await, length));
            }
        }
        let p50: Vec<_> = figures.iter().map(|rounds| median(rounds.iter().map(|it| it.p50))).collect();
        for ((index, (name, _)), figures) in clients.iter().enumerate().zip(figures) {
            show(&format!("{kind:?} {name}"), figures);
            if index > 0 {
                println!("  a call in the process takes {:.2} of it", p50[0] / p50[index]);
            }
        }
    }
    show("Generated without a channel", alone);
}

/// Makes calls of the service itself, without a channel and without a task. Returns their times, which
/// generated code takes of each call.
async fn without_a_channel(length: Duration) -> Vec<Duration> {
    let mut client = TransferClient::new(TransferServer::new(PlainService));
    let (mut times, end) = (Vec::with_capacity(1 << 18), Instant::now() + length);
    loop {
        let start = Instant::now();
        let request = PutRequest { payload: Bytes::from_static(&[0; LENGTH]), ..PutRequest::default() };
        assert_eq!(client.put(request).await.unwrap().into_inner().bytes, LENGTH as u64);
        let now = Instant::now();
        times.push(now - start);
        if now >= end {
            return times;
        }
    }
}

async fn rungs(client: &Client, inflight: &[usize], rounds: usize, length: Duration) {
    for &inflight in inflight {
        for kind in [CallKind::Plain, CallKind::Generated] {
            let mut figures = Vec::new();
            for _ in 0..rounds {
                figures.push(Figures::of(client.calls(kind, inflight, length).await, length));
            }
            show(&format!("{kind:?} × {inflight}"), figures);
        }
    }
}

async fn blocked(client: &Client, rounds: usize, length: Duration) {
    let (mut alone, mut beside, mut costs) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        let before = Figures::of(client.calls(CallKind::Generated, CALLERS, length).await, length);
        let stream = client.block().await;
        let during = Figures::of(client.calls(CallKind::Generated, CALLERS, length).await, length);
        drop(stream);
        costs.push((1.0 - during.rate / before.rate) * 100.0);
        alone.push(before);
        beside.push(during);
    }
    show(&format!("× {CALLERS}"), alone);
    show(&format!("× {CALLERS} beside a blocked stream"), beside);
    println!("the blocked stream costs {:.1} % of the calls, the median of the rounds", median(costs));
}

async fn beside(client: &Client, rounds: usize, length: Duration) {
    let (mut alone, mut beside, mut times) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        let before = Figures::of(client.calls(CallKind::Generated, 1, length).await, length);
        let goes_on = Arc::new(AtomicBool::new(true));
        let transfers = tokio::spawn(client.clone().transfer(LARGE, Arc::clone(&goes_on)));
        // The first transfer touches fresh memory.
        tokio::time::sleep(Duration::from_millis(50)).await;
        let during = Figures::of(client.calls(CallKind::Generated, 1, length).await, length);
        goes_on.store(false, Ordering::Relaxed);
        assert!(transfers.await.unwrap() > 0);
        times.push(during.p99 / before.p99);
        alone.push(before);
        beside.push(during);
    }
    show("× 1", alone);
    show("× 1 beside transfers of 64 MiB", beside);
    println!(
        "beside a transfer p99 is {:.1} × that of a call alone, the median of the rounds",
        median(times)
    );
}

/// The figures of one round, in microseconds, and thousands of calls a second.
struct Figures {
    p50: f64,
    p99: f64,
    rate: f64,
}

impl Figures {
    fn of(times: Vec<Duration>, length: Duration) -> Self {
        let micros = || times.iter().map(|time| time.as_secs_f64() * 1e6);
        let rate = times.len() as f64 / length.as_secs_f64() / 1e3;
        Self { p50: quantile(micros(), 0.5), p99: quantile(micros(), 0.99), rate }
    }
}

fn show(name: &str, rounds: Vec<Figures>) {
    let of = |figure: fn(&Figures) -> f64| median(rounds.iter().map(figure));
    let (p50, p99, rate) = (of(|it| it.p50), of(|it| it.p99), of(|it| it.rate));
    println!("{name}: p50 {p50:.2} µs, p99 {p99:.2} µs, {rate:.1} k calls/s");
}

/// A way to make a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CallKind {
    /// A request and a response with bodies of bytes, without generated code.
    Plain,
    /// tonic's generated code.
    Generated,
}

/// One connection.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    plain: RdmaChannel,
    generated: TransferClient<RdmaChannel>,
    /// The same, with large fields by reference.
    gathering: TransferClient<GatherBoth<RdmaChannel>>,
}

impl Client {
    pub(crate) async fn connect(uri: &str) -> Self {
        Self::with(uri, Config::default()).await
    }

    async fn with(uri: &str, config: Config) -> Self {
        let endpoint = Endpoint::from_shared(uri.to_owned()).unwrap();
        let channel = RdmaChannel::builder(endpoint).config(config).connect().await.unwrap();
        assert!(channel.last_connection().is_some_and(|info| info.is_native()));
        let generated = TransferClient::new(channel.clone());
        let gathering = TransferClient::new(gather::GatherBoth::new(channel.clone()));
        let client = Self { plain: channel, generated, gathering };
        client.clone().call(CallKind::Generated).await;
        client
    }

    /// Makes one small call.
    async fn call(&mut self, kind: CallKind) {
        match kind {
            CallKind::Plain => {
                let body = Body::new(Full::new(Bytes::from_static(&[0; LENGTH])));
                let request = http::Request::post("/native.Plain/Call").body(body).unwrap();
                let response = self.plain.call(request).await.unwrap();
                assert_eq!(response.into_body().collect().await.unwrap().to_bytes().len(), LENGTH);
            }
            CallKind::Generated => {
                let payload = Bytes::from_static(&[0; LENGTH]);
                let reply =
                    self.generated.put(PutRequest { payload, ..PutRequest::default() }).await.unwrap();
                assert_eq!(reply.into_inner().bytes, LENGTH as u64);
            }
        }
    }

    /// Makes calls for `length`, so many at a time. Returns their times.
    pub(crate) async fn calls(&self, kind: CallKind, inflight: usize, length: Duration) -> Vec<Duration> {
        let mut callers = JoinSet::new();
        let end = Instant::now() + length;
        for _ in 0..inflight {
            let mut client = self.clone();
            callers.spawn(async move {
                let mut times = Vec::with_capacity(1 << 18);
                loop {
                    let start = Instant::now();
                    client.call(kind).await;
                    let now = Instant::now();
                    times.push(now - start);
                    if now >= end {
                        return times;
                    }
                }
            });
        }
        callers.join_all().await.concat()
    }

    /// Opens a stream of messages without a reader, and waits until its window is full.
    pub(crate) async fn block(&self) -> Streaming<PutRequest> {
        let message = PutRequest { payload: vec![1; 10_000].into(), ..PutRequest::default() };
        let requests = tokio_stream::iter([message]);
        let stream = self.generated.clone().echo(requests).await.unwrap().into_inner();
        tokio::time::sleep(Duration::from_millis(20)).await;
        stream
    }

    /// Sends `bytes` again and again from registered memory, as long as `goes_on`. Returns the number of
    /// transfers.
    pub(crate) async fn transfer(self, bytes: usize, goes_on: Arc<AtomicBool>) -> u64 {
        let mut buffer = Pool::for_sending(2 * bytes as u64).allocate(bytes).unwrap();
        buffer.fill(1);
        let payload = buffer.freeze();
        let (mut client, mut count) = (self.gathering, 0);
        while goes_on.load(Ordering::Relaxed) {
            let request = PutRequest { payload: payload.clone(), ..PutRequest::default() };
            assert_eq!(client.put(request).await.unwrap().into_inner().bytes, bytes as u64);
            count += 1;
        }
        count
    }
}

/// Starts the server process. Returns it, and its URI. Dropping it ends it.
pub(crate) fn start(core: Option<usize>) -> (Child, String) {
    let mut command = process::again().unwrap();
    command.arg("server").args(core.map(|core| format!("--core={core}")));
    Child::ready("the server", command, Duration::from_secs(60)).unwrap()
}

/// Runs the server process.
pub(crate) fn serve(core: Option<usize>) {
    process::end_with_stdin(|| {}).unwrap();
    run(core, async {
        let (uri, server) = bind().await;
        println!("{uri}");
        server.await;
    });
}

/// Returns the address of a new server, and the future that serves.
pub(crate) async fn bind() -> (String, impl Future<Output = ()> + Send) {
    bind_with(Config::default()).await
}

async fn bind_with(config: Config) -> (String, impl Future<Output = ()> + Send) {
    let incoming = RdmaIncoming::builder().config(config).bind("127.0.0.1:0").await.unwrap();
    let uri = format!("http://{}", incoming.local_addr());
    let server =
        RdmaServer::new().layer(gather::GatherBothLayer::new().max_decoding_message_size(usize::MAX));
    let transfer = TransferServer::new(PlainService).max_decoding_message_size(usize::MAX);
    let server = server.add_service(PlainService).add_service(transfer).serve_with_incoming(incoming);
    (uri, async { server.await.unwrap() })
}

/// Answers each call at once.
#[derive(Clone, Copy, Debug)]
struct PlainService;

impl NamedService for PlainService {
    const NAME: &'static str = "native.Plain";
}

impl Service<http::Request<Body>> for PlainService {
    type Response = http::Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: http::Request<Body>) -> Self::Future {
        ready(Ok(http::Response::new(Full::new(Bytes::from_static(&[7; LENGTH])))))
    }
}

#[tonic::async_trait]
impl Transfer for PlainService {
    async fn put(&self, request: Request<PutRequest>) -> Result<Response<PutReply>, Status> {
        let bytes = request.get_ref().payload.len() as u64;
        Ok(Response::new(PutReply { bytes, ..PutReply::default() }))
    }

    /// Sends the first message again and again.
    async fn echo(
        &self,
        request: Request<Streaming<PutRequest>>,
    ) -> Result<Response<BoxStream<PutRequest>>, Status> {
        let first = request.into_inner().next().await.ok_or(Status::invalid_argument("no message"))??;
        Ok(Response::new(Box::pin(tokio_stream::iter(std::iter::repeat_with(move || Ok(first.clone()))))))
    }
}
