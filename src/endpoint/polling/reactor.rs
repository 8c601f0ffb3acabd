//! The completion queues of one runtime, and the thread or task that polls them.
//!
//! Each runtime has one reactor for each device and configuration in use. A reactor has one or more
//! completion queues. Each new queue pair gets the one with the most room. Polling a queue hands every completion to
//! its connection, which wakes tasks.
//!
//! ```text
//!  Adaptive, current-thread runtime built with `idle_polling`:  on_thread_park ── spins, then arms ──┐
//!  Adaptive, any other runtime:                                 the poll task ─── spins, then arms ──┼─▶ event fd
//!  Event:                                                       the poll task ─── arms ──────────────┘   wakes the
//!  Busy:                                                        a thread for each queue, forever        poll task
//! ```
//!
//! In a runtime with several workers a byte stream has a [queue of its own](OwnQueue), up to a number of them:
//! the tasks that wait for the connection poll it, arm it, and are woken by its event descriptor. The poll task
//! only spins for it.
//!
//! The poll task polls while the runtime is never idle, and the event descriptors wake it. With `Busy` the
//! poll task replaces a thread while other threads want the core of that thread.

#[cfg(test)]
#[path = "reactor_tests.rs"]
mod tests;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use tokio::runtime::{Builder, Handle, Id, RuntimeFlavor};
use tokio::sync::Notify;

use super::callers::Callers;
use super::own::{Expected, OwnQueue, OwnQueues};
use super::pace::{Observation, Pace, Spin, Spun};
use super::pollers::{self, Accepting, BusyThread, SleepingThreads, Step, this_thread};
use super::processors::Processors;
use super::queue::{LateArrivals, Polled, Queue};
use super::waits::{self, Spinning};
use crate::endpoint::config::{Config, PollMode, SharedReceive};
use crate::endpoint::deferred::OwnedTask;
use crate::endpoint::deferred::Run;
use crate::endpoint::link::receive::{self, SharedBuffers};
use tonic_rdma_verbs::unstable::{lock, run_each};
use tonic_rdma_verbs::{Context, QueuePairCapacity, VerbsError};

/// The completion queues of one runtime on one device.
#[derive(Debug)]
pub struct Reactor {
    queues: Vec<Arc<Queue>>,
    next: AtomicUsize,
    own: Arc<OwnQueues>,
    expected: Arc<Expected>,
    spinner: Mutex<Spinner>,
    /// Wakes the poll task.
    pub(super) wake_task: Arc<Notify>,
    mode: PollMode,
    spin_limit: Duration,
    /// The runtime's `on_thread_park` polls this reactor.
    idle_polled: AtomicBool,
    /// The thread that did so last; 0 before.
    home: AtomicUsize,
    /// `on_thread_park` has polled since the poll task last polled.
    was_idle: AtomicBool,
    multi_thread: bool,
    several_workers: bool,
    task: OnceLock<OwnedTask>,
    /// The task that takes the device's events.
    _events: Option<OwnedTask>,
    sleeping_threads: Arc<SleepingThreads>,
    pub(super) callers: Callers,
    late: LateArrivals,
    unfinished: UnfinishedRuns,
    _threads: Vec<BusyThread>,
}

/// Work that a thread has found and may not run. The poll task runs it.
#[derive(Debug, Default)]
struct UnfinishedRuns {
    any: AtomicBool,
    /// Weak, because each run keeps the reactor.
    runs: Mutex<Vec<Weak<dyn Run>>>,
}

/// The state of the thread or task that polls; at most one polls at a time.
#[derive(Debug)]
struct Spinner {
    pace: Pace,
    armed: bool,
    /// The spin of the poll task, which runs again and again.
    spinning: Spinning,
}

/// The reactors of this process.
pub(super) static REACTORS: LazyLock<Registry> = LazyLock::new(Registry::default);

