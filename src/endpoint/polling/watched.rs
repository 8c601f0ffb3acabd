//! Words in memory that peers write without a completion here, the list of such words that a queue checks with each poll, and the values
//! that no completion announced although the poller slept.

use std::fmt::Debug;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::task::Waker;
use std::time::{Duration, Instant};

use tonic_rdma_verbs::internal::lock;

/// A word in memory that a peer changes without a completion here.
pub trait Watched: Send + Sync + Debug + 'static {
    /// Returns whether the awaited value has arrived. If so, adds the waiting task to `wakers`, and the queue does not check this
    /// word again.
    fn check(&self, wakers: &mut Vec<Waker>) -> bool;

    /// Returns a record of the arrived value, which shows later whether a completion has announced the value. `None` before the
    /// value has arrived.
    fn unannounced(&self) -> Option<UnannouncedArrival>;

    /// Asks for a completion or an event with the next change, because the poller is about to sleep.
    fn ask_for_completion(&self);

    /// Returns whether a change makes an event of the armed completion queue, so that a poller that sleeps needs no time limit
    /// ([`QueuePair::announces_writes`](tonic_rdma_verbs::QueuePair::announces_writes)).
    fn is_announced(&self) -> bool;
}

/// A record of a value that arrived, made before a completion has announced the value.
#[derive(Clone, Debug)]
pub struct UnannouncedArrival {
    /// Counts the completions that announce such values.
    pub announcements: Arc<AtomicU64>,
    /// The count before the value arrived.
    pub before: u64,
    /// This end has asked the peer for a completion.
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
    words: Mutex<Vec<Entry>>,
    /// Number of words, to be read without the lock.
    count: AtomicUsize,
    /// Number of words that may change without an event.
    silent: AtomicUsize,
}

/// A word of the list.
#[derive(Debug)]
struct Entry {
    word: Weak<dyn Watched>,
    is_announced: bool,
}

impl WatchList {
    /// Adds a word.
    pub(super) fn add(&self, word: Weak<dyn Watched>) {
        let is_announced = word.upgrade().is_some_and(|word| word.is_announced());
        let mut words = lock(&self.words);
        words.push(Entry { word, is_announced });
        self.count(&words);
    }

    /// Notes the numbers of words. The list is locked.
    fn count(&self, words: &[Entry]) {
        let silent = words.iter().filter(|entry| !entry.is_announced).count();
        self.silent.store(silent, Ordering::SeqCst);
        // SYNC: SeqCst before the caller looks whether the poller sleeps: Dekker with `Queue::arm`, then
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

    /// Checks every word, and removes the words whose value has arrived. Returns the number of removed words. `checked` gets a
    /// reference to each word. The caller drops these references without the lock, because one may be the last of its word.
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

    /// Returns the words that still exist. The caller uses and drops them without the lock, because a returned reference may be
    /// the last of its word.
    fn all(&self) -> Vec<Arc<dyn Watched>> {
        lock(&self.words).iter().filter_map(|entry| entry.word.upgrade()).collect()
    }
}

/// The metric of values that only the time limit of a sleep found. Each of them was found up to 20 ms late.
const METRIC: &str = "tonic_rdma_tensor_naps_total";
/// Longest time between a value and the completion that announces the value. The peer may not get a core in between.
const PATIENCE: Duration = Duration::from_secs(10);

/// Values that arrived while the poll task slept, and whose completion may still come: a peer may have been stopped
/// between the value and the request for the completion.
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
            let is_overdue = !arrival.asked || now.saturating_duration_since(*since) > PATIENCE;
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
