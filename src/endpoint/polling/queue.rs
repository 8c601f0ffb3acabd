//! One completion queue, and the participants whose queue pairs complete on it: connections, and ports of
//! tensor links. With each poll it also polls the words in memory that peers write without a completion here.

#[cfg(test)]
#[path = "queue_tests.rs"]
pub(super) mod tests;

use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::task::Waker;
use std::time::{Duration, Instant};

use slab::Slab;
use tokio::sync::Notify;

use crate::endpoint::deferred::{Deferred, Run, ready_tasks_of};
use crate::endpoint::info::PollCounters;
use crate::endpoint::link::receive::SharedBuffers;
use crate::endpoint::link::{WorkId, WorkKind};
use tonic_rdma_verbs::unstable::{drop_all, lock, run_foreign, wake_all};
use tonic_rdma_verbs::{CompletionQueue, Context, QueuePairNumber, VerbsError, WorkCompletion};

/// A completion queue of the device, polled by one thread or task at a time.
#[derive(Debug)]
pub struct Queue {
    pub(super) completions: Arc<dyn CompletionQueue>,
    /// Receive buffers that the connections share, where device and configuration allow that.
    shared: Option<Arc<SharedBuffers>>,
    participants: Mutex<Participants>,
    used: AtomicUsize,
    /// Participants for which messages arrive that no caller waits for.
    unasked: AtomicUsize,
    /// The device's name, and the most completions that a queue of the device has room for.
    limit: (String, u32),
    pub(super) watched: WatchList,
    /// The poller sleeps, or is about to. Completions wake it. A watched word has no completion, unless the
    /// peer is asked for one.
    asleep: AtomicBool,
    /// The poller's sleep has a short time limit.
    timed_sleep: AtomicBool,
    /// Wakes the poll task.
    wake_task: Arc<Notify>,
    batch: Mutex<Batch>,
    /// Completions taken so far.
    taken: AtomicU64,
    /// The counters of this queue's polls.
    pub(crate) polling: Arc<PollCounters>,
}

#[derive(Debug, Default)]
struct Participants {
    by_key: Slab<Entry>,
    /// Sum of the participants' completions.
    completions: u64,
    /// Completions that the device's queue has room for.
    capacity: u32,
    /// Keys by queue pair, for completions of shared receives, which carry no key. Empty without shared
    /// receives.
    by_number: HashMap<QueuePairNumber, u32>,
}

/// A participant, and the number of its requests that may complete between two polls.
#[derive(Debug)]
struct Entry {
    participant: Arc<dyn Participant>,
    completions: u32,
}

/// Buffers of one poll, kept so that polling allocates nothing.
#[derive(Debug)]
struct Batch {
    completions: [WorkCompletion; Queue::BATCH],
    after: Deferred,
    checked: Vec<Arc<dyn Watched>>,
}

/// The result of a poll.
#[derive(Clone, Copy, Debug, Default)]
pub struct Polled {
    /// Completions taken.
    pub completions: usize,
    /// Tasks woken, and calls that became tasks.
    pub woken: usize,
    /// Calls of [`Run::run`], which may have woken tasks, too.
    pub ran: usize,
    /// A part of a message was moved, and the next polls are likely to move more.
    pub moving: bool,
}

impl Polled {
    /// Returns the sums of both.
    pub fn plus(self, other: Self) -> Self {
        Self {
            completions: self.completions + other.completions,
            woken: self.woken + other.woken,
            ran: self.ran + other.ran,
            moving: self.moving || other.moving,
        }
    }

    /// Returns whether completions, or parts of a message, have come.
    pub fn has_arrivals(self) -> bool {
        self.completions > 0 || self.moving
    }
}

impl Queue {
    /// Completions that a queue is made for at first. A completion takes 64 bytes of locked memory on most
    /// devices. Drivers round up to the next power of two, less one.
    const CAPACITY: u32 = (1 << 17) - 1;
    /// Completions taken in one poll, so that no connection keeps the others waiting for long.
    const BATCH: usize = 64;

    /// Creates a queue on the device, for many participants. `wake_task` wakes the task that polls the queue.
    pub(super) fn new(
        context: &dyn Context,
        shared: Option<Arc<SharedBuffers>>,
        wake_task: &Arc<Notify>,
    ) -> Result<Self, VerbsError> {
        let capacity = Self::CAPACITY.min(context.attributes().max_completions);
        Self::with_capacity(context, capacity, shared, wake_task)
    }

