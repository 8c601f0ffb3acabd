//! A buffer in the first-level cache.

/// Bytes of the buffer. They fit the first-level cache together with the data of a reduction.
const PIECE: usize = 8 << 10;

/// A buffer through which bytes of a peer pass, because the peer may change them at any time.
pub(super) struct Scratch {
    piece: Box<Piece>,
}

#[repr(align(64))]
struct Piece([u8; PIECE]);

impl Scratch {
    pub(super) fn new() -> Self {
        Self { piece: Box::new(Piece([0; PIECE])) }
    }

    /// Passes `length` bytes to `then` piece by piece, with their offset. `copy` fills a piece from an offset.
    #[inline]
    pub(super) fn pieces<E>(
        &mut self,
        length: usize,
        copy: impl Fn(usize, &mut [u8]) -> Result<(), E>,
        mut then: impl FnMut(usize, &[u8]),
    ) -> Result<(), E> {
        let mut done = 0;
        while done < length {
            let piece = &mut self.piece.0[..PIECE.min(length - done)];
            copy(done, piece)?;
            then(done, piece);
            done += piece.len();
        }
        Ok(())
    }
}