impl Reactor {
    /// Returns the current runtime's reactor for this device and configuration. The first call creates the
    /// reactor. The reactor is dropped with its last user.
    ///
    /// # Errors
    /// The device can't provide the queues, or the system can't provide a thread or an event descriptor.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn current(context: &Arc<dyn Context>, config: &Config) -> Result<Arc<Self>, VerbsError> {
        let runtime = Handle::current();
        let key = Key::new(runtime.id(), context, config);
        REACTORS.get_or_add(key, || Self::new(context, config, &runtime))
    }

    fn new(context: &Arc<dyn Context>, config: &Config, runtime: &Handle) -> Result<Arc<Self>, VerbsError> {
        // The first call reads files, which no message should wait for.
        Processors::current();
        let wake_task = Arc::new(Notify::new());
        let queues = (0..config.completion_queues.max(1))
            .map(|_| Ok(Arc::new(Queue::new(&**context, shared_buffers(&**context, config)?, &wake_task)?)))
            .collect::<Result<Vec<_>, VerbsError>>()?;
        let waiters = pollers::waiters(&queues)?;
        let sleeping_threads = SleepingThreads::new(Arc::clone(&wake_task));
        let threads = match config.poll_mode {
            PollMode::Busy => BusyThread::start_all(&queues, &config.poll_cpus, &sleeping_threads)?,
            PollMode::Adaptive | PollMode::Event => Vec::new(),
        };
        let own = Arc::<OwnQueues>::default();
        let events = pollers::watch_device(context, &queues, &own, runtime)?;
        let multi_thread = runtime.runtime_flavor() != RuntimeFlavor::CurrentThread;
        let several_workers = multi_thread && runtime.metrics().num_workers() > 1;
        let of_callers = if multi_thread { Duration::MAX } else { waits::ONLY_THREAD };
        let reactor = Arc::new(Self {
            queues,
            next: AtomicUsize::new(0),
            own,
            expected: Expected::new(&wake_task),
            spinner: Mutex::new(Spinner {
                pace: Pace::new(config.spin_limit),
                armed: false,
                spinning: Spinning::default(),
            }),
            wake_task: Arc::clone(&wake_task),
            mode: config.poll_mode,
            spin_limit: config.spin_limit,
            idle_polled: AtomicBool::new(false),
            home: AtomicUsize::new(0),
            was_idle: AtomicBool::new(false),
            multi_thread,
            several_workers,
            task: OnceLock::new(),
            _events: events,
            sleeping_threads,
            callers: Callers::new(config.spin_limit.min(of_callers)),
            late: LateArrivals::default(),
            unfinished: UnfinishedRuns::default(),
            _threads: threads,
        });
        let task = runtime.spawn(pollers::run(Arc::downgrade(&reactor), waiters, wake_task));
        let _ = reactor.task.set(OwnedTask(task.abort_handle()));
        Ok(reactor)
    }

    /// Returns a queue for a connection of this `capacity` alone, if such a queue pays. It does
    ///
    /// - in a runtime with several workers, because the poll task would have to wake one of the others. A
    ///   runtime with one thread has the poll task on this thread, so that costs no wake-up;
    /// - unless threads poll in any case: in mode `Busy`;
    /// - on a device where each connection has its own receive buffers;
    /// - up to a number of connections ([`OwnQueues::MOST`]).
    ///
    /// # Errors
    /// The system can't provide an event descriptor.
    pub(crate) fn own_queue(
        &self,
        context: &dyn Context,
        capacity: &QueuePairCapacity,
    ) -> Result<Option<OwnQueue>, VerbsError> {
        let shares = self.queues.iter().any(|queue| queue.shared().is_some());
        if self.mode == PollMode::Busy || shares || !self.several_workers {
            return Ok(None);
        }
        // A device may give a queue pair more than it was asked for.
        let completions = 2 * (capacity.send_requests + capacity.receive_requests);
        let attributes = context.attributes();
        let completions = (completions + attributes.window_requests).min(attributes.max_completions);
        let make = || Queue::with_capacity(context, completions, None, &self.wake_task);
        let Some(queue) = self.own.add(make)? else { return Ok(None) };
        let pace = Pace::new(if self.mode == PollMode::Adaptive { self.spin_limit } else { Duration::ZERO });
        // Two ends that spin keep two processors from the threads that the answer passes through.
        let is_shared = Processors::current().usable() < waits::UNSHARED;
        OwnQueue::new(queue, pace, is_shared, &self.expected).map(Some)
    }

    /// Returns the queue for the next queue pair: the one whose queue pairs have the fewest completions, in turn
    /// if several have as few.
    pub fn assign(&self) -> &Arc<Queue> {
        let turn = self.next.fetch_add(1, Ordering::Relaxed) % self.queues.len();
        let (before, from) = self.queues.split_at(turn);
        let in_turn = from.iter().chain(before);
        in_turn.min_by_key(|queue| queue.expected_completions()).unwrap_or(&self.queues[turn])
    }

    /// Polls every queue once.
    pub(super) fn poll(&self) -> Polled {
        self.queues.iter().map(|queue| queue.poll()).fold(Polled::default(), Polled::plus)
    }

    /// Spins for as long as that pays, then arms the queues. Called when a thread of the runtime is about to
    /// park.
    pub(super) fn idle(&self) {
        // While another thread polls, the poll task polls from time to time.
        if self.mode != PollMode::Adaptive || self.multi_thread || self.callers.is_own_polled() {
            return;
        }
        self.idle_polled.store(true, Ordering::Relaxed);
        self.home.store(this_thread(), Ordering::Relaxed);
        let Ok(mut spinner) = self.spinner.try_lock() else { return };
        if self.queues.iter().all(|queue| queue.is_unused()) {
            return;
        }
        self.was_idle.store(true, Ordering::Relaxed);
        let was_armed = spinner.armed;
        let _accepting = Accepting::begin();
        match self.spin(&mut spinner) {
            // The queues are not armed any more, so nothing else would wake the poll task if this thread
            // stays busy.
            Spun::Woke if was_armed => self.wake_task.notify_one(),
            Spun::Woke => {}
            // If no task is ready, the runtime would sleep now, and the queues are not armed.
            Spun::Ran => self.wake_task.notify_one(),
            // The thread of the runtime sleeps.
            Spun::Nothing => {
                if self.arm(&mut spinner) || self.queues.iter().any(|queue| queue.wants_timed_sleep()) {
                    self.wake_task.notify_one();
                }
            }
        }
    }

    /// Returns a pace for futures that spin on a word before their thread sleeps; `None` if the configuration
    /// allows no such spin. See [`may_spin`].
    pub fn pace_of_callers(&self) -> Option<Pace> {
        (self.mode == PollMode::Adaptive).then(|| Pace::new(self.spin_limit))
    }

    /// Polls `queue` on behalf of a future until `is_done` returns true (true), or until polling does not pay
    /// any more (false): then the future returns `Pending`, and the poll task polls. In a runtime with one
    /// worker this polls once, or for some microseconds if nothing else needs the thread: `begun` is the time
    /// when a call began that waits for the first part of its answer. Once `is_done` has returned true, it is
    /// not called again.
    pub(crate) fn wait_as_caller(
        &self,
        queue: &Queue,
        begun: Option<Instant>,
        mut is_done: impl FnMut() -> bool,
    ) -> bool {
        if is_done() {
            self.callers.arrived();
            return true;
        }
        if self.mode != PollMode::Adaptive || !self.multi_thread || !may_spin() {
            return self.wait_alone(queue, begun, is_done);
        }
        let Some(mut permit) = self.callers.begin() else {
            self.callers.wait();
            // The caller that polls may have stopped before it could see this.
            if !self.callers.is_polling() && !queue.is_asleep() {
                self.wake_task.notify_one();
            }
            return is_done();
        };
        let (mut was_armed, mut done) = (false, false);
        let begin = || {
            if let Ok(mut spinner) = self.spinner.try_lock() {
                was_armed = spinner.armed;
                self.disarm(&mut spinner.armed);
            }
        };
        permit.pace.spin(Instant::now(), begin, poll_for(queue, is_done, &mut done));
        if !done {
            self.callers.wait();
        }
        let takes_over = self.callers.hand_over(permit, !self.serves_callers_only());
        // A poll task that sleeps at armed queues is woken by an event. If this caller took the arming back,
        // the poll task polls from time to time from now on.
        if was_armed || (takes_over && !queue.is_asleep()) {
            self.wake_task.notify_one();
        }
        done
    }

    /// Waits as the only thread of a runtime: polls `queue` once, or for some microseconds.
    fn wait_alone(&self, queue: &Queue, begun: Option<Instant>, mut is_done: impl FnMut() -> bool) -> bool {
        // Elsewhere the poll task would have to take over, which costs what the wait saves. The thread of
        // another runtime has tasks of its own.
        let is_home = self.home.load(Ordering::Relaxed) == this_thread();
        if let Some(begun) = begun.filter(|_| is_home && self.callers.is_single_call())
            && let now = Instant::now()
            && now.saturating_duration_since(begun) <= waits::ALONE
            && let Ok(mut pace) = self.callers.pace.try_lock()
        {
            let (mut has_begun, mut done) = (false, false);
            let begin = || {
                has_begun = true;
                self.was_idle.store(true, Ordering::Relaxed);
                self.take_arming_back();
            };
            let mut poll = poll_for(queue, &mut is_done, &mut done);
            // Other arrivals do not prolong this wait, because the other tasks need the thread.
            let poll = move || match poll() {
                Observation::Arrival => Observation::Nothing,
                other => other,
            };
            pace.spin(now, begin, poll);
            if done && let Ok(mut spinner) = self.spinner.try_lock() {
                spinner.pace.resume();
            }
            if has_begun {
                return done;
            }
        }
        queue.poll();
        let done = is_done();
        if done {
            self.callers.arrived();
        }
        done
    }

    /// Leaves `run` to the poll task, which carries it out where no code of the application is in flight.
    pub(crate) fn leave(&self, run: Weak<dyn Run>) {
        lock(&self.unfinished.runs).push(run);
        self.unfinished.any.store(true, Ordering::Release);
        self.wake_task.notify_one();
        // The task that a worker wakes last is run by this worker alone, when the present task waits. So
        // another task comes last.
        if self.multi_thread
            && let Ok(runtime) = Handle::try_current()
        {
            runtime.spawn(std::future::ready(()));
        }
    }

    /// Runs the work that other threads left to the poll task.
    fn run_unfinished(&self) {
        if self.unfinished.any.load(Ordering::Relaxed) && self.unfinished.any.swap(false, Ordering::Acquire) {
            let runs = std::mem::take(&mut *lock(&self.unfinished.runs));
            run_each("work of a connection", runs.iter().filter_map(Weak::upgrade), Run::run);
        }
    }

    /// Disarms armed queues, because this thread polls them now. No event would wake the poll task if this
    /// thread stays busy, so that task polls from time to time from now on.
    pub(super) fn take_arming_back(&self) {
        if let Ok(mut spinner) = self.spinner.try_lock()
            && spinner.armed
        {
            self.disarm(&mut spinner.armed);
            self.wake_task.notify_one();
        }
    }

    /// Returns whether all connections of the reactor's queues belong to callers, so that nothing arrives
    /// that no caller waits for.
    fn serves_callers_only(&self) -> bool {
        self.queues.iter().all(|queue| queue.serves_callers_only())
    }

    /// Spins until a poll has woken a task, or [another reason](Spin) ends the spin.
    fn spin(&self, spinner: &mut Spinner) -> Spun {
        let Spinner { pace, armed, .. } = spinner;
        let mut spin = Spin::default();
        let wanted = pace.spin(
            Instant::now(),
            || self.disarm(armed),
            || {
                self.run_unfinished();
                spin.found(self.poll(), Instant::now)
            },
        );
        spin.end(wanted)
    }

    /// Arms every queue, and polls once more. Returns whether there were arrivals by then.
    fn arm(&self, spinner: &mut Spinner) -> bool {
        if !spinner.armed {
            Processors::refresh(Instant::now());
            for queue in &self.queues {
                queue.arm();
            }
            spinner.armed = true;
        }
        for queue in &self.queues {
            // A peer sends a completion with the next change of a word.
            queue.watched.ask_for_completions();
        }
        // Another thread that is polling may have polled before the queue was armed, so this thread polls
        // too.
        let polled = self.queues.iter().map(|queue| queue.poll_now()).fold(Polled::default(), Polled::plus);
        if polled.has_arrivals() {
            spinner.pace.arrived(Instant::now());
        }
        polled.has_arrivals()
    }

    fn disarm(&self, armed: &mut bool) {
        if std::mem::take(armed) {
            for queue in &self.queues {
                queue.disarm();
            }
        }
    }

    /// Polls, and decides what the poll task does next. `watched`: the task has waited for the whole time of
    /// [`Step::Watch`] without a wake-up.
    pub(super) fn step(&self, watched: bool) -> Step {
        let _accepting = Accepting::begin();
        self.run_unfinished();
        self.expected.spin();
        if self.mode == PollMode::Busy && !self.sleeping_threads.any() {
            return Step::Sleep;
        }
        if self.callers.is_polling() {
            // The caller, or a thread that polls itself, may be busy with something else, and wake-ups may
            // keep this task from waiting for a whole time.
            if watched || self.callers.is_own_polled() {
                self.poll();
            }
            return Step::Watch;
        }
        if self.callers.have_polled() && self.serves_callers_only() {
            return Step::Watch;
        }
        let Ok(mut spinner) = self.spinner.try_lock() else { return Step::Again };
        let polled = self.poll();
        if polled.has_arrivals() {
            let now = Instant::now();
            spinner.pace.arrived(now);
            spinner.spinning = Spinning::default();
            // The tasks that were woken run before the next poll, if polling pays. A task that goes on at once
            // wakes another worker in a multi-thread runtime.
            if !self.several_workers || !spinner.pace.budget(now).is_zero() {
                return Step::Again;
            }
        }
        if self.several_workers {
            return self.spin_and_arm(&mut spinner);
        }
        // With one CPU, a peer of this host can't answer while this thread spins.
        let spins = self.mode == PollMode::Adaptive && Processors::current().cpus > 1;
        if spins && !self.idle_polled.load(Ordering::Relaxed) {
            let Spinner { pace, armed, spinning } = &mut *spinner;
            if spinning.again_at(pace, Instant::now()).is_ok() {
                self.disarm(armed);
                return Step::Again;
            }
            *spinning = Spinning::default();
        }
        // Arming costs a system call on some devices, and then an event for every completion. So the flag is
        // cleared only after a whole wait: a task that was woken shortly after its last poll can't know that
        // the runtime is never idle.
        let was_idle = match watched {
            true => self.was_idle.swap(false, Ordering::Relaxed),
            false => self.was_idle.load(Ordering::Relaxed),
        };
        if was_idle {
            return if spinner.armed { Step::Sleep } else { Step::Watch };
        }
        if self.arm(&mut spinner) { Step::Again } else { Step::Sleep }
    }

    /// Spins on this worker for as long as that pays, because other workers serve the other tasks; then arms the
    /// queues.
    fn spin_and_arm(&self, spinner: &mut Spinner) -> Step {
        let spun = match self.mode {
            PollMode::Adaptive => self.spin(spinner),
            PollMode::Event | PollMode::Busy => Spun::Nothing,
        };
        match spun {
            Spun::Woke | Spun::Ran => Step::Again,
            Spun::Nothing if self.arm(spinner) => Step::Again,
            Spun::Nothing => Step::Sleep,
        }
    }

    /// Notes that the poll task is about to sleep (`wanted` is true), or has slept (false). Returns whether
    /// the sleep needs a time limit.
    pub(super) fn set_timed_sleep(&self, wanted: bool) -> bool {
        // The flags are cleared first, so that a word that is added from here on wakes the task.
        self.queues.iter().for_each(|queue| queue.set_timed_sleep(false));
        let timed =
            wanted && (!self.late.is_empty() || self.queues.iter().any(|queue| queue.wants_timed_sleep()));
        self.queues.iter().for_each(|queue| queue.set_timed_sleep(timed));
        timed
    }

    /// Wakes the tasks whose watched values arrived while nothing woke the poll task; returns whether there
    /// are any.
    pub(super) fn wake_watched(&self) -> bool {
        self.late.add(self.queues.iter().flat_map(|queue| queue.watched.unannounced()).collect());
        self.queues.iter().map(|queue| queue.wake_watched()).sum::<usize>() > 0
    }

    /// Notes that an event woke the poll task.
    pub(super) fn event(&self) {
        let mut spinner = lock(&self.spinner);
        spinner.armed = false;
        spinner.pace.arrived_after_sleep();
        self.queues.iter().for_each(|queue| queue.woken());
    }
}

