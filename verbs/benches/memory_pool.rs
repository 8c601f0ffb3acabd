//! The cost of the pool's functions that run for every message.
#![allow(clippy::expect_used, reason = "a bench that can't run says so by stopping")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::hint::black_box;

use bytes::Bytes;
use divan::Bencher;
use tonic_rdma_verbs::memory::sites::{SHORTEST, SiteAllocator, SiteBuf, SitePlacement, SiteSettings, sent};
use tonic_rdma_verbs::memory::trace::TracingAllocator;
use tonic_rdma_verbs::memory::{Pool, Quota};

/// Also serves the other benches here, at the cost that `trace_allocate` shows for `idle`.
#[global_allocator]
static ALLOCATOR: TracingAllocator = TracingAllocator::new(System);

fn main() {
    divan::main();
}

/// Lease and drop of a block that was in use before.
#[divan::bench(args = [64, 4 << 10, 64 << 10, 1 << 20, 16 << 20])]
fn lease_warm(bencher: Bencher<'_, '_>, length: usize) {
    let pool = pool();
    drop(pool.lease(length, Quota::Send));
    bencher.bench_local(|| drop(pool.lease(black_box(length), Quota::Send)));
}

/// Allocation, freeze and drop of a buffer that was in use before.
#[divan::bench]
fn freeze_warm(bencher: Bencher<'_, '_>) {
    let pool = pool();
    bencher.bench_local(|| drop(pool.allocate(black_box(64 << 10)).map(|buffer| buffer.freeze())));
}

/// Look-up of a slice that lies in one of `buffers` frozen buffers.
#[divan::bench(args = [1, 64, 4096])]
fn find_hit(bencher: Bencher<'_, '_>, buffers: usize) {
    let pool = pool();
    let frozen = freeze(&pool, buffers);
    let slice = &frozen[buffers / 2][100..2000];
    bencher.bench_local(|| drop(pool.find(black_box(slice.as_ptr() as usize), slice.len())));
}

/// Look-up of a slice of other memory, among `buffers` frozen buffers.
#[divan::bench(args = [0, 1, 4096])]
fn find_miss(bencher: Bencher<'_, '_>, buffers: usize) {
    let pool = pool();
    let _frozen = freeze(&pool, buffers);
    let elsewhere = vec![0_u8; 2000];
    bencher.bench_local(|| drop(pool.find(black_box(elsewhere.as_ptr() as usize), elsewhere.len())));
}

/// Look-up of a slice that begins in a frozen buffer and ends beyond it.
#[divan::bench]
fn find_near_miss(bencher: Bencher<'_, '_>) {
    let pool = pool();
    let frozen = freeze(&pool, 4096);
    let address = frozen[2048].as_ptr() as usize;
    bencher.bench_local(|| drop(pool.find(black_box(address), 1 << 20)));
}

/// The cost of a sent slice that lies in no buffer of an allocation site, while there are `buffers` unsent
/// frozen buffers.
#[divan::bench(args = [0, 1, 4096])]
fn sites_sent_miss(bencher: Bencher<'_, '_>, buffers: usize) {
    let elsewhere = Pool::allocate(&pool(), 16 << 10).map(|buffer| buffer.freeze()).unwrap_or_default();
    let sites = SiteAllocator::new(pool(), SiteSettings::default());
    let _unsent: Vec<Bytes> = (0..buffers).map(|_| sites.allocate(SHORTEST).freeze()).collect();
    bencher.bench_local(|| sent(black_box(&elsewhere)));
}

/// The cost of a sent slice that lies between two unsent frozen buffers.
#[divan::bench]
fn sites_sent_near_miss(bencher: Bencher<'_, '_>) {
    let sites = learned(&pool(), 2 * SHORTEST);
    let buffers: Vec<Bytes> = (0..64).map(|_| allocate(&sites, 2 * SHORTEST).freeze()).collect();
    sent(&buffers[32]);
    bencher.bench_local(|| sent(black_box(&buffers[32])));
}

