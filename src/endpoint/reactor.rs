//! The completion queues of one runtime, and who polls them.
//!
//! Each runtime has one reactor (for each way of polling in use), with one or more completion queues over which
//! connections are spread in turn. Polling a queue hands every completion to its connection, which wakes tasks.
//!
//! ```text
//!  Adaptive, current-thread runtime built with `idle_polling`:  on_thread_park ── spins, then arms ──┐
//!  Adaptive, any other runtime:                                 the poll task ─── spins, then arms ──┼─▶ event fd
//!  Event:                                                       the poll task ─── arms ──────────────┘   wakes the
//!  Busy:                                                        a thread for each queue, for ever        poll task
//! ```
//!
//! The poll task keeps the queues from starving while the runtime is never idle, and it is what the event descriptor
//! wakes. In `Busy` it stands in for threads whose core others want.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, Weak};
use std::time::{Duration, Instant};

use tokio::runtime::{Handle, Id, RuntimeFlavor};
use tokio::sync::Notify;
use tokio::task::AbortHandle;

use super::busy::{BusyThread, StandIn};
use super::config::{Config, PollMode, SharedReceive};
use super::lock;
use super::pace::{Pace, Seen};
use super::poll_task;
use super::queue::{Polled, Queue, Untold};
use super::shared_receive::SharedBuffers;
use super::{events, isolation};
use tonic_rdma_verbs::{Context, VerbsError};

/// See the module's documentation.
#[derive(Debug)]
pub struct Reactor {
    queues: Vec<Arc<Queue>>,
    next: AtomicUsize,
    spinner: Mutex<Spinner>,
    kick: Arc<Notify>,
    mode: PollMode,
    spin_limit: Duration,
    /// Whether the runtime's `on_thread_park` polls us, and whether it did since the poll task last looked.
    idle_polled: AtomicBool,
    was_idle: AtomicBool,
    multi_thread: bool,
    task: OnceLock<AbortHandle>,
    /// Watches the device for what is no completion.
    events: Option<AbortHandle>,
    stand_in: Arc<StandIn>,
    /// Words that came while the poll task slept, and of which no completion has told yet.
    untold: Mutex<Vec<(Untold, Instant)>>,
    _threads: Vec<BusyThread>,
}

/// State of whoever polls: at most one at a time.
#[derive(Debug)]
struct Spinner {
    pace: Pace,
    armed: bool,
    spinning_since: Option<Instant>,
    last_yield: Instant,
}

/// What the poll task is to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Let other tasks run, then poll again.
    Again,
    /// Wait for an event or a kick; the queues are armed, or threads poll them.
    Sleep,
    /// The same for a moment, then look again; the runtime's thread polls, and arms the queues before it sleeps.
    Watch,
}

/// Waits for a word of a peer's that only the safety net ended, which adds up to 20 ms to each.
const NAPS: &str = "tonic_rdma_tensor_naps_total";
/// How long a bell may take after the word that it tells of.
const LATE_BELL: Duration = Duration::from_secs(1);

/// Reactors by runtime, device and way of polling.
static REACTORS: LazyLock<Mutex<HashMap<Key, Weak<Reactor>>>> = LazyLock::new(Mutex::default);
/// Counts changes to [`REACTORS`], so that those who keep a copy know when to look again.
static GENERATION: AtomicUsize = AtomicUsize::new(0);

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    runtime: Id,
    /// The opened device, by its address: a device may be open more than once, with other options.
    device: usize,
    mode: PollMode,
    cpus: Vec<usize>,
    spin_limit: Duration,
    queues: usize,
    /// Whether receive buffers are shared, and their length.
    receives: (SharedReceive, u32),
}

impl Reactor {
    /// The current runtime's reactor for this device and configuration; made at first use, gone with its last user.
    pub fn current(context: &Arc<dyn Context>, config: &Config) -> Result<Arc<Self>, VerbsError> {
        let runtime = Handle::current();
        let key = Key {
            runtime: runtime.id(),
            device: Arc::as_ptr(context).cast::<()>().addr(),
            mode: config.poll_mode,
            cpus: config.poll_cpus.clone(),
            spin_limit: config.spin_limit,
            queues: config.completion_queues,
            receives: (config.shared_receive, config.slot_size),
        };
        let mut reactors = lock(&REACTORS);
        if let Some(reactor) = reactors.get(&key).and_then(Weak::upgrade) {
            return Ok(reactor);
        }
        reactors.retain(|_, reactor| reactor.strong_count() > 0);
        let reactor = Self::new(context, config, &runtime)?;
        reactors.insert(key, Arc::downgrade(&reactor));
        GENERATION.fetch_add(1, Ordering::Release);
        Ok(reactor)
    }