    /// Creates a queue with room for `capacity` completions.
    pub(super) fn with_capacity(
        context: &dyn Context,
        capacity: u32,
        shared: Option<Arc<SharedBuffers>>,
        wake_task: &Arc<Notify>,
    ) -> Result<Self, VerbsError> {
        let attributes = context.attributes();
        Ok(Self {
            completions: context.create_completion_queue(capacity)?,
            shared,
            participants: Mutex::new(Participants { capacity, ..Participants::default() }),
            used: AtomicUsize::new(0),
            unasked: AtomicUsize::new(0),
            watched: WatchList::default(),
            asleep: AtomicBool::new(false),
            timed_sleep: AtomicBool::new(false),
            wake_task: Arc::clone(wake_task),
            limit: (attributes.name.clone(), attributes.max_completions),
            batch: Mutex::new(Batch {
                completions: [WorkCompletion::EMPTY; Self::BATCH],
                after: Deferred::default(),
                checked: Vec::new(),
            }),
            taken: AtomicU64::new(0),
            polling: Arc::default(),
        })
    }

    /// Returns the device's completion queue, to create queue pairs with.
    pub fn completion_queue(&self) -> &Arc<dyn CompletionQueue> {
        &self.completions
    }

    /// Returns the receive buffers that the connections of this queue share, if they do.
    pub(crate) fn shared(&self) -> Option<&Arc<SharedBuffers>> {
        self.shared.as_ref()
    }

    /// Adds the participant that `make` builds. `make` gets the key that the participant's work requests have
    /// to carry. `completions` is the number of requests that the participant may have posted at a time: each
    /// of them completes if the queue pair fails, whether it was signaled or not. So a queue never overruns,
    /// which would end all its participants. The queue grows with its participants.
    ///
    /// # Errors
    /// The device has no queue for as many completions, or can't resize the queue.
    pub fn add<P: Participant, E>(
        &self,
        completions: u32,
        make: impl FnOnce(u32) -> Result<Arc<P>, E>,
    ) -> Result<Result<(u32, Arc<P>), E>, QueueFull> {
        let mut participants = lock(&self.participants);
        self.make_room(&mut participants, completions)?;
        let entry = participants.by_key.vacant_entry();
        let key = entry.key() as u32;
        let participant = match make(key) {
            Ok(participant) => participant,
            Err(error) => return Ok(Err(error)),
        };
        entry.insert(Entry { participant: Arc::clone(&participant) as Arc<dyn Participant>, completions });
        participants.completions += u64::from(completions);
        if self.shared.is_some() {
            participants.by_number.insert(participant.queue_pair_number(), key);
        }
        self.used.store(participants.by_key.len(), Ordering::Relaxed);
        self.unasked.fetch_add(usize::from(!participant.answers_callers()), Ordering::Relaxed);
        Ok(Ok((key, participant)))
    }

    /// Returns how many requests of all participants may complete between two polls.
    pub(super) fn expected_completions(&self) -> u64 {
        lock(&self.participants).completions
    }

    /// Makes room for as many completions more.
    fn make_room(&self, participants: &mut Participants, completions: u32) -> Result<(), QueueFull> {
        let needed = participants.completions + u64::from(completions);
        if needed <= participants.capacity.into() {
            return Ok(());
        }
        let (device, limit) = &self.limit;
        let full = |most, reason| {
            let (device, participants) = (device.clone(), participants.by_key.len());
            QueueFull { device, most, participants, reason }
        };
        let wanted = ((needed + 1).next_power_of_two() - 1).min(u64::from(*limit)) as u32;
        if needed > wanted.into() {
            return Err(full(*limit, None));
        }
        // There may be memory for what is needed, and not for more.
        let resize = |size: u32| self.completions.resize(size).map(|()| size);
        let resized = resize(wanted).or_else(|_| resize(needed as u32));
        participants.capacity = resized.map_err(|reason| full(participants.capacity, Some(reason)))?;
        Ok(())
    }

