//! Futures that look at a completion queue themselves while they wait for the answer to a call.
//!
//! One thread of a runtime does so at a time, so that the other workers serve tasks, timers and sockets. Meanwhile the poll task looks
//! from time to time only, and the queues are not armed. When the caller stops although a future waits, the poll task takes over. When it
//! stops because its answer has come, and all other arrivals belong to callers too, the queues stay as they are: the next call
//! usually comes at once, and otherwise the poll task arms them within some milliseconds.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::pace::Pace;

/// The callers of one reactor.
#[derive(Debug)]
pub(super) struct Callers {
    /// The pace of the caller that looks; locked while one looks.
    pace: Mutex<Pace>,
    /// A caller is looking.
    looking: AtomicBool,
    /// A caller has looked since the poll task asked last.
    looked: AtomicBool,
    /// A future waits that does not look itself.
    waiting: AtomicBool,
}

/// The right to look, until dropped.
#[derive(Debug)]
pub(super) struct Turn<'a> {
    callers: &'a Callers,
    pace: MutexGuard<'a, Pace>,
}

impl Callers {
    /// Makes the callers of a reactor, each of which looks for `longest` at most.
    pub(super) fn new(longest: Duration) -> Self {
        Self {
            pace: Mutex::new(Pace::new(longest)),
            looking: AtomicBool::new(false),
            looked: AtomicBool::new(false),
            waiting: AtomicBool::new(false),
        }
    }

    /// Returns the right to look; `None` while another caller has it.
    pub(super) fn begin(&self) -> Option<Turn<'_>> {
        let pace = self.pace.try_lock().ok()?;
        self.looking.store(true, Ordering::SeqCst);
        self.looked.store(true, Ordering::Relaxed);
        Some(Turn { callers: self, pace })
    }

    /// Notes that an answer came that no caller was looking for.
    pub(super) fn arrived(&self) {
        if let Ok(mut pace) = self.pace.try_lock() {
            pace.arrived(Instant::now());
        }
    }

    /// Returns whether a caller is looking.
    pub(super) fn is_looking(&self) -> bool {
        self.looking.load(Ordering::SeqCst)
    }

    /// Returns whether a caller has looked since the last call of this function, and no future waits that does not look itself.
    pub(super) fn have_looked(&self) -> bool {
        self.looked.swap(false, Ordering::Relaxed) && !self.waiting.load(Ordering::SeqCst)
    }

    /// Notes that a future waits that does not look itself.
    pub(super) fn wait(&self) {
        self.waiting.store(true, Ordering::SeqCst);
    }

    /// Returns whether a future began to wait since the last call of this function.
    pub(super) fn take_waiting(&self) -> bool {
        self.waiting.load(Ordering::SeqCst) && self.waiting.swap(false, Ordering::SeqCst)
    }
}

impl Turn<'_> {
    /// Returns the pace.
    pub(super) fn pace(&mut self) -> &mut Pace {
        &mut self.pace
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.callers.looking.store(false, Ordering::SeqCst);
    }
}