/// Returns a poll of `queue` for a caller that waits for `is_done`, which is called after polls that found
/// something, and now and then, because another thread may have polled, too. `done` is whether it returned true.
fn poll_for(
    queue: &Queue,
    mut is_done: impl FnMut() -> bool,
    done: &mut bool,
) -> impl FnMut() -> Observation {
    let mut polls = 0_u32;
    move || {
        let polled = queue.poll();
        polls = polls.wrapping_add(1);
        *done = (polled.completions > 0 || polls.is_multiple_of(waits::POLLS_PER_CLOCK_READ)) && is_done();
        match *done {
            true => Observation::Wanted,
            // A task that this poll woke may wait for this thread, so that task goes first.
            false if polled.woken + polled.ran > 0 => Observation::Wanted,
            // Parts of a long message do not count: this future may not keep its thread until the message's
            // end. The poll task does.
            false if polled.completions > 0 => Observation::Arrival,
            false => Observation::Nothing,
        }
    }
}

/// Returns whether a future may keep the current thread busy for a moment. Returns true in a runtime with
/// several workers: a later wake-up of the thread would cost more, and another worker serves the other tasks
/// meanwhile. The only worker of a runtime has to serve all tasks, so it may not spin.
pub fn may_spin() -> bool {
    Handle::try_current().is_ok_and(|runtime| {
        runtime.runtime_flavor() == RuntimeFlavor::MultiThread && runtime.metrics().num_workers() > 1
    })
}