    /// Removes a participant. Completions that still come for the participant are dropped.
    pub fn remove<P: Participant + ?Sized>(&self, key: u32, participant: &P) {
        let mut participants = lock(&self.participants);
        let found = participants.by_key.get(key as usize);
        let ours = found.is_some_and(|entry| std::ptr::addr_eq(Arc::as_ptr(&entry.participant), participant));
        let removed = ours.then(|| participants.by_key.remove(key as usize));
        if let Some(entry) = &removed {
            participants.completions -= u64::from(entry.completions);
            participants.by_number.remove(&participant.queue_pair_number());
            self.unasked.fetch_sub(usize::from(!participant.answers_callers()), Ordering::Relaxed);
        }
        self.used.store(participants.by_key.len(), Ordering::Relaxed);
        // Dropping the participant destroys its queue pair, which must not happen under the lock.
        drop(participants);
        drop(removed);
    }

    /// Checks `word` with every poll until its value has arrived or the word is gone. If the poller sleeps,
    /// the caller asks the peer for a completion itself.
    pub fn watch(&self, word: Weak<dyn Watched>) {
        self.watched.add(word);
        if self.wants_timed_sleep() {
            self.wake_task.notify_one();
        }
    }

    /// Returns whether the poller sleeps, or is about to.
    #[inline]
    pub fn is_asleep(&self) -> bool {
        self.asleep.load(Ordering::SeqCst)
    }

    /// Returns whether words are watched.
    #[inline]
    pub fn has_watched(&self) -> bool {
        !self.watched.is_empty()
    }

    /// Returns whether words that may change without an event are watched while the poller sleeps without a
    /// time limit.
    pub(super) fn wants_timed_sleep(&self) -> bool {
        self.watched.has_silent() && self.is_asleep() && !self.timed_sleep.load(Ordering::SeqCst)
    }

    /// Notes whether the poller's sleep has a short time limit.
    pub(super) fn set_timed_sleep(&self, timed: bool) {
        self.timed_sleep.store(timed, Ordering::SeqCst);
    }

    /// Wakes the tasks whose watched values have arrived; returns how many there are.
    pub fn wake_watched(&self) -> usize {
        let (mut wakers, mut checked) = (Vec::new(), Vec::new());
        let arrived = self.watched.check(&mut wakers, &mut checked);
        wake_all(wakers);
        drop_all(checked);
        arrived
    }

    /// Returns whether all that arrives answers calls of this process.
    pub(super) fn serves_callers_only(&self) -> bool {
        self.unasked.load(Ordering::Relaxed) == 0
    }

    /// Returns the number of completions taken so far.
    pub(super) fn completions_taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    /// Returns whether the queue has no participant.
    pub(super) fn is_unused(&self) -> bool {
        self.used.load(Ordering::Relaxed) == 0
    }

    /// Hands the completions that have come to their participants, then wakes tasks and runs the work that
    /// the participants found. Does nothing if another thread is polling this queue.
    #[inline]
    pub fn poll(&self) -> Polled {
        match self.batch.try_lock() {
            Ok(batch) => self.poll_but(None, batch),
            Err(_) => Polled::default(),
        }
    }

    /// Polls as [`poll`](Self::poll) does, but first waits for another thread that is polling.
    pub(super) fn poll_now(&self) -> Polled {
        self.poll_but(None, lock(&self.batch))
    }

    /// Polls for the task `waiting`, which is running, and so is not woken. First waits for another thread that
    /// is polling.
    pub(super) fn poll_as(&self, waiting: &Waker) -> Polled {
        self.poll_but(Some(waiting), lock(&self.batch))
    }

    /// Polls until no more completions come. First waits for another thread that is polling.
    pub fn drain(&self) {
        /// Bounds the loop, because a peer may send as fast as this side polls.
        const ROUNDS: usize = 1024;
        let mut batch = lock(&self.batch);
        for _ in 0..ROUNDS {
            if self.take_completions(&mut batch) == 0 {
                break;
            }
        }
        self.carry_out(batch);
    }

    /// Polls, and wakes all tasks but `waiting`.
    #[inline]
    fn poll_but(&self, waiting: Option<&Waker>, mut batch: MutexGuard<'_, Batch>) -> Polled {
        let completions = self.take_completions(&mut batch);
        let moving = self.completions.is_moving();
        if let Some(waiting) = waiting {
            batch.after.wakers.retain(|waker| !waker.will_wake(waiting));
        }
        let (woken, ran) = self.carry_out(batch);
        Polled { completions, woken, ran, moving }
    }

