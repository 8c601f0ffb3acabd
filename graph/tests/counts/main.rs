//! Counts what an operation asks of the device in the steady state, for each way to move data, and prints the
//! table. Both ends are in this process, so each row has the work of both.
//!
//! ```sh
//! cargo test -p tonic-rdma-graph --test counts -- --nocapture
//! ```
//!
//! `COUNTS_PATHS` chooses the rows whose names have this text, and `COUNTS_OPERATIONS` the number of operations.
//! The test fails if operations register memory or create another object, on any device. It has a process of its
//! own, because it counts those of the whole process.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

mod graphs;

use std::alloc::System;
use std::any::Any;
use std::env;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use bytes::Bytes;
use support::{Runtime, config, descriptors_and_mappings, free_address, within};
use tonic::body::Body;
use tonic::client::GrpcService;
use tonic::transport::{Endpoint, Server};
use tonic::{Request, Response, Status};
use tonic_rdma::memory::Pool;
use tonic_rdma::memory::trace::TracingAllocator;
use tonic_rdma::{RdmaChannel, RdmaConnector, RdmaIncoming, RdmaServer, Verdict, gather};
use tonic_rdma_collective::{Communicator, Launch, Reduction};
use tonic_rdma_proto::transfer::transfer_client::TransferClient;
use tonic_rdma_proto::transfer::transfer_server::{Transfer, TransferServer};
use tonic_rdma_proto::transfer::{PutReply, PutRequest};
use tonic_rdma_tensor::unstable::OwnPolling;
use tonic_rdma_tensor::{
    Dtype, NamedOffer, NamedReply, Notification, RdmaDevice, Rights, Shape, Tensor, TensorMut, TensorSpec,
};
use tonic_rdma_verbs::counting::{self, Counter, Counts, Posts};

/// The rows. None of their operations registers memory.
const PATHS: &[&str] = &[
    "tonic call, 64 B",
    "tonic call, 1 MiB",
    "tonic call, gather, 1 MiB of a pool",
    "tonic call, gather, tuned frames, 1 MiB of a pool",
    "native call, 64 B",
    "native call, 1 MiB",
    "native call, gather both ways, 1 MiB of a pool",
    "static slot, 64 B",
    "static slot, 1 MiB region",
    "static slot, 1 MiB of a pool",
    "static slot, 1 MiB of the heap",
    "dynamic slot, 1 MiB of a pool",
    "dynamic slot, 1 MiB of the heap",
    "named tensor, 1 MiB of a pool",
    "named tensor, 1 MiB of the heap",
    "region write, 1 MiB",
    "region read, 1 MiB",
    "all-reduce, 64 B",
    "all-reduce, 1 MiB registered",
    "all-reduce, 1 MiB of the heap",
    "graph step, static, 1 MiB each way",
    "graph step, dynamic, 1 MiB each way",
];

/// Places what the nodes of graphs allocate in registered memory. All other memory is that of the system.
#[global_allocator]
static ALLOCATOR: TracingAllocator = TracingAllocator::new(System);

const SMALL: usize = 64;
const LARGE: usize = 1 << 20;
/// Operations before the count, which map memory, and fill pools and caches.
const WARM_UP: u64 = 64;
/// Regions by which the pools of a path may still grow, in all operations together. The longest is that of a
/// tensor link's copies: 32 MiB, in parts of a tensor's length.
const GROWTH: u64 = 40;

#[test]
fn operations_of_the_steady_state() {
    let mut table = Table::new();
    // Each step has the time limit of a test.
    Runtime::MultiThread.run_for_ever(async {
        calls(&mut table).await;
        native_calls(&mut table).await;
        slots(&mut table).await;
        named_tensors(&mut table).await;
        regions(&mut table).await;
        all_reduces(&mut table).await;
        graphs::steps(&mut table).await;
    });
    table.print();
    table.check();
    if table.is_soft {
        let cost = |notification| named_tensor_alone(&table.counter, notification);
        // The request, and the write that announces itself.
        let found = cost(None);
        assert_eq!(found, NamedTensorCost { posts: [1, 0, 1], trips: 2 });
        println!("a named tensor of {SMALL} B: {found:?}");
        // Without immediate data a frame follows the write, and does not wait for its completion.
        let found = cost(Some(Notification::Message));
        assert_eq!(found, NamedTensorCost { posts: [2, 1, 0], trips: 2 });
        println!("without immediate data: {found:?}");
    }
}

/// The counts of a path.
struct Row {
    path: &'static str,
    counts: Counts,
    time: Duration,
    descriptors: i64,
    mappings: i64,
}