/// Creates receive buffers that connections share, if device and configuration allow that.
fn shared_buffers(context: &dyn Context, config: &Config) -> Result<Option<Arc<SharedBuffers>>, VerbsError> {
    let wanted = config.shared_receive;
    if wanted == SharedReceive::Never || context.attributes().max_shared_receive_queues == 0 {
        return Ok(None);
    }
    let separate_domains = receive::separate_domains(context);
    if !separate_domains && wanted == SharedReceive::Auto {
        return Ok(None);
    }
    SharedBuffers::new(context, config, separate_domains).map(Some)
}

/// Finds reactors by runtime, device and configuration. The registry keeps no reactor alive.
#[derive(Debug, Default)]
pub(super) struct Registry {
    entries: Mutex<HashMap<Key, Weak<Reactor>>>,
    /// Counts additions, so that a reader that keeps a copy knows when the copy is out of date.
    generation: AtomicUsize,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    runtime: Id,
    /// The opened device, by its address: a device may be open more than once, with other options.
    device: usize,
    mode: PollMode,
    cpus: Vec<usize>,
    spin_limit: Duration,
    queues: usize,
    /// The sharing of receive buffers, and their length.
    receives: (SharedReceive, u32),
}

impl Key {
    pub(super) fn new(runtime: Id, context: &Arc<dyn Context>, config: &Config) -> Self {
        Self {
            runtime,
            device: Arc::as_ptr(context).cast::<()>().addr(),
            mode: config.poll_mode,
            cpus: config.poll_cpus.clone(),
            spin_limit: config.spin_limit,
            queues: config.completion_queues,
            receives: (config.shared_receive, config.slot_size),
        }
    }
}

