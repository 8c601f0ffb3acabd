//! The atomics that the structures in shared memory are built on, and the orderings that the structures need.
//!
//! Shipping code uses the atomics of the standard library ([`Native`]). The models in `verbs/models` run the same code on the
//! atomics of loom, with the shipping orderings and with weaker ones, which must fail.

use std::sync::atomic::Ordering::{self, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU64, fence};

/// A kind of atomics.
pub trait Platform {
    /// A 64-bit atomic.
    type Word: Word;

    /// Orders the accesses of this thread.
    fn fence(order: Ordering);
}

/// A 64-bit atomic.
pub trait Word {
    /// Loads the value.
    fn load(&self, order: Ordering) -> u64;

    /// Stores `value`.
    fn store(&self, value: u64, order: Ordering);

    /// Sets the bits `set` and clears the bits `clear`.
    fn change(&self, set: u64, clear: u64);
}

/// The orderings of the structures. The provided values are those of the shipping code.
pub trait Orders {
    /// Order of the store of a record's tag, after the store of the record's content.
    const PUBLISH: Ordering = Release;
    /// Order of the load of a record's tag, before the loads of the record's content.
    const OBSERVE: Ordering = Acquire;
    /// Order of the store that gives the place of records back, after the loads of their content.
    const GIVE_BACK: Ordering = Release;
    /// Order of the load that takes the place of records back, before the stores of new content.
    const RECLAIM: Ordering = Acquire;
    /// Order of the fence between the store of news and the load of the peer's attention. `Relaxed` means no fence.
    const NEWS_FENCE: Ordering = SeqCst;
    /// Order of the fence between the store of this end's attention and the look for news. `Relaxed` means no fence.
    const ATTENTION_FENCE: Ordering = SeqCst;
    /// Order of the fence between the loads of memory that the peer may revoke, and the load that shows whether the memory was
    /// revoked. `Relaxed` means no fence.
    const CHECK_FENCE: Ordering = Acquire;
    /// Order of the fence between the store that revokes memory and later stores to this memory. `Relaxed` means no fence.
    const REVOKE_FENCE: Ordering = SeqCst;
}

/// The shipping orderings.
#[derive(Clone, Copy, Debug)]
pub enum Shipping {}

impl Orders for Shipping {}

/// The atomics of the standard library.
#[derive(Clone, Copy, Debug)]
pub enum Native {}

impl Platform for Native {
    type Word = AtomicU64;

    #[inline]
    fn fence(order: Ordering) {
        fence(order);
    }
}

impl Word for AtomicU64 {
    #[inline]
    fn load(&self, order: Ordering) -> u64 {
        Self::load(self, order)
    }

    #[inline]
    fn store(&self, value: u64, order: Ordering) {
        Self::store(self, value, order);
    }

    #[inline]
    fn change(&self, set: u64, clear: u64) {
        let _ = self.fetch_update(Relaxed, Relaxed, |value| Some(value & !clear | set));
    }
}

/// Executes a fence of `order`; none if `order` is `Relaxed`.
#[inline]
pub(crate) fn fence_of<P: Platform>(order: Ordering) {
    if order != Relaxed {
        P::fence(order);
    }
}
