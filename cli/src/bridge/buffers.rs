//! Buffers for the bytes between two streams. A connection has a buffer for each direction only while bytes are in it. So
//! idle connections cost no memory, and busy ones reuse buffers that are still in the processor's cache.

use std::cell::RefCell;

/// Bytes of a buffer: the most that one read takes.
pub(crate) const LENGTH: usize = 256 * 1024;

/// The number of free buffers that a thread keeps.
const KEPT: usize = 64;

thread_local! {
    static FREE: RefCell<Vec<Box<[u8]>>> = const { RefCell::new(Vec::new()) };
}

/// Takes the buffer that this thread used last, or makes a new one.
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
