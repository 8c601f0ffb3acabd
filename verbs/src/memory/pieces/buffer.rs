//! A buffer: registered memory that the application fills.

use std::fmt;
use std::ops::{Deref, DerefMut};

use bytes::Bytes;

use super::super::pool::HeldPiece;
use super::lease::Lease;

/// Registered memory that the application fills and then sends without a copy. [`freeze`](Self::freeze) turns it into
/// [`Bytes`], which the transport recognises by their address ([`Pool::find`](super::Pool::find)).
///
/// `&[u8]` and `&mut [u8]` of it are sound: there is one owner, no segment of it is given out before it is frozen, and
/// its slab is registered without any right to write and holds nothing but such buffers.
pub struct RegisteredBuf {
    held: HeldPiece,
    length: usize,
}

impl RegisteredBuf {
    pub(crate) fn new(held: HeldPiece, length: usize) -> Self {
        debug_assert!(length <= held.capacity());
        Self { held, length }
    }

    /// Shortens it to `length` bytes; nothing happens if it is no longer than that.
    pub fn truncate(&mut self, length: usize) {
        self.length = self.length.min(length);
    }

    /// Makes it immutable and shareable. The memory goes back to the pool when the last clone and the last slice of the
    /// result, and the last [`Lease`] on it, are gone.
    pub fn freeze(self) -> Bytes {
        self.into_lease().into_bytes()
    }

    /// Makes it immutable, as a lease on all of it.
    pub fn into_lease(self) -> Lease {
        let Self { held, length } = self;
        Lease::freeze(held, length)
    }
}

impl Deref for RegisteredBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY:
        // - `length` is at most the capacity of the piece, which lies in a mapping that `held` keeps alive,
        // - the memory is initialised: the kernel hands it out zeroed, and
        // - nobody writes to it while the reference lives: the pool gave the piece to this owner alone, who is
        //   borrowed, and the region has no right to write.
        unsafe { std::slice::from_raw_parts(self.held.as_ptr(), self.length) }
    }
}

impl DerefMut for RegisteredBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY:
        // - as in `deref`, and
        // - the owner is borrowed mutably, so that no other reference exists.
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
