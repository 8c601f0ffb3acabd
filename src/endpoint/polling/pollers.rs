//! The tasks and threads that poll a reactor's queues, and what is known about the current thread: its
//! number, and whether it may begin calls.
//!
//! One task of a reactor polls its queues. Where the thread of an idle runtime polls itself, the task polls
//! only while that runtime is never idle. The event descriptors of the queues wake it. With
//! [`PollMode::Busy`](crate::PollMode::Busy) a thread of its own spins on each queue. Another task takes the
//! events of the device that belong to no request: port down, queue pair failed, device removed.

use std::cell::Cell;
use std::future::{Future as _, poll_fn};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::thread::CpuSet;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::timeout;

use super::own::OwnQueues;
use super::pace::Pace;
use super::queue::Queue;
use super::reactor::Reactor;
use super::waits::Spinning;
use crate::endpoint::deferred::OwnedTask;
use tonic_rdma_verbs::{Context as Device, VerbsError};

/// Counts the polling threads that sleep because other threads want their cores. While one sleeps, the poll
/// task waits for the queues' events. That saves a second wake-up, from thread to task.
#[derive(Debug)]
pub(super) struct SleepingThreads {
    threads: AtomicUsize,
    wake_task: Arc<Notify>,
}

impl SleepingThreads {
    pub(super) fn new(wake_task: Arc<Notify>) -> Arc<Self> {
        Arc::new(Self { threads: AtomicUsize::new(0), wake_task })
    }

    /// Returns whether the poll task has to poll the queues.
    pub(super) fn any(&self) -> bool {
        self.threads.load(Ordering::Acquire) > 0
    }

