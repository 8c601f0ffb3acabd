//! The attention of an end: the wake-ups that its owner wants for news. Only the owner writes the word.
//!
//! This is Dekker's algorithm. The peer stores news, executes a fence, then loads the attention. The owner stores its attention,
//! executes a fence, then looks for news. At least one of the two finds the other's store, so no news stays unseen.

use super::platform::{Orders, Platform, Word, fence_of};
use std::sync::atomic::Ordering::Relaxed;

/// The owner's last request that got an event. The peer of the owner keeps it, for one completion queue of the owner.
#[derive(Debug)]
pub struct Answered<P: Platform>(P::Word);

impl<P: Platform> Default for Answered<P> {
    /// Makes a record of no request.
    fn default() -> Self {
        Self(P::Word::new(u64::MAX))
    }
}

impl<P: Platform> Answered<P> {
    /// Notes that the request in `attention` gets an event. Returns false if it has got one before. If two threads call this
    /// function at one time, there may be two events.
    #[inline]
    pub fn answer(&self, attention: Attention) -> bool {
        let is_new = self.0.load(Relaxed) != attention.request();
        if is_new {
            self.0.store(attention.request(), Relaxed);
        }
        is_new
    }
}

/// The wake-ups that the owner of an end wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attention(u64);

impl Attention {
    /// No wake-up.
    pub const NONE: Self = Self(0);
    /// The owner's device looks at the end when the peer asks for it, because no thread polls the end.
    pub const DEVICE: Self = Self(1);
    /// News in the ring makes an event of the completion queue of receives. WRITEs without immediate data are no such news.
    pub const NEWS: Self = Self(2);
    /// Progress of the owner's requests makes an event of the completion queue of sends.
    pub const PROGRESS: Self = Self(4);

    /// The owner has requests that wait for progress of the peer.
    pub const STUCK: Self = Self(8);

    /// A WRITE without immediate data makes an event of the completion queue of receives.
    pub const WRITES: Self = Self(16);

    /// The bits of wake-ups. The bits above count the requests of the owner.
    const ALL: u64 = 31;

    /// One request of the owner. The count may wrap.
    const REQUEST: u64 = 1 << 8;

    /// Returns both.
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns whether one of `other` is wanted.
    #[inline]
    pub fn wants(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// Adds this attention to `word`. Before it relies on the wake-ups, the owner calls [`fence`](Self::fence), then looks for
    /// news.
    #[inline]
    pub fn add<P: Platform>(self, word: &P::Word) {
        word.change(self.0, 0);
    }

    /// Adds this attention to `word`, as a new request: the peer makes one event for each request, although more news may come
    /// before the owner has woken up. Called whenever the owner begins to rely on the wake-ups. See [`add`](Self::add).
    #[inline]
    pub fn ask<P: Platform>(self, word: &P::Word) {
        word.add(Self::REQUEST);
        self.add::<P>(word);
    }

    /// Returns the number of the owner's request.
    #[inline]
    pub fn request(self) -> u64 {
        self.0 / Self::REQUEST
    }

    /// Returns whether no wake-up is wanted.
    #[inline]
    pub fn is_polled(self) -> bool {
        !self.wants(Self(Self::ALL))
    }

    /// Orders stores of attention before the looks for news that follow.
    #[inline]
    pub fn fence<P: Platform, O: Orders>() {
        fence_of::<P>(O::ATTENTION_FENCE);
    }

    /// Takes this attention away from `word`.
    #[inline]
    pub fn remove<P: Platform>(self, word: &P::Word) {
        word.change(0, self.0);
    }

    /// Returns the attention in `word`, which this end wrote.
    #[inline]
    pub fn of_own<P: Platform>(word: &P::Word) -> Self {
        Self(word.load(Relaxed))
    }

    /// Returns the attention that the peer shows in `word`. The caller has stored its news before. A peer may show any value.
    #[inline]
    pub fn of_peer<P: Platform, O: Orders>(word: &P::Word) -> Self {
        fence_of::<P>(O::NEWS_FENCE);
        Self(word.load(Relaxed))
    }
}
