//! The payload of an OFFER: where bytes of a body lie.
//!
//! ```text
//!  0      8      16          24
//!  offer  total  aligned_at  pieces …     1 │ address (8) │ rkey (4) │ length (8)      memory of the sender
//!                                         0 │ length (2) │ bytes                       bytes in this frame
//! ```

use super::header::{Frames, Payload};
use super::violation::CallViolation;
use bytes::{Buf as _, Bytes, TryGetError};
use tonic_rdma_verbs::{RemoteSegment, Rkey};

/// A part of the offered bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::grpc) enum OfferPiece {
    /// Memory of the sender, which the receiver reads.
    Remote { from: RemoteSegment, length: u64 },
    /// Bytes in the frame, at most 65 535.
    Inline(Bytes),
}

impl OfferPiece {
    /// The length of an encoded piece of the sender's memory.
    pub(in crate::grpc) const REMOTE_LENGTH: usize = 21;
    /// The length of what precedes the bytes of an inline piece.
    pub(in crate::grpc) const INLINE_PREFIX: usize = 3;

    /// Returns the number of offered bytes.
    pub(in crate::grpc) fn length(&self) -> u64 {
        match self {
            Self::Remote { length, .. } => *length,
            Self::Inline(bytes) => bytes.len() as u64,
        }
    }

    /// Returns the length of the encoded piece.
    pub(in crate::grpc) fn encoded_length(&self) -> usize {
        match self {
            Self::Remote { .. } => Self::REMOTE_LENGTH,
            Self::Inline(bytes) => Self::INLINE_PREFIX + bytes.len(),
        }
    }
}

/// Bytes of a body by reference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::grpc) struct Offer {
    /// The number of the offer, in order of the sender's offers.
    pub(in crate::grpc) id: u64,
    /// The number of bytes: the sum of the pieces.
    pub(in crate::grpc) total: u64,
    /// The byte that is to land at a multiple of 64 bytes.
    pub(in crate::grpc) aligned_at: u64,
    pub(in crate::grpc) pieces: Vec<OfferPiece>,
}

impl Offer {
    /// The longest offer, in bytes. Sums of lengths and costs never overflow.
    pub(in crate::grpc) const LONGEST: u64 = 1 << 60;
    /// The length of what precedes the pieces.
    pub(in crate::grpc) const PREFIX: usize = 24;

    /// Adds the payload to `out`.
    pub(in crate::grpc) fn encode(&self, out: &mut Vec<u8>) {
        for number in [self.id, self.total, self.aligned_at] {
            out.extend_from_slice(&number.to_le_bytes());
        }
        for piece in &self.pieces {
            match piece {
                OfferPiece::Remote { from, length } => {
                    out.push(1);
                    out.extend_from_slice(&from.address.to_le_bytes());
                    out.extend_from_slice(&from.rkey.0.to_le_bytes());
                    out.extend_from_slice(&length.to_le_bytes());
                }
                OfferPiece::Inline(bytes) => {
                    out.push(0);
                    // The sender makes no longer pieces.
                    out.extend_from_slice(&(bytes.len() as u16).to_le_bytes());
                    out.extend_from_slice(bytes);
                }
            }
        }
    }

    /// Reads the payload of an OFFER.
    ///
    /// # Errors
    /// The payload is no offer: too short, without bytes, with an empty piece, with a sum that differs from the total, with memory beyond the
    /// end of the address space, or with an alignment beyond its end.
    pub(in crate::grpc) fn decode(frames: &Frames, payload: Payload) -> Result<Self, CallViolation> {
        let mut rest = frames.bytes(payload);
        let bad = CallViolation::Offer;
        let id = rest.try_get_u64_le().map_err(short)?;
        let total = rest.try_get_u64_le().map_err(short)?;
        let aligned_at = rest.try_get_u64_le().map_err(short)?;
        let (mut pieces, mut sum) = (Vec::with_capacity(2), 0_u64);
        while let Some((tag, after)) = rest.split_first() {
            rest = after;
            let piece = match tag {
                1 => {
                    let address = rest.try_get_u64_le().map_err(short)?;
                    let rkey = Rkey(rest.try_get_u32_le().map_err(short)?);
                    let length = rest.try_get_u64_le().map_err(short)?;
                    let from = RemoteSegment { address, rkey };
                    from.address.checked_add(length).ok_or(bad("a piece ends beyond the address space"))?;
                    OfferPiece::Remote { from, length }
                }
                0 => {
                    let length = rest.try_get_u16_le().map_err(short)?.into();
                    let (bytes, after) =
                        rest.split_at_checked(length).ok_or(bad("a piece is longer than the frame"))?;
                    rest = after;
                    // Pieces wait in memory, so they do not keep the message.
                    OfferPiece::Inline(Bytes::copy_from_slice(bytes))
                }
                _ => return Err(bad("a piece has an unknown tag")),
            };
            if piece.length() == 0 {
                return Err(bad("a piece is empty"));
            }
            sum = sum.checked_add(piece.length()).ok_or(bad("the sum of the pieces is too large"))?;
            pieces.push(piece);
        }
        if total == 0 || sum != total || total > Self::LONGEST {
            return Err(bad("the pieces do not add up to the total"));
        }
        if aligned_at >= total {
            return Err(bad("the aligned byte is beyond the end"));
        }
        Ok(Self { id, total, aligned_at, pieces })
    }
}

/// Returns the error of a payload that ends too early.
fn short(_: TryGetError) -> CallViolation {
    CallViolation::Offer("the frame is too short")
}
