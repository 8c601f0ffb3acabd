//! What this machine charges for getting from one thread to another, for a system call, and for a copy, without which the figures
//! of two machines can't be compared: a small call over TCP is mostly wake-ups and system calls, one over RDMA has none of them at
//! best, and a large one is mostly copies.

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use serde::Serialize;

use crate::measure::process::cores::{self, Cores};
use crate::units;

/// How long each of them is measured.
const LENGTH: Duration = Duration::from_millis(10);

/// Round trips between two readings of the clock, where one is hardly longer than a reading.
const SPINS: u32 = 64;

/// Bytes that are copied: more than caches of a core hold.
const COPY: usize = 16 << 20;

/// Round trips between two threads, each on a core of its own where there are two, and other costs: medians.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Costs {
    /// Both look at a word of memory without ever sleeping; absent where they have one core between them.
    pub(crate) spin_us: Option<f64>,
    /// Each sleeps until the other wakes it, by eventfd; absent where that could not be done.
    pub(crate) wake_us: Option<f64>,
    /// A system call that does next to nothing.
    pub(crate) syscall_us: Option<f64>,
    /// A copy of 16 MiB within one thread, in 10⁹ bytes a second.
    pub(crate) memcpy_gbytes_per_s: Option<f64>,
}

impl Costs {
    /// Measures for some 50 ms.
    pub(crate) fn measure() -> Self {
        let cores = Cores::choose();
        Self {
            spin_us: cores.and_then(spin).map(micros),
            wake_us: wake(cores).map(micros),
            syscall_us: system_call().map(micros),
            memcpy_gbytes_per_s: copy().map(|took| COPY as f64 / took.as_secs_f64() / 1e9),
        }
    }

    /// In words.
    pub(crate) fn summary(&self) -> String {
        let took = |micros: Option<f64>| micros.map_or_else(|| "unknown".to_owned(), units::micros);
        let (spin, wake) = (took(self.spin_us), took(self.wake_us));
        let call = took(self.syscall_us);
        let copy = self.memcpy_gbytes_per_s.map_or_else(|| "unknown".to_owned(), units::digits);
        format!(
            "a round trip between two threads takes {spin} where both spin, {wake} where both sleep; a system call takes {call}; \
             memcpy does {copy} GB/s"
        )
    }
}

fn micros(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}

/// The word that ends the game.
const OVER: u64 = u64::MAX;

/// A system call.
fn system_call() -> Option<Duration> {
    median_of(|| {
        let start = Instant::now();
        for _ in 0..SPINS {
            std::hint::black_box(rustix::process::getppid());
        }
        Some(start.elapsed() / SPINS)
    })
}

/// A copy into memory that was written before.
fn copy() -> Option<Duration> {
    let (from, mut to) = (vec![1_u8; COPY], vec![2_u8; COPY]);
    median_of(|| {
        let start = Instant::now();
        to.copy_from_slice(std::hint::black_box(&from));
        std::hint::black_box(&mut to);
        Some(start.elapsed())
    })
}

/// A round trip of a word that one thread makes odd and the other even.
fn spin(cores: Cores) -> Option<Duration> {
    let word = AtomicU64::new(0);
    thread::scope(|scope| {
        scope.spawn(|| {
            let _ = cores::pin(cores.server);
            loop {
                match word.load(Ordering::Acquire) {
                    OVER => return,
                    odd if odd % 2 == 1 => word.store(odd + 1, Ordering::Release),
                    _ => std::hint::spin_loop(),
                }
            }
        });
        let timed = scope.spawn(|| {
            let _ = cores::pin(cores.client);
            let mut next = 1;
            let median = median_of(|| {
                let start = Instant::now();
                for _ in 0..SPINS {
                    word.store(next, Ordering::Release);
                    while word.load(Ordering::Acquire) == next {
                        std::hint::spin_loop();
                    }
                    next += 2;
                }
                Some(start.elapsed() / SPINS)
            });
            word.store(OVER, Ordering::Release);
            median
        });
        timed.join().ok().flatten()
    })
}

/// A round trip of two counters, for each of which a thread sleeps.
fn wake(cores: Option<Cores>) -> Option<Duration> {
    let counter = || eventfd(0, EventfdFlags::CLOEXEC).ok();
    let (ping, pong) = (counter()?, counter()?);
    thread::scope(|scope| {
        scope.spawn(|| {
            let _ = cores.map(|cores| cores::pin(cores.server));
            while take(&ping) == Some(1) && give(&pong, 1).is_some() {}
        });
        let timed = scope.spawn(|| {
            let _ = cores.map(|cores| cores::pin(cores.client));
            let median = median_of(|| {
                let start = Instant::now();
                give(&ping, 1)?;
                take(&pong)?;
                Some(start.elapsed())
            });
            // Any other number ends it.
            give(&ping, 2)?;
            median
        });
        timed.join().ok().flatten()
    })
}

/// Adds to a counter.
fn give(counter: &OwnedFd, number: u64) -> Option<()> {
    rustix::io::write(counter, &number.to_ne_bytes()).ok().map(drop)
}

/// Sleeps until a counter is not zero, and takes what is in it.
fn take(counter: &OwnedFd) -> Option<u64> {
    let mut number = [0; 8];
    loop {
        match rustix::io::read(counter, &mut number) {
            Ok(_) => return Some(u64::from_ne_bytes(number)),
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return None,
        }
    }
}

/// The median of what `sample` finds within [`LENGTH`], once at least.
fn median_of(mut sample: impl FnMut() -> Option<Duration>) -> Option<Duration> {
    let mut samples = Vec::with_capacity(1 << 12);
    let start = Instant::now();
    loop {
        samples.push(sample()?);
        if start.elapsed() >= LENGTH {
            samples.sort_unstable();
            return samples.get(samples.len() / 2).copied();
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use super::*;

    #[test]
    fn all_costs_are_found_where_there_are_two_cores() {
        let costs = Costs::measure();
        assert_eq!(costs.spin_us.is_some(), Cores::choose().is_some());
        assert!(costs.syscall_us > Some(0.0) && costs.memcpy_gbytes_per_s > Some(0.0));
        assert!(costs.wake_us.unwrap() > 0.0 && costs.spin_us.is_none_or(|spin| spin > 0.0));
    }

    #[test]
    fn what_could_not_be_measured_is_said() {
        let costs =
            Costs { spin_us: None, wake_us: Some(14.0), syscall_us: Some(0.5), memcpy_gbytes_per_s: None };
        let summary = costs.summary();
        assert!(summary.contains("unknown where both spin, 14.0 µs where both sleep"), "{summary}");
        assert!(summary.contains("a system call takes 0.50 µs; memcpy does unknown"), "{summary}");
    }

    #[test]
    fn one_core_is_enough_for_threads_that_sleep() {
        assert!(wake(None).is_some());
    }
}
