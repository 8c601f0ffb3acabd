//! What the handles of a communicator share: its engines, and the thread that carries on operations that no caller polls.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Wake, Waker};
use std::time::{Duration, Instant};

use super::pause::Pause;
use super::plans::Plans;
use crate::engine::{Engine, Lent, OperationId};
use crate::error::CollectiveError;
use crate::group::Group;
use crate::lane::remote::RemoteLanes;
use crate::memory::MemoryPool;

/// How long operations may go on after a rank was lost. Operations that need nothing more of it end well: a rank may leave when
/// its own part of the last operation is done.
const GRACE: Duration = Duration::from_millis(20);

pub(crate) type RemoteEngine = Engine<RemoteLanes>;

/// Which engine carries out an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Which {
    Group,
    /// Messages between two ranks, over lanes of their own.
    Pairs,
}

pub(crate) struct Shared {
    pub(crate) group: Group,
    pub(crate) pool: MemoryPool,
    pub(crate) plans: Plans,
    pub(crate) limit: Duration,
    /// Whether the ranks of this host outnumber its cores.
    pub(crate) crowded: bool,
    engine: Mutex<RemoteEngine>,
    pairs: Mutex<RemoteEngine>,
    /// When this rank saw that the group has failed.
    failed: Mutex<Option<Instant>>,
    /// Threads that poll in `wait`.
    pollers: AtomicUsize,
    sleeping: AtomicBool,
    bell: Mutex<bool>,
    rung: Condvar,
}

impl Shared {
    pub(crate) fn new(
        group: Group,
        pool: MemoryPool,
        plans: Plans,
        limit: Duration,
        engines: [RemoteEngine; 2],
    ) -> Result<Arc<Self>, CollectiveError> {
        let neighbours = group.ranks_of_this_host().len();
        let crowded = neighbours > group.cores(group.rank());
        let [mut engine, mut pairs] = engines;
        engine.ask_before_expiry();
        pairs.ask_before_expiry();
        let shared = Arc::new(Self {
            group,
            pool,
            plans,
            limit,
            crowded,
            engine: Mutex::new(engine),
            pairs: Mutex::new(pairs),
            failed: Mutex::new(None),
            pollers: AtomicUsize::new(0),
            sleeping: AtomicBool::new(false),
            bell: Mutex::new(false),
            rung: Condvar::new(),
        });
        let weak = Arc::downgrade(&shared);
        std::thread::Builder::new()
            .name("tonic-rdma-collective".into())
            .spawn(move || carry_on(&weak))
            .map_err(|error| {
                CollectiveError::Setup(format!("no thread for the progress of operations: {error}").into())
            })?;
        shared.group.failure().wake(&Waker::from(Arc::new(Alarm(Arc::downgrade(&shared)))));
        Ok(shared)
    }

