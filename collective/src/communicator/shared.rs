//! What the handles of a communicator share: its engines, and the thread that carries on operations that no
//! caller polls.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Wake, Waker};
use std::time::{Duration, Instant};

use crate::engine::{Engine, LentSlices, OperationId};
use crate::error::{CollectiveError, CollectiveErrorKind, setup};
use crate::group::Group;
use crate::link::remote::RemoteLinks;
use crate::memory::MemoryPool;
use crate::plan::PlanTable;
use tonic_rdma::unstable::waits::{self, Spinning};
use tonic_rdma::unstable::{Pace, Processors, lock};

/// How long operations may not move after a rank was lost. Operations that need nothing more of this rank end
/// well: a rank may leave when its own part of the last operation is done, and the messages that it sent
/// before are still received.
const GRACE: Duration = Duration::from_millis(20);
/// The same where ranks outnumber cores. A rank that lives may then wait for a core.
const CROWDED_GRACE: Duration = Duration::from_millis(40);

pub(crate) type RemoteEngine = Engine<RemoteLinks>;

/// The engine that carries out an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EngineKind {
    Group,
    /// Messages between two ranks, over links of their own.
    PointToPoint,
}

pub(crate) struct SharedState {
    pub(crate) group: Group,
    pub(crate) pool: MemoryPool,
    pub(crate) plans: PlanTable,
    pub(crate) limit: Duration,
    /// Whether the ranks of this host outnumber its cores.
    pub(crate) crowded: bool,
    /// The paces of the futures and of the threads that wait for operations; locked while one spins.
    pub(super) paces: [Mutex<Pace>; 2],
    /// By [`EngineKind`].
    engines: [Mutex<RemoteEngine>; 2],
    /// Since when the operations in flight have not moved although a rank is lost. `None` if they move, or no
    /// rank is lost.
    stalled_since: Mutex<Option<Instant>>,
    /// Threads that poll an engine in `wait`, by engine.
    pollers: [AtomicUsize; 2],
    sleeping: AtomicBool,
    notified: Mutex<bool>,
    notification: Condvar,
}

impl EngineKind {
    pub(crate) const ALL: [Self; 2] = [Self::Group, Self::PointToPoint];
}

impl SharedState {
    pub(crate) fn new(
        group: Group,
        pool: MemoryPool,
        plans: PlanTable,
        limit: Duration,
        engines: [RemoteEngine; 2],
    ) -> Result<Arc<Self>, CollectiveError> {
        let neighbours = group.ranks_of_this_host().len();
        let crowded = neighbours > group.cores(group.rank());
        let shared = Arc::new(Self {
            group,
            pool,
            plans,
            limit,
            crowded,
            // Where a future does not spin, the progress thread and the task have to be woken.
            paces: [waits::COLLECTIVE_FUTURE, waits::COLLECTIVE_THREAD]
                .map(|longest| Mutex::new(Pace::new(longest).saving(waits::COLLECTIVE_THREAD))),
            engines: engines.map(Mutex::new),
            stalled_since: Mutex::new(None),
            pollers: Default::default(),
            sleeping: AtomicBool::new(false),
            notified: Mutex::new(false),
            notification: Condvar::new(),
        });
        let weak = Arc::downgrade(&shared);
        std::thread::Builder::new()
            .name("tonic-rdma-collective".into())
            .spawn(move || run_progress_thread(&weak))
            .map_err(|error| setup(format!("no thread for the progress of operations: {error}")))?;
        shared.group.failure().wake(&Waker::from(Arc::new(FailureWaker(Arc::downgrade(&shared)))));
        Ok(shared)
    }