    /// The reactors of `runtime`, and the generation that this answer is of.
    pub fn of_runtime(runtime: Id) -> (usize, Vec<Weak<Self>>) {
        let reactors = lock(&REACTORS);
        let of_runtime = reactors.iter().filter(|(key, _)| key.runtime == runtime);
        (Self::generation(), of_runtime.map(|(_, reactor)| reactor.clone()).collect())
    }

    /// Changes whenever a reactor comes.
    pub fn generation() -> usize {
        GENERATION.load(Ordering::Acquire)
    }

    fn new(context: &Arc<dyn Context>, config: &Config, runtime: &Handle) -> Result<Arc<Self>, VerbsError> {
        let kick = Arc::new(Notify::new());
        let queues = (0..config.completion_queues.max(1))
            .map(|_| Ok(Arc::new(Queue::new(&**context, shared_buffers(&**context, config)?, &kick)?)))
            .collect::<Result<Vec<_>, VerbsError>>()?;
        let waiters = poll_task::waiters(&queues)?;
        let stand_in = StandIn::new(Arc::clone(&kick));
        let threads = match config.poll_mode {
            PollMode::Busy => BusyThread::start_all(&queues, &config.poll_cpus, &stand_in)?,
            PollMode::Adaptive | PollMode::Event => Vec::new(),
        };
        let events = events::watch(context, &queues, runtime)?;
        let reactor = Arc::new(Self {
            queues,
            next: AtomicUsize::new(0),
            spinner: Mutex::new(Spinner {
                pace: Pace::new(config.spin_limit),
                armed: false,
                spinning_since: None,
                last_yield: Instant::now(),
            }),
            kick: Arc::clone(&kick),
            mode: config.poll_mode,
            spin_limit: config.spin_limit,
            idle_polled: AtomicBool::new(false),
            was_idle: AtomicBool::new(false),
            multi_thread: runtime.runtime_flavor() != RuntimeFlavor::CurrentThread,
            task: OnceLock::new(),
            events,
            stand_in,
            untold: Mutex::default(),
            _threads: threads,
        });
        let task = runtime.spawn(poll_task::run(Arc::downgrade(&reactor), waiters, kick));
        let _ = reactor.task.set(task.abort_handle());
        Ok(reactor)
    }

    /// The queue for the next connection.
    pub fn assign(&self) -> &Arc<Queue> {
        let turn = self.next.fetch_add(1, Ordering::Relaxed);
        &self.queues[turn % self.queues.len()]
    }

    /// Polls every queue once.
    pub fn poll(&self) -> Polled {
        self.queues.iter().map(|queue| queue.poll()).fold(Polled::default(), Polled::plus)
    }

    /// One of the runtime's threads is about to park: spins for as long as it pays, then arms the queues.
    pub fn idle(&self) {
        if self.mode != PollMode::Adaptive || self.multi_thread {
            return;
        }
        self.idle_polled.store(true, Ordering::Relaxed);
        let Ok(mut spinner) = self.spinner.try_lock() else { return };
        if self.queues.iter().all(|queue| queue.is_unused()) {
            return;
        }
        self.was_idle.store(true, Ordering::Relaxed);
        let was_armed = spinner.armed;
        if self.spin(&mut spinner) {
            // Nothing would wake the poll task any more, should this thread not be idle again for long.
            if was_armed {
                self.kick.notify_one();
            }
        } else if self.arm(&mut spinner) || self.queues.iter().any(|queue| queue.wants_naps()) {
            self.kick.notify_one();
        }
    }

