//! Futures that poll a completion queue themselves while they wait for the answer to a call, and threads that
//! poll the queues themselves.
//!
//! One thread of a runtime does so at a time, so that the other workers serve tasks, timers and sockets.
//! Meanwhile the poll task polls from time to time only, and the queues are not armed. When the caller stops
//! although a future waits or other calls are in flight, the poll task takes over. When it stops because the
//! answer to the only call has come, and nothing else can arrive, the queues stay as they are: the next call
//! usually comes at once, and otherwise the poll task arms them within some milliseconds.
//!
//! In a runtime with one thread a future does so only for the only call, and only if the call has just begun, so
//! that the thread has nothing else to do. That spares the way through the scheduler: otherwise the future would
//! return `Pending`, the runtime would ask the system for events, and its hook would poll the queue.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use super::pace::Pace;
use super::reactor::Reactor;

/// The callers of one reactor.
#[derive(Debug)]
pub(super) struct Callers {
    /// The pace of the caller that polls; locked while one polls.
    pub(super) pace: Mutex<Pace>,
    /// A caller is polling.
    polling: AtomicBool,
    /// A caller has polled since the poll task asked last.
    polled: AtomicBool,
    /// A future waits that does not poll itself.
    waiting: AtomicBool,
    /// Calls in flight.
    calls: AtomicUsize,
    /// Threads that poll themselves for a while.
    own_polling: AtomicUsize,
}

/// The right to poll, until dropped.
#[derive(Debug)]
pub(super) struct PollPermit<'a> {
    callers: &'a Callers,
    pub(super) pace: MutexGuard<'a, Pace>,
}

impl Callers {
    /// Makes the callers of a reactor, each of which polls for `longest` at most.
    pub(super) fn new(longest: Duration) -> Self {
        Self {
            pace: Mutex::new(Pace::new(longest)),
            polling: AtomicBool::new(false),
            polled: AtomicBool::new(false),
            waiting: AtomicBool::new(false),
            calls: AtomicUsize::new(0),
            own_polling: AtomicUsize::new(0),
        }
    }

    /// Returns the right to poll; `None` while another caller has it.
    pub(super) fn begin(&self) -> Option<PollPermit<'_>> {
        let pace = self.pace.try_lock().ok()?;
        self.polling.store(true, Ordering::SeqCst);
        self.polled.store(true, Ordering::SeqCst);
        Some(PollPermit { callers: self, pace })
    }

    /// Notes that an answer came that no caller was polling for.
    pub(super) fn arrived(&self) {
        if let Ok(mut pace) = self.pace.try_lock() {
            pace.arrived_now();
        }
    }

    /// Returns whether a caller is polling, or a thread polls itself.
    pub(super) fn is_polling(&self) -> bool {
        self.polling.load(Ordering::SeqCst) || self.is_own_polled()
    }

    /// Returns whether a thread polls itself.
    pub(super) fn is_own_polled(&self) -> bool {
        self.own_polling.load(Ordering::SeqCst) > 0
    }

    /// Returns whether a caller has polled since the last call of this function, and left nothing to the poll
    /// task.
    pub(super) fn have_polled(&self) -> bool {
        self.polled.swap(false, Ordering::SeqCst) && !self.waiting.load(Ordering::SeqCst)
    }

    /// Notes that a future waits that does not poll itself.
    pub(super) fn wait(&self) {
        self.waiting.store(true, Ordering::SeqCst);
    }

    /// Ends a caller's polling, and returns whether the poll task has to take over: a future waits, or other
    /// calls are in flight. `always`: something else may arrive, too.
    pub(super) fn hand_over(&self, permit: PollPermit<'_>, always: bool) -> bool {
        drop(permit);
        let waiting = self.waiting.load(Ordering::SeqCst) && self.waiting.swap(false, Ordering::SeqCst);
        let takes_over = waiting || always || self.calls.load(Ordering::SeqCst) > 1;
        if takes_over {
            // The poll task polls with its next step.
            self.polled.store(false, Ordering::SeqCst);
        }
        takes_over
    }

    /// Returns whether one call is in flight.
    pub(super) fn is_single_call(&self) -> bool {
        self.calls.load(Ordering::Relaxed) == 1
    }
}

/// A call of this process in flight, whose future may poll a queue, until this is dropped.
#[derive(Debug)]
pub(crate) struct CallInFlight(Arc<Reactor>);

impl CallInFlight {
    /// Notes that a call has begun.
    pub(crate) fn begin(reactor: &Arc<Reactor>) -> Self {
        reactor.callers.calls.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(reactor))
    }
}

impl Drop for CallInFlight {
    fn drop(&mut self) {
        self.0.callers.calls.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A thread polls the queues of a reactor itself, until this is dropped. Meanwhile the queues are not armed,
/// so that arrivals and completions wake no other thread, and the poll task polls once in a millisecond only.
#[derive(Debug)]
#[must_use = "the poll task takes over when this is dropped"]
pub struct OwnPolling(Arc<Reactor>);

impl OwnPolling {
    /// Begins to poll on this thread, which polls until it drops the result. The poll task polls once in each
    /// millisecond meanwhile.
    pub fn of(reactor: &Arc<Reactor>) -> Self {
        reactor.callers.own_polling.fetch_add(1, Ordering::SeqCst);
        // If the poll task is in a step, it may arm the queues once more. Then the first event wakes it, and
        // it does not arm them again.
        reactor.take_arming_back();
        Self(Arc::clone(reactor))
    }

    /// Polls every queue once. A queue that another thread is polling is left to that thread.
    pub fn poll(&self) {
        self.0.poll();
    }
}

impl Drop for OwnPolling {
    fn drop(&mut self) {
        self.0.callers.own_polling.fetch_sub(1, Ordering::SeqCst);
        // The poll task takes over.
        self.0.wake_task.notify_one();
    }
}

impl Drop for PollPermit<'_> {
    fn drop(&mut self) {
        self.callers.polling.store(false, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;
    use crate::endpoint::config::Config;

    #[test]
    fn the_poll_task_does_not_wait_after_a_caller_that_stopped_without_its_answer() {
        let callers = Callers::new(Duration::from_micros(120));
        callers.calls.store(1, Ordering::SeqCst);
        let permit = callers.begin().unwrap();
        assert!(callers.is_polling());
        callers.wait();
        assert!(callers.hand_over(permit, false), "a future waits");
        assert!(!callers.is_polling() && !callers.have_polled(), "nothing else would poll the queue");
    }

    #[tokio::test]
    async fn threads_that_poll_themselves_keep_the_poll_task_waiting() {
        let context = tonic_rdma_verbs::soft::open().unwrap();
        let reactor = Reactor::current(&context, &Config::default()).unwrap();
        let callers = &reactor.callers;
        let (first, second) = (OwnPolling::of(&reactor), OwnPolling::of(&reactor));
        drop(first);
        assert!(callers.is_polling() && callers.is_own_polled(), "one is left");
        drop(second);
        assert!(!callers.is_polling() && !callers.is_own_polled());
    }

    #[test]
    fn the_poll_task_waits_once_for_the_next_call_of_the_only_caller() {
        let callers = Callers::new(Duration::from_micros(120));
        callers.calls.store(1, Ordering::SeqCst);
        let permit = callers.begin().unwrap();
        assert!(!callers.hand_over(permit, false));
        assert!(callers.have_polled());
        assert!(!callers.have_polled(), "no caller came since");
        // Other calls wait for their answers.
        callers.calls.store(2, Ordering::SeqCst);
        let permit = callers.begin().unwrap();
        assert!(callers.hand_over(permit, false));
        assert!(!callers.have_polled());
    }
}
