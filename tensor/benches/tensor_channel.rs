//! Measures the tensor channel between two processes: the time to send a tensor and get the acknowledgement,
//! for every kind of placement; copies of bytes, with `memcpy` for comparison; and fetches of a buffer's blocks
//! beside READs of them.
//!
//! ```sh
//! cargo bench -p tonic-rdma-tensor --bench tensor_channel
//! ```
//!
//! The other process is this binary again (`peer`). Where both spin, or have a runtime that polls when idle,
//! each has a core if there are two. The benches by futures also run in tokio's own runtimes, as a program
//! that pins nothing has them.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a bench stops at an error")]
#![allow(clippy::panic, missing_docs, reason = "a bench stops at an error")]

use std::fmt;
use std::future::Future;
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use bytes::Bytes;
use divan::Bencher;
use divan::counter::BytesCount;
use prost::Message as _;
use tokio::runtime::Runtime;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tonic_rdma::memory::Pool;
use tonic_rdma::{RdmaIncoming, RdmaServer};
use tonic_rdma_commands::clap::{self, ValueEnum};
use tonic_rdma_commands::process::{self, Child};
use tonic_rdma_commands::{Flavour, Named as _, cores, parse_name};
use tonic_rdma_tensor::buffer::{BufferClient, BufferPool, LeaseOptions, RemoteBuffer};
use tonic_rdma_tensor::{
    BlockCopy, Channel, Dtype, MemRegion, Memcpy, NamedOffer, NamedReply, RdmaDevice, Rights, Shape,
    StaticSender, Tensor, TensorMut, TensorSpec,
};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    match arguments.split_first() {
        Some((first, rest)) if first == PEER => run_peer(rest),
        _ => divan::main(),
    }
}

/// Lengths of tensors, in bytes.
const LENGTHS: [u64; 5] = [64, 4 << 10, 64 << 10, 1 << 20, 16 << 20];

/// A runtime of both processes, and the length of the tensors in bytes.
#[derive(Clone, Copy)]
struct Case(Flavour, u64);

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.0, self.1)
    }
}

fn cases() -> impl Iterator<Item = Case> {
    let flavours = [Flavour::IdlePolling, Flavour::CurrentThread, Flavour::multi_thread()];
    flavours.into_iter().flat_map(|flavour| LENGTHS.map(|length| Case(flavour, length)))
}

/// Sends a tensor into a static slot. Both sides poll memory, for the tensor and for its release, and
/// never sleep.
#[divan::bench(args = LENGTHS, sample_count = 300, max_time = 2)]
fn static_slot(bencher: Bencher<'_, '_>, length: u64) {
    let peer = Peer::start(Role::Static, length, Flavour::IdlePolling);
    let mut sender =
        peer.block_on(async { peer.channel.static_sender("slot", &bytes(length)).await.unwrap() });
    let mut region = Some(peer.region(length));
    repeat(bencher, length, || {
        let mut sending = sender.try_send_region(region.take().unwrap());
        region = Some(finish(&mut sending));
        wait_ready(&mut sender);
    });
}

fn wait_ready(sender: &mut StaticSender) {
    while !sender.is_ready().unwrap() {
        relax();
    }
}

/// Sends a tensor into a static slot by futures.
#[divan::bench(args = cases(), sample_count = 300, max_time = 2)]
fn static_slot_async(bencher: Bencher<'_, '_>, Case(flavour, length): Case) {
    let peer = Peer::start(Role::StaticAsync, length, flavour);
    let mut sender =
        peer.block_on(async { peer.channel.static_sender("slot", &bytes(length)).await.unwrap() });
    let mut region = Some(peer.region(length));
    repeat(bencher, length, || {
        peer.block_on(async {
            region = Some(sender.send_region(region.take().unwrap()).await.unwrap());
            sender.flush().await.unwrap();
        });
    });
}

