//! Measures the tensor channel between two processes: the time to send a tensor and get the acknowledgement, for every kind of
//! placement; and copies of bytes, with `memcpy` for comparison.
//!
//! ```sh
//! cargo bench -p tonic-rdma-tensor --bench tensor_channel
//! ```
//!
//! The other process is this binary again (`peer`). Where both spin, or have a runtime that polls when idle, each has a core if there
//! are two. The benches by futures also run in tokio's own runtimes, as a program that pins nothing has them.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a bench stops at an error")]
#![allow(clippy::panic, missing_docs, reason = "a bench stops at an error")]

mod peer;

use std::hint::black_box;

use divan::Bencher;
use divan::counter::BytesCount;
use tonic_rdma::memory::Pool;
use tonic_rdma_commands::Flavour;
use tonic_rdma_tensor::{BlockCopy, MemRegion, Requested, Rights, StaticSender, Tensor, TensorMut};

use peer::{Peer, Role, bytes, relax};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    match arguments.split_first() {
        Some((first, rest)) if first == peer::ARGUMENT => peer::run(rest),
        _ => divan::main(),
    }
}

/// Lengths of tensors, in bytes.
const LENGTHS: [u64; 5] = [64, 4 << 10, 64 << 10, 1 << 20, 16 << 20];

/// A runtime of both processes as a type, which divan prints.
trait Runtime {
    fn flavour() -> Flavour;
}

struct IdlePolling;
struct CurrentThread;
struct MultiThread;

impl Runtime for IdlePolling {
    fn flavour() -> Flavour {
        Flavour::IdlePolling
    }
}

impl Runtime for CurrentThread {
    fn flavour() -> Flavour {
        Flavour::CurrentThread
    }
}

impl Runtime for MultiThread {
    fn flavour() -> Flavour {
        Flavour::multi_thread()
    }
}

/// Sends a tensor into a static slot. Both ends look at memory, for the tensor and for its release, and never sleep.
#[divan::bench(args = LENGTHS, sample_count = 300, max_time = 2)]
fn static_slot(bencher: Bencher<'_, '_>, length: u64) {
    let peer = Peer::start(Role::Static, length, Flavour::IdlePolling);
    let mut sender =
        peer.block_on(async { peer.channel().static_sender("slot", &bytes(length)).await.unwrap() });
    let mut region = Some(peer.region(length));
    repeat(bencher, length, || {
        let mut sending = sender.start_region(region.take().unwrap());
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
#[divan::bench(types = [IdlePolling, CurrentThread, MultiThread], args = LENGTHS, sample_count = 300, max_time = 2)]
fn static_slot_async<R: Runtime>(bencher: Bencher<'_, '_>, length: u64) {
    let peer = Peer::start(Role::StaticAsync, length, R::flavour());
    let mut sender =
        peer.block_on(async { peer.channel().static_sender("slot", &bytes(length)).await.unwrap() });
    let mut region = Some(peer.region(length));
    repeat(bencher, length, || {
        peer.block_on(async {
            region = Some(sender.send_region(region.take().unwrap()).await.unwrap());
            sender.flush().await.unwrap();
        });
    });
}

/// Sends tensors into a static slot of two buffers by futures: a tensor may be under way while the receiver has another one.
#[divan::bench(types = [IdlePolling, CurrentThread, MultiThread], args = LENGTHS, sample_count = 300, max_time = 2)]
fn static_slot_of_two<R: Runtime>(bencher: Bencher<'_, '_>, length: u64) {
    let peer = Peer::start(Role::StaticOfTwo, length, R::flavour());
    let mut sender =
        peer.block_on(async { peer.channel().static_sender("slot", &bytes(length)).await.unwrap() });
    let mut region = Some(peer.region(length));
    repeat(bencher, length, || {
        region = Some(peer.block_on(sender.send_region(region.take().unwrap())).unwrap());
    });
}

/// Sends the metadata of a tensor, which the peer then reads.
#[divan::bench(types = [IdlePolling, CurrentThread, MultiThread], args = LENGTHS, sample_count = 300, max_time = 2)]
fn dynamic_slot<R: Runtime>(bencher: Bencher<'_, '_>, length: u64) {
    let peer = Peer::start(Role::Dynamic, length, R::flavour());
    let mut sender = peer.block_on(async { peer.channel().dynamic_sender("slot").await.unwrap() });
    let (_pool, tensor) = registered(length);
    repeat(bencher, length, || {
        peer.block_on(async {
            sender.send(&tensor).await.unwrap();
            sender.flush().await.unwrap();
        });
    });
}

/// Requests a tensor by name and step, of a known shape.
#[divan::bench(types = [IdlePolling, CurrentThread, MultiThread], args = LENGTHS, sample_count = 300, max_time = 2)]
fn rendezvous<R: Runtime>(bencher: Bencher<'_, '_>, length: u64) {
    let peer = Peer::start(Role::Provider, length, R::flavour());
    let mut step = 0;
    repeat(bencher, length, || {
        peer.block_on(async {
            let Requested::Tensor(tensor) = peer.channel().request("tensor", step).await.unwrap() else {
                panic!("a dead tensor")
            };
            step += 1;
            black_box(tensor);
        });
    });
}

/// Writes four blocks into a region of the peer with a notice, for which the peer waits, and waits for the peer's notice.
#[divan::bench(types = [IdlePolling, CurrentThread, MultiThread], args = LENGTHS, sample_count = 300, max_time = 2)]
fn notice<R: Runtime>(bencher: Bencher<'_, '_>, length: u64) {
    let mut peer = Peer::start(Role::Notice, length, R::flavour());
    let answers = peer.device().allocate(8).unwrap();
    let answers = peer.device().export("answers", answers, Rights::READ_WRITE).unwrap();
    peer.send_endpoint();
    let remote = peer.block_on(async { peer.channel().region("region").await.unwrap() });
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
                Some(peer.channel().write(&remote).notify(true).blocks_from(filled, &blocks).await.unwrap());
            answers.notice().await.unwrap();
        });
    });
}

/// Measures what moves `length` bytes, after a hundred turns.
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
    let remote = peer.block_on(async { peer.channel().region("region").await.unwrap() });
    let mut region = Some(peer.region(length));
    let mut copy = || {
        let local = region.take().unwrap();
        let mut memcpy = match WRITE {
            true => peer.channel().write(&remote).from(local, ..),
            false => peer.channel().read(&remote).into(local, ..),
        };
        region = Some(finish(&mut memcpy));
    };
    (0..20).for_each(|_| copy());
    bencher.counter(BytesCount::new(length)).bench_local(copy);
}

fn finish(memcpy: &mut tonic_rdma_tensor::Memcpy) -> MemRegion {
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
    let remote = peer.block_on(async { peer.channel().region("region").await.unwrap() });
    let blocks = blocks();
    let mut region = Some(peer.region(length));
    let mut batch = || {
        let local = region.take().unwrap();
        region = Some(finish(&mut peer.channel().write(&remote).blocks_from(local, &blocks)));
    };
    (0..3).for_each(|_| batch());
    bencher.counter(BytesCount::new(BLOCKS * BLOCK)).bench_local(batch);
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
