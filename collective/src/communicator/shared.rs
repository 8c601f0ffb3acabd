//! What the handles of a communicator share: its engines, and the thread that carries on operations that no caller polls.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Wake, Waker};
use std::time::{Duration, Instant};

use crate::engine::{Engine, Lent, OperationId};
use crate::error::{CollectiveError, CollectiveErrorKind, setup};
use crate::group::Group;
use crate::lane::remote::RemoteLanes;
use crate::memory::MemoryPool;
use crate::plan::PlanTable;
use tonic_rdma::unstable::lock;

/// How long operations may stand still after a rank was lost. Operations that need nothing more of this rank end well: a rank may
/// leave when its own part of the last operation is done, and the messages that it sent before are still received.
const GRACE: Duration = Duration::from_millis(20);
/// The same where ranks outnumber cores. A rank that lives may then wait for a core.
const CROWDED_GRACE: Duration = Duration::from_millis(40);

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
    pub(crate) plans: PlanTable,
    pub(crate) limit: Duration,
    /// Whether the ranks of this host outnumber its cores.
    pub(crate) crowded: bool,
    /// By [`Which`].
    engines: [Mutex<RemoteEngine>; 2],
    /// Since when the operations under way stand still although a rank is lost. `None` if that is not so.
    stands_still: Mutex<Option<Instant>>,
    /// Threads that poll an engine in `wait`, by engine.
    pollers: [AtomicUsize; 2],
    sleeping: AtomicBool,
    bell: Mutex<bool>,
    rung: Condvar,
}