/// Allocation, filling, freeze and drop of 4 KiB:
/// - `vec` and `pool`: without sites, on the heap and in a pool;
/// - `never sent`: at a site in the source whose buffers are never sent;
/// - `sent` and `sent, named`: at a site in the source, and at a named site, whose buffers are all sent.
#[divan::bench(args = ["vec", "pool", "never sent", "sent", "sent, named"])]
fn sites_allocate(bencher: Bencher<'_, '_>, what: &str) {
    let pool = pool();
    let sites = learned(&pool, SHORTEST);
    match what {
        "vec" => bencher.bench_local(|| drop(Bytes::from(vec![1_u8; black_box(SHORTEST)]))),
        "pool" => bencher.bench_local(|| {
            drop(pool.allocate(black_box(SHORTEST)).map(|mut buffer| {
                buffer.fill(1);
                buffer.freeze()
            }));
        }),
        "never sent" => bencher.bench_local(|| {
            let mut buffer = sites.allocate(black_box(SHORTEST));
            buffer.fill(1);
            drop(buffer.freeze());
        }),
        "sent" => bencher.bench_local(|| {
            let mut buffer = allocate(&sites, black_box(SHORTEST));
            buffer.fill(1);
            sent(&buffer.freeze());
        }),
        _ => bencher.bench_local(|| {
            sites.next_iteration();
            let mut buffer = sites.allocate_named("tensor", black_box(SHORTEST));
            buffer.fill(1);
            sent(&buffer.freeze());
        }),
    }
}

/// Allocation and release of 4 KiB of memory:
/// - `system`: by the inner allocator alone;
/// - `idle`: by the tracing allocator, outside of executions;
/// - `live`: the same, while 1000 traced allocations are live;
/// - `traced`: in an execution of a node that sends nothing, on the heap;
/// - `placed`: in an execution of a node that sends the allocation, in the pool.
#[divan::bench(args = ["system", "idle", "live", "traced", "placed"])]
fn trace_allocate(bencher: Bencher<'_, '_>, what: &str) {
    let (trace, _live) = tracing(if what == "live" { 1000 } else { 0 });
    if what == "placed" {
        let _execution = trace.enter(1);
        trace.crossed(&Vec::from([0; SHORTEST]));
    }
    let _execution = match what {
        "traced" => Some(trace.enter(0)),
        "placed" => Some(trace.enter(1)),
        _ => None,
    };
    let layout = Layout::new::<[u8; SHORTEST]>();
    if what == "system" {
        bencher.bench_local(|| allocate_and_free(&System, black_box(layout)));
    } else {
        bencher.bench_local(|| allocate_and_free(&ALLOCATOR, black_box(layout)));
    }
    assert_eq!(trace.report().placed > 0, what == "placed");
}

/// An execution of a node that allocates nothing, and the look-up of bytes that are sent, among 1000 live
/// allocations.
#[divan::bench(args = ["enter", "crossed"])]
fn trace_calls(bencher: Bencher<'_, '_>, what: &str) {
    let (trace, live) = tracing(1000);
    match what {
        "enter" => bencher.bench_local(|| drop(trace.enter(black_box(0)))),
        _ => bencher.bench_local(|| trace.crossed(black_box(&live[500]))),
    }
}

/// Makes an allocator that traces, with `live` traced allocations of 100 bytes.
fn tracing(live: usize) -> (SiteAllocator, Vec<Vec<u8>>) {
    let trace = SiteAllocator::tracing(1 << 30).expect("this program has the allocator");
    let mut allocations = Vec::with_capacity(live);
    let execution = trace.enter(0);
    allocations.extend((0..live).map(|_| vec![1; 100]));
    drop(execution);
    (trace, allocations)
}

/// Allocates memory and frees it.
fn allocate_and_free(allocator: &impl GlobalAlloc, layout: Layout) {
    // SAFETY: the layout is not of size zero.
    let start = black_box(unsafe { allocator.alloc(layout) });
    assert!(!start.is_null());
    // SAFETY: the memory came from this allocator, with this layout.
    unsafe { allocator.dealloc(start, layout) };
}

/// Makes an allocator that has learnt that the buffers of [`allocate`] are sent.
fn learned(pool: &Pool, length: usize) -> SiteAllocator {
    let sites = SiteAllocator::new(pool.clone(), SiteSettings::default());
    sent(&allocate(&sites, length).freeze());
    sites.next_iteration();
    assert_eq!(allocate(&sites, length).placement(), SitePlacement::Registered);
    sites
}

fn allocate(sites: &SiteAllocator, length: usize) -> SiteBuf {
    sites.allocate(length)
}

fn freeze(pool: &Pool, count: usize) -> Vec<Bytes> {
    (0..count).filter_map(|_| pool.allocate(4096).ok()).map(|buffer| buffer.freeze()).collect()
}

/// Makes a pool that no device knows, so that only the pool is measured.
fn pool() -> Pool {
    Pool::for_sending(1 << 30)
}