/// Sends tensors into a static slot of two buffers by futures: a tensor may be under way while the receiver
/// has another one.
#[divan::bench(args = cases(), sample_count = 300, max_time = 2)]
fn static_slot_of_two(bencher: Bencher<'_, '_>, Case(flavour, length): Case) {
    let peer = Peer::start(Role::StaticOfTwo, length, flavour);
    let mut sender =
        peer.block_on(async { peer.channel.static_sender("slot", &bytes(length)).await.unwrap() });
    let mut region = Some(peer.region(length));
    repeat(bencher, length, || {
        region = Some(peer.block_on(sender.send_region(region.take().unwrap())).unwrap());
    });
}

/// Sends the metadata of a tensor, which the peer then reads.
#[divan::bench(args = cases(), sample_count = 300, max_time = 2)]
fn dynamic_slot(bencher: Bencher<'_, '_>, Case(flavour, length): Case) {
    let peer = Peer::start(Role::Dynamic, length, flavour);
    let mut sender = peer.block_on(async { peer.channel.dynamic_sender("slot").await.unwrap() });
    let (_pool, tensor) = registered(length);
    repeat(bencher, length, || {
        peer.block_on(async {
            sender.send(&tensor).await.unwrap();
            sender.flush().await.unwrap();
        });
    });
}

/// Requests a tensor by name and step, of a known shape.
#[divan::bench(args = cases(), sample_count = 300, max_time = 2)]
fn named(bencher: Bencher<'_, '_>, Case(flavour, length): Case) {
    let peer = Peer::start(Role::Provider, length, flavour);
    let mut step = 0;
    repeat(bencher, length, || {
        peer.block_on(async {
            let NamedReply::Tensor(tensor) = peer.channel.request("tensor", step).await.unwrap() else {
                panic!("a dead tensor")
            };
            step += 1;
            black_box(tensor);
        });
    });
}

/// Writes four blocks into a region of the peer with a notice, for which the peer waits, and waits for the
/// peer's notice.
#[divan::bench(args = cases(), sample_count = 300, max_time = 2)]
fn notice(bencher: Bencher<'_, '_>, Case(flavour, length): Case) {
    let mut peer = Peer::start(Role::Notice, length, flavour);
    let answers = peer.device.allocate(8).unwrap();
    let answers = peer.device.export("answers", answers, Rights::READ_WRITE).unwrap();
    peer.send_endpoint();
    let remote = peer.block_on(async { peer.channel.region("region").await.unwrap() });
    peer.block_on(async { answers.notice().await.unwrap() });
    // The blocks have another order at the peer.
    let block =
        |(from, to)| BlockCopy { local: from * length / 4, remote: to * length / 4, length: length / 4 };
    let blocks = [(0, 0), (1, 2), (2, 1), (3, 3)].map(block);
    let mut region = Some(peer.region(length));
    repeat(bencher, length, || {
        peer.block_on(async {
            let filled = region.take().unwrap();
            region =
                Some(peer.channel.write(&remote).notify(true).blocks_from(filled, &blocks).await.unwrap());
            answers.notice().await.unwrap();
        });
    });
}

/// Measures `turn`, which moves `length` bytes, after a hundred calls that warm up.
fn repeat(bencher: Bencher<'_, '_>, length: u64, mut turn: impl FnMut()) {
    (0..100).for_each(|_| turn());
    bencher.counter(BytesCount::new(length)).bench_local(turn);
}

fn registered(length: u64) -> (Pool, Tensor) {
    let pool = Pool::for_sending(2 * length.max(1 << 20));
    let mut tensor = TensorMut::in_pool(bytes(length), &pool).unwrap();
    tensor.bytes_mut().fill(1);
    (pool, tensor.freeze())
}

