//! What the soft device costs: `cargo bench --bench soft_device`. Two threads, pinned to cores 0 and 1.
#![allow(clippy::unwrap_used, missing_docs, reason = "a benchmark")]

use std::hint::black_box;
use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use divan::Bencher;
use divan::counter::{BytesCount, ItemsCount};
use tonic_rdma::verbs::{
    Access, CompletionQueue, CompletionStatus, Context, HostMemory, LocalSegment, MemoryRegion, Operation,
    PathSettings, Payload, QueuePair, QueuePairCapacity, ReceiveRequest, RemoteSegment, SendRequest,
    WorkCompletion, soft,
};

const RECEIVES: u64 = 512;
const MESSAGE: usize = 64;
const LARGE: usize = 1 << 20;

fn main() {
    divan::main();
}

/// One end of a connection.
struct Side {
    _context: Arc<dyn Context>,
    queue: Arc<dyn CompletionQueue>,
    pair: Arc<dyn QueuePair>,
    region: Arc<dyn MemoryRegion>,
}

impl Side {
    fn new() -> Self {
        let context = soft::open().unwrap();
        let domain = context.alloc_protection_domain().unwrap();
        let queue = context.create_completion_queue(4096).unwrap();
        let capacity = QueuePairCapacity {
            send_requests: 1024,
            receive_requests: 1024,
            send_segments: 1,
            receive_segments: 1,
            inline: 512,
        };
        let pair = domain.create_queue_pair(&queue, &queue, &capacity).unwrap();
        let all = Access::from_bits_truncate(7);
        pair.to_init(all).unwrap();
        let memory = Arc::new(HostMemory::shared(2 * LARGE, 4096).unwrap());
        memory.copy_in(0, &vec![1; 2 * LARGE]).unwrap();
        let region = domain.register(memory, all).unwrap();
        Self { _context: context, queue, pair, region }
    }

    fn connected() -> (Self, Self) {
        let (a, b) = (Self::new(), Self::new());
        let settings = PathSettings::default();
        a.pair.to_rtr(&b.pair.local_address(), &settings).unwrap();
        b.pair.to_rtr(&a.pair.local_address(), &settings).unwrap();
        a.pair.to_rts(&settings).unwrap();
        b.pair.to_rts(&settings).unwrap();
        (a, b)
    }

    fn segment(&self, offset: usize, length: usize) -> LocalSegment {
        // SAFETY: nobody makes a reference to the memory.
        unsafe { LocalSegment::new(&*self.region, offset..offset + length) }
    }

    fn remote(&self) -> RemoteSegment {
        RemoteSegment { address: self.region.memory().address(), rkey: self.region.rkey() }
    }

    fn post_receive(&self, wr_id: u64) {
        let into = [self.segment(wr_id as usize * MESSAGE, MESSAGE)];
        self.pair.post_receive(&[ReceiveRequest { wr_id, into: &into }]).unwrap();
    }

    fn post_receives(&self) {
        (0..RECEIVES).for_each(|wr_id| self.post_receive(wr_id));
    }

    fn send(&self, signaled: bool) {
        let payload = [7u8; MESSAGE];
        let slices = [IoSlice::new(&payload)];
        let operation = Operation::Send { data: Payload::Inline(&slices), immediate: None };
        self.pair.post_send(&[SendRequest { wr_id: RECEIVES, operation, signaled }]).unwrap();
    }

    fn run(&self, operation: Operation<'_>) {
        self.pair.post_send(&[SendRequest { wr_id: RECEIVES, operation, signaled: true }]).unwrap();
        let mut completions = [WorkCompletion::EMPTY; 1];
        while self.queue.poll(&mut completions) == 0 {}
        assert_eq!(completions[0].status, CompletionStatus::Success);
    }

    /// Polls until one receive came, and posts it again; false when told to stop.
    fn take_one(&self, stop: &AtomicBool) -> bool {
        let mut completions = [WorkCompletion::EMPTY; 1];
        loop {
            if self.queue.poll(&mut completions) == 0 {
                if stop.load(Ordering::Relaxed) {
                    return false;
                }
                std::hint::spin_loop();
            } else if completions[0].wr_id < RECEIVES {
                self.post_receive(completions[0].wr_id);
                return true;
            }
        }
    }
}

fn pin(core: usize) {
    // SAFETY: a zeroed set is a valid, empty one, and the call reads no more than its size.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(core, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set);
    }
}

/// Runs `other` on core 1 while `measure` runs on core 0.
fn with_other(other: impl FnOnce(&AtomicBool) + Send, measure: impl FnOnce()) {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            pin(1);
            other(&stop);
        });
        pin(0);
        measure();
        stop.store(true, Ordering::Relaxed);
    });
}

