//! A completion queue that one connection has for itself. A task that waits for the connection polls this queue,
//! and registers its event descriptor with the runtime: an arrival wakes the waiting task as the runtime's
//! own sockets do, with no other task or thread in between.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;

use super::pace::{Observation, Pace};
use super::processors::Processors;
use super::queue::Queue;
use super::waits;
use tonic_rdma_verbs::unstable::{drop_all, lock, wake_all};
use tonic_rdma_verbs::{CompletionQueue, VerbsError};

/// A completion queue of one connection, and its event descriptor.
#[derive(Debug)]
pub(crate) struct OwnQueue {
    queue: Arc<Queue>,
    descriptor: AsyncFd<EventDescriptor>,
    waiting: Arc<WaitingTasks>,
    /// Wakes the waiting tasks.
    waker: Waker,
    /// The queue is armed, or its event has not been taken. Locked while the device's queue is armed or disarmed:
    /// the poll task and the waiting tasks do so, each on its own thread.
    armed: Mutex<bool>,
    /// Decides how long the poll task spins for this connection.
    pace: Mutex<Pace>,
    /// Whether there is enough traffic to spin for; `None` if all traffic is.
    traffic: Option<Mutex<Traffic>>,
    expected: Arc<Expected>,
}

/// What a task waits for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Wait {
    Read,
    Write,
    Delivery,
}

/// The tasks that wait for one connection, the last one for each [`Wait`]. An event of its queue wakes them
/// all, because any of them may poll the queue for the others.
#[derive(Debug)]
struct WaitingTasks {
    tasks: Mutex<[Option<Waker>; 3]>,
    /// Wakes the supervisor of the connection, which polls the queue while no task waits.
    supervisor: Arc<Notify>,
}

impl WaitingTasks {
    fn add(&self, wait: Wait, task: &Waker) {
        let mut tasks = lock(&self.tasks);
        let waiting = &mut tasks[wait as usize];
        let replaced = match waiting {
            Some(known) if known.will_wake(task) => None,
            _ => waiting.replace(task.clone()),
        };
        drop(tasks);
        // The last reference to a task may run code of the application.
        drop_all(replaced);
    }
}

impl Wake for WaitingTasks {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let tasks = std::mem::take(&mut *lock(&self.tasks));
        if tasks.iter().all(Option::is_none) {
            self.supervisor.notify_one();
        }
        wake_all(tasks.into_iter().flatten());
    }
}

/// The queues of this kind that a runtime has.
#[derive(Debug, Default)]
pub(super) struct OwnQueues(Mutex<Vec<Weak<Queue>>>);

impl OwnQueues {
    /// Most of them. Each has two descriptors, and one more for each end of the socket that wakes it.
    pub(super) const MOST: usize = 32;

    /// Adds the queue that `make` makes, if there are not too many.
    pub(super) fn add<E>(&self, make: impl FnOnce() -> Result<Queue, E>) -> Result<Option<Arc<Queue>>, E> {
        let mut queues = lock(&self.0);
        queues.retain(|queue| queue.strong_count() > 0);
        if queues.len() >= Self::MOST {
            return Ok(None);
        }
        let queue = Arc::new(make()?);
        queues.push(Arc::downgrade(&queue));
        Ok(Some(queue))
    }

    /// Returns those that are in use.
    pub(super) fn all(&self) -> Vec<Arc<Queue>> {
        lock(&self.0).iter().filter_map(Weak::upgrade).collect()
    }
}

/// How closely arrivals follow one another, where a spin keeps a processor from threads that want it: then a
/// spin pays only if the threads are seldom idle.
#[derive(Debug)]
struct Traffic {
    /// The completions at the last time when the task began to wait.
    completions: u64,
    since: Instant,
    /// Moving average of the time for each completion.
    gap: Duration,
}

impl Traffic {
    fn new(now: Instant) -> Self {
        Self { completions: 0, since: now, gap: 4 * waits::DENSE }
    }

    /// Notes that the task begins to wait after `completions` in all. Returns whether a spin may pay.
    fn is_dense(&mut self, completions: u64, now: Instant) -> bool {
        let count = u32::try_from(completions - self.completions).unwrap_or(u32::MAX).max(1);
        let gap = (now.saturating_duration_since(self.since) / count).min(16 * waits::DENSE);
        self.gap = (self.gap * 7 + gap) / 8;
        (self.completions, self.since) = (completions, now);
        self.gap <= waits::DENSE
    }
}