    /// The poll task's turn; `watched` if it has waited for all of [`Step::Watch`]'s moment, and nothing woke it.
    pub fn step(&self, watched: bool) -> Step {
        if self.mode == PollMode::Busy && !self.stand_in.is_wanted() {
            return Step::Sleep;
        }
        let Ok(mut spinner) = self.spinner.try_lock() else { return Step::Again };
        for _ in 0..self.looks(&spinner) {
            if self.poll().completions > 0 {
                spinner.pace.arrived(Instant::now());
                spinner.spinning_since = None;
                return Step::Again;
            }
            std::hint::spin_loop();
        }
        if self.mode == PollMode::Adaptive
            && !self.idle_polled.load(Ordering::Relaxed)
            && self.within_budget(&mut spinner)
        {
            return Step::Again;
        }
        // Arming costs a system call on some devices, and an event for every completion while it lasts. Whoever was woken
        // a moment after the last look has not seen a runtime that is never idle.
        let was_idle = match watched {
            true => self.was_idle.swap(false, Ordering::Relaxed),
            false => self.was_idle.load(Ordering::Relaxed),
        };
        if was_idle {
            return if spinner.armed { Step::Sleep } else { Step::Watch };
        }
        if self.arm(&mut spinner) { Step::Again } else { Step::Sleep }
    }

    /// How often the poll task looks in one turn. In a multi-thread runtime each turn may wake another worker.
    fn looks(&self, spinner: &Spinner) -> usize {
        const SPINNING: usize = 16;
        if self.multi_thread && spinner.spinning_since.is_some() { SPINNING } else { 1 }
    }

    /// What a future may go by that looks at its word for a while before it lets its thread sleep; `None` where no thread is to
    /// spin. See [`may_spin`].
    pub fn pace_of_callers(&self) -> Option<Pace> {
        (self.mode == PollMode::Adaptive).then(|| Pace::new(self.spin_limit))
    }

    /// The poll task was woken by an event.
    pub fn event(&self) {
        let mut spinner = lock(&self.spinner);
        spinner.armed = false;
        self.queues.iter().for_each(|queue| queue.woken());
    }

    /// The poll task is about to sleep (`wanted`), or has slept; whether it should look again soon, even if nothing wakes it.
    pub fn set_nap(&self, wanted: bool) -> bool {
        // What begins to be watched from here on kicks the task.
        self.queues.iter().for_each(|queue| queue.set_napping(false));
        let naps =
            wanted && (!lock(&self.untold).is_empty() || self.queues.iter().any(|queue| queue.wants_naps()));
        self.queues.iter().for_each(|queue| queue.set_napping(naps));
        naps
    }

    /// Nothing woke the poll task for a while: wakes those whose words have come all the same; whether there were any. They
    /// are counted if no bell tells of them later either: a peer may have been stopped between the word and the bell.
    pub fn wake_untold(&self) -> bool {
        let now = Instant::now();
        let fresh: Vec<_> = self.queues.iter().flat_map(|queue| queue.untold()).collect();
        let mut all = lock(&self.untold);
        all.extend(fresh.into_iter().map(|untold| (untold, now)));
        all.retain(|(untold, since)| {
            let is_lost = !untold.asked || now.saturating_duration_since(*since) > LATE_BELL;
            if is_lost && !untold.was_told() {
                metrics::counter!(NAPS).increment(1);
                tracing::debug!(
                    asked = untold.asked,
                    "a word came without the completion that should tell of it"
                );
            }
            !is_lost && !untold.was_told()
        });
        drop(all);
        self.queues.iter().map(|queue| queue.wake_watched()).sum::<usize>() > 0
    }

    /// Spins until a task was woken (true) or the budget is spent.
    fn spin(&self, spinner: &mut Spinner) -> bool {
        let Spinner { pace, armed, .. } = spinner;
        let disarm = || self.disarm(armed);
        pace.spin(disarm, || match self.poll() {
            Polled { completions: 0, .. } => Seen::Nothing,
            Polled { woken: 0, .. } => Seen::Arrival,
            Polled { .. } => Seen::Wanted,
        })
    }

    /// Whether the poll task, which spins by running again and again, has budget left.
    fn within_budget(&self, spinner: &mut Spinner) -> bool {
        let now = Instant::now();
        let Some(since) = spinner.spinning_since else {
            if spinner.pace.budget(now).is_zero() {
                return false;
            }
            self.disarm(&mut spinner.armed);
            spinner.spinning_since = Some(now);
            spinner.last_yield = now;
            return true;
        };
        let mut now = now;
        if now - spinner.last_yield > spinner.pace.yield_every() {
            now = spinner.pace.yield_core(now);
            spinner.last_yield = now;
        }
        if now - since < spinner.pace.budget(now) {
            return true;
        }
        spinner.spinning_since = None;
        spinner.pace.missed();
        false
    }