    /// Takes completions and hands them to their participants. Returns their number, with the watched words
    /// that have arrived.
    fn take_completions(&self, batch: &mut Batch) -> usize {
        self.polling.polls.add(1);
        let count = self.completions.poll(&mut batch.completions);
        // Only one thread polls at a time.
        self.taken.store(self.completions_taken() + count as u64, Ordering::Relaxed);
        let mut rest = &batch.completions[..count];
        while let Some(first) = rest.first() {
            let of_same_pair = |completion: &&WorkCompletion| completion.queue_pair == first.queue_pair;
            let (group, others) = rest.split_at(rest.iter().take_while(of_same_pair).count());
            match self.participant(first) {
                Some(participant) => self.hand_to(participant, group, &mut batch.after),
                None => self.give_back(group),
            }
            rest = others;
        }
        // The words are checked after the completions, because completions bring the values if the device
        // does not place bytes in order. SYNC: a poll that stores a value may have no fence before this
        // check, and then miss a word that a task adds at this moment, while that task misses the value. The
        // next poll checks again. Before the poller sleeps, it arms the queues, which executes a fence, and
        // polls once more.
        let arrived = self.watched.check(&mut batch.after.wakers, &mut batch.checked);
        drop_all(batch.checked.drain(..));
        count + arrived
    }

    /// Hands completions to their participant. A panic ends this participant, and no other.
    #[inline]
    fn hand_to(&self, participant: Arc<dyn Participant>, group: &[WorkCompletion], after: &mut Deferred) {
        let handled = run_foreign("the handler of completions", || {
            // If the participant was removed meanwhile, this drops it.
            let participant = participant;
            participant.handle_completions(group, after);
        });
        if handled.is_none()
            && let Some(participant) = group.first().and_then(|first| self.participant(first))
        {
            after.runs.push(Arc::new(Broken(participant)));
        }
    }

    /// Carries out what a poll found, without the lock. Returns how many tasks were woken, and how much work
    /// was run.
    fn carry_out(&self, mut batch: MutexGuard<'_, Batch>) -> (usize, usize) {
        if batch.after.is_empty() {
            return (0, 0);
        }
        let mut after = std::mem::take(&mut batch.after);
        drop(batch);
        let (woken, ran) = (after.wakers.len(), after.runs.len());
        let woken = woken + ready_tasks_of(|| after.carry_out());
        // The lists go back, so that the next poll allocates nothing. Another thread that polls has lists of
        // its own.
        if let Ok(mut batch) = self.batch.try_lock()
            && batch.after.is_empty()
        {
            batch.after = after;
        }
        (woken, ran)
    }

    /// Returns the participant that a completion belongs to, if it has not been removed.
    fn participant(&self, completion: &WorkCompletion) -> Option<Arc<dyn Participant>> {
        let participants = lock(&self.participants);
        let id = WorkId::from_bits(completion.wr_id);
        let key = match id.kind {
            WorkKind::SharedReceive => *participants.by_number.get(&completion.queue_pair)?,
            WorkKind::Receive | WorkKind::Send | WorkKind::Read => id.connection,
        };
        // Another participant may have this key by now: the queue pair's number shows that.
        let found = participants.by_key.get(key as usize).map(|entry| &entry.participant);
        found.filter(|it| it.queue_pair_number() == completion.queue_pair).cloned()
    }

    /// Posts shared buffers again that have messages for a removed connection.
    fn give_back(&self, completions: &[WorkCompletion]) {
        let Some(shared) = &self.shared else { return };
        for id in completions.iter().map(|completion| WorkId::from_bits(completion.wr_id)) {
            if id.kind == WorkKind::SharedReceive
                && let Err(reason) = shared.post(id.value)
            {
                tonic_rdma_verbs::unstable::throttled!(warn, slot = id.value, %reason, "a shared receive buffer is lost");
            }
        }
    }

    /// Ends the participants whose queue pairs the device has given up.
    pub(super) fn fail_with_device(&self) {
        let participants: Vec<_> =
            lock(&self.participants).by_key.iter().map(|(_, it)| Arc::clone(&it.participant)).collect();
        participants.iter().for_each(|participant| participant.fail_with_device());
    }