impl Shared {
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
            engines: engines.map(Mutex::new),
            stands_still: Mutex::new(None),
            pollers: Default::default(),
            sleeping: AtomicBool::new(false),
            bell: Mutex::new(false),
            rung: Condvar::new(),
        });
        let weak = Arc::downgrade(&shared);
        std::thread::Builder::new()
            .name("tonic-rdma-collective".into())
            .spawn(move || carry_on(&weak))
            .map_err(|error| setup(format!("no thread for the progress of operations: {error}")))?;
        shared.group.failure().wake(&Waker::from(Arc::new(Alarm(Arc::downgrade(&shared)))));
        Ok(shared)
    }

    /// Locks an engine.
    #[inline]
    pub(crate) fn engine(&self, which: Which) -> MutexGuard<'_, RemoteEngine> {
        lock(&self.engines[which as usize])
    }

    /// Carries out a round of looks for one caller. Returns whether something moved.
    pub(crate) fn progress(
        self: &Arc<Self>,
        which: Which,
        now: Option<Instant>,
        lent: Option<(OperationId, Lent<'_>)>,
    ) -> bool {
        let (moved, failed) = {
            let mut engine = self.engine(which);
            (engine.progress(now, lent), engine.failure().is_some())
        };
        // An operation may have failed in its start.
        if now.is_some() || moved || failed || self.group.failure().happened() {
            self.attend(which, now, moved);
        }
        moved
    }

    /// Passes failures between the group and the engines, and says where this rank is. `moved` says whether an operation has moved
    /// since the last call.
    fn attend(self: &Arc<Self>, which: Which, now: Option<Instant>, moved: bool) {
        let (failure, late, position) = {
            let mut engine = self.engine(which);
            (engine.failure().cloned(), engine.take_late(), engine.position)
        };
        if which == Which::Group {
            self.group.position().set(position.0, position.1);
        }
        if let Some((id, suspect)) = late {
            let shared = Arc::clone(self);
            self.group.session.runtime.handle().spawn(async move {
                let culprit = shared.group.find_culprit(suspect).await;
                shared.engine(which).expire(id, culprit);
                shared.attend(which, None, false);
                shared.wake_thread();
            });
        }
        match (failure, self.group.failure().reason()) {
            (Some(failure), None) => self.tell(&failure),
            (_, Some(reason)) => self.hear(reason, now, moved),
            (None, None) => {}
        }
    }

    /// Tells the other ranks of a failure of this one.
    pub(crate) fn tell(&self, failure: &CollectiveError) {
        if failure.kind() == CollectiveErrorKind::RankLost {
            // All ranks notice that by themselves.
            self.group.failure().set(failure.clone());
        } else {
            self.group.report(failure.clone());
        }
    }

    /// Ends the operations because the group has failed. If a rank is lost, operations end only once they stand still: what the
    /// rank sent before is there, and an operation that needs no more of it ends well. The same holds while this rank still sets
    /// up the group: another rank may have gone on, and have reported the failure of a later operation.
    pub(super) fn hear(&self, reason: &CollectiveError, now: Option<Instant>, moved: bool) {
        if reason.kind() == CollectiveErrorKind::RankLost || self.engine(Which::Group).sets_up {
            let idle = [Which::Group, Which::Pairs].into_iter().all(|which| self.engine(which).is_idle());
            let mut since = lock(&self.stands_still);
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
            engine.lanes.give_up();
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
        *lock(&self.bell) = true;
        self.rung.notify_one();
    }

    /// Returns whether an engine has operations under way that no thread polls. A thread polls one engine only.
    fn has_work(&self) -> bool {
        [Which::Group, Which::Pairs].into_iter().any(|which| self.needs_thread(which))
    }

    /// Returns whether a thread polls an engine.
    fn is_polled(&self) -> bool {
        self.pollers.iter().any(|pollers| pollers.load(Ordering::SeqCst) > 0)
    }

    fn needs_thread(&self, which: Which) -> bool {
        self.pollers[which as usize].load(Ordering::SeqCst) == 0 && !self.engine(which).is_idle()
    }

    /// Sleeps until there is work for the progress thread.
    fn sleep(&self) {
        self.sleeping.store(true, Ordering::SeqCst);
        std::sync::atomic::fence(Ordering::SeqCst);
        if !self.has_work() {
            let mut bell = lock(&self.bell);
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

/// Says that a caller polls an engine, so that the progress thread does not.
pub(crate) struct Polling<'a> {
    shared: &'a Shared,
    which: Which,
}

impl<'a> Polling<'a> {
    pub(crate) fn new(shared: &'a Shared, which: Which) -> Self {
        shared.pollers[which as usize].fetch_add(1, Ordering::SeqCst);
        Self { shared, which }
    }
}

impl Drop for Polling<'_> {
    fn drop(&mut self) {
        self.shared.pollers[self.which as usize].fetch_sub(1, Ordering::SeqCst);
        if self.shared.has_work() {
            self.shared.wake_thread();
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
        // A thread that polls hears of the failure by itself, after each look. This one does not know what that thread has found.
        if let Some(reason) = shared.group.failure().reason()
            && !shared.is_polled()
        {
            shared.hear(reason, None, false);
        }
        if !shared.has_work() {
            shared.sleep();
            pause.moved();
            continue;
        }
        for which in [Which::Group, Which::Pairs] {
            if shared.needs_thread(which) && shared.progress(which, now, None) {
                pause.moved();
            }
        }
        now = pause.pause();
    }
}

/// The looks at memory between two looks at the clock.
const LOOKS: u32 = 1000;
const SPIN: Duration = Duration::from_micros(100);
const YIELD: Duration = Duration::from_millis(1);
const LONGEST_NAP: Duration = Duration::from_millis(1);

/// How a thread waits for other ranks: it spins, then yields, then naps.
#[derive(Debug)]
pub(super) struct Pause {
    /// Whether more ranks than cores run on this host. Then a rank that spins keeps another from running.
    crowded: bool,
    looks: u32,
    began: Option<Instant>,
    yields: bool,
    has_moved: bool,
}

impl Pause {
    pub(super) fn new(crowded: bool) -> Self {
        Self { crowded, looks: 0, began: None, yields: crowded, has_moved: false }
    }

    /// Notes that something has moved.
    pub(super) fn moved(&mut self) {
        self.began = None;
        self.yields = self.crowded;
        self.has_moved = true;
    }

    /// Returns whether something has moved since this value was made.
    pub(super) fn has_moved(&self) -> bool {
        self.has_moved
    }

    /// Waits a little. Returns the time if it read the clock.
    pub(super) fn pause(&mut self) -> Option<Instant> {
        self.looks += 1;
        if self.yields {
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
        if self.looks < if self.yields { LOOKS / 20 } else { LOOKS } {
            return None;
        }
        self.looks = 0;
        let now = Instant::now();
        let waited = now.saturating_duration_since(*self.began.get_or_insert(now));
        self.yields = self.crowded || waited > SPIN;
        if waited > YIELD {
            std::thread::sleep((waited / 16).min(LONGEST_NAP));
            // After a nap, each look is a nap, until something moves.
            self.looks = LOOKS;
            return Some(Instant::now());
        }
        Some(now)
    }
}
