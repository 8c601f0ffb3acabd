//! Threads that spin on completion queues ([`PollMode::Busy`](crate::PollMode::Busy)), and what each thread knows of itself: whether it may
//! begin calls, and its number.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::thread::CpuSet;
use tokio::sync::Notify;

use super::pace::Pace;
use super::queue::Queue;
use tonic_rdma_verbs::VerbsError;

/// Counts the polling threads that sleep because other threads want their cores. While one sleeps, the poll task waits for the
/// queues' events. That saves a second wake-up, from thread to task.
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

/// A thread that polls one queue without pause, except while other threads want its core. Dropping stops and joins it.
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
            Self::start(Arc::clone(queue), index, cpu, Arc::clone(sleeping_threads))
        };
        queues.iter().enumerate().map(start).collect()
    }

    fn start(
        queue: Arc<Queue>,
        index: usize,
        cpu: Option<usize>,
        sleeping_threads: Arc<SleepingThreads>,
    ) -> Result<Self, VerbsError> {
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

/// Polls until `stopped` is set. While other threads want the core, leaves the queue to the poll task: this thread may wait for
/// messages of the very threads that its spinning keeps from running.
fn spin(queue: &Queue, stopped: &AtomicBool, sleeping_threads: &SleepingThreads) {
    const POLLS_PER_LOOK: usize = 16;
    let _accepting = Accepting::begin();
    let mut pace = Pace::new(Duration::MAX);
    let mut last_yield = Instant::now();
    while !stopped.load(Ordering::Relaxed) {
        for _ in 0..POLLS_PER_LOOK {
            if !queue.poll().has_arrivals() {
                std::hint::spin_loop();
            }
        }
        let now = Instant::now();
        if now - last_yield > pace.yield_every() {
            last_yield = pace.yield_core(now);
            if pace.is_crowded(last_yield) {
                sleeping_threads.while_asleep(|| sleep(&pace, stopped));
            }
        }
    }
}

fn sleep(pace: &Pace, stopped: &AtomicBool) {
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

/// This thread begins calls, or it does not, until this is dropped.
///
/// A handler must not begin within the poll of another future: it would see the task-locals, the span and the other context of that future, and would
/// run under the locks that its caller holds. So calls begin where no code of the application is under way: in the poll task, in the hook of
/// an idle runtime, and in busy threads.
#[derive(Debug)]
pub(crate) struct Accepting {
    before: bool,
}

impl Accepting {
    /// Notes that no code of the application is under way on this thread.
    pub(crate) fn begin() -> Self {
        Self { before: HERE.replace(true) }
    }

    /// Takes the right to begin a call: none begins within it. Returns `None` if this thread begins no calls.
    pub(crate) fn take() -> Option<Self> {
        HERE.replace(false).then_some(Self { before: true })
    }

    /// Returns whether this thread begins calls.
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
