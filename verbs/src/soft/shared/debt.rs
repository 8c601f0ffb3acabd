//! The looks at the peer's attention that an end owes.
//!
//! After a store of news a fence must come before the look at the peer's attention. The fence waits until the peer's core has
//! given the cache line away, some 100 ns. So a thread that stores news looks at once, without the fence, which finds a peer that
//! has been asleep for a while. The end owes one look with the fence, for a peer that is just falling asleep. The next poll that
//! finds nothing else to do settles this debt, and so does the thread that arms the queue.
//!
//! A thread that stores news holds a lock while it looks whether the queue is armed, and while it adds to the debt. A thread that
//! arms the queue takes this lock afterwards. So either it finds the debt, or the other thread finds that the queue is armed.

use std::fmt::Debug;
use std::marker::PhantomData;
use std::sync::atomic::Ordering::Relaxed;

use super::platform::{Orders, Platform, Word};

/// The looks that an end owes. Each kind has a word of its own, so that adding to the debt is a plain store: an operation that
/// reads and writes would wait as long as the fence.
#[derive(Debug)]
pub struct Debt<P: Platform, O> {
    words: [P::Word; 3],
    orders: PhantomData<fn() -> O>,
}

impl<P: Platform, O> Debt<P, O> {
    /// The end has published records, not only of WRITEs without immediate data.
    pub const NEWS: u8 = 1;
    /// The end has taken records or posted receives.
    pub const PROGRESS: u8 = 2;
    /// The end has published records of WRITEs without immediate data.
    pub const WRITES: u8 = 4;
}

impl<P: Platform, O: Orders> Default for Debt<P, O> {
    /// Makes an end that owes nothing.
    fn default() -> Self {
        Self { words: [(); 3].map(|()| P::Word::new(0)), orders: PhantomData }
    }
}

impl<P: Platform, O: Orders> Debt<P, O> {
    /// Adds to the debt, for the news that this thread has stored before.
    #[inline]
    pub fn add(&self, debt: u8) {
        for (index, word) in self.words.iter().enumerate() {
            if debt & (1 << index) != 0 {
                // SYNC: pairs with `take`. Stored even if the word is set, because another thread may be taking the debt now,
                // and look before this thread's news are visible.
                word.store(1, O::OWE);
            }
        }
    }

    /// Returns whether the end owes a look.
    #[inline]
    pub fn is_any(&self) -> bool {
        self.words.iter().any(|word| word.load(Relaxed) != 0)
    }

    /// Takes the debt. The caller executes a fence, then makes the looks.
    pub fn take(&self) -> u8 {
        let mut debt = 0;
        for (index, word) in self.words.iter().enumerate() {
            // SYNC: pairs with `add`: the news that the debt is for come before the caller's fence.
            if word.load(Relaxed) != 0 && word.take(O::SETTLE) != 0 {
                debt |= 1 << index;
            }
        }
        debt
    }
}
