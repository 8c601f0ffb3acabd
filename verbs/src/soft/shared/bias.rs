//! The bias of a lock towards one thread, its owner. The owner enters and leaves by plain stores; any other
//! thread first takes the bias away.
//!
//! This is Dekker's algorithm with unequal fences. The owner stores that it is inside, then checks whether
//! the bias is still its own; between the two it has only a light fence, which costs no time. The other
//! thread takes the bias away, then executes a heavy fence, which makes all threads of the process execute a
//! fence, then checks whether the owner is inside. At least one of the two finds the other's store. For all
//! other uses of the lock there is a second lock, the gate (`BiasedLock`).
//!
//! A former owner that was interrupted between its two checks of the bias may store at any later time that it
//! is inside, and then that it is not. So each owner has a word of its own for that. Another thread gets the
//! word only after the former owner has come through the gate, or has ended, and so has done with it.

use std::fmt::Debug;
use std::marker::PhantomData;
use std::sync::atomic::Ordering::Relaxed;

use super::platform::{Orders, Platform, Word, heavy_fence_of, light_fence_of};

/// Most threads that have had the bias of a lock, have not come through its gate since, and have not ended.
const SEATS: usize = 4;

/// The bias of a lock. Threads have numbers, which are not 0.
#[derive(Debug)]
pub struct Bias<P: Platform, O> {
    /// The number of the owner × `SEATS` + its seat; 0 if there is none. Written with the gate locked.
    owner: P::Word,
    /// For each seat, whether its thread is inside. Only that thread writes it.
    inside: [P::Word; SEATS],
    orders: PhantomData<fn() -> O>,
}

/// The threads that have the seats of a lock; 0 for a free seat. The gate guards them.
#[derive(Debug, Default)]
pub struct Seats([u64; SEATS]);

/// The seat of a thread that is inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seat(usize);

impl<P: Platform, O: Orders> Default for Bias<P, O> {
    /// Makes a bias towards no thread.
    fn default() -> Self {
        Self { owner: P::Word::new(0), inside: [(); SEATS].map(|()| P::Word::new(0)), orders: PhantomData }
    }
}

impl<P: Platform, O: Orders> Bias<P, O> {
    /// Enters as the thread `me`, if the bias is towards this thread; `None` if it is not, or if this thread
    /// is inside.
    #[inline]
    pub fn enter(&self, me: u64) -> Option<Seat> {
        let owner = self.owner.load(Relaxed);
        if owner / SEATS as u64 != me {
            return None;
        }
        let seat = Seat(owner as usize % SEATS);
        let inside = &self.inside[seat.0];
        if inside.load(Relaxed) != 0 {
            return None;
        }
        inside.store(1, Relaxed);
        // SYNC: pairs with the heavy fence of `take_away`.
        light_fence_of::<P>(O::ENTER_FENCE);
        if self.owner.load(Relaxed) == owner {
            return Some(seat);
        }
        self.leave(seat);
        None
    }

    /// Leaves. Called by the thread that has entered, also if the bias was taken away meanwhile.
    #[inline]
    pub fn leave(&self, seat: Seat) {
        // SYNC: pairs with `is_free`: a thread that finds the owner gone sees what the owner did inside.
        self.inside[seat.0 % SEATS].store(0, O::LEAVE);
    }

    /// Gives the bias to the thread `me`, which calls this function, holds the gate, and is about to release
    /// it. Returns false, and gives no bias, if no seat is free.
    pub fn give(&self, me: u64, seats: &mut Seats) -> bool {
        let free = seats.0.iter().position(|thread| *thread == 0);
        if let Some(seat) = free {
            seats.0[seat] = me;
            self.owner.store(me * SEATS as u64 + seat as u64, Relaxed);
        }
        free.is_some()
    }

    /// Takes the bias away, if a thread has it. The caller holds the gate. Returns the seat of that thread:
    /// the caller waits until the seat [is free](Self::is_free).
    pub fn take_away(&self) -> Option<Seat> {
        let owner = self.owner.load(Relaxed);
        if owner == 0 {
            return None;
        }
        self.owner.store(0, Relaxed);
        // SYNC: pairs with the light fence of `enter`.
        heavy_fence_of::<P>(O::TAKE_AWAY_FENCE);
        Some(Seat(owner as usize % SEATS))
    }

    /// Returns whether the thread of `seat` is not inside, after the bias was taken away.
    pub fn is_free(&self, seat: Seat) -> bool {
        // SYNC: pairs with `leave`.
        self.inside[seat.0].load(O::CLAIM) == 0
    }
}

impl Seats {
    /// Frees the seat of the thread `thread`: it calls this function and has come through the gate, or it has
    /// ended, and the caller has synchronized with its end.
    pub fn free(&mut self, thread: u64) {
        for seat in self.0.iter_mut().filter(|seat| **seat == thread) {
            *seat = 0;
        }
    }
}
