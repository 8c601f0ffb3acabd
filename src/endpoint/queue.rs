//! One completion queue, and those whose queue pairs complete on it: connections, and the ports of tensor links.

use std::collections::HashMap;
use std::fmt::Debug;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::task::Waker;

use slab::Slab;
use tokio::sync::Notify;

use super::counters::PollCounters;
use super::lock;
use super::shared_receive::SharedBuffers;
use super::work_id::{Kind, WorkId};
use tonic_rdma_verbs::{
    CompletionQueue, Context, DeviceAttributes, QueuePairNumber, VerbsError, WorkCompletion,
};

#[cfg(test)]
#[path = "queue_tests.rs"]
mod tests;

/// Whoever has a queue pair whose completions come on a [`Queue`].
pub trait Participant: Send + Sync + Debug + 'static {
    /// The queue pair.
    fn queue_pair_number(&self) -> QueuePairNumber;

    /// Completions of its requests, in order. Tasks to wake are added to `wakers`.
    fn handle_completions(&self, completions: &[WorkCompletion], wakers: &mut Vec<Waker>);

    /// Looks whether the device has given up the queue pair.
    fn fail_with_device(&self);
}

/// Something that peers change without a completion here: a word in memory.
pub trait Watched: Send + Sync + Debug + 'static {
    /// Whether what was waited for has come; its task is added to `wakers`, and it is not asked again.
    fn check(&self, wakers: &mut Vec<Waker>) -> bool;

    /// If it has come: how to learn whether a completion tells of that.
    fn untold(&self) -> Option<Untold>;

    /// Nobody will look at it for a while: asks the peer for a completion with the next change.
    fn ask_for_completion(&self);
}

/// Something that came without a completion that tells of it, so far.
#[derive(Clone, Debug)]
pub struct Untold {
    /// Counts such completions.
    pub told: Arc<AtomicU64>,
    /// How many there were before it came.
    pub before: u64,
    /// Whether the peer was asked for one.
    pub asked: bool,
}

