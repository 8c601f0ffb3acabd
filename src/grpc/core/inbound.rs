//! An offer of the peer.

use std::collections::VecDeque;
use std::ops::Range;

use bytes::Bytes;

use super::stream::StreamKey;
use crate::endpoint::Piece;
use crate::grpc::frame::{Offer, OfferPiece};
use crate::grpc::landing_budget::Charge;
use tonic_rdma_verbs::RemoteSegment;

/// An offer of the peer, until its bytes are taken.
#[derive(Debug)]
pub(super) struct InOffer {
    pub(super) offer: Offer,
    /// The number of the call.
    pub(super) call: u32,
    /// The stream. None once nothing reads the offer any more.
    pub(super) stream: Option<StreamKey>,
    /// The offer is one whole message.
    pub(super) is_message: bool,
    /// The offer is delivered in one piece.
    pub(super) in_one: bool,
    /// The number of bytes for which fetches were started.
    pub(super) fetched: u64,
    /// The fetches that were not taken, in order.
    pub(super) landings: VecDeque<Landing>,
    /// The fetches that have not landed.
    pub(super) under_way: usize,
}

/// A fetch of an offer.
#[derive(Debug)]
pub(super) struct Landing {
    pub(super) fetch: u64,
    pub(super) length: u64,
    /// The memory that the content counts as, if it is delivered in one piece.
    pub(super) charge: Option<Charge>,
    /// The content, once it has landed.
    pub(super) memory: Option<Bytes>,
}

impl InOffer {
    pub(super) fn new(offer: Offer, call: u32, stream: StreamKey, is_message: bool) -> Self {
        Self {
            offer,
            call,
            stream: Some(stream),
            is_message,
            in_one: false,
            fetched: 0,
            landings: VecDeque::new(),
            under_way: 0,
        }
    }

    /// Returns the number of bytes for which no fetch was started.
    pub(super) fn left(&self) -> u64 {
        self.offer.total - self.fetched
    }

    /// Returns whether the next bytes have landed.
    pub(super) fn has_landed(&self) -> bool {
        self.landings.front().is_some_and(|landing| landing.memory.is_some())
    }

    /// Returns where a range of the offered bytes lies.
    pub(super) fn pieces(&self, range: Range<u64>) -> Vec<Piece<'_>> {
        let (mut at, mut found) = (0, Vec::with_capacity(2));
        for piece in &self.offer.pieces {
            let (start, end) = (range.start.max(at), range.end.min(at + piece.length()));
            if start < end {
                let (offset, length) = (start - at, end - start);
                found.push(match piece {
                    OfferPiece::Remote { from, .. } => {
                        let from = RemoteSegment { address: from.address + offset, ..*from };
                        Piece::Remote { from, length }
                    }
                    // Offsets of inline pieces are below 65 536.
                    OfferPiece::Inline(bytes) => {
                        Piece::Inline(&bytes[offset as usize..(offset + length) as usize])
                    }
                });
            }
            at += piece.length();
        }
        found
    }
}
