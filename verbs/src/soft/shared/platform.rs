//! The atomics that the structures in shared memory are built on, and the orderings that the structures need.
//!
//! Shipping code uses the atomics of the standard library ([`Native`]). The models in `verbs/models` run the
//! same code on the atomics of loom, with the shipping orderings and with weaker ones, which must fail.

use std::fmt::Debug;
use std::sync::atomic::Ordering::{self, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU64, compiler_fence, fence};

use crate::soft::biased_lock;

/// A kind of atomics.
pub trait Platform {
    /// A 64-bit atomic.
    type Word: Word + Debug;

    /// Orders the accesses of this thread.
    fn fence(order: Ordering);

    /// Orders the accesses of this thread as [`fence`](Self::fence) does, for threads that execute a
    /// [`heavy_fence`](Self::heavy_fence). Costs no time.
    fn light_fence(order: Ordering);

    /// Orders the accesses of this thread, and those of all threads of the process that execute a light
    /// fence.
    fn heavy_fence(order: Ordering);
}

/// A 64-bit atomic.
pub trait Word {
    /// Makes a word.
    fn new(value: u64) -> Self;

    /// Loads the value.
    fn load(&self, order: Ordering) -> u64;

    /// Stores `value`.
    fn store(&self, value: u64, order: Ordering);

    /// Sets the bits `set` and clears the bits `clear`.
    fn change(&self, set: u64, clear: u64);

    /// Adds `value`. Wraps.
    fn add(&self, value: u64);

    /// Stores `value`, unless the word has a greater value. Returns the value before.
    fn raise(&self, value: u64, order: Ordering) -> u64;

    /// Stores 0. Returns the value before.
    fn take(&self, order: Ordering) -> u64;
}

/// The orderings of the structures. The provided values are those of the shipping code.
pub trait Orders {
    /// Order of the store of a record's tag, after the store of the record's content.
    const PUBLISH: Ordering = Release;
    /// Order of the load of a record's tag, before the loads of the record's content.
    const OBSERVE: Ordering = Acquire;
    /// Order of the store that gives the slot of records back, after the loads of their content.
    const GIVE_BACK: Ordering = Release;
    /// Order of the load that takes the slot of records back, before the stores of new content.
    const RECLAIM: Ordering = Acquire;
    /// Order of the fence between the store of news and the load of the peer's attention. `Relaxed` means no
    /// fence.
    const NEWS_FENCE: Ordering = SeqCst;
    /// Order of the fence between the store of this side's attention, or of the flag that arms a queue, and
    /// the check for news. `Relaxed` means no fence.
    const ATTENTION_FENCE: Ordering = SeqCst;
    /// Order of the fence between the loads of memory that the peer may revoke, and the load that shows
    /// whether the memory was revoked. `Relaxed` means no fence.
    const CHECK_FENCE: Ordering = Acquire;
    /// Order of the fence between the store that revokes memory and later stores to this memory. `Relaxed`
    /// means no fence. In the language's model `Release` is enough. `SeqCst` also orders streaming stores,
    /// and stores of the kernel, which that model does not have.
    const REVOKE_FENCE: Ordering = SeqCst;
    /// Order of the store of a key, after the store of the key's entry.
    const INSERT: Ordering = Release;
    /// Order of the fence between the load of a key and the loads of its entry. `Relaxed` means no fence.
    const FIND_FENCE: Ordering = Acquire;
    /// Order of the store that shows a state or a failure, after the stores that belong to it.
    const SHOW: Ordering = Release;
    /// Order of the load of a state or a failure, before the loads that belong to it.
    const CHECK: Ordering = Acquire;
    /// Order of the fence between the store of work and the check whether the queue is armed.
    const NOTIFY_FENCE: Ordering = SeqCst;
    /// Order of the store that notes a debt, after the store of the news that the debt is for.
    const OWE: Ordering = Release;
    /// Order of the operation that takes a debt, before the loads and the fence that follow.
    const SETTLE: Ordering = Acquire;
    /// Order of the fence between the store that ends a guard and the last check for records.
    const GUARD_FENCE: Ordering = SeqCst;
    /// Order of the light fence between the store that the owner of a bias is inside, and the check whether
    /// the bias is still its own.
    const ENTER_FENCE: Ordering = SeqCst;
    /// Order of the heavy fence between the store that takes a bias away, and the check whether the owner is
    /// inside.
    const TAKE_AWAY_FENCE: Ordering = SeqCst;
    /// Order of the store that the owner of a bias is outside, after what it did inside.
    const LEAVE: Ordering = Release;
    /// Order of the load that finds the former owner outside, before what the lock guards is used.
    const CLAIM: Ordering = Acquire;
}

/// The shipping orderings.
#[derive(Clone, Copy, Debug)]
pub enum Shipping {}

impl Orders for Shipping {}

/// The atomics of the standard library.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Native {}

impl Platform for Native {
    type Word = AtomicU64;

    #[inline]
    fn fence(order: Ordering) {
        fence(order);
    }

    #[inline]
    fn light_fence(order: Ordering) {
        compiler_fence(order);
    }

    fn heavy_fence(_: Ordering) {
        biased_lock::execute();
    }
}

impl Word for AtomicU64 {
    fn new(value: u64) -> Self {
        Self::new(value)
    }

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

    #[inline]
    fn add(&self, value: u64) {
        self.fetch_add(value, Relaxed);
    }

    #[inline]
    fn raise(&self, value: u64, order: Ordering) -> u64 {
        self.fetch_max(value, order)
    }

    #[inline]
    fn take(&self, order: Ordering) -> u64 {
        self.swap(0, order)
    }
}

/// Executes a fence of `order`; none if `order` is `Relaxed`.
#[inline]
pub(crate) fn fence_of<P: Platform>(order: Ordering) {
    if order != Relaxed {
        P::fence(order);
    }
}

/// Executes a light fence of `order`; none if `order` is `Relaxed`.
#[inline]
pub(crate) fn light_fence_of<P: Platform>(order: Ordering) {
    if order != Relaxed {
        P::light_fence(order);
    }
}

/// Executes a heavy fence of `order`; none if `order` is `Relaxed`.
pub(crate) fn heavy_fence_of<P: Platform>(order: Ordering) {
    if order != Relaxed {
        P::heavy_fence(order);
    }
}