    /// Arms every queue, and looks once more; true if something had come in between.
    fn arm(&self, spinner: &mut Spinner) -> bool {
        if !spinner.armed {
            for queue in &self.queues {
                queue.arm();
            }
            spinner.armed = true;
        }
        for queue in &self.queues {
            queue.ask_for_completions();
        }
        // Whoever else is in the middle of polling may have looked before the queue was armed: its poll does not do for ours.
        let polled = self.queues.iter().map(|queue| queue.poll_now()).fold(Polled::default(), Polled::plus);
        if polled.completions > 0 {
            spinner.pace.arrived(Instant::now());
        }
        polled.completions > 0
    }

    fn disarm(&self, armed: &mut bool) {
        if std::mem::take(armed) {
            for queue in &self.queues {
                queue.disarm();
            }
        }
    }
}

/// Whether a future may keep the current thread for a moment: in a multi-thread runtime waking that thread later costs more, and
/// another worker serves the other tasks meanwhile. A runtime's only worker has them all to serve.
pub fn may_spin() -> bool {
    Handle::try_current().is_ok_and(|runtime| {
        runtime.runtime_flavor() == RuntimeFlavor::MultiThread && runtime.metrics().num_workers() > 1
    })
}

/// Receive buffers that connections share, if the device and the configuration let them.
fn shared_buffers(context: &dyn Context, config: &Config) -> Result<Option<Arc<SharedBuffers>>, VerbsError> {
    let wanted = config.shared_receive;
    if wanted == SharedReceive::Never || context.attributes().max_shared_receive_queues == 0 {
        return Ok(None);
    }
    let separate_domains = isolation::separate_domains(context);
    if !separate_domains && wanted == SharedReceive::Auto {
        return Ok(None);
    }
    SharedBuffers::new(context, config, separate_domains).map(Some)
}

impl Drop for Reactor {
    fn drop(&mut self) {
        self.task.get().into_iter().chain(&self.events).for_each(AbortHandle::abort);
    }
}

/// Reactors that a thread's `on_thread_park` polls.
#[derive(Debug, Default)]
pub(super) struct IdleHook {
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    runtime: Option<Id>,
    generation: usize,
    reactors: Vec<Weak<Reactor>>,
}

impl IdleHook {
    /// A thread of the runtime is about to park.
    pub(super) fn park(&self) {
        // Another worker that is in here already does the polling.
        let Ok(mut known) = self.known.try_lock() else { return };
        self.refresh(&mut known);
        for reactor in known.reactors.iter().filter_map(Weak::upgrade) {
            reactor.idle();
        }
    }

    fn refresh(&self, known: &mut MutexGuard<'_, Known>) {
        if known.runtime.is_some() && known.generation == Reactor::generation() {
            return;
        }
        let Ok(handle) = Handle::try_current() else { return };
        known.runtime = Some(handle.id());
        (known.generation, known.reactors) = Reactor::of_runtime(handle.id());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn connections_are_spread_over_the_queues_in_turn() {
        let context = tonic_rdma_verbs::soft::open().unwrap();
        let reactor = Reactor::current(&context, &Config::default().completion_queues(3)).unwrap();
        let assigned: Vec<&Arc<Queue>> = (0..6).map(|_| reactor.assign()).collect();
        for turn in 0..3 {
            assert!(Arc::ptr_eq(assigned[turn], assigned[turn + 3]));
            assert!(!Arc::ptr_eq(assigned[turn], assigned[(turn + 1) % 3]));
        }
    }

    #[tokio::test]
    async fn a_runtime_has_one_reactor_for_each_way_of_polling() {
        let context = tonic_rdma_verbs::soft::open().unwrap();
        let reactor = |config: Config| Reactor::current(&context, &config).unwrap();
        let adaptive = reactor(Config::default());
        assert!(Arc::ptr_eq(&adaptive, &reactor(Config::default())));
        assert!(!Arc::ptr_eq(&adaptive, &reactor(Config::default().poll_mode(PollMode::Event))));
    }
}