impl Row {
    /// Returns the totals with their names. `imm` is immediate data, and `at once` are READs that a thread
    /// carries out itself. Objects are those of the device, regions left out.
    fn columns(&self) -> [(&'static str, f64); 17] {
        let Self { counts, descriptors, mappings, .. } = self;
        let mut bytes = 0;
        let mut posts = |of: Posts| (bytes += of.bytes, of.requests as f64).1;
        [
            ("reg.", counts.regions.created as f64),
            ("dereg.", counts.regions.destroyed as f64),
            ("windows", counts.windows.created as f64),
            ("send", posts(counts.sends)),
            ("send imm", posts(counts.sends_with_immediate)),
            ("write", posts(counts.writes)),
            ("write imm", posts(counts.writes_with_immediate)),
            ("read", posts(counts.reads)),
            ("at once", posts(counts.reads_at_once)),
            ("receive", counts.receives.requests as f64),
            ("signaled", counts.signaled as f64),
            ("compl.", counts.completions as f64),
            ("KiB moved", bytes as f64 / 1024.0),
            ("objects", self.objects() as f64),
            ("descr.", *descriptors as f64),
            ("mappings", *mappings as f64),
            ("µs", self.time.as_secs_f64() * 1e6),
        ]
    }

    fn objects(&self) -> u64 {
        let Counts { domains, completion_queues, queue_pairs, shared_receive_queues, .. } = self.counts;
        [domains, completion_queues, queue_pairs, shared_receive_queues].iter().map(|of| of.created).sum()
    }
}

struct Table {
    counter: Counter,
    chosen: String,
    operations: u64,
    rows: Vec<Row>,
    is_soft: bool,
    /// What the rows used. Its end would be counted in the next row.
    used: Vec<Box<dyn Any>>,
}

impl Table {
    fn new() -> Self {
        let operations = env::var("COUNTS_OPERATIONS").map_or(200, |text| text.parse().unwrap());
        let chosen = env::var("COUNTS_PATHS").unwrap_or_default();
        assert!(operations > GROWTH, "{operations} operations don't show a registration for each");
        Self {
            counter: counting::count_all(),
            chosen,
            operations,
            rows: Vec::new(),
            is_soft: false,
            used: Vec::new(),
        }
    }

    fn is_chosen(&self, path: &str) -> bool {
        path.contains(&self.chosen)
    }

    /// Counts operations of `path`, if it was chosen.
    async fn row(&mut self, path: &str, mut operation: impl AsyncFnMut()) {
        let path = *PATHS.iter().find(|name| **name == path).unwrap_or_else(|| panic!("add {path} to PATHS"));
        if !self.is_chosen(path) {
            return;
        }
        let mut repeat = async |times| {
            for _ in 0..times {
                operation().await;
            }
        };
        within(repeat(WARM_UP)).await;
        let (counts, before, start) = (self.counter.counts(), descriptors_and_mappings(), Instant::now());
        within(repeat(self.operations)).await;
        let time = start.elapsed();
        let (counts, after) = (self.counter.counts().since(&counts), descriptors_and_mappings());
        let grown = |before: usize, after: usize| after as i64 - before as i64;
        let (descriptors, mappings) = (grown(before.0, after.0), grown(before.1, after.1));
        self.rows.push(Row { path, counts, time, descriptors, mappings });
    }

    fn print(&self) {
        let line = |first: &str, cells: &[String]| {
            let cells: String = cells.iter().map(|cell| format!(" {cell:>9} |")).collect();
            println!("| {first:49} |{cells}");
        };
        let Some(first) = self.rows.first() else { panic!("no path has `{}` in its name", self.chosen) };
        println!("\nfor each of {} operations, both ends together:\n", self.operations);
        line("path", &first.columns().map(|(name, _)| name.to_owned()));
        line("---", &first.columns().map(|_| "---:".to_owned()));
        for row in &self.rows {
            line(row.path, &row.columns().map(|(_, total)| short(total / self.operations as f64)));
        }
    }

