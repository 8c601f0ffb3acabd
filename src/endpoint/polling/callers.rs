//! Futures that poll a completion queue themselves while they wait for the answer to a call, and threads that
//! poll the queues themselves.
//!
//! One thread of a runtime does so at a time, so that the other workers serve tasks, timers and sockets.
//! Meanwhile the poll task polls from time to time only, and the queues are not armed. When the caller stops
//! although a future waits or other calls are in flight, the poll task takes over. When it stops because the
//! answer to the only call has come, and nothing else can arrive, the queues stay as they are: the next call
//! usually comes at once, and otherwise the poll task arms them within some milliseconds.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::pace::Pace;
use super::queue::Polled;
use super::reactor::Reactor;

/// The callers of one reactor.
#[derive(Debug)]
pub(super) struct Callers {
    /// The pace of the caller that polls; locked while one polls.
    pace: Mutex<Pace>,
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
            pace.arrived(Instant::now());
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

/// Decides whether a future polls for a short time, and learns from earlier waits.
///
/// If the runtime's thread has nothing else to do, a future that waits for an answer spares the way through
/// the scheduler: it polls the queue itself for some microseconds. Otherwise the future would return
/// `Pending`, the runtime would ask the system for events, and its hook would poll the queue.
///
/// Only one thread uses this at a time, that of the runtime, so no operation has to be atomic with another.
#[derive(Debug, Default)]
pub(super) struct ShortWaits {
    /// Longest wait.
    longest: Duration,
    /// Waits in a row that brought no answer.
    failed: AtomicU32,
    /// Futures that do not wait, before one tries again.
    skips: AtomicU32,
    /// A wait has brought an answer since the last call of [`take_answered`](Self::take_answered).
    answered: AtomicBool,
}

impl ShortWaits {
    /// Longest wait. Answers that take longer are not worth it: what a wait saves is less than a microsecond.
    const LONGEST: Duration = Duration::from_micros(20);
    /// A call that began longer ago than this has let other tasks run before its first wait, so these tasks
    /// need the thread.
    const ALONE: Duration = Duration::from_micros(10);
    /// After so many waits in a row without an answer, the number of futures that do not wait grows no more.
    const MOST_FAILED: u32 = 8;

    /// Makes the decision for waits of `longest` at most, and never of more than 20 µs.
    pub(super) fn new(longest: Duration) -> Self {
        Self { longest: longest.min(Self::LONGEST), ..Self::default() }
    }

    /// Returns the start of the wait of a future whose call began at `begun`, if it waits.
    pub(super) fn begin(&self, begun: Instant) -> Option<Instant> {
        let skips = self.skips.load(Ordering::Relaxed);
        if skips > 0 {
            self.skips.store(skips - 1, Ordering::Relaxed);
            return None;
        }
        let now = Instant::now();
        (!self.longest.is_zero() && Self::is_alone(begun, now)).then_some(now)
    }

    fn is_alone(begun: Instant, now: Instant) -> bool {
        now.saturating_duration_since(begun) <= Self::ALONE
    }

    /// Polls from `start` on until `is_done` (true). Returns false when the time is over, or when a poll has
    /// made other tasks ready. Calls `is_done` after polls that found something, and with each reading of the
    /// clock: another thread may have polled, too.
    pub(super) fn wait(
        &self,
        start: Instant,
        mut poll: impl FnMut() -> Polled,
        mut is_done: impl FnMut() -> bool,
    ) -> bool {
        const POLLS_PER_CLOCK_READ: usize = 16;
        loop {
            for _ in 0..POLLS_PER_CLOCK_READ {
                let polled = poll();
                if polled.completions > 0 {
                    if is_done() {
                        return self.note_answer();
                    }
                    if polled.woken + polled.ran > 0 {
                        return false;
                    }
                }
                std::hint::spin_loop();
            }
            if is_done() {
                return self.note_answer();
            }
            if start.elapsed() > self.longest {
                let failed = (self.failed.load(Ordering::Relaxed) + 1).min(Self::MOST_FAILED);
                self.failed.store(failed, Ordering::Relaxed);
                self.skips.store((1 << failed) - 1, Ordering::Relaxed);
                return false;
            }
        }
    }

    fn note_answer(&self) -> bool {
        self.failed.store(0, Ordering::Relaxed);
        self.answered.store(true, Ordering::Relaxed);
        true
    }

    /// Returns whether a wait has brought an answer since the last call of this function.
    pub(super) fn take_answered(&self) -> bool {
        let answered = self.answered.load(Ordering::Relaxed);
        if answered {
            self.answered.store(false, Ordering::Relaxed);
        }
        answered
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

#[cfg(test)]
mod short_waits_tests {
    use super::*;

    const LIMIT: Duration = Duration::from_micros(120);

    fn nothing() -> Polled {
        Polled::default()
    }

    fn begins(waits: &ShortWaits) -> bool {
        waits.begin(Instant::now() + Duration::from_secs(3600)).is_some()
    }

    #[test]
    fn a_wait_ends_with_the_answer() {
        let waits = ShortWaits::new(LIMIT);
        assert!(begins(&waits) && !waits.take_answered());
        let mut polls = 0;
        let poll = || {
            polls += 1;
            Polled { completions: usize::from(polls % 5 == 0), ..Polled::default() }
        };
        let mut asked = 0;
        let far = Instant::now() + Duration::from_secs(3600);
        assert!(waits.wait(far, poll, || {
            asked += 1;
            asked == 2
        }));
        assert_eq!((polls, asked), (10, 2), "nothing has changed after polls that found nothing");
        assert!(waits.take_answered() && !waits.take_answered());
    }

    #[test]
    fn a_wait_ends_with_an_answer_that_another_thread_has_found() {
        let waits = ShortWaits::new(LIMIT);
        let far = Instant::now() + Duration::from_secs(3600);
        let mut asked = 0;
        assert!(waits.wait(far, nothing, || {
            asked += 1;
            asked == 3
        }));
        assert!(waits.take_answered());
    }

    #[test]
    fn a_wait_ends_when_a_look_makes_other_tasks_ready() {
        let waits = ShortWaits::new(LIMIT);
        let far = Instant::now() + Duration::from_secs(3600);
        for polled in [Polled { woken: 1, ..nothing() }, Polled { ran: 1, ..nothing() }] {
            assert!(!waits.wait(far, || Polled { completions: 1, ..polled }, || false));
            assert!(begins(&waits), "this was no failure");
        }
    }

    #[test]
    fn waits_without_an_answer_become_rare_until_one_brings_an_answer() {
        let waits = ShortWaits::new(LIMIT);
        let mut tries = 0;
        for _ in 0..10_000 {
            if begins(&waits) {
                tries += 1;
                assert!(!waits.wait(Instant::now(), nothing, || false));
            }
        }
        assert!((10_000 / 256..50).contains(&tries), "{tries}");
        while !begins(&waits) {}
        let arrival = || Polled { completions: 1, ..nothing() };
        assert!(waits.wait(Instant::now(), arrival, || true));
        assert!(begins(&waits) && begins(&waits));
    }

    #[test]
    fn a_call_that_has_let_others_run_does_not_wait() {
        let waits = ShortWaits::new(LIMIT);
        let begun = Instant::now();
        assert!(!ShortWaits::is_alone(begun, begun + ShortWaits::ALONE * 2));
        assert!(ShortWaits::is_alone(begun, begun + ShortWaits::ALONE / 2));
        assert!(waits.begin(begun - ShortWaits::ALONE * 2).is_none());
        assert!(!begins(&ShortWaits::new(Duration::ZERO)), "the user wants no waits");
    }
}