impl Registry {
    /// Returns the reactor of `key`, or makes and adds one.
    pub(super) fn get_or_add<E>(
        &self,
        key: Key,
        make: impl FnOnce() -> Result<Arc<Reactor>, E>,
    ) -> Result<Arc<Reactor>, E> {
        let mut entries = lock(&self.entries);
        if let Some(reactor) = entries.get(&key).and_then(Weak::upgrade) {
            return Ok(reactor);
        }
        entries.retain(|_, reactor| reactor.strong_count() > 0);
        let reactor = make()?;
        entries.insert(key, Arc::downgrade(&reactor));
        self.generation.fetch_add(1, Ordering::Release);
        Ok(reactor)
    }

    /// Returns the reactors of `runtime`, and the generation of this answer.
    pub(super) fn of_runtime(&self, runtime: Id) -> (usize, Vec<Weak<Reactor>>) {
        let entries = lock(&self.entries);
        let of_runtime = entries.iter().filter(|(key, _)| key.runtime == runtime);
        (self.generation(), of_runtime.map(|(_, reactor)| reactor.clone()).collect())
    }

    /// Returns a number that changes with each addition.
    pub(super) fn generation(&self) -> usize {
        self.generation.load(Ordering::Acquire)
    }
}

/// Makes the runtime under construction poll the completion queues of its connections when it has nothing
/// else to do. This gives the lowest latency, because no other thread and no wake-up is between a completion
/// and the task.
///
/// This function sets the builder's [`on_thread_park`](Builder::on_thread_park), and so replaces a callback
/// of your own there. It is made for current-thread runtimes; a multi-thread runtime polls from a task, with
/// or without this function. It changes only [`PollMode::Adaptive`].
///
/// ```
/// let runtime = tonic_rdma::runtime::idle_polling(&mut tokio::runtime::Builder::new_current_thread())
///     .enable_all()
///     .build()?;
/// # drop(runtime);
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn idle_polling(builder: &mut Builder) -> &mut Builder {
    let hook = Arc::new(IdleHook::default());
    builder.on_thread_park(move || hook.park())
}

/// Polls the reactors of one runtime when a thread of the runtime is about to park.
#[derive(Debug, Default)]
struct IdleHook {
    known: Mutex<KnownReactors>,
}

/// A copy of the registry's entries for one runtime.
#[derive(Debug, Default)]
struct KnownReactors {
    runtime: Option<Id>,
    generation: usize,
    reactors: Vec<Weak<Reactor>>,
}

impl IdleHook {
    fn park(&self) {
        // If another worker has the lock, that worker polls.
        let Ok(mut known) = self.known.try_lock() else { return };
        known.refresh();
        for reactor in known.reactors.iter().filter_map(Weak::upgrade) {
            reactor.idle();
        }
    }
}

impl KnownReactors {
    fn refresh(&mut self) {
        if self.runtime.is_some() && self.generation == REACTORS.generation() {
            return;
        }
        let Ok(handle) = Handle::try_current() else { return };
        self.runtime = Some(handle.id());
        (self.generation, self.reactors) = REACTORS.of_runtime(handle.id());
    }
}