    /// Locks an engine.
    #[inline]
    pub(crate) fn engine(&self, kind: EngineKind) -> MutexGuard<'_, RemoteEngine> {
        lock(&self.engines[kind as usize])
    }

    /// Carries out a round of polls for one caller. Returns whether something moved.
    pub(crate) fn progress(
        self: &Arc<Self>,
        kind: EngineKind,
        now: Option<Instant>,
        lent: Option<(OperationId, LentSlices<'_>)>,
    ) -> bool {
        let (moved, failed, unwanted) = {
            let mut engine = self.engine(kind);
            (engine.progress(now, lent), engine.failure().is_some(), engine.take_unwanted())
        };
        drop(unwanted);
        // An operation may have failed in its start.
        if now.is_some() || moved || failed || self.group.failure().reason().is_some() {
            self.attend(kind, now, moved);
        }
        moved
    }

    /// Passes failures between the group and the engines, and publishes the step of this rank. `moved` says
    /// whether an operation has moved since the last call.
    fn attend(self: &Arc<Self>, kind: EngineKind, now: Option<Instant>, moved: bool) {
        let (failure, late, position) = {
            let mut engine = self.engine(kind);
            (engine.failure().cloned(), engine.take_late(), engine.position)
        };
        if kind == EngineKind::Group {
            self.group.position().set(position.0, position.1);
        }
        if let Some((id, suspect)) = late {
            let shared = Arc::clone(self);
            self.group.session.runtime.handle().spawn(async move {
                let culprit = shared.group.find_culprit(suspect).await;
                shared.engine(kind).expire(id, culprit);
                shared.attend(kind, None, false);
                shared.wake_thread();
            });
        }
        match (failure, self.group.failure().reason()) {
            (Some(failure), None) => self.report_failure(&failure),
            (_, Some(reason)) => self.apply_failure(reason, now, moved),
            (None, None) => {}
        }
    }

    /// Reports a failure of this rank to the others.
    pub(crate) fn report_failure(&self, failure: &CollectiveError) {
        if failure.kind() == CollectiveErrorKind::RankLost {
            // All ranks notice that by themselves.
            self.group.failure().set(failure.clone());
        } else {
            self.group.report(failure.clone());
        }
    }

    /// Ends the operations because the group has failed. If a rank is lost, operations end only once they no
    /// longer move: what the rank sent before is there, and an operation that needs no more of it ends well.
    /// The same holds while this rank still sets up the group: another rank may have gone on, and have
    /// reported the failure of a later operation.
    pub(super) fn apply_failure(&self, reason: &CollectiveError, now: Option<Instant>, moved: bool) {
        let is_lost = reason.kind() == CollectiveErrorKind::RankLost;
        if let Some((rank, loss)) = reason.lost_rank().zip(reason.loss()) {
            for kind in EngineKind::ALL {
                self.engine(kind).links.lose(rank, loss);
            }
        }
        if is_lost || self.engine(EngineKind::Group).sets_up {
            let idle = EngineKind::ALL.into_iter().all(|kind| self.engine(kind).is_idle());
            let mut since = lock(&self.stalled_since);
            if idle || moved {
                *since = None;
                return;
            }
            let now = now.unwrap_or_else(Instant::now);
            let grace = if self.crowded { CROWDED_GRACE } else { GRACE };
            if now.saturating_duration_since(*since.get_or_insert(now)) < grace {
                return;
            }
        }
        for kind in EngineKind::ALL {
            let mut engine = self.engine(kind);
            if engine.failure().is_none() {
                engine.fail(reason.clone());
            }
        }
    }

    /// Ends all operations of this rank, before the survivors agree.
    pub(crate) fn revoke(&self, reason: &CollectiveError) {
        for kind in EngineKind::ALL {
            let mut engine = self.engine(kind);
            engine.fail(reason.clone());
            engine.links.give_up();
        }
    }

    /// Has the progress thread carry on what is under way.
    pub(crate) fn wake_thread(&self) {
        // SYNC POINT: the thread sets `sleeping`, and then checks whether there is work. A caller starts
        // work, and then checks here.
        std::sync::atomic::fence(Ordering::SeqCst);
        if self.sleeping.load(Ordering::SeqCst) {
            self.notify_thread();
        }
    }

    /// Wakes the progress thread if it sleeps, whether or not there is work.
    pub(crate) fn notify_thread(&self) {
        *lock(&self.notified) = true;
        self.notification.notify_one();
    }

    /// Returns whether an engine has operations under way that no thread polls. A thread polls one engine
    /// only.
    fn has_work(&self) -> bool {
        EngineKind::ALL.into_iter().any(|kind| self.needs_thread(kind))
    }

    /// Returns whether a thread polls an engine.
    fn is_polled(&self) -> bool {
        self.pollers.iter().any(|pollers| pollers.load(Ordering::SeqCst) > 0)
    }

    fn needs_thread(&self, kind: EngineKind) -> bool {
        self.pollers[kind as usize].load(Ordering::SeqCst) == 0 && !self.engine(kind).is_idle()
    }

    /// Sleeps until there is work for the progress thread.
    fn sleep(&self) {
        self.sleeping.store(true, Ordering::SeqCst);
        std::sync::atomic::fence(Ordering::SeqCst);
        if !self.has_work() {
            let mut notified = lock(&self.notified);
            if !*notified {
                // The time limit is for a caller that polls and then never returns.
                let waited = self.notification.wait_timeout(notified, Duration::from_millis(100));
                notified = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
            *notified = false;
        }
        self.sleeping.store(false, Ordering::SeqCst);
    }
}

impl Drop for SharedState {
    fn drop(&mut self) {
        for kind in EngineKind::ALL {
            for memory in &mut self.engine(kind).take_kept() {
                // A peer may still read from it, so that the pool must not use it again.
                memory.retire();
            }
        }
    }
}

impl std::fmt::Debug for SharedState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SharedState").field("group", &self.group).finish_non_exhaustive()
    }
}

/// A caller polls an engine, so the progress thread does not.
pub(crate) struct Polling<'a> {
    shared: &'a SharedState,
    kind: EngineKind,
}

