//! Threads that sleep, and threads that wake them. Each rule is Dekker's algorithm: one thread stores its flag, executes a fence,
//! then looks at the work; the other thread stores the work, executes a fence, then looks at the flag. At least one of them finds
//! the other's store.

use std::fmt::Debug;
use std::marker::PhantomData;
use std::sync::atomic::Ordering::Relaxed;

use super::platform::{Orders, Platform, Word, fence_of};

/// Whether the poller of a completion queue wants an event, because it sleeps or is about to sleep.
#[derive(Debug)]
pub struct Arming<P: Platform, O> {
    armed: P::Word,
    orders: PhantomData<fn() -> O>,
}

impl<P: Platform, O: Orders> Default for Arming<P, O> {
    /// Makes a queue that is not armed.
    fn default() -> Self {
        Self { armed: P::Word::new(0), orders: PhantomData }
    }
}

impl<P: Platform, O: Orders> Arming<P, O> {
    /// Notes that the poller wants an event. Afterwards the poller executes a fence ([`Attention::fence`](super::attention::Attention::fence)), and looks for work once
    /// more.
    pub fn arm(&self) {
        self.armed.store(1, Relaxed);
    }

    /// Notes that the poller does not want an event any more. Only pollers call this function, one at a time. Returns whether the
    /// queue was armed.
    pub fn disarm(&self) -> bool {
        let was_armed = self.is_armed();
        if was_armed {
            self.armed.store(0, Relaxed);
        }
        was_armed
    }

    /// Returns whether the poller wants an event. A thread that has stored work executes a fence first, or holds a lock that the
    /// poller takes after [`arm`](Self::arm).
    #[inline]
    pub fn is_armed(&self) -> bool {
        self.armed.load(Relaxed) != 0
    }

    /// Returns whether the poller wants an event for the work that this thread has stored before.
    #[inline]
    pub fn wants_event(&self) -> bool {
        // SYNC: pairs with the fence after `arm`.
        fence_of::<P>(O::NOTIFY_FENCE);
        self.is_armed()
    }
}

/// Whether the device's thread looks after the records of a queue pair.
#[derive(Debug)]
pub struct Guarded<P: Platform, O> {
    guarded: P::Word,
    orders: PhantomData<fn() -> O>,
}

impl<P: Platform, O: Orders> Default for Guarded<P, O> {
    /// Makes a queue pair without a guard.
    fn default() -> Self {
        Self { guarded: P::Word::new(0), orders: PhantomData }
    }
}

impl<P: Platform, O: Orders> Guarded<P, O> {
    /// Returns whether the guard has to begin, because a record was published, and the caller has executed a fence since.
    #[inline]
    pub fn begin(&self) -> bool {
        let begins = self.guarded.load(Relaxed) == 0;
        if begins {
            self.guarded.store(1, Relaxed);
        }
        begins
    }

    /// Ends the guard, unless `has_records` finds records. Returns whether the guard has ended.
    pub fn end(&self, has_records: impl FnOnce() -> bool) -> bool {
        self.guarded.store(0, Relaxed);
        // SYNC: pairs with the fence between the store of a record and `begin`.
        fence_of::<P>(O::GUARD_FENCE);
        let goes_on = has_records();
        if goes_on {
            self.guarded.store(1, Relaxed);
        }
        !goes_on
    }
}
