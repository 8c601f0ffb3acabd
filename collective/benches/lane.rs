//! Measures lanes between two ranks of this process, each with a thread of its own: `cargo bench -p tonic-rdma-collective --bench lane`.
//!
//! A round trip is a message and its answer, so two one-way times. The best and the middle of many runs are printed, because other
//! work on the machine makes single runs long. The numbers are those of threads that spin on cores of their own: with fewer than
//! two cores they mean nothing. The memory of references does not change, so it may lie in the reader's cache.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a bench that can't run says so by stopping"
)]

use std::hint::spin_loop;
use std::time::{Duration, Instant};

use tonic_rdma_collective::internal::Duo;

/// Lengths of inline messages, in bytes.
const INLINE: [usize; 6] = [0, 8, 40, 64, 1024, 16 << 10];
/// Lengths of references, in bytes.
const REFERENCES: [usize; 4] = [16 << 10, 64 << 10, 1 << 20, 16 << 20];
const RUNS: usize = 40;

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    for views in [true, false] {
        let [first, second] = runtime.block_on(Duo::open(views, 16 << 20)).unwrap();
        assert_eq!(first.is_view(), views, "this machine has no views");
        println!("{}", if views { "by views" } else { "by writes" });
        let inline: &[usize] = if views { &INLINE } else { &INLINE[..3] };
        measure(first, second, inline, if views { 2000 } else { 200 });
    }
}

/// Prints the time of a round trip for each length. `count` is the number of round trips of a run with short messages.
fn measure(mut first: Duo, mut second: Duo, inline: &[usize], count: usize) {
    let inline = inline.iter().map(|length| (*length, false));
    let work: Vec<_> = inline.chain(REFERENCES.map(|length| (length, true))).collect();
    let runs = |(length, by_reference): (usize, bool)| {
        (length, by_reference, (count * 4096 / (length + 4096)).max(2))
    };
    let plan: Vec<_> = work.into_iter().map(runs).collect();
    let answers = plan.clone();
    let answering = std::thread::spawn(move || {
        for (length, by_reference, trips) in answers {
            let mut into = vec![0; length];
            for _ in 0..RUNS * trips {
                receive(&mut second, &mut into);
                send(&mut second, &into, by_reference);
            }
        }
        second
    });
    for (length, by_reference, trips) in plan {
        let mut into = vec![0; length];
        let mut times: Vec<_> = (0..RUNS)
            .map(|_| {
                let start = Instant::now();
                for _ in 0..trips {
                    send(&mut first, &into, by_reference);
                    receive(&mut first, &mut into);
                }
                start.elapsed() / trips as u32
            })
            .collect();
        times.sort_unstable();
        print(length, by_reference, times[0], times[RUNS / 2]);
    }
    drop(answering.join().unwrap());
}

fn send(duo: &mut Duo, bytes: &[u8], by_reference: bool) {
    while !(if by_reference { duo.refer(bytes.len()) } else { duo.send(bytes) }).unwrap() {
        spin_loop();
    }
}

fn receive(duo: &mut Duo, into: &mut [u8]) {
    while !duo.receive(into).unwrap() {
        spin_loop();
    }
}

fn print(length: usize, by_reference: bool, best: Duration, middle: Duration) {
    let kind = if by_reference { "reference" } else { "inline" };
    println!("  {kind:9} {length:>9} B   round trip: best {best:>10.3?}, median {middle:>10.3?}");
}