impl<'a> Polling<'a> {
    pub(crate) fn new(shared: &'a SharedState, kind: EngineKind) -> Self {
        shared.pollers[kind as usize].fetch_add(1, Ordering::SeqCst);
        Self { shared, kind }
    }
}

impl Drop for Polling<'_> {
    fn drop(&mut self) {
        self.shared.pollers[self.kind as usize].fetch_sub(1, Ordering::SeqCst);
        if self.shared.has_work() {
            self.shared.wake_thread();
        }
    }
}

/// Wakes the progress thread when the group fails, so that it ends the operations.
struct FailureWaker(Weak<SharedState>);

impl Wake for FailureWaker {
    fn wake(self: Arc<Self>) {
        if let Some(shared) = self.0.upgrade() {
            shared.notify_thread();
        }
    }
}

/// The progress thread. It ends when the communicator and all its operations are dropped.
fn run_progress_thread(shared: &Weak<SharedState>) {
    let Some(crowded) = shared.upgrade().map(|shared| shared.crowded) else { return };
    let pace = Mutex::new(Pace::new(waits::COLLECTIVE_THREAD));
    let mut backoff = Backoff::new(&pace, crowded);
    let mut now = None;
    while let Some(shared) = shared.upgrade() {
        // A thread that polls handles the failure itself after each poll, because only that thread knows
        // whether its operation moves.
        if let Some(reason) = shared.group.failure().reason()
            && !shared.is_polled()
        {
            shared.apply_failure(reason, None, false);
        }
        if !shared.has_work() {
            // Operations that a failure has ended leave memory too.
            for kind in EngineKind::ALL {
                let unwanted = shared.engine(kind).take_unwanted();
                drop(unwanted);
            }
            // The sleep is no wait for another rank.
            backoff.moved();
            shared.sleep();
            continue;
        }
        for kind in EngineKind::ALL {
            if shared.needs_thread(kind) && shared.progress(kind, now, None) {
                backoff.moved();
            }
        }
        now = backoff.wait();
    }
}

/// How a thread waits for other ranks: it spins, then yields, then naps. A future only spins.
#[derive(Debug)]
pub(super) struct Backoff<'a> {
    /// `None` if this thread does not spin: more ranks than cores run on this host, so that a rank that spins
    /// keeps another from running, or another thread of this rank spins.
    pace: Option<MutexGuard<'a, Pace>>,
    spinning: Spinning,
    /// The end of the spin.
    spun: Option<Instant>,
    polls: u32,
    has_moved: bool,
}

impl<'a> Backoff<'a> {
    /// The polls after which [`wait`](Self::wait) returns the time, for deadlines.
    const POLLS: u32 = 256;

    /// Makes a wait that spins for as long as `pace` says, unless `crowded`.
    pub(super) fn new(pace: &'a Mutex<Pace>, crowded: bool) -> Self {
        let pace = if crowded { None } else { pace.try_lock().ok() };
        Self { pace, spinning: Spinning::default(), spun: None, polls: 0, has_moved: false }
    }

    /// Notes that something has moved.
    pub(super) fn moved(&mut self) {
        if let Some(pace) = &mut self.pace {
            pace.arrived_now();
        }
        (self.spinning, self.spun, self.has_moved) = (Spinning::default(), None, true);
    }

    /// Returns whether something has moved since this value was made.
    pub(super) fn has_moved(&self) -> bool {
        self.has_moved
    }

    /// Returns whether to poll again at once.
    #[inline]
    pub(super) fn spins(&mut self) -> bool {
        let Some(pace) = &mut self.pace else { return false };
        if self.spun.is_none() {
            self.spun = self.spinning.again(pace).err();
        }
        self.spun.is_none()
    }

    /// Waits a little. Returns the time now and then, and after each nap.
    pub(super) fn wait(&mut self) -> Option<Instant> {
        self.polls = self.polls.wrapping_add(1);
        let is_due = self.polls.is_multiple_of(Self::POLLS);
        if self.spins() {
            return is_due.then(Instant::now);
        }
        std::thread::yield_now();
        let now = Instant::now();
        let waited = now.saturating_duration_since(*self.spun.get_or_insert(now));
        if waited <= waits::COLLECTIVE_YIELDS && !Processors::current().is_limited() {
            return is_due.then_some(now);
        }
        Processors::refresh(now);
        std::thread::sleep((waited / waits::COLLECTIVE_NAP_SHARE).min(waits::COLLECTIVE_NAP));
        Some(Instant::now())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thread_of_a_rank_spins_unless_ranks_outnumber_cores() {
        let pace = Mutex::new(Pace::new(waits::COLLECTIVE_THREAD));
        assert!(!Backoff::new(&pace, true).spins());
        let mut first = Backoff::new(&pace, false);
        assert!(first.spins() && !Backoff::new(&pace, false).spins());
        drop(first);
        assert!(Backoff::new(&pace, false).spins());
    }
}
