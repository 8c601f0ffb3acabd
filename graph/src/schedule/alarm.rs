//! Wakes the thread of an executor.

use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Wake;
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use tonic_rdma_verbs::internal::lock;

/// Wakes the thread of an executor, and keeps which receives have arrived.
#[derive(Debug)]
pub(super) struct Alarm {
    thread: Thread,
    rung: AtomicBool,
    arrivals: Mutex<Vec<usize>>,
}

/// The waker of one receive.
#[derive(Debug)]
pub(super) struct Arrival {
    pub(super) alarm: Arc<Alarm>,
    pub(super) receive: usize,
}

impl Alarm {
    /// Makes the alarm of the current thread.
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self { thread: thread::current(), rung: AtomicBool::new(false), arrivals: Mutex::default() })
    }

    /// Notes that one should look at a receive.
    pub(super) fn look_at(&self, receive: usize) {
        lock(&self.arrivals).push(receive);
    }

    /// Takes the receives that one should look at.
    pub(super) fn arrivals(&self) -> Vec<usize> {
        mem::take(&mut *lock(&self.arrivals))
    }

    /// Returns whether there are receives that one should look at.
    pub(super) fn has_arrivals(&self) -> bool {
        !lock(&self.arrivals).is_empty()
    }

    /// Forgets earlier rings. Call this before the wakers are given out.
    pub(super) fn set(&self) {
        self.rung.store(false, Ordering::SeqCst);
    }

    /// Sleeps until the alarm rings, at most for `longest`. Returns whether it has rung. Only the thread that made the alarm may call
    /// this.
    pub(super) fn sleep(&self, longest: Duration) -> bool {
        // A ring after `set` leaves the thread's token, so that it is not lost. A token may also be left of an earlier ring, or of
        // another user of this thread: it ends a park early, and is no ring.
        let began = Instant::now();
        while !self.has_rung() {
            let left = longest.saturating_sub(began.elapsed());
            if left.is_zero() {
                return false;
            }
            thread::park_timeout(left);
        }
        true
    }

    /// Returns whether the alarm has rung since it was set.
    pub(super) fn has_rung(&self) -> bool {
        self.rung.load(Ordering::SeqCst)
    }

    fn ring(&self) {
        if !self.rung.swap(true, Ordering::SeqCst) {
            self.thread.unpark();
        }
    }
}

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        self.ring();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.ring();
    }
}

impl Wake for Arrival {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.alarm.look_at(self.receive);
        self.alarm.ring();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_of_an_earlier_ring_does_not_end_a_sleep() {
        let alarm = Alarm::new();
        alarm.ring();
        alarm.set();
        let began = Instant::now();
        assert!(!alarm.sleep(Duration::from_millis(30)));
        assert!(began.elapsed() >= Duration::from_millis(30), "the sleep ended early without a ring");
        alarm.ring();
        assert!(alarm.sleep(Duration::from_secs(600)));
    }
}