    fn while_asleep(&self, sleep: impl FnOnce()) {
        self.threads.fetch_add(1, Ordering::AcqRel);
        self.wake_task.notify_one();
        sleep();
        self.threads.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A thread that polls one queue without pause, except while other threads want its core. Dropping stops and
/// joins it.
#[derive(Debug)]
pub(super) struct BusyThread {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl BusyThread {
    /// Starts one thread for each queue, on the CPUs in turn.
    pub(super) fn start_all(
        queues: &[Arc<Queue>],
        cpus: &[usize],
        sleeping_threads: &Arc<SleepingThreads>,
    ) -> Result<Vec<Self>, VerbsError> {
        let start = |(index, queue): (usize, &Arc<Queue>)| {
            let cpu = (!cpus.is_empty()).then(|| cpus[index % cpus.len()]);
            let (queue, sleeping_threads) = (Arc::clone(queue), Arc::clone(sleeping_threads));
            let stop = Arc::new(AtomicBool::new(false));
            let stopped = Arc::clone(&stop);
            let thread = std::thread::Builder::new()
                .name(format!("rdma-poll-{index}"))
                .spawn(move || {
                    if let Some(cpu) = cpu {
                        pin_to(cpu);
                    }
                    spin(&queue, &stopped, &sleeping_threads);
                })
                .map_err(|error| VerbsError::os("starting a polling thread", error))?;
            Ok(Self { stop, thread: Some(thread) })
        };
        queues.iter().enumerate().map(start).collect()
    }
}

impl Drop for BusyThread {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

/// Polls until `stopped` is set. While other threads want the core, leaves the queue to the poll task: the
/// messages that it polls for may come from threads that its spinning keeps off the core.
fn spin(queue: &Queue, stopped: &AtomicBool, sleeping_threads: &SleepingThreads) {
    let _accepting = Accepting::begin();
    let (mut pace, mut spinning) = (Pace::new(Duration::MAX), Spinning::default());
    while !stopped.load(Ordering::Relaxed) {
        queue.poll();
        if spinning.again(&mut pace).is_err() {
            sleeping_threads.while_asleep(|| park_while_crowded(&pace, stopped));
        }
    }
}

fn park_while_crowded(pace: &Pace, stopped: &AtomicBool) {
    while !stopped.load(Ordering::Relaxed)
        && let Some(left) = pace.crowded_for(Instant::now())
    {
        std::thread::park_timeout(left);
    }
}

fn pin_to(cpu: usize) {
    let mut set = CpuSet::new();
    set.set(cpu);
    if let Err(error) = rustix::thread::sched_setaffinity(None, &set) {
        tracing::warn!(cpu, %error, "polling thread not pinned: no such CPU, or none that this process may use");
    }
}

thread_local! {
    static HERE: Cell<bool> = const { Cell::new(false) };
}

/// Sets whether this thread may begin calls. Dropping this restores the earlier value.
///
/// A handler must not begin within the poll of another future: it would see the task-locals, the span and the
/// other context of that future, and would run under the locks that its caller holds. So calls begin where no
/// code of the application is in flight: in the poll task, in the hook of an idle runtime, and in busy
/// threads.
#[derive(Debug)]
pub(crate) struct Accepting {
    before: bool,
}

impl Accepting {
    /// Notes that no code of the application is in flight on this thread.
    pub(crate) fn begin() -> Self {
        Self { before: HERE.replace(true) }
    }

    /// Takes the right to begin one call. Until this is dropped, no other call may begin on this thread.
    /// Returns `None` if the thread may begin none.
    pub(crate) fn take() -> Option<Self> {
        HERE.replace(false).then_some(Self { before: true })
    }

    /// Returns whether this thread may begin calls.
    pub(crate) fn is_here() -> bool {
        HERE.get()
    }
}

impl Drop for Accepting {
    fn drop(&mut self) {
        // A thread that ends has no calls.
        let _ = HERE.try_with(|here| here.set(self.before));
    }
}

thread_local! {
    /// Its address tells threads apart.
    static THREAD: u8 = const { 0 };
}

/// Returns a number that no other thread of this process has meanwhile, and that is not 0.
pub(crate) fn this_thread() -> usize {
    THREAD.try_with(|byte| std::ptr::from_ref(byte).addr()).unwrap_or(usize::MAX)
}

/// Longest time between two polls of the queues of a runtime that is never idle.
const WATCH: Duration = Duration::from_millis(1);
/// Longest sleep while words are watched.
const TIMED_SLEEP: Duration = Duration::from_millis(20);

/// The next step of the poll task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Let other tasks run, then poll again.
    Again,
    /// Wait for an event or a wake-up; the queues are armed, or threads poll them.
    Sleep,
    /// Wait for a short time only: the runtime's thread polls, and arms the queues before it sleeps.
    Watch,
}

/// A queue's event descriptor, registered with the runtime.
#[derive(Debug)]
pub(super) struct Waiter {
    /// A duplicate, which stays valid after the queue is gone.
    descriptor: AsyncFd<OwnedFd>,
    queue: Weak<Queue>,
}

/// Registers the queues' event descriptors with the current runtime.
pub(super) fn waiters(queues: &[Arc<Queue>]) -> Result<Vec<Waiter>, VerbsError> {
    let waiter = |queue: &Arc<Queue>| {
        let descriptor = readable(queue.completions.event_fd(), "watching a completion queue")?;
        Ok(Waiter { descriptor, queue: Arc::downgrade(queue) })
    };
    queues.iter().map(waiter).collect()
}

#[allow(deprecated, reason = "sound for a descriptor that is owned; its successor is unsafe to call")]
fn readable(descriptor: BorrowedFd<'_>, watching: &'static str) -> Result<AsyncFd<OwnedFd>, VerbsError> {
    let failed = |error| VerbsError::os(watching, error);
    let descriptor = descriptor.try_clone_to_owned().map_err(failed)?;
    AsyncFd::with_interest(descriptor, Interest::READABLE).map_err(failed)
}

/// Runs until the reactor is gone.
pub(super) async fn run(reactor: Weak<Reactor>, waiters: Vec<Waiter>, wake: Arc<Notify>) {
    let mut watched = false;
    loop {
        // The task keeps no reactor alive across an await, so the reactor is dropped with its last user.
        let Some(step) = reactor.upgrade().map(|reactor| reactor.step(watched)) else { return };
        watched = false;
        match step {
            Step::Again => run_again().await,
            Step::Sleep => sleep(&reactor, &waiters, &wake).await,
            Step::Watch => match timeout(WATCH, event_or_wake(&waiters, &wake)).await {
                Ok(true) => event(&reactor),
                Ok(false) => {}
                Err(_) => watched = true,
            },
        }
    }
}

/// Waits for an event or a wake-up. While words are watched, the sleep has a time limit. The reason: a device
/// that places bytes late may bring a value after the peer has checked whether this side sleeps. Then no
/// completion announces the value.
async fn sleep(reactor: &Weak<Reactor>, waiters: &[Waiter], wake: &Notify) {
    let set_timed_sleep = |wanted| reactor.upgrade().is_some_and(|reactor| reactor.set_timed_sleep(wanted));
    let mut limit = set_timed_sleep(true).then_some(TIMED_SLEEP);
    let had_event = loop {
        let woken = event_or_wake(waiters, wake);
        let Some(length) = limit else { break woken.await };
        if let Ok(had_event) = timeout(length, woken).await {
            break had_event;
        }
        let Some(reactor) = reactor.upgrade() else { return };
        if reactor.wake_watched() {
            break false;
        }
        limit = reactor.set_timed_sleep(true).then_some(TIMED_SLEEP);
    };
    set_timed_sleep(false);
    if had_event {
        event(reactor);
    }
}

fn event(reactor: &Weak<Reactor>) {
    if let Some(reactor) = reactor.upgrade() {
        reactor.event();
    }
}

/// Lets every task that is runnable now run first. Unlike tokio's `yield_now` this needs no system call. In a
/// multi-thread runtime, another worker may take this task over while other tasks keep this worker busy.
async fn run_again() {
    let mut yielded = false;
    poll_fn(|context| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// Waits for an event of a queue (true) or for a wake-up (false).
async fn event_or_wake(waiters: &[Waiter], wake: &Notify) -> bool {
    let mut woken = pin!(wake.notified());
    poll_fn(|context| {
        if take_events(waiters, context) {
            return Poll::Ready(true);
        }
        woken.as_mut().poll(context).map(|()| false)
    })
    .await
}

/// Takes all pending events and returns whether there was one. Registers `context` with every queue, for the
/// next event.
fn take_events(waiters: &[Waiter], context: &mut Context<'_>) -> bool {
    let mut any = false;
    for waiter in waiters {
        while let Poll::Ready(Ok(mut guard)) = waiter.descriptor.poll_read_ready(context) {
            any = true;
            if let Some(queue) = waiter.queue.upgrade() {
                queue.completions.acknowledge_events();
            }
            guard.clear_ready();
        }
    }
    any
}

/// Starts a task that takes the device's events and ends the connections of `queues` that an event concerns.
/// Returns `None` for a device without events.
pub(super) fn watch_device(
    context: &Arc<dyn Device>,
    queues: &[Arc<Queue>],
    own: &Arc<OwnQueues>,
    runtime: &Handle,
) -> Result<Option<OwnedTask>, VerbsError> {
    let Some(descriptor) = context.async_event_fd() else { return Ok(None) };
    let descriptor = readable(descriptor, "watching a device for events")?;
    let queues = queues.iter().map(Arc::downgrade).collect();
    let task = runtime.spawn(take_device_events(descriptor, Arc::clone(context), queues, Arc::clone(own)));
    Ok(Some(OwnedTask(task.abort_handle())))
}

/// Longest time between two checks of the device, because some devices fail without an event.
const CHECK_EVERY: Duration = Duration::from_secs(1);

async fn take_device_events(
    descriptor: AsyncFd<OwnedFd>,
    context: Arc<dyn Device>,
    queues: Vec<Weak<Queue>>,
    own: Arc<OwnQueues>,
) {
    loop {
        match timeout(CHECK_EVERY, descriptor.readable()).await {
            // The flag is cleared before the events are taken, so that an event that comes meanwhile is not
            // missed.
            Ok(Ok(mut ready)) => ready.clear_ready(),
            Ok(Err(_)) => return,
            Err(_) => {}
        }
        context.handle_events();
        let queues = queues.iter().filter_map(Weak::upgrade).chain(own.all());
        queues.for_each(|queue| queue.fail_with_device());
    }
}
