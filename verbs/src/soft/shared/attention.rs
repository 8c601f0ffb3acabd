//! The attention of an end: the wake-ups that its owner wants for news. Only the owner writes the word.
//!
//! This is Dekker's algorithm. The peer stores news, executes a fence, then loads the attention. The owner stores its attention,
//! executes a fence, then looks for news. At least one of the two finds the other's store, so no news stays unseen.

use super::platform::{Orders, Platform, Word, fence_of};
use std::sync::atomic::Ordering::Relaxed;

/// The wake-ups that the owner of an end wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attention(u64);

impl Attention {
    /// None: a thread polls the end.
    pub const POLLED: Self = Self(0);
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

    /// All bits.
    const ALL: u64 = 31;

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
        Self(word.load(Relaxed) & Self::ALL)
    }

    /// Returns the attention that the peer shows in `word`. The caller has stored its news before. A peer may show any value.
    #[inline]
    pub fn of_peer<P: Platform, O: Orders>(word: &P::Word) -> Self {
        fence_of::<P>(O::NEWS_FENCE);
        Self(word.load(Relaxed) & Self::ALL)
    }
}
