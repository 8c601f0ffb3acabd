//! Words in memory that peers write without a completion here, and the list of such words that a queue checks with each poll.

use std::fmt::Debug;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::task::Waker;

use crate::endpoint::lock::lock;

/// A word in memory that a peer changes without a completion here.
pub trait Watched: Send + Sync + Debug + 'static {
    /// Returns whether the awaited value has arrived. If so, adds the waiting task to `wakers`, and the queue does not check this
    /// word again.
    fn check(&self, wakers: &mut Vec<Waker>) -> bool;

    /// Returns a record of the arrived value, which shows later whether a completion has announced the value. `None` before the
    /// value has arrived.
    fn unannounced(&self) -> Option<UnannouncedArrival>;

    /// Asks the peer for a completion with the next change, because the poller is about to sleep.
    fn ask_for_completion(&self);
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
    words: Mutex<Vec<Weak<dyn Watched>>>,
    /// Number of words, to be read without the lock.
    count: AtomicUsize,
}

impl WatchList {
    /// Adds a word.
    pub(super) fn add(&self, word: Weak<dyn Watched>) {
        let mut words = lock(&self.words);
        words.push(word);
        // SYNC: SeqCst before the caller looks whether the poller sleeps: Dekker with `Queue::arm`, then
        // `Queue::ask_for_completions`.
        self.count.store(words.len(), Ordering::SeqCst);
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
        words.retain(|word| match word.upgrade() {
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
        self.count.store(words.len(), Ordering::SeqCst);
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
        lock(&self.words).iter().filter_map(Weak::upgrade).collect()
    }
}