impl Untold {
    /// Whether a completion has come since.
    pub fn was_told(&self) -> bool {
        self.told.load(Ordering::Relaxed) != self.before
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Queue {
    completions: Arc<dyn CompletionQueue>,
    /// Receive buffers that the connections share, on a device that lets them.
    shared: Option<Arc<SharedBuffers>>,
    participants: Mutex<Participants>,
    used: AtomicUsize,
    /// Participants that it has room for.
    limit: usize,
    watched: Mutex<Vec<Weak<dyn Watched>>>,
    watching: AtomicUsize,
    /// Whether its poller sleeps, or is about to: completions wake it, and what is watched has to be asked for.
    asleep: AtomicBool,
    /// Whether that sleep ends by itself soon.
    napping: AtomicBool,
    /// Wakes the poll task.
    kick: Arc<Notify>,
    batch: Mutex<Batch>,
    polling: Arc<PollCounters>,
}

#[derive(Debug, Default)]
struct Participants {
    by_key: Slab<Arc<dyn Participant>>,
    /// Their keys, where completions of shared receives come, which carry none.
    by_number: HashMap<QueuePairNumber, u32>,
}

/// What one poll works with; kept so that polling allocates nothing.
#[derive(Debug)]
struct Batch {
    completions: [WorkCompletion; Queue::BATCH],
    wakers: Vec<Waker>,
    looked_at: Vec<Arc<dyn Watched>>,
}

/// What a poll found.
#[derive(Clone, Copy, Debug, Default)]
pub struct Polled {
    /// Completions taken.
    pub completions: usize,
    /// Tasks woken.
    pub woken: usize,
}

impl Polled {
    pub fn plus(self, other: Self) -> Self {
        Self { completions: self.completions + other.completions, woken: self.woken + other.woken }
    }
}

impl Queue {
    /// Completions that a queue is made for, where the device has as many.
    const CAPACITY: u32 = 1 << 20;
    /// The same where they take memory that is locked, 64 bytes each.
    const LOCKED_CAPACITY: u32 = 1 << 17;
    /// Room for a connection: it has at most some 200 completions that nobody has taken yet, those of its receive
    /// buffers, its READs, and every 64th of its sends.
    const OF_A_CONNECTION: u32 = 256;
    /// Completions taken in one poll, so that no connection keeps the others waiting for long.
    const BATCH: usize = 64;

    /// A queue of the device, as large as makes sense.
    pub(super) fn new(
        context: &dyn Context,
        shared: Option<Arc<SharedBuffers>>,
        kick: &Arc<Notify>,
    ) -> Result<Self, VerbsError> {
        let (capacity, limit) = Self::size_on(context.attributes());
        Ok(Self {
            completions: context.create_completion_queue(capacity)?,
            shared,
            participants: Mutex::default(),
            used: AtomicUsize::new(0),
            watched: Mutex::default(),
            watching: AtomicUsize::new(0),
            asleep: AtomicBool::new(false),
            napping: AtomicBool::new(false),
            kick: Arc::clone(kick),
            limit,
            batch: Mutex::new(Batch {
                completions: [WorkCompletion::EMPTY; Self::BATCH],
                wakers: Vec::with_capacity(2 * Self::BATCH),
                looked_at: Vec::new(),
            }),
            polling: Arc::default(),
        })
    }

    /// Returns how many completions a queue of the device has room for, and how many participants.
    fn size_on(device: &DeviceAttributes) -> (u32, usize) {
        let wanted = if device.locks_memory { Self::LOCKED_CAPACITY } else { Self::CAPACITY };
        let capacity = wanted.min(device.max_completions);
        (capacity, (capacity / Self::OF_A_CONNECTION).max(1) as usize)
    }

    /// The queue itself, to create queue pairs with.
    pub fn completion_queue(&self) -> &Arc<dyn CompletionQueue> {
        &self.completions
    }

    /// The receive buffers that its connections share, if they do.
    pub(super) fn shared(&self) -> Option<&Arc<SharedBuffers>> {
        self.shared.as_ref()
    }

    /// Adds the participant that `make` builds for the key that its work requests are to carry.
    pub fn add<P: Participant, E>(
        &self,
        make: impl FnOnce(u32) -> Result<Arc<P>, E>,
    ) -> Result<Result<(u32, Arc<P>), E>, QueueFull> {
        let mut participants = lock(&self.participants);
        if participants.by_key.len() >= self.limit {
            return Err(QueueFull);
        }
        let entry = participants.by_key.vacant_entry();
        let key = entry.key() as u32;
        let participant = match make(key) {
            Ok(participant) => participant,
            Err(error) => return Ok(Err(error)),
        };
        entry.insert(Arc::clone(&participant) as Arc<dyn Participant>);
        if self.shared.is_some() {
            participants.by_number.insert(participant.queue_pair_number(), key);
        }
        self.used.store(participants.by_key.len(), Ordering::Relaxed);
        Ok(Ok((key, participant)))
    }

    /// Takes a participant out. Completions that still come for it are dropped.
    pub fn remove<P: Participant>(&self, key: u32, participant: &P) {
        let mut participants = lock(&self.participants);
        let found = participants.by_key.get(key as usize);
        let ours = found.is_some_and(|entry| std::ptr::addr_eq(Arc::as_ptr(entry), participant));
        let removed = ours.then(|| participants.by_key.remove(key as usize));
        if ours {
            participants.by_number.remove(&participant.queue_pair_number());
        }
        self.used.store(participants.by_key.len(), Ordering::Relaxed);
        // Dropping the participant destroys its queue pair: not under the lock.
        drop(participants);
        drop(removed);
    }

    /// Has `watched` looked at with every poll, until it has come or is gone. If the poller sleeps, the caller asks for a
    /// completion itself.
    pub fn watch(&self, watched: Weak<dyn Watched>) {
        let mut all = lock(&self.watched);
        all.push(watched);
        // SYNC: SeqCst before looking whether the poller sleeps: Dekker with `arm`, then `ask_for_completions`.
        self.watching.store(all.len(), Ordering::SeqCst);
        drop(all);
        if self.wants_naps() {
            self.kick.notify_one();
        }
    }

    /// Whether the poller sleeps, or is about to.
    pub fn is_asleep(&self) -> bool {
        self.asleep.load(Ordering::SeqCst)
    }

    /// Whether anything is watched.
    pub fn is_watching(&self) -> bool {
        self.watching.load(Ordering::SeqCst) > 0
    }

    /// Whether something is watched while the poller sleeps, and that sleep does not end by itself.
    pub fn wants_naps(&self) -> bool {
        self.is_watching() && self.is_asleep() && !self.napping.load(Ordering::SeqCst)
    }

    /// Whether the poller's sleep ends by itself soon.
    pub fn set_napping(&self, napping: bool) {
        self.napping.store(napping, Ordering::SeqCst);
    }

    /// What is watched and has come, though no completion told of it yet.
    pub fn untold(&self) -> Vec<Untold> {
        // Not under the lock, as the last reference to something watched may go with this one.
        let watched: Vec<_> = lock(&self.watched).iter().filter_map(Weak::upgrade).collect();
        let untold = watched.iter().filter_map(|watched| watched.untold());
        untold.filter(|untold| !untold.was_told()).collect()
    }

    /// Wakes the tasks of what is watched and has come; how many there were.
    pub fn wake_watched(&self) -> usize {
        let (mut wakers, mut looked_at) = (Vec::new(), Vec::new());
        let come = self.check_watched(&mut wakers, &mut looked_at);
        wakers.into_iter().for_each(Waker::wake);
        come
    }

    /// Looks at what is watched; how many of them have come. What was `looked_at` is to be dropped by the caller, as the last
    /// reference may go with it: not under the lock.
    fn check_watched(&self, wakers: &mut Vec<Waker>, looked_at: &mut Vec<Arc<dyn Watched>>) -> usize {
        if !self.is_watching() {
            return 0;
        }
        let mut all = lock(&self.watched);
        let (before, mut gone) = (all.len(), 0);
        all.retain(|watched| match watched.upgrade() {
            Some(watched) => {
                let come = watched.check(wakers);
                looked_at.push(watched);
                !come
            }
            None => {
                gone += 1;
                false
            }
        });
        self.watching.store(all.len(), Ordering::SeqCst);
        before - all.len() - gone
    }

    /// Whether nobody uses it.
    pub fn is_unused(&self) -> bool {
        self.used.load(Ordering::Relaxed) == 0
    }

    /// Hands completions that have come to their connections and wakes tasks. Does nothing if somebody else is in the
    /// middle of it.
    pub fn poll(&self) -> Polled {
        self.batch.try_lock().map_or_else(|_| Polled::default(), |mut batch| self.poll_with(&mut batch))
    }

    /// The same, and waits for whoever is in the middle of it.
    pub fn poll_now(&self) -> Polled {
        self.poll_with(&mut lock(&self.batch))
    }

    /// Polls until nothing comes any more, waiting for whoever is in the middle of it.
    pub fn drain(&self) {
        /// A peer that sends as fast as we take must not keep us here.
        const ROUNDS: usize = 1024;
        let mut batch = lock(&self.batch);
        for _ in 0..ROUNDS {
            if self.poll_with(&mut batch).completions == 0 {
                break;
            }
        }
    }

    fn poll_with(&self, batch: &mut Batch) -> Polled {
        self.polling.polls.add(1);
        let count = self.completions.poll(&mut batch.completions);
        let mut rest = &batch.completions[..count];
        while let Some(first) = rest.first() {
            let same = |completion: &&WorkCompletion| completion.queue_pair == first.queue_pair;
            let (group, others) = rest.split_at(rest.iter().take_while(same).count());
            match self.participant(first) {
                Some(participant) => participant.handle_completions(group, &mut batch.wakers),
                None => self.give_back(group),
            }
            rest = others;
        }
        // After the completions: those of a device that does not place in order may have brought what is watched.
        let come = self.check_watched(&mut batch.wakers, &mut batch.looked_at);
        batch.looked_at.clear();
        let woken = batch.wakers.len();
        batch.wakers.drain(..).for_each(Waker::wake);
        Polled { completions: count + come, woken }
    }

    /// The participant that a completion is for, if it is still there.
    fn participant(&self, completion: &WorkCompletion) -> Option<Arc<dyn Participant>> {
        let participants = lock(&self.participants);
        let id = WorkId::from_bits(completion.wr_id);
        let key = match id.kind {
            Kind::SharedReceive => *participants.by_number.get(&completion.queue_pair)?,
            Kind::Receive | Kind::Send | Kind::Read => id.connection,
        };
        // A key may have been given to another connection since; the queue pair tells.
        let found = participants.by_key.get(key as usize);
        found.filter(|it| it.queue_pair_number() == completion.queue_pair).cloned()
    }

    /// Posts shared buffers that messages for a connection which is gone came into.
    fn give_back(&self, completions: &[WorkCompletion]) {
        let Some(shared) = &self.shared else { return };
        for id in completions.iter().map(|completion| WorkId::from_bits(completion.wr_id)) {
            if id.kind == Kind::SharedReceive
                && let Err(reason) = shared.post(id.value)
            {
                tonic_rdma_verbs::internal::throttled!(warn, slot = id.value, %reason, "a shared receive buffer is lost");
            }
        }
    }

    /// Ends the participants whose queue pairs the device has given up, with its reason.
    pub fn fail_with_device(&self) {
        let participants: Vec<_> =
            lock(&self.participants).by_key.iter().map(|(_, it)| Arc::clone(it)).collect();
        participants.iter().for_each(|participant| participant.fail_with_device());
    }

    /// Has peers tell of what is watched by a completion, before everybody sleeps.
    pub fn ask_for_completions(&self) {
        if !self.is_watching() {
            return;
        }
        let watched: Vec<_> = lock(&self.watched).iter().filter_map(Weak::upgrade).collect();
        watched.iter().for_each(|watched| watched.ask_for_completion());
    }

    /// Asks for an event with the next completion.
    pub fn arm(&self) {
        self.polling.sleeps.add(1);
        self.asleep.store(true, Ordering::SeqCst);
        if let Err(error) = self.completions.arm() {
            tracing::error!(%error, "a completion queue can't be armed; its connections may stall");
        }
    }

    /// Takes [`arm`](Self::arm) back.
    pub fn disarm(&self) {
        self.asleep.store(false, Ordering::SeqCst);
        self.completions.disarm();
    }

    /// The poller was woken by an event, and the queue is not armed any more.
    pub fn woken(&self) {
        self.asleep.store(false, Ordering::SeqCst);
    }

    pub fn event_fd(&self) -> BorrowedFd<'_> {
        self.completions.event_fd()
    }

    pub fn acknowledge_events(&self) {
        self.completions.acknowledge_events();
    }

    /// How it has been polled.
    pub(super) fn polling(&self) -> &Arc<PollCounters> {
        &self.polling
    }
}

/// As many connections as the completion queue can serve.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the completion queue serves as many connections as it can; RDMA_CQS adds queues")]
pub struct QueueFull;