    /// Locks an engine.
    #[inline]
    pub(crate) fn engine(&self, which: Which) -> MutexGuard<'_, RemoteEngine> {
        let engine = match which {
            Which::Group => &self.engine,
            Which::Pairs => &self.pairs,
        };
        engine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Carries out a round of looks for one caller. Returns whether something moved.
    pub(crate) fn progress(
        self: &Arc<Self>,
        which: Which,
        now: Option<Instant>,
        lent: Option<(OperationId, Lent<'_>)>,
    ) -> bool {
        let moved = self.engine(which).progress(now, lent);
        if now.is_some() || moved || self.group.failure().happened() {
            self.attend(which, now);
        }
        moved
    }

    /// Passes failures between the group and the engines, and says where this rank is.
    fn attend(self: &Arc<Self>, which: Which, now: Option<Instant>) {
        let (failure, late, position) = {
            let mut engine = self.engine(which);
            (engine.failure().map(Arc::clone), engine.take_late(), engine.position())
        };
        if now.is_some() && which == Which::Group {
            self.group.position().set(position.0, position.1);
        }
        if let Some((id, suspect)) = late {
            let shared = Arc::clone(self);
            self.group.runtime().spawn(async move {
                let culprit = shared.group.find_culprit(suspect).await;
                shared.engine(which).expire(id, culprit);
                shared.attend(which, None);
                shared.wake_thread();
            });
        }
        match (failure, self.group.failure().reason()) {
            (Some(failure), None) => self.tell(&failure),
            (_, Some(reason)) => self.hear(reason, now),
            (None, None) => {}
        }
    }

    /// Tells the other ranks of a failure of this one.
    pub(crate) fn tell(&self, failure: &CollectiveError) {
        if matches!(failure, CollectiveError::RankLost { .. }) {
            // All ranks notice that by themselves.
            self.group.failure().set(failure.clone());
        } else {
            self.group.report(failure.clone());
        }
    }

    /// Ends the operations because the group has failed.
    fn hear(&self, reason: &CollectiveError, now: Option<Instant>) {
        if matches!(reason, CollectiveError::RankLost { .. }) {
            let now = now.unwrap_or_else(Instant::now);
            let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
            let busy = [Which::Group, Which::Pairs].into_iter().any(|which| !self.engine(which).is_idle());
            if busy && now.saturating_duration_since(*failed.get_or_insert(now)) < GRACE {
                return;
            }
        }
        for which in [Which::Group, Which::Pairs] {
            let mut engine = self.engine(which);
            if engine.failure().is_none() {
                engine.fail(reason.clone());
            }
        }
    }

    /// Ends all operations of this rank, before the survivors agree.
    pub(crate) fn revoke(&self, reason: &CollectiveError) {
        for which in [Which::Group, Which::Pairs] {
            let mut engine = self.engine(which);
            engine.fail(reason.clone());
            engine.lanes_mut().give_up();
        }
    }

    /// Has the progress thread carry on what is under way.
    pub(crate) fn wake_thread(&self) {
        // SYNC POINT: the thread sets `sleeping`, and then looks whether there is work. A caller starts work, and then looks here.
        std::sync::atomic::fence(Ordering::SeqCst);
        if self.sleeping.load(Ordering::SeqCst) {
            self.ring();
        }
    }

    /// Wakes the progress thread if it sleeps, whether or not there is work.
    pub(crate) fn ring(&self) {
        *self.bell.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.rung.notify_one();
    }

    fn has_work(&self) -> bool {
        self.pollers.load(Ordering::SeqCst) == 0
            && [Which::Group, Which::Pairs].into_iter().any(|which| !self.engine(which).is_idle())
    }

    /// Sleeps until there is work for the progress thread.
    fn sleep(&self) {
        self.sleeping.store(true, Ordering::SeqCst);
        std::sync::atomic::fence(Ordering::SeqCst);
        if !self.has_work() {
            let mut bell = self.bell.lock().unwrap_or_else(PoisonError::into_inner);
            if !*bell {
                // The time is a bound for a caller that polls and then never comes back.
                let waited = self.rung.wait_timeout(bell, Duration::from_millis(100));
                bell = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
            *bell = false;
        }
        self.sleeping.store(false, Ordering::SeqCst);
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        for which in [Which::Group, Which::Pairs] {
            for memory in &mut self.engine(which).take_kept() {
                // A peer may still pull from it, so that the pool must not use it again.
                memory.retire();
            }
        }
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("group", &self.group).finish_non_exhaustive()
    }
}

/// Says that a caller polls, so that the progress thread does not.
pub(crate) struct Polling<'a>(&'a Shared);

impl<'a> Polling<'a> {
    pub(crate) fn new(shared: &'a Shared) -> Self {
        shared.pollers.fetch_add(1, Ordering::SeqCst);
        Self(shared)
    }
}

impl Drop for Polling<'_> {
    fn drop(&mut self) {
        self.0.pollers.fetch_sub(1, Ordering::SeqCst);
        if self.0.has_work() {
            self.0.wake_thread();
        }
    }
}

/// Wakes the progress thread when the group fails, so that it ends the operations.
struct Alarm(Weak<Shared>);

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        if let Some(shared) = self.0.upgrade() {
            shared.ring();
        }
    }
}

/// The progress thread. It ends when the communicator and all its operations are dropped.
fn carry_on(shared: &Weak<Shared>) {
    let mut pause = match shared.upgrade() {
        Some(shared) => Pause::new(shared.crowded),
        None => return,
    };
    let mut now = None;
    while let Some(shared) = shared.upgrade() {
        if let Some(reason) = shared.group.failure().reason() {
            shared.hear(reason, None);
        }
        if !shared.has_work() {
            shared.sleep();
            pause.moved();
            continue;
        }
        let group = shared.progress(Which::Group, now, None);
        if group | shared.progress(Which::Pairs, now, None) {
            pause.moved();
        }
        now = pause.pause();
    }
}
