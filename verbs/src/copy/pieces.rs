//! Copies of memory that others may change, piece by piece through the processor's cache.

use std::mem::MaybeUninit;

use super::{copy_to_read, prefetch};

/// Bytes of a piece, which fit the first-level cache together with the data of the function that takes the pieces.
const PIECE: usize = 8 << 10;

/// Bytes that are copied at a time, after as many bytes of the next piece were called into the caches.
const STEP: usize = 1 << 10;

/// Room for a piece, aligned to a cache line.
#[repr(align(64))]
struct Piece([MaybeUninit<u8>; PIECE]);

/// Passes `length` bytes from `from` on to `then`, in consecutive pieces. Every piece but the last has a multiple of 64 bytes. The
/// first byte of each piece is aligned to 64 bytes.
///
/// # Safety
/// - `from` must be valid for reads of `length` bytes. Accesses of others at the same time do no harm.
/// - No `&mut` reference to the bytes may exist.
pub(crate) unsafe fn for_each_piece(from: *const u8, length: usize, mut then: impl FnMut(&[u8])) {
    let mut piece = Piece([MaybeUninit::uninit(); PIECE]);
    let mut done = 0;
    while done < length {
        let count = PIECE.min(length - done);
        let room = piece.0.as_mut_ptr().cast::<u8>();
        for at in (0..count).step_by(STEP) {
            let step = STEP.min(count - at);
            let start = from.wrapping_add(done + at);
            prefetch(start.wrapping_add(PIECE), step.min(length.saturating_sub(done + at + PIECE)));
            // SAFETY:
            // - these bytes of the source are a part of those that the caller promises, and
            // - the piece is ours, and has room for `count` bytes.
            unsafe { copy_to_read(start, room.wrapping_add(at), step) };
        }
        // SAFETY: the copy has initialised `count` bytes of the piece, to which no other reference exists.
        then(unsafe { std::slice::from_raw_parts(room, count) });
        done += count;
    }
}
