//! A buffer: registered memory that the application fills.

use std::fmt;
use std::ops::{Deref, DerefMut};

use bytes::Bytes;

use super::super::pool::held::HeldPiece;
use super::lease::Lease;

/// Registered memory that the application fills and then sends without a copy. [`freeze`](Self::freeze) turns the buffer
/// into [`Bytes`], which the transport recognises by their address ([`Pool::find`](crate::memory::Pool::find)).
///
/// `&[u8]` and `&mut [u8]` of a buffer are sound: a buffer has one owner and gives out no segment before it is frozen. Its
/// slab is registered without a right to write, and holds only such buffers.
pub struct RegisteredBuf {
    held: HeldPiece,
    length: usize,
}

impl RegisteredBuf {
    /// Makes a buffer of the first `length` bytes of a held piece.
    pub(crate) fn new(held: HeldPiece, length: usize) -> Self {
        debug_assert!(length <= held.capacity());
        Self { held, length }
    }

    /// Shortens the buffer to `length` bytes. Does nothing if the buffer is not longer.
    pub fn truncate(&mut self, length: usize) {
        self.length = self.length.min(length);
    }

    /// Makes the buffer immutable and shareable. The memory returns to the pool when the last clone and the last slice of
    /// the result, and the last [`Lease`] of the buffer, are dropped.
    pub fn freeze(self) -> Bytes {
        self.into_lease().into_bytes()
    }

    /// Makes the buffer immutable, and returns a lease of all of it.
    pub fn into_lease(self) -> Lease {
        let Self { held, length } = self;
        Lease::freeze(held, length)
    }
}

impl Deref for RegisteredBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY:
        // - `length` is at most the capacity of the piece, which lies in a mapping that `held` keeps alive.
        // - The memory is initialised: the kernel zeroes it.
        // - Nothing writes to the memory while the reference lives: the pool gave the piece only to this owner, the owner
        //   is borrowed, and the region has no right to write.
        unsafe { std::slice::from_raw_parts(self.held.as_ptr(), self.length) }
    }
}

impl DerefMut for RegisteredBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY:
        // - As in `deref`.
        // - The owner is borrowed mutably, so no other reference exists.
        unsafe { std::slice::from_raw_parts_mut(self.held.as_ptr(), self.length) }
    }
}

impl AsRef<[u8]> for RegisteredBuf {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl AsMut<[u8]> for RegisteredBuf {
    fn as_mut(&mut self) -> &mut [u8] {
        self
    }
}

impl From<RegisteredBuf> for Bytes {
    fn from(buffer: RegisteredBuf) -> Self {
        buffer.freeze()
    }
}

impl From<RegisteredBuf> for Lease {
    fn from(buffer: RegisteredBuf) -> Self {
        buffer.into_lease()
    }
}

impl fmt::Debug for RegisteredBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RegisteredBuf({:p}, {} bytes)", self.held.as_ptr(), self.length)
    }
}