/// A message of 64 B there and one back, both sides polling.
#[divan::bench(sample_count = 1000, sample_size = 100)]
fn round_trip_64_bytes(bencher: Bencher<'_, '_>) {
    let (a, b) = Side::connected();
    a.post_receives();
    b.post_receives();
    let never = AtomicBool::new(false);
    with_other(
        |stop| {
            while b.take_one(stop) {
                b.send(true);
            }
        },
        || {
            bencher.bench_local(|| {
                a.send(true);
                a.take_one(&never)
            });
        },
    );
}

/// 64 messages of 64 B one way, each into a receive that is posted again, then one back that acknowledges them.
#[divan::bench(sample_count = 1000, sample_size = 100)]
fn message_rate_64_bytes(bencher: Bencher<'_, '_>) {
    const BATCH: usize = 64;
    let (a, b) = Side::connected();
    a.post_receives();
    b.post_receives();
    let never = AtomicBool::new(false);
    with_other(
        |stop| {
            while (0..BATCH).all(|_| b.take_one(stop)) {
                b.send(true);
            }
        },
        || {
            bencher.counter(ItemsCount::new(BATCH)).bench_local(|| {
                (1..BATCH).for_each(|_| a.send(false));
                a.send(true);
                a.take_one(&never)
            });
        },
    );
}

/// Posting an inline WRITE of 64 B and polling its completion: the initiator's cost alone.
#[divan::bench(sample_count = 1000, sample_size = 100)]
fn write_64_bytes(bencher: Bencher<'_, '_>) {
    let (a, b) = Side::connected();
    pin(0);
    let payload = [7u8; MESSAGE];
    let slices = [IoSlice::new(&payload)];
    bencher.bench_local(|| {
        a.run(Operation::Write { data: Payload::Inline(&slices), remote: b.remote(), immediate: None });
    });
}

/// Polling a completion queue that has nothing.
#[divan::bench(sample_count = 1000, sample_size = 100)]
fn empty_poll(bencher: Bencher<'_, '_>) {
    let (a, _b) = Side::connected();
    let mut completions = [WorkCompletion::EMPTY; 16];
    bencher.bench_local(|| black_box(a.queue.poll(&mut completions)));
}

/// READ of 1 MiB that is hot in the cache.
#[divan::bench(sample_count = 1000)]
fn read_1_mebibyte(bencher: Bencher<'_, '_>) {
    let (a, b) = Side::connected();
    pin(0);
    let into = [a.segment(0, LARGE)];
    bencher
        .counter(BytesCount::new(LARGE))
        .bench_local(|| a.run(Operation::Read { into: &into, remote: b.remote() }));
}

/// Copies as the device makes them, between places that are this many bytes apart within a page. See `verbs::copy`.
#[divan::bench(args = [0, 8, 64])]
fn copy(bencher: Bencher<'_, '_>, apart: usize) {
    pin(0);
    const SLOT: usize = 17 * 1024;
    let (from, to) = (vec![1u8; 4096 + SLOT], HostMemory::shared(2 * 4096 + SLOT, 4096).unwrap());
    let from = &from[from.as_ptr().align_offset(4096)..][..SLOT];
    bencher.counter(BytesCount::new(SLOT)).bench_local(|| to.copy_in(apart, black_box(from)));
}

/// The same by `memcpy`.
#[divan::bench(args = [0, 8, 64])]
fn copy_by_memcpy(bencher: Bencher<'_, '_>, apart: usize) {
    pin(0);
    const SLOT: usize = 17 * 1024;
    let (from, mut to) = (vec![1u8; 4096 + SLOT], vec![0u8; 2 * 4096 + SLOT]);
    let from = &from[from.as_ptr().align_offset(4096)..][..SLOT];
    let start = to.as_ptr().align_offset(4096) + apart;
    bencher
        .counter(BytesCount::new(SLOT))
        .bench_local(|| black_box(&mut to)[start..start + SLOT].copy_from_slice(black_box(from)));
}

/// The same bytes by `memcpy`, to compare with.
#[divan::bench(sample_count = 1000)]
fn memcpy_1_mebibyte(bencher: Bencher<'_, '_>) {
    pin(0);
    let (from, mut to) = (vec![1u8; LARGE], vec![0u8; LARGE]);
    bencher
        .counter(BytesCount::new(LARGE))
        .bench_local(|| black_box(&mut to).copy_from_slice(black_box(&from)));
}