/// Makes one memcpy into the peer's region, or out of it.
#[divan::bench(args = LENGTHS, consts = [true, false], sample_count = 300, max_time = 2)]
fn memcpy<const WRITE: bool>(bencher: Bencher<'_, '_>, length: u64) {
    let peer = Peer::start(Role::Region, length, Flavour::IdlePolling);
    let remote = peer.block_on(async { peer.channel.region("region").await.unwrap() });
    let mut region = Some(peer.region(length));
    let mut copy = || {
        let local = region.take().unwrap();
        let mut memcpy = match WRITE {
            true => peer.channel.write(&remote).from(local, ..),
            false => peer.channel.read(&remote).into(local, ..),
        };
        region = Some(finish(&mut memcpy));
    };
    (0..20).for_each(|_| copy());
    bencher.counter(BytesCount::new(length)).bench_local(copy);
}

fn finish(memcpy: &mut Memcpy) -> MemRegion {
    loop {
        if let Some(result) = memcpy.try_take() {
            return result.unwrap();
        }
        relax();
    }
}

/// Makes one `memcpy` of the C library, between regions of this process.
#[divan::bench(args = LENGTHS, sample_count = 300, max_time = 2)]
fn memcpy_of_libc(bencher: Bencher<'_, '_>, length: u64) {
    let peer = Peer::start(Role::Region, 64, Flavour::IdlePolling);
    let (from, mut to) = (peer.region(length), peer.region(length));
    let mut copy = || to.copy_from_slice(black_box(&from));
    (0..20).for_each(|_| copy());
    bencher.counter(BytesCount::new(length)).bench_local(copy);
}

/// The number of blocks of a batch, and their length.
const BLOCKS: u64 = 4096;
const BLOCK: u64 = 16 << 10;

/// Returns every second block, in another order at the peer.
fn blocks() -> Vec<BlockCopy> {
    let place = |index: u64| 2 * BLOCK * ((index * 1361) % BLOCKS);
    (0..BLOCKS)
        .map(|index| BlockCopy { local: 2 * BLOCK * index, remote: place(index), length: BLOCK })
        .collect()
}

/// Copies scattered blocks in one operation.
#[divan::bench(sample_count = 100, max_time = 2)]
fn batch_of_blocks(bencher: Bencher<'_, '_>) {
    let length = 2 * BLOCKS * BLOCK;
    let peer = Peer::start(Role::Region, length, Flavour::IdlePolling);
    let remote = peer.block_on(async { peer.channel.region("region").await.unwrap() });
    let blocks = blocks();
    let mut region = Some(peer.region(length));
    let mut batch = || {
        let local = region.take().unwrap();
        region = Some(finish(&mut peer.channel.write(&remote).blocks_from(local, &blocks)));
    };
    (0..3).for_each(|_| batch());
    bencher.counter(BytesCount::new(BLOCKS * BLOCK)).bench_local(batch);
}

/// Fetches all of a buffer by a call.
#[divan::bench(args = LENGTHS, sample_count = 300, max_time = 2)]
fn fetch(bencher: Bencher<'_, '_>, length: u64) {
    let mut peer = Peer::start(Role::Buffer, length, Flavour::IdlePolling);
    let (handle, client) = (peer.handle(), peer.block_on(async { BufferClient::of_runtime() }));
    let fetch = || peer.block_on(client.fetch(&handle)).unwrap();
    repeat(bencher, length, || drop(fetch()));
    assert!(is_right(0, length, &fetch()));
}