/// The connections that the poll task is to spin for.
#[derive(Debug)]
pub(super) struct Expected {
    any: AtomicBool,
    queues: Mutex<Vec<Weak<OwnQueue>>>,
    wake_task: Arc<Notify>,
}

impl Expected {
    pub(super) fn new(wake_task: &Arc<Notify>) -> Arc<Self> {
        Arc::new(Self {
            any: AtomicBool::new(false),
            queues: Mutex::default(),
            wake_task: Arc::clone(wake_task),
        })
    }

    /// Spins for one connection after the other, until a task was woken. The queues of the others are armed.
    pub(super) fn spin(&self) {
        if self.any.load(Ordering::Relaxed) && self.any.swap(false, Ordering::Acquire) {
            let queues = std::mem::take(&mut *lock(&self.queues));
            let _ = queues.iter().filter_map(Weak::upgrade).any(|own| own.spin());
        }
    }
}

#[derive(Debug)]
struct EventDescriptor(Arc<dyn CompletionQueue>);

impl AsRawFd for EventDescriptor {
    fn as_raw_fd(&self) -> RawFd {
        self.0.event_fd().as_raw_fd()
    }
}

impl OwnQueue {
    /// Most rounds of one call of [`poll_until`](Self::poll_until), because a peer may send as fast as this
    /// end polls.
    const ROUNDS: usize = 16;

    /// Registers the queue's event descriptor with the current runtime.
    #[allow(deprecated, reason = "sound for a descriptor that is owned; its successor is unsafe to call")]
    pub(super) fn new(
        queue: Arc<Queue>,
        pace: Pace,
        is_shared: bool,
        expected: &Arc<Expected>,
    ) -> Result<Self, VerbsError> {
        let descriptor = EventDescriptor(Arc::clone(queue.completion_queue()));
        let descriptor = AsyncFd::with_interest(descriptor, Interest::READABLE)
            .map_err(|error| VerbsError::os("watching a completion queue", error))?;
        let waiting = Arc::new(WaitingTasks { tasks: Mutex::default(), supervisor: Arc::default() });
        let waker = Arc::clone(&waiting).into();
        let (pace, expected) = (Mutex::new(pace), Arc::clone(expected));
        let traffic = is_shared.then(|| Mutex::new(Traffic::new(Instant::now())));
        Ok(Self { queue, descriptor, waiting, waker, armed: Mutex::default(), pace, traffic, expected })
    }

    /// Returns the queue.
    pub(crate) fn queue(&self) -> &Arc<Queue> {
        &self.queue
    }

    /// Returns what wakes the supervisor of the connection.
    pub(crate) fn supervisor(&self) -> &Arc<Notify> {
        &self.waiting.supervisor
    }

    /// Calls `check` until it returns a value or nothing more has arrived. Then the next arrival wakes the
    /// task `waiting`, which is the one that calls.
    pub(crate) fn poll_until<T>(
        &self,
        wait: Wait,
        waiting: &Waker,
        mut check: impl FnMut() -> Poll<T>,
    ) -> Poll<T> {
        for _ in 0..Self::ROUNDS {
            if let Poll::Ready(value) = check() {
                return Poll::Ready(value);
            }
            self.waiting.add(wait, waiting);
            if !self.poll_arrivals(waiting) {
                return Poll::Pending;
            }
        }
        waiting.wake_by_ref();
        Poll::Pending
    }

    /// Notes that the connection's task has sent something, has woken no other task before, and waits for the
    /// answer now. If that pays, the poll task spins for the answer: it runs next on this thread, which would
    /// sleep otherwise.
    pub(crate) fn expect(self: &Arc<Self>) {
        let Ok(mut pace) = self.pace.try_lock() else { return };
        let now = Instant::now();
        pace.begin(now);
        let is_dense = self
            .traffic
            .as_ref()
            .is_none_or(|traffic| lock(traffic).is_dense(self.queue.completions_taken(), now));
        if is_dense && !pace.budget(now).is_zero() {
            drop(pace);
            lock(&self.expected.queues).push(Arc::downgrade(self));
            self.expected.any.store(true, Ordering::Release);
            self.expected.wake_task.notify_one();
        }
    }