    fn check(&self) {
        let chosen = PATHS.iter().filter(|path| self.is_chosen(path)).count();
        assert_eq!(chosen, self.rows.len(), "every path is counted");
        let is_above = |row: &&Row| {
            row.counts.regions.created > GROWTH
                || row.objects() > 0
                || row.descriptors.max(row.mappings) > 2 * GROWTH as i64
        };
        let above = self.rows.iter().filter(is_above);
        let above: Vec<_> = above.map(|row| format!("{}: {:?}", row.path, row.counts)).collect();
        assert!(above.is_empty(), "registrations or other objects:\n{}", above.join("\n"));
    }
}

fn short(number: f64) -> String {
    format!("{number:.2}").trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[derive(Clone, Copy)]
struct Sink;

#[tonic::async_trait]
impl Transfer for Sink {
    async fn put(&self, request: Request<PutRequest>) -> Result<Response<PutReply>, Status> {
        let bytes = request.get_ref().payload.len() as u64;
        Ok(Response::new(PutReply { bytes, ..PutReply::default() }))
    }
}

async fn put<T>(client: &mut TransferClient<T>, payload: Bytes)
where
    T: GrpcService<Body>,
    T::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    T::ResponseBody: http_body::Body<Data = Bytes> + Send + 'static,
    <T::ResponseBody as http_body::Body>::Error: Into<Box<dyn std::error::Error + Send + Sync>> + Send,
{
    let length = payload.len() as u64;
    let reply = client.put(PutRequest { payload, ..PutRequest::default() }).await.unwrap();
    assert_eq!(reply.into_inner().bytes, length);
}

fn heap(length: usize) -> Bytes {
    vec![7; length].into()
}

fn pooled(pool: &Pool, length: usize) -> Bytes {
    let mut buffer = pool.allocate(length).unwrap();
    buffer.fill(7);
    buffer.freeze()
}

fn service() -> TransferServer<Sink> {
    TransferServer::new(Sink).max_decoding_message_size(usize::MAX)
}

async fn listen() -> (RdmaIncoming, Endpoint) {
    let incoming = RdmaIncoming::builder().config(config()).bind("127.0.0.1:0").await.unwrap();
    let endpoint = Endpoint::from_shared(format!("http://{}", incoming.local_addr())).unwrap();
    (incoming, endpoint)
}

async fn calls(table: &mut Table) {
    let (incoming, endpoint) = listen().await;
    let server = Server::builder().layer(gather::GatherResponses::new()).add_service(service());
    tokio::spawn(server.serve_with_incoming(incoming));
    let connector = RdmaConnector::new().config(config());
    let channel = within(endpoint.connect_with_connector(connector.clone())).await.unwrap();
    let info = connector.last_connection().unwrap();
    assert_eq!(info.verdict(), Verdict::Rdma, "{}", info.reason());
    table.is_soft = info.provider() == Some("soft");
    let mut client = TransferClient::new(channel.clone());
    table.row("tonic call, 64 B", async || put(&mut client, heap(SMALL)).await).await;
    table.row("tonic call, 1 MiB", async || put(&mut client, heap(LARGE)).await).await;
    let mut client = TransferClient::new(gather::GatherRequests::new(channel));
    let pool = Pool::for_sending(64 << 20);
    table
        .row("tonic call, gather, 1 MiB of a pool", async || put(&mut client, pooled(&pool, LARGE)).await)
        .await;
    table.used.push(Box::new((client, pool)));
    tuned_calls(table).await;
}

/// Calls whose frames are long enough for a READ where the device has windows.
async fn tuned_calls(table: &mut Table) {
    let (incoming, endpoint) = listen().await;
    let (stream, connection) = (16 << 20, 32 << 20);
    let server = Server::builder().max_frame_size(512 << 10).initial_stream_window_size(stream);
    let server = server.initial_connection_window_size(connection);
    let server = server.layer(gather::GatherResponses::new()).add_service(service());
    tokio::spawn(server.serve_with_incoming(incoming));
    let endpoint = endpoint.initial_stream_window_size(stream).initial_connection_window_size(connection);
    let connector = RdmaConnector::new().config(config());
    let channel = within(endpoint.connect_with_connector(connector)).await.unwrap();
    let mut client = TransferClient::new(gather::GatherRequests::new(channel));
    let pool = Pool::for_sending(64 << 20);
    let path = "tonic call, gather, tuned frames, 1 MiB of a pool";
    table.row(path, async || put(&mut client, pooled(&pool, LARGE)).await).await;
    table.used.push(Box::new((client, pool)));
}

async fn native_calls(table: &mut Table) {
    let (incoming, endpoint) = listen().await;
    let layer = gather::GatherBothLayer::new().max_decoding_message_size(usize::MAX);
    tokio::spawn(RdmaServer::new().layer(layer).add_service(service()).serve_with_incoming(incoming));
    let channel = within(RdmaChannel::builder(endpoint).config(config()).connect()).await.unwrap();
    let info = channel.last_connection().unwrap();
    assert!(info.is_native(), "{}", info.reason());
    let mut client = TransferClient::new(channel.clone());
    table.row("native call, 64 B", async || put(&mut client, heap(SMALL)).await).await;
    table.row("native call, 1 MiB", async || put(&mut client, heap(LARGE)).await).await;
    let mut client = TransferClient::new(gather::GatherBoth::new(channel));
    let pool = Pool::for_sending(64 << 20);
    let path = "native call, gather both ways, 1 MiB of a pool";
    table.row(path, async || put(&mut client, pooled(&pool, LARGE)).await).await;
    table.used.push(Box::new((client, pool)));
}

fn spec(length: usize) -> TensorSpec {
    TensorSpec::new(Dtype::U8, Shape::new(&[length as u64]).unwrap()).unwrap()
}

/// Returns a new tensor of 1 MiB, as an engine makes one for each step.
fn tensor(pool: Option<&Pool>) -> Tensor {
    let tensor = match pool {
        Some(pool) => TensorMut::in_pool(spec(LARGE), pool),
        None => TensorMut::zeroed(spec(LARGE)),
    };
    let mut tensor = tensor.unwrap();
    tensor.bytes_mut().fill(7);
    tensor.freeze()
}

/// Where the tensors of two rows come from.
fn memories(pool: &Pool) -> [(&'static str, Option<&Pool>); 2] {
    [("1 MiB of a pool", Some(pool)), ("1 MiB of the heap", None)]
}

async fn devices() -> (RdmaDevice, RdmaDevice, tonic_rdma_tensor::Channel) {
    let server = RdmaDevice::bind("127.0.0.1:0").await.unwrap();
    let client = RdmaDevice::bind("127.0.0.1:0").await.unwrap();
    let channel = within(client.channel(&server.endpoint(), 0)).await.unwrap();
    (server, client, channel)
}

async fn slots(table: &mut Table) {
    let (server, client, channel) = devices().await;
    let pool = Pool::for_sending(64 << 20);
    let mut receiver = server.static_receiver("small", &spec(SMALL), 2).unwrap();
    let mut sender = channel.static_sender("small", &spec(SMALL)).await.unwrap();
    let send = async || {
        sender.send_bytes(&[7; SMALL]).await.unwrap();
        assert_eq!(receiver.recv().await.unwrap().len(), SMALL);
    };
    table.row("static slot, 64 B", send).await;
    let mut receiver = server.static_receiver("large", &spec(LARGE), 2).unwrap();
    let mut sender = channel.static_sender("large", &spec(LARGE)).await.unwrap();
    let mut region = Some(client.allocate(LARGE).unwrap());
    let send = async || {
        let sending = sender.send_region(region.take().unwrap());
        let (sent, length) = tokio::join!(sending, async { receiver.recv().await.unwrap().len() });
        (region, _) = (Some(sent.unwrap()), assert_eq!(length, LARGE));
    };
    table.row("static slot, 1 MiB region", send).await;
    for (memory, pool) in memories(&pool) {
        let send = async || {
            let sent = tensor(pool);
            let receive = async { receiver.recv().await.unwrap().len() };
            let (sent, length) = tokio::join!(sender.send(&sent), receive);
            sent.unwrap();
            assert_eq!(length, LARGE);
        };
        table.row(&format!("static slot, {memory}"), send).await;
    }
    let mut receiver = server.dynamic_receiver("dynamic", 2).unwrap();
    let mut sender = channel.dynamic_sender("dynamic").await.unwrap();
    for (memory, pool) in memories(&pool) {
        let send = async || {
            let sent = tensor(pool);
            let (result, arrived) = tokio::join!(sender.send(&sent), receiver.recv());
            result.unwrap();
            assert_eq!(arrived.unwrap().spec(), sent.spec());
        };
        table.row(&format!("dynamic slot, {memory}"), send).await;
    }
    table.used.push(Box::new((server, client, channel, receiver, sender, pool)));
}

async fn named_tensors(table: &mut Table) {
    let (server, client, channel) = devices().await;
    let (pool, mut step) = (Pool::for_sending(64 << 20), 0);
    for (memory, pool) in memories(&pool) {
        let request = async || {
            step += 1;
            server.put("activations", step, NamedOffer::Tensor(tensor(pool)), 1).unwrap();
            let reply = channel.request("activations", step).await.unwrap();
            let NamedReply::Tensor(arrived) = reply else { panic!("a dead tensor") };
            assert_eq!(*arrived.spec(), spec(LARGE));
        };
        table.row(&format!("named tensor, {memory}"), request).await;
    }
    table.used.push(Box::new((server, client, channel, pool)));
}

/// What one named tensor costs at both ends together.
#[derive(Debug, PartialEq, Eq)]
struct NamedTensorCost {
    /// Sends, and writes without and with immediate data.
    posts: [u64; 3],
    /// How often the one end had to wait for the other: the trips from one end to the other, one after another.
    trips: u32,
}

/// Moves one named tensor whose metadata the requester knows. Each end has a runtime of its own, and both stand
/// still while this thread polls for one end, until that has nothing to do, and then for the other.
fn named_tensor_alone(counter: &Counter, notification: Option<Notification>) -> NamedTensorCost {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (here, there) = (runtime(), runtime());
    let builder = || match notification {
        Some(way) => RdmaDevice::builder().notification(way),
        None => RdmaDevice::builder(),
    };
    let server = there.block_on(builder().bind("127.0.0.1:0")).unwrap();
    let (stop, stopped) = tokio::sync::oneshot::channel();
    let serve = std::thread::spawn(move || {
        let _ = there.block_on(stopped);
        there
    });
    let tensor = || NamedOffer::Tensor(TensorMut::zeroed(spec(SMALL)).unwrap().freeze());
    let (client, channel) = here.block_on(within(async {
        let client = builder().bind("127.0.0.1:0").await.unwrap();
        let channel = client.channel(&server.endpoint(), 0).await.unwrap();
        for step in 0..4 {
            server.put("loss", step, tensor(), 1).unwrap();
            channel.request("loss", step).await.unwrap();
        }
        (client, channel)
    }));
    stop.send(()).unwrap();
    let there = serve.join().unwrap();
    let ends = [OwnPolling::new(&server), OwnPolling::new(&client)];
    server.put("loss", 4, tensor(), 1).unwrap();
    let _entered = here.enter();
    let before = counter.counts();
    let mut request = pin!(channel.request("loss", 4));
    let mut trips = 0;
    for end in ends.iter().cycle().take(100) {
        for _ in 0..16 {
            end.poll();
        }
        trips += 1;
        if let Poll::Ready(reply) = request.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            assert!(matches!(reply, Ok(NamedReply::Tensor(_))), "{reply:?}");
            break;
        }
    }
    let counts = counter.counts().since(&before);
    drop(there);
    let posts = [counts.sends, counts.writes, counts.writes_with_immediate].map(|posts| posts.requests);
    NamedTensorCost { posts, trips }
}

async fn regions(table: &mut Table) {
    let (server, client, channel) = devices().await;
    let exported = server.export("region", server.allocate(LARGE).unwrap(), Rights::READ_WRITE).unwrap();
    let remote = channel.region("region").await.unwrap();
    let mut local = Some(client.allocate(LARGE).unwrap());
    let write = async || {
        local = Some(channel.write(&remote).from(local.take().unwrap(), ..).await.unwrap());
    };
    table.row("region write, 1 MiB", write).await;
    let read = async || {
        local = Some(channel.read(&remote).into(local.take().unwrap(), ..).await.unwrap());
    };
    table.row("region read, 1 MiB", read).await;
    table.used.push(Box::new((server, client, channel, exported, local)));
}

async fn all_reduces(table: &mut Table) {
    let address = free_address();
    let connect = |rank| {
        let launch = Launch::new(rank, 2, address.as_str());
        Communicator::builder().config(config()).launch(launch).connect()
    };
    let (a, b) = within(async { tokio::join!(connect(0), connect(1)) }).await;
    let (a, b) = (a.unwrap(), b.unwrap());
    for (path, bytes) in [("all-reduce, 64 B", SMALL), ("all-reduce, 1 MiB registered", LARGE)] {
        let buffer = |rank: &Communicator| rank.allocate::<f32>(bytes / size_of::<f32>()).unwrap();
        let mut buffers = Some((buffer(&a), buffer(&b)));
        let reduce = async || {
            let (x, y) = buffers.take().unwrap();
            let (x, y) = tokio::join!(a.all_reduce(x, Reduction::Max), b.all_reduce(y, Reduction::Max));
            buffers = Some((x.unwrap(), y.unwrap()));
        };
        table.row(path, reduce).await;
        table.used.push(Box::new(buffers));
    }
    let (mut x, mut y) = (vec![0_f32; LARGE / size_of::<f32>()], vec![0_f32; LARGE / size_of::<f32>()]);
    let reduce = async || {
        let operations = (a.all_reduce(&mut x[..], Reduction::Max), b.all_reduce(&mut y[..], Reduction::Max));
        let (x, y) = tokio::join!(operations.0, operations.1);
        assert!(x.is_ok() && y.is_ok());
    };
    table.row("all-reduce, 1 MiB of the heap", reduce).await;
    table.used.push(Box::new((a, b)));
}
