//! The bias of a lock towards one thread, its owner. The owner enters and leaves by plain stores; any other thread first takes the
//! bias away.
//!
//! This is Dekker's algorithm with unequal fences. The owner stores that it is inside, then looks whether the bias is still its own;
//! between the two it has only a light fence, which costs no time. The other thread takes the bias away, then executes a heavy
//! fence, which makes all threads of the process execute a fence, then looks whether the owner is inside. At least one of the two
//! finds the other's store. For all other uses of the lock there is a second lock, the gate (`BiasedLock`).

use std::fmt::Debug;
use std::marker::PhantomData;
use std::sync::atomic::Ordering::Relaxed;

use super::platform::{Orders, Platform, Word, heavy_fence_of, light_fence_of};

/// The bias of a lock. Threads have numbers, which are not 0.
#[derive(Debug)]
pub struct Bias<P: Platform, O> {
    /// The number of the owner; 0 if there is none. Written with the gate locked.
    owner: P::Word,
    /// Whether the owner is inside. Only the owner writes it.
    inside: P::Word,
    orders: PhantomData<fn() -> O>,
}

impl<P: Platform, O: Orders> Default for Bias<P, O> {
    /// Makes a bias towards no thread.
    fn default() -> Self {
        Self { owner: P::Word::new(0), inside: P::Word::new(0), orders: PhantomData }
    }
}

impl<P: Platform, O: Orders> Bias<P, O> {
    /// Enters as the thread `me`, if the bias is towards this thread. Returns false if it is not, or if this thread is inside.
    #[inline]
    pub fn enter(&self, me: u64) -> bool {
        if self.owner.load(Relaxed) != me || self.inside.load(Relaxed) != 0 {
            return false;
        }
        self.inside.store(1, Relaxed);
        // SYNC: pairs with the heavy fence of `take_away`.
        light_fence_of::<P>(O::ENTER_FENCE);
        let stays = self.owner.load(Relaxed) == me;
        if !stays {
            self.leave();
        }
        stays
    }

    /// Leaves. Called by the owner that has entered, also if the bias was taken away meanwhile.
    #[inline]
    pub fn leave(&self) {
        // SYNC: pairs with `is_free`: a thread that finds the owner gone sees what the owner did inside.
        self.inside.store(0, O::LEAVE);
    }

    /// Returns whether a thread has the bias. The caller holds the gate.
    pub fn is_given(&self) -> bool {
        self.owner.load(Relaxed) != 0
    }

    /// Gives the bias to the thread `me`, which calls this function, holds the gate, and is about to release it.
    pub fn give(&self, me: u64) {
        self.owner.store(me, Relaxed);
    }

    /// Takes the bias away. The caller holds the gate. Then it waits until the lock [is free](Self::is_free).
    pub fn take_away(&self) {
        self.owner.store(0, Relaxed);
        // SYNC: pairs with the light fence of `enter`.
        heavy_fence_of::<P>(O::TAKE_AWAY_FENCE);
    }

    /// Returns whether the owner is not inside, after the bias was taken away.
    pub fn is_free(&self) -> bool {
        // SYNC: pairs with `leave`.
        self.inside.load(O::CLAIM) == 0
    }
}