/// Fetches the blocks of a buffer by one call, in turns with READs of the same blocks of a region. Prints the
/// ratio of the medians.
#[divan::bench(sample_count = 30, max_time = 4)]
#[allow(clippy::print_stdout, reason = "the ratio is no column of the table")]
fn fetched_blocks(bencher: Bencher<'_, '_>) {
    let length = 2 * BLOCKS * BLOCK;
    let mut peer = Peer::start(Role::Buffer, length, Flavour::IdlePolling);
    let handle = peer.handle();
    let remote = peer.block_on(async { peer.channel.region("region").await.unwrap() });
    let (blocks, client) = (blocks(), peer.block_on(async { BufferClient::of_runtime() }));
    let ranges: Vec<_> = blocks.iter().map(|block| block.remote..block.remote + block.length).collect();
    let mut region = Some(peer.region(length));
    let mut read = || {
        let start = Instant::now();
        let local = region.take().unwrap();
        let local = finish(&mut peer.channel.read(&remote).blocks_into(local, &blocks));
        let elapsed = start.elapsed();
        let arrived = |block: &BlockCopy| &local[block.local as usize..(block.local + block.length) as usize];
        assert!(blocks.iter().all(|block| is_right(block.remote, BLOCK, arrived(block))));
        region = Some(local);
        elapsed
    };
    let fetch = || {
        let start = Instant::now();
        let fetched = peer.block_on(client.fetch_blocks(&handle, &ranges)).unwrap();
        (start.elapsed(), fetched)
    };
    let (mut reads, mut fetches) = (Vec::new(), Vec::new());
    bencher.counter(BytesCount::new(BLOCKS * BLOCK)).with_inputs(|| reads.push(read())).bench_local_values(
        |()| {
            let (elapsed, fetched) = fetch();
            fetches.push(elapsed);
            fetched
        },
    );
    let (_, fetched) = fetch();
    assert!(ranges.iter().zip(&fetched).all(|(range, block)| is_right(range.start, BLOCK, block)));
    if let (Some(read), Some(fetch)) = (median(reads), median(fetches)) {
        let ratio = fetch.as_secs_f64() / read.as_secs_f64();
        println!("\n{BLOCKS} blocks: fetched in {fetch:.1?}, READ in {read:.1?}, ratio {ratio:.2}");
    }
}

/// Writes all of a buffer of 1 MiB by a call.
#[divan::bench(sample_count = 100, max_time = 2)]
fn write_back(bencher: Bencher<'_, '_>) {
    let length = 1 << 20;
    let mut peer = Peer::start(Role::Buffer, length, Flavour::IdlePolling);
    let (handle, client) = (peer.handle(), peer.block_on(async { BufferClient::of_runtime() }));
    let bytes = Bytes::from(vec![7; length as usize]);
    let write = || peer.block_on(client.write_back(&handle, 0, bytes.clone())).unwrap();
    (0..3).for_each(|_| write());
    bencher.counter(BytesCount::new(length)).bench_local(write);
    assert_eq!(peer.block_on(client.fetch(&handle)).unwrap(), bytes);
}

fn median(mut times: Vec<Duration>) -> Option<Duration> {
    times.sort_unstable();
    times.get(times.len() / 2).copied()
}

/// Writes content whose every word depends on its place.
fn fill(memory: &mut [u8]) {
    let words = memory.chunks_exact_mut(8).zip(0..);
    words.for_each(|(bytes, at)| bytes.copy_from_slice(&word(at)));
}

fn is_right(from: u64, length: u64, bytes: &[u8]) -> bool {
    bytes.len() as u64 == length && bytes.chunks_exact(8).zip(from / 8..).all(|(bytes, at)| bytes == word(at))
}

fn word(at: u64) -> [u8; 8] {
    at.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_ne_bytes()
}

/// Copies the blocks by the C library.
#[divan::bench(sample_count = 100, max_time = 2)]
fn blocks_of_libc(bencher: Bencher<'_, '_>) {
    let length = 2 * BLOCKS * BLOCK;
    let peer = Peer::start(Role::Region, 64, Flavour::IdlePolling);
    let (from, mut to) = (peer.region(length), peer.region(length));
    let blocks = blocks();
    let mut copy = || {
        for block in black_box(&blocks) {
            let (local, remote, length) =
                (block.local as usize, block.remote as usize, block.length as usize);
            to[remote..remote + length].copy_from_slice(&from[local..local + length]);
        }
    };
    (0..3).for_each(|_| copy());
    bencher.counter(BytesCount::new(BLOCKS * BLOCK)).bench_local(copy);
}