    /// Asks the device for an event with the next completion.
    pub(super) fn arm(&self) {
        self.polling.sleeps.add(1);
        self.asleep.store(true, Ordering::SeqCst);
        if let Err(error) = self.completions.arm() {
            tracing::error!(%error, "a completion queue can't be armed; its connections may stall");
        }
    }

    /// Undoes [`arm`](Self::arm): the poller is awake, and needs no event.
    pub(super) fn disarm(&self) {
        self.asleep.store(false, Ordering::SeqCst);
        self.completions.disarm();
    }

    /// Takes the event that the queue was armed for, so that it is no longer armed.
    pub(super) fn take_event(&self) {
        self.completions.acknowledge_events();
        self.woken();
    }

    /// Notes that an event woke the poller, so that the queue is no longer armed.
    pub(super) fn woken(&self) {
        self.asleep.store(false, Ordering::SeqCst);
    }
}

/// A participant that has panicked. It is ended without the lock of the queue.
#[derive(Debug)]
struct Broken(Arc<dyn Participant>);

impl Run for Broken {
    fn run(self: Arc<Self>) {
        self.0.fail_after_panic();
    }
}

/// The completion queue has no room for the completions of another participant, and can't grow.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "the completion queue of {device} has room for {most} completions, and its {participants} queue pairs leave \
     too few for another{}; RDMA_COMPLETION_QUEUES adds queues",
    reason.as_ref().map_or_else(String::new, |reason| format!(" (it can't grow: {reason})"))
)]
pub struct QueueFull {
    device: String,
    most: u32,
    participants: usize,
    /// Why the queue can't grow, if the device has longer queues.
    reason: Option<VerbsError>,
}

/// The owner of a queue pair whose requests complete on a [`Queue`]: a connection, or a port of a tensor
/// link.
pub trait Participant: Send + Sync + Debug + 'static {
    /// Returns the number of the queue pair.
    fn queue_pair_number(&self) -> QueuePairNumber;

    /// Takes completions of its requests, in order, and adds the tasks to wake and the work to run to
    /// `after`.
    fn handle_completions(&self, completions: &[WorkCompletion], after: &mut Deferred);

    /// Returns whether all that arrives answers calls of this process, so that a caller waits for it.
    fn answers_callers(&self) -> bool {
        false
    }

    /// Ends the participant if the device has given up its queue pair.
    fn fail_with_device(&self);

    /// Ends the participant, because [`handle_completions`](Self::handle_completions) panicked.
    fn fail_after_panic(&self);
}

/// A word in memory that a peer changes without a completion here.
pub trait Watched: Send + Sync + Debug + 'static {
    /// Returns whether the awaited value has arrived. If so, adds the waiting task to `wakers`, and the queue
    /// does not check this word again.
    fn check(&self, wakers: &mut Vec<Waker>) -> bool;

    /// Returns a record of the arrived value, which shows later whether a completion has announced the value.
    /// `None` before the value has arrived.
    fn unannounced(&self) -> Option<UnannouncedArrival>;

    /// Asks for a completion or an event with the next change, because the poller is about to sleep.
    fn ask_for_completion(&self);

    /// Returns whether a change makes an event of the armed completion queue, so that a poller that sleeps
    /// needs no time limit
    /// ([`LocalQueuePair::need_no_events`](tonic_rdma_verbs::LocalQueuePair::need_no_events)).
    fn is_announced(&self) -> bool;
}

/// A record of a value that arrived, made before a completion has announced the value.
#[derive(Clone, Debug)]
pub struct UnannouncedArrival {
    /// Counts the completions that announce such values.
    pub announcements: Arc<AtomicU64>,
    /// The count before the value arrived.
    pub before: u64,
    /// This side has asked the peer for a completion.
    pub asked: bool,
}

impl UnannouncedArrival {
    /// Returns whether a completion has announced the value since.
    pub fn was_announced(&self) -> bool {
        self.announcements.load(Ordering::Relaxed) != self.before
    }
}

/// The watched words of one queue.
#[derive(Debug, Default)]
pub(super) struct WatchList {
    words: Mutex<Vec<WatchedWord>>,
    /// Number of words, to be read without the lock.
    count: AtomicUsize,
    /// Number of words that may change without an event.
    silent: AtomicUsize,
}

