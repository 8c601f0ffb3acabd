//! Groups that come and go in one process leave nothing. The allocator of this test counts what is allocated,
//! because resident memory depends on what the allocator keeps. `COLLECTIVE_GROUPS` sets the number of
//! groups; the test prints resident memory as well.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test, which prints what it counts"
)]

use std::time::{Duration, Instant};

use support::{Counting, Held, descriptors_and_mappings, free_address, held_by_this_process};
use tonic_rdma_collective::{Communicator, Launch, PlanChoice, Reduction};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const LIMIT: Duration = Duration::from_secs(120);

/// Makes a group of two ranks on threads of their own, uses it, and drops it.
fn group(number: usize) {
    const ELEMENTS: usize = 200_000;
    let address = free_address();
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let address = address.clone();
            scope.spawn(move || {
                let mut builder = tokio::runtime::Builder::new_multi_thread();
                let runtime = builder.worker_threads(1).enable_all().build().unwrap();
                let launch = Launch::new(rank, 2, address).job(format!("group {number}"));
                // Long enough for a busy machine; only a hang takes so long.
                let builder =
                    Communicator::builder().launch(launch).plans(PlanChoice::Default).deadline(LIMIT);
                let communicator = runtime.block_on(builder.connect()).unwrap();
                let mut values = vec![rank as f32; ELEMENTS];
                communicator.all_reduce(&mut values[..], Reduction::Sum).wait().unwrap();
                assert!(values.iter().all(|value| *value == 1.0));
                communicator.barrier().wait().unwrap();
            });
        }
    });
}

/// What the groups of this process hold.
#[derive(Clone, Copy, Debug)]
struct Resources {
    blocks: isize,
    bytes: isize,
    descriptors: usize,
    mappings: usize,
    threads: usize,
}

impl Resources {
    fn now() -> Self {
        let (descriptors, mappings) = descriptors_and_mappings();
        let threads = std::fs::read_dir("/proc/self/task").unwrap().count();
        let Held { blocks, bytes } = held_by_this_process();
        Self { blocks, bytes, descriptors, mappings, threads }
    }

    /// Returns what is held once `is_settled` is true of it. Memory that a peer has mapped is unmapped some
    /// seconds after the end of the group.
    fn when(is_settled: impl Fn(&Self) -> bool) -> Self {
        let begun = Instant::now();
        loop {
            let now = Self::now();
            if is_settled(&now) {
                return now;
            }
            assert!(begun.elapsed() < LIMIT, "it does not settle: {now:?}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

#[test]
fn groups_that_are_gone_leave_nothing() {
    // So many that what caches hold more or less at the end, up to 10 KiB, is less than the limit for each
    // group.
    let count =
        std::env::var("COLLECTIVE_GROUPS").map_or(100, |count| count.parse().expect("COLLECTIVE_GROUPS"));
    // The first ones fill caches.
    (0..5).for_each(group);
    let before = Resources::when(|now| now.mappings == 0);
    println!("before: {before:?}");
    for number in 0..count {
        group(number);
        if number % (count / 10).max(1) == 0 {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let resident = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap();
            println!(
                "{number} groups: {} blocks, {} bytes, {resident}",
                Resources::now().blocks,
                Resources::now().bytes
            );
        }
    }
    // Less than a block for two groups. Some blocks come and go with the threads of the runtimes.
    let after = Resources::when(|now| {
        now.mappings == 0
            && now.threads <= before.threads
            && now.descriptors <= before.descriptors
            && now.blocks <= before.blocks + count as isize / 2
            && now.bytes <= before.bytes + 256 * count as isize
    });
    println!("{count} groups: {before:?} before, {after:?} after");
}