/// First argument of the other process.
const PEER: &str = "peer";
/// The longest time for the other process to start, or to end.
const LIMIT: Duration = Duration::from_secs(60);

/// The role of the other process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Role {
    /// Receives tensors from a static slot by polling.
    Static,
    /// Receives tensors from a static slot by `recv().await`.
    StaticAsync,
    /// Receives tensors from a static slot of two buffers by `recv().await`.
    StaticOfTwo,
    /// Receives tensors from a dynamic slot.
    Dynamic,
    /// Offers tensors, some steps ahead.
    Provider,
    /// Exports a region.
    Region,
    /// Exports a region, and shares a buffer that may be written.
    Buffer,
    /// Exports a region, waits for notices there, and answers each with a notice in a region of the caller.
    Notice,
}

/// Returns the spec of a tensor of this many bytes.
fn bytes(length: u64) -> TensorSpec {
    TensorSpec::new(Dtype::U8, Shape::new(&[length]).unwrap()).unwrap()
}

/// Pauses between two polls of memory.
fn relax() {
    std::hint::spin_loop();
}

/// Builds a runtime. One that polls when idle gets a core of its own, if there are two; the others run as in
/// a program that pins nothing.
fn runtime(flavour: Flavour, index: usize) -> Runtime {
    if flavour == Flavour::IdlePolling {
        let allowed = cores::allowed();
        let _ = cores::pin(allowed[index % allowed.len()]);
    }
    flavour.build().unwrap()
}

/// A handle to the other process, with a channel to it. The drop ends the process.
struct Peer {
    process: Child,
    device: RdmaDevice,
    channel: Channel,
    runtime: Runtime,
}

impl Peer {
    /// Starts the other process. Both processes have a runtime of this flavour.
    fn start(role: Role, length: u64, flavour: Flavour) -> Self {
        static CORES: LazyLock<Vec<usize>> = LazyLock::new(cores::allowed);
        // The other process inherits the cores of this thread, and the last bench may have pinned it.
        let _ = cores::pin_to(&CORES);
        let mut command = process::again().unwrap();
        command.args([PEER, role.name(), &length.to_string(), &flavour.to_string()]);
        let (process, endpoint) = Child::ready("the other process", command, LIMIT).unwrap();
        let runtime = runtime(flavour, 0);
        let (device, channel) = runtime.block_on(async {
            let device = RdmaDevice::builder().bind("127.0.0.1:0").await.unwrap();
            let channel = device.channel(&endpoint, 0).await.unwrap();
            (device, channel)
        });
        Self { process, device, channel, runtime }
    }

    /// Tells the other process the endpoint of this one.
    fn send_endpoint(&mut self) {
        self.process.send_line(self.device.endpoint());
    }

    /// Returns the handle that the other process has printed.
    fn handle(&mut self) -> RemoteBuffer {
        let mut line = self.process.line(LIMIT).unwrap();
        while !line.starts_with("handle ") {
            line = self.process.line(LIMIT).unwrap();
        }
        let digits = line.rsplit(' ').next().unwrap().as_bytes();
        let byte = |pair: &[u8]| u8::from_str_radix(str::from_utf8(pair).unwrap(), 16).unwrap();
        let bytes: Vec<u8> = digits.chunks(2).map(byte).collect();
        RemoteBuffer::decode(&*bytes).unwrap()
    }

    fn block_on<F: Future>(&self, future: F) -> F::Output {
        self.runtime.block_on(future)
    }

    /// Returns a region of this process, already touched.
    fn region(&self, length: u64) -> MemRegion {
        let mut region = self.device.allocate(length as usize).unwrap();
        region.fill(1);
        region
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.process.end(LIMIT);
    }
}

