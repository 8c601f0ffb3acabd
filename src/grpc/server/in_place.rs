//! The choice whether a call is polled where it was found, or in a task of its own.
//!
//! A call that ends in its first poll costs no task and no switch to one. So the thread that finds a call
//! polls the call itself, unless:
//!
//! - code of the application may be under way on the thread ([`Accepting`]), such as another call that is
//!   polled in place;
//! - polls of the same path have been slow, or the thread has spent long on calls just before, and other
//!   threads could help.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use crate::endpoint::Accepting;

/// Polls of a path that take longer than this on average are left to a task.
const SLOW: Duration = Duration::from_micros(50);
/// Of so many calls of a slow path, one is polled in place, to find out whether the path is still slow.
const RETRY: u32 = 64;
/// A thread spends at most this long on one burst of calls, if the runtime has other threads.
const BURST: Duration = Duration::from_micros(200);
/// A pause of this length ends a burst.
const PAUSE: Duration = Duration::from_micros(5);
/// Of so many polls in the only thread of a runtime, one is measured.
const MEASURED: u32 = 8;
/// Most paths whose time is known. A server has fewer methods.
const PATHS: usize = 4096;

thread_local! {
    static THREAD: Thread = const {
        Thread {
            count: Cell::new(0),
            ended: Cell::new(None),
            spent: Cell::new(Duration::ZERO),
        }
    };
}

/// What this thread does with calls.
struct Thread {
    /// Calls that it has polled in place.
    count: Cell<u32>,
    /// The end of its last poll in place.
    ended: Cell<Option<Instant>>,
    /// The time that it has spent in this burst.
    spent: Cell<Duration>,
}

/// The right of this thread to poll one call in place. Dropping this gives the right back.
#[derive(Debug)]
pub(super) struct InPlace {
    /// `None` if the poll is not measured.
    started: Option<Instant>,
    _only: Accepting,
}

impl InPlace {
    /// Takes the right. `alone` says that the runtime has no other thread. Returns `None` if the call has to
    /// become a task. Measuring a poll reads the clock twice. So a poll is measured if the runtime has other
    /// threads, if there are slow paths, and otherwise for one call of eight.
    pub(super) fn begin(have_slow: bool, alone: bool) -> Option<Self> {
        let is_measured = |thread: &Thread| {
            let count = thread.count.get();
            thread.count.set(count.wrapping_add(1));
            !alone || have_slow || count.is_multiple_of(MEASURED)
        };
        let now = THREAD.with(|thread| is_measured(thread).then(Instant::now));
        Self::begin_at(now, alone)
    }

    fn begin_at(now: Option<Instant>, alone: bool) -> Option<Self> {
        THREAD.with(|thread| {
            let only = Accepting::take()?;
            let Some(now) = now else { return Some(Self { started: None, _only: only }) };
            let paused = thread.ended.get().is_none_or(|ended| now.saturating_duration_since(ended) > PAUSE);
            if paused {
                thread.spent.set(Duration::ZERO);
            } else if !alone && thread.spent.get() > BURST {
                thread.ended.set(Some(now));
                return None;
            }
            Some(Self { started: Some(now), _only: only })
        })
    }

    /// Returns when the poll began, if it is measured.
    pub(super) fn started(&self) -> Option<Instant> {
        self.started
    }

    /// Ends the poll, and returns how long it took, if it was measured.
    pub(super) fn end(self) -> Option<Duration> {
        let started = self.started?;
        let now = Instant::now();
        let took = now.saturating_duration_since(started);
        THREAD.with(|thread| {
            thread.ended.set(Some(now));
            thread.spent.set(thread.spent.get().saturating_add(took));
        });
        Some(took)
    }
}

/// How long polls in place take, for the paths that have been slow once.
#[derive(Debug, Default)]
pub(super) struct Paths {
    /// There are slow paths. Most servers have none, and spare the lock.
    any: AtomicBool,
    slow: RwLock<HashMap<Box<str>, Arc<Average>>>,
}

/// The moving average of one path.
#[derive(Debug, Default)]
struct Average {
    nanoseconds: AtomicU64,
    /// Calls that were left to tasks.
    left_to_tasks: AtomicU32,
}

impl Paths {
    /// Returns whether there are slow paths.
    pub(super) fn have_slow(&self) -> bool {
        // Relaxed: a thread that does not see the first slow path yet treats its calls as quick once more.
        self.any.load(Ordering::Relaxed)
    }

    /// Returns whether a call of `path` is quick enough to be polled in place.
    pub(super) fn is_quick(&self, path: &str) -> bool {
        self.find(path).is_none_or(|average| average.is_quick())
    }

    /// Notes how long a poll in place took.
    pub(super) fn took(&self, path: &str, time: Duration) {
        if let Some(average) = self.find(path) {
            average.add(time);
            if average.is_forgotten() {
                let mut slow = self.slow.write().unwrap_or_else(PoisonError::into_inner);
                slow.remove(path);
                self.any.store(!slow.is_empty(), Ordering::Relaxed);
            }
        } else if time > SLOW {
            let mut slow = self.slow.write().unwrap_or_else(PoisonError::into_inner);
            if slow.len() < PATHS {
                slow.entry(path.into()).or_default().add(time);
                self.any.store(true, Ordering::Relaxed);
            }
        }
    }