    /// Spins until a task was woken (true), or for as long as that pays.
    pub(super) fn spin(&self) -> bool {
        let Ok(mut pace) = self.pace.try_lock() else { return false };
        let mut has_begun = false;
        let begin = || {
            has_begun = true;
            let mut armed = lock(&self.armed);
            if std::mem::take(&mut *armed) {
                self.queue.disarm();
            }
        };
        let poll = || {
            let polled = self.queue.poll();
            match polled.woken + polled.ran {
                0 if polled.has_arrivals() => Observation::Arrival,
                0 => Observation::Nothing,
                _ => Observation::Wanted,
            }
        };
        let found = pace.spin(Instant::now(), begin, poll);
        if !found && has_begun {
            self.arm();
            return self.queue.poll_now().woken > 0;
        }
        found
    }

    /// Notes that no task comes to the connection any more, so that an event wakes the supervisor.
    pub(crate) fn leave_to_supervisor(&self) {
        let tasks = std::mem::take(&mut *lock(&self.waiting.tasks));
        drop_all(tasks.into_iter().flatten());
    }

    /// Returns when the supervisor of a connection is to poll the queue, although an event has woken a task for
    /// that: the task may have stopped to wait. The times are the same for all connections, so that a thread
    /// wakes once for all of them.
    pub(crate) fn next_round(now: Instant) -> Instant {
        const ROUND: Duration = Duration::from_millis(500);
        static FIRST: LazyLock<Instant> = LazyLock::new(Instant::now);
        let rounds = now.saturating_duration_since(*FIRST).as_nanos() / ROUND.as_nanos() + 1;
        *FIRST + ROUND * u32::try_from(rounds).unwrap_or(u32::MAX)
    }

    /// Polls for tasks that do not come to the connection themselves.
    pub(crate) fn poll(&self) {
        Processors::refresh(Instant::now());
        if (0..Self::ROUNDS).all(|_| self.poll_arrivals(Waker::noop())) {
            self.waiting.supervisor.notify_one();
        }
    }

    /// Polls for the task `waiting`. Returns true if something has arrived; `waiting` itself is not woken then.
    /// Returns false if the next arrival makes an event.
    fn poll_arrivals(&self, waiting: &Waker) -> bool {
        let mut context = Context::from_waker(&self.waker);
        // An error says that the runtime has ended.
        while let Poll::Ready(Ok(mut ready)) = self.descriptor.poll_read_ready(&mut context) {
            let mut armed = lock(&self.armed);
            self.queue.take_event();
            *armed = false;
            drop(armed);
            ready.clear_ready();
            if let Ok(mut pace) = self.pace.try_lock() {
                pace.arrived_after_sleep();
            }
        }
        if *lock(&self.armed) {
            return false;
        }
        if self.queue.poll_as(waiting).has_arrivals() {
            return true;
        }
        self.arm();
        // The rest may have come before the queue was armed.
        self.queue.poll_as(waiting).has_arrivals()
    }

    fn arm(&self) {
        let mut armed = lock(&self.armed);
        if !std::mem::replace(&mut *armed, true) {
            self.queue.arm();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each attempt may have another waker, as that of a future among many.
    #[test]
    fn one_task_waits_for_each_reason() {
        let tasks = WaitingTasks { tasks: Mutex::default(), supervisor: Arc::default() };
        let other = WaitingTasks { tasks: Mutex::default(), supervisor: Arc::default() };
        let waker = Waker::from(Arc::new(other));
        for wait in [Wait::Read, Wait::Write, Wait::Read] {
            tasks.add(wait, Waker::noop());
            tasks.add(wait, &waker);
        }
        let tasks = std::mem::take(&mut *lock(&tasks.tasks));
        assert!(tasks[..2].iter().all(|task| task.as_ref().is_some_and(|task| task.will_wake(&waker))));
        assert!(tasks[2].is_none());
    }

    #[test]
    fn traffic_is_dense_while_completions_come_close_together() {
        let mut now = Instant::now();
        let (mut traffic, mut completions) = (Traffic::new(now), 0);
        let mut waits = |count, micros| {
            (completions, now) = (completions + count, now + Duration::from_micros(micros));
            traffic.is_dense(completions, now)
        };
        assert!((0..100).all(|_| !waits(2, 160)), "one call at a time");
        assert!((0..100).any(|_| waits(8, 160)), "many calls at once");
        assert!((0..4).any(|_| !waits(0, 1000)));
    }
}
