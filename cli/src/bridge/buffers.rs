//! Buffers that bytes rest in between two streams. A connection has one for each direction while something is on its way,
//! and none while nothing is: idle ones cost no memory, and busy ones take turns with those that the cache still holds.

use std::cell::RefCell;

/// Bytes of a buffer: what a read takes at most.
pub(crate) const LENGTH: usize = 256 * 1024;

/// Free buffers that a thread keeps.
const KEPT: usize = 64;

thread_local! {
    static FREE: RefCell<Vec<Box<[u8]>>> = const { RefCell::new(Vec::new()) };
}

/// The buffer used last by this thread, or a new one.
pub(crate) fn take() -> Box<[u8]> {
    let free = FREE.with_borrow_mut(Vec::pop);
    free.unwrap_or_else(|| vec![0; LENGTH].into_boxed_slice())
}

/// Gives a buffer back.
pub(crate) fn give(buffer: Box<[u8]>) {
    FREE.with_borrow_mut(|free| {
        if free.len() < KEPT {
            free.push(buffer);
        }
    });
}