    fn find(&self, path: &str) -> Option<Arc<Average>> {
        if !self.have_slow() {
            return None;
        }
        self.slow.read().unwrap_or_else(PoisonError::into_inner).get(path).cloned()
    }
}

impl Average {
    /// Weight of one poll.
    const SHARE: u64 = 8;

    fn is_quick(&self) -> bool {
        self.nanoseconds.load(Ordering::Relaxed) <= nanoseconds(SLOW)
            || self.left_to_tasks.fetch_add(1, Ordering::Relaxed) % RETRY == RETRY - 1
    }

    /// Returns whether the path has been quick for some time. The first call of a path is often slow, because
    /// its code and memory are touched for the first time.
    fn is_forgotten(&self) -> bool {
        self.nanoseconds.load(Ordering::Relaxed) <= nanoseconds(SLOW) / 16
    }

    /// Adds a poll. If two threads add at the same time, one of the polls may be lost.
    fn add(&self, time: Duration) {
        let (before, time) = (self.nanoseconds.load(Ordering::Relaxed), nanoseconds(time));
        let after = if before > nanoseconds(SLOW) && time <= nanoseconds(SLOW) {
            // A quick poll of a slow path: those between were not measured, so this one weighs more.
            before / 2
        } else {
            before - before / Self::SHARE + time / Self::SHARE
        };
        self.nanoseconds.store(after, Ordering::Relaxed);
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX / Average::SHARE)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    const PATH: &str = "/a.B/C";

    #[test]
    fn a_thread_does_not_poll_a_call_within_a_call() {
        assert!(InPlace::begin(false, true).is_none(), "code of the application may be under way");
        let _accepting = Accepting::begin();
        let first = InPlace::begin(false, true).unwrap();
        assert!(InPlace::begin(false, true).is_none());
        first.end();
        drop(InPlace::begin(false, true).unwrap());
        assert!(InPlace::begin(false, true).is_some());
    }

    #[test]
    fn the_only_thread_of_a_runtime_measures_some_calls_until_there_are_slow_ones() {
        let _accepting = Accepting::begin();
        let measured = |have_slow, alone| {
            (0..800).filter(|_| InPlace::begin(have_slow, alone).unwrap().end().is_some()).count()
        };
        assert_eq!(measured(false, true), 100);
        assert_eq!(measured(true, true), 800);
        THREAD.with(|thread| (thread.ended.set(None), thread.spent.set(Duration::ZERO)));
        assert!(InPlace::begin(false, false).unwrap().end().is_some());
    }

    #[test]
    fn a_thread_with_others_beside_it_stops_after_a_turn() {
        let _accepting = Accepting::begin();
        let begin = |now, alone| InPlace::begin_at(Some(now), alone).map(drop).is_some();
        let now = Instant::now();
        THREAD.with(|thread| {
            thread.ended.set(Some(now));
            thread.spent.set(BURST * 2);
        });
        assert!(!begin(now + PAUSE / 2, false), "others can help");
        assert!(begin(now + PAUSE / 2, true), "no other thread");
        assert!(begin(now + PAUSE * 4, false), "a pause");
    }

    #[test]
    fn slow_paths_go_to_tasks_until_they_are_quick_again() {
        let paths = Paths::default();
        assert!(paths.is_quick(PATH));
        paths.took(PATH, SLOW * 2);
        assert!(paths.is_quick(PATH), "one poll may be slow by chance");
        for _ in 0..20 {
            paths.took(PATH, SLOW * 2);
        }
        assert!(paths.is_quick("/a.B/D"), "another path");
        let quick = |count| (0..count).filter(|_| paths.is_quick(PATH)).count();
        assert_eq!(quick(RETRY * 3), 3, "three trials");
        paths.took(PATH, SLOW / 50);
        assert_eq!(quick(10), 10);
    }

    #[test]
    fn a_path_that_is_quick_again_costs_nothing_any_more() {
        let paths = Paths::default();
        paths.took(PATH, SLOW * 2);
        assert!(paths.any.load(Ordering::Relaxed));
        for _ in 0..100 {
            paths.took(PATH, SLOW / 50);
        }
        assert!(!paths.any.load(Ordering::Relaxed) && paths.slow.read().unwrap().is_empty());
        paths.took(PATH, SLOW * 2);
        assert!(paths.find(PATH).is_some());
    }

    #[test]
    fn quick_paths_take_no_memory() {
        let paths = Paths::default();
        (0..10_000).for_each(|number| paths.took(&format!("/{number}"), SLOW / 2));
        assert!(paths.slow.read().unwrap().is_empty());
        (0..10_000).for_each(|number| paths.took(&format!("/{number}"), SLOW * 2));
        assert_eq!(paths.slow.read().unwrap().len(), PATHS);
    }
}
