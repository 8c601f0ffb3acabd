//! A frozen buffer: a piece that is not written to any more.

use std::mem::ManuallyDrop;
use std::sync::{Arc, Weak};

use super::super::index::AddressIndex;
use super::held::HeldPiece;

/// Frozen buffers by address.
pub(crate) type FrozenIndex = AddressIndex<Weak<FrozenBuffer>>;

/// A buffer that is not written to any more. The index of its pool contains the buffer.
#[derive(Debug)]
pub(crate) struct FrozenBuffer {
    /// Dropped with this value, unless [`thaw`](Self::thaw) takes it out.
    held: ManuallyDrop<HeldPiece>,
    length: usize,
}

impl FrozenBuffer {
    /// Freezes the first `length` bytes of `held`, and adds them to the index.
    pub(crate) fn new(held: HeldPiece, length: usize) -> Arc<Self> {
        let address = held.as_ptr() as usize;
        let frozen = Arc::new(Self { held: ManuallyDrop::new(held), length });
        frozen.held.shared().freeze(address, length, &frozen);
        frozen
    }

    /// Returns the piece that the buffer lies in.
    pub(crate) fn held(&self) -> &HeldPiece {
        &self.held
    }

    /// Returns the length in bytes.
    pub(crate) fn length(&self) -> usize {
        self.length
    }

    /// Removes the buffer from the index, and returns its piece.
    pub(crate) fn thaw(self) -> HeldPiece {
        let mut this = ManuallyDrop::new(self);
        this.held.shared().thaw(this.held.as_ptr() as usize);
        // SAFETY: `this` is never dropped and is not used after this line, so the piece is taken once.
        unsafe { ManuallyDrop::take(&mut this.held) }
    }
}

impl Drop for FrozenBuffer {
    fn drop(&mut self) {
        // The buffer leaves the index before the piece goes back to the pool, because the memory may become another buffer
        // at once.
        self.held.shared().thaw(self.held.as_ptr() as usize);
        // SAFETY: the piece is dropped only here. `thaw` takes the piece, but prevents the drop of the value.
        unsafe { ManuallyDrop::drop(&mut self.held) }
    }
}