/// A word of the list.
#[derive(Debug)]
struct WatchedWord {
    word: Weak<dyn Watched>,
    is_announced: bool,
}

impl WatchList {
    /// Adds a word.
    pub(super) fn add(&self, word: Weak<dyn Watched>) {
        let is_announced = word.upgrade().is_some_and(|word| word.is_announced());
        let mut words = lock(&self.words);
        words.push(WatchedWord { word, is_announced });
        self.count(&words);
    }

    /// Notes the numbers of words. The list is locked.
    fn count(&self, words: &[WatchedWord]) {
        let silent = words.iter().filter(|entry| !entry.is_announced).count();
        self.silent.store(silent, Ordering::SeqCst);
        // SYNC: SeqCst before the caller checks whether the poller sleeps: Dekker with `Queue::arm`, then
        // `Queue::ask_for_completions`.
        self.count.store(words.len(), Ordering::SeqCst);
    }

    /// Returns whether a word may change without an event.
    pub(super) fn has_silent(&self) -> bool {
        self.silent.load(Ordering::SeqCst) != 0
    }

    /// Returns whether there is no word in the list.
    pub(super) fn is_empty(&self) -> bool {
        self.count.load(Ordering::SeqCst) == 0
    }

    /// Checks every word, and removes the words whose value has arrived. Returns the number of removed words.
    /// `checked` gets a reference to each word. The caller drops these references without the lock, because
    /// one may be the last of its word.
    pub(super) fn check(&self, wakers: &mut Vec<Waker>, checked: &mut Vec<Arc<dyn Watched>>) -> usize {
        if self.is_empty() {
            return 0;
        }
        let mut words = lock(&self.words);
        let (before, mut gone) = (words.len(), 0);
        words.retain(|entry| match entry.word.upgrade() {
            Some(word) => {
                let arrived = word.check(wakers);
                checked.push(word);
                !arrived
            }
            None => {
                gone += 1;
                false
            }
        });
        self.count(&words);
        before - words.len() - gone
    }

    /// Returns the values that have arrived although no completion has announced them yet.
    pub(super) fn unannounced(&self) -> Vec<UnannouncedArrival> {
        let words = self.all();
        let arrivals = words.iter().filter_map(|word| word.unannounced());
        arrivals.filter(|arrival| !arrival.was_announced()).collect()
    }

    /// Lets every word ask its peer for a completion.
    pub(super) fn ask_for_completions(&self) {
        if !self.is_empty() {
            self.all().iter().for_each(|word| word.ask_for_completion());
        }
    }

    /// Returns the words that still exist. The caller uses and drops them without the lock, because a
    /// returned reference may be the last of its word.
    fn all(&self) -> Vec<Arc<dyn Watched>> {
        lock(&self.words).iter().filter_map(|entry| entry.word.upgrade()).collect()
    }
}

/// The metric of values that only the time limit of a sleep found. Each of them was found up to 20 ms late.
const METRIC: &str = "tonic_rdma_tensor_naps_total";
/// Longest time between a value and the completion that announces the value. The peer may not get a core in
/// between.
const ANNOUNCEMENT_TIMEOUT: Duration = Duration::from_secs(10);

/// Values that arrived while the poll task slept, and whose completion may still come: a peer may have been
/// stopped between the value and the request for the completion.
#[derive(Debug, Default)]
pub(super) struct LateArrivals(Mutex<Vec<(UnannouncedArrival, Instant)>>);

impl LateArrivals {
    /// Returns whether no value waits for its completion.
    pub(super) fn is_empty(&self) -> bool {
        lock(&self.0).is_empty()
    }

    /// Adds `fresh` values, and counts those whose completion is overdue.
    pub(super) fn add(&self, fresh: Vec<UnannouncedArrival>) {
        let now = Instant::now();
        let mut all = lock(&self.0);
        all.extend(fresh.into_iter().map(|arrival| (arrival, now)));
        all.retain(|(arrival, since)| {
            let is_overdue = !arrival.asked || now.saturating_duration_since(*since) > ANNOUNCEMENT_TIMEOUT;
            if is_overdue && !arrival.was_announced() {
                metrics::counter!(METRIC).increment(1);
                tracing::debug!(
                    asked = arrival.asked,
                    "a word came without the completion that should tell of it"
                );
            }
            !is_overdue && !arrival.was_announced()
        });
    }
}