/// Runs the other process: this binary, started again, which serves until its standard input ends.
fn run_peer(arguments: &[String]) {
    let [role, length, flavour] = arguments else { panic!("peer ROLE LENGTH RUNTIME, not {arguments:?}") };
    let role = parse_name("role", role).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let (ending, ended) = tokio::sync::oneshot::channel();
    let (sender, lines) = unbounded_channel();
    let stopping = Arc::clone(&stop);
    let closed = move || {
        stopping.store(true, Ordering::Relaxed);
        let _ = ending.send(());
    };
    process::on_stdin(move |line| drop(sender.send(line)), closed).unwrap();
    runtime(Flavour::parse(flavour).unwrap(), 1).block_on(async {
        tokio::select! {
            () = serve(role, length.parse().expect("a length"), &stop, lines) => {}
            _ = ended => {}
        }
    });
}

async fn serve(role: Role, length: u64, stop: &AtomicBool, mut lines: UnboundedReceiver<String>) {
    let device = RdmaDevice::builder().bind("127.0.0.1:0").await.unwrap();
    let ready = || process::report_line(device.endpoint()).unwrap();
    let running = || !stop.load(Ordering::Relaxed);
    let export = || {
        let mut memory = device.allocate(length as usize).unwrap();
        fill(&mut memory);
        device.export("region", memory, Rights::READ_WRITE).unwrap()
    };
    match role {
        Role::Static => {
            let mut receiver = device.static_receiver("slot", &bytes(length), 1).unwrap();
            ready();
            drop(receiver.recv().await.unwrap());
            let mut polls = 0_u32;
            while running() {
                match receiver.try_recv() {
                    Ok(Some(_)) => continue,
                    Ok(None) => {}
                    Err(error) => panic!("{error}"),
                }
                relax();
                polls += 1;
                if polls.is_multiple_of(1 << 20) {
                    tokio::task::yield_now().await;
                }
            }
        }
        Role::StaticAsync | Role::StaticOfTwo => {
            let depth = if role == Role::StaticOfTwo { 2 } else { 1 };
            let mut receiver = device.static_receiver("slot", &bytes(length), depth).unwrap();
            ready();
            while running() && receiver.recv().await.is_ok() {}
        }
        Role::Dynamic => {
            let mut receiver = device.dynamic_receiver("slot", 1).unwrap();
            ready();
            while running() && receiver.recv().await.is_ok() {}
        }
        Role::Provider => {
            let (_pool, tensor) = registered(length);
            ready();
            let mut step = 0;
            while running() {
                while device.offer_counts().offers < 64 {
                    device.put("tensor", step, NamedOffer::Tensor(tensor.clone()), 1).unwrap();
                    step += 1;
                }
                tokio::task::yield_now().await;
            }
        }
        Role::Region => {
            let _region = export();
            ready();
            std::future::pending::<()>().await;
        }
        Role::Buffer => {
            let _region = export();
            let incoming = RdmaIncoming::bind("127.0.0.1:0").await.unwrap();
            let pool = BufferPool::new(format!("http://{}", incoming.local_addr())).unwrap();
            let mut memory = pool.allocate(length as usize).unwrap();
            fill(&mut memory);
            let options = LeaseOptions::new().writable();
            let (_lease, handle) = pool.share_with(memory.freeze(), options).unwrap();
            let digits: String = handle.encode_to_vec().iter().map(|byte| format!("{byte:02x}")).collect();
            ready();
            process::report_line(format!("handle {digits}")).unwrap();
            RdmaServer::new().add_service(pool.service()).serve_with_incoming(incoming).await.unwrap();
        }
        Role::Notice => {
            let region = export();
            ready();
            let Some(caller) = lines.recv().await else { return };
            let channel = device.channel(&caller, 0).await.unwrap();
            let remote = channel.region("answers").await.unwrap();
            let mut answer = device.allocate(8).unwrap();
            let block = [BlockCopy { local: 0, remote: 0, length: 8 }];
            // The first answer shows that this process has attached to the caller's region.
            while let Ok(sent) = channel.write(&remote).notify(true).blocks_from(answer, &block).await {
                answer = sent;
                if region.notice().await.is_err() {
                    return;
                }
            }
        }
    }
}
