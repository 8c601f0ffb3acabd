//! Content that was offered to the peer by reference, until the peer gives it back.

use super::stream::{NumberMap, Stream};
use crate::grpc::frame::OfferSegment;
use tonic_rdma_verbs::RemoteSegment;

/// The offers of this side.
#[derive(Debug)]
pub(super) struct SentOffers<K> {
    /// What the peer may read, by offer.
    offers: NumberMap<u64, SentOffer<K>>,
    next: u64,
    /// The messages that are copied before they are offered, by stream.
    preparing: NumberMap<u32, Preparing<K>>,
    /// Calls that have ended, and of which the peer has not given all offers back, with the number of these
    /// offers and what the call counts.
    ended: NumberMap<u32, (u32, usize)>,
    /// What these calls count together.
    ended_counts: usize,
}

/// What the peer may read.
#[derive(Debug)]
pub(super) struct SentOffer<K> {
    pub(super) stream: u32,
    /// Bytes of the message or part.
    pub(super) total: usize,
    /// Bytes that were copied for it.
    pub(super) copied: usize,
    #[expect(dead_code, reason = "keeps the memory in place")]
    pub(super) kept: Vec<K>,
}

impl<K> Default for SentOffers<K> {
    fn default() -> Self {
        let (offers, preparing, ended) = Default::default();
        Self { offers, next: 0, preparing, ended, ended_counts: 0 }
    }
}

/// A message that is copied, a chunk at a time, before it is offered.
#[derive(Debug)]
pub(super) struct Preparing<K> {
    pub(super) segments: Vec<OfferSegment>,
    pub(super) kept: Vec<K>,
    /// Bytes of `segments` that were copied to memory that the peer reads.
    pub(super) copied: usize,
    /// The length of the encoded segments.
    pub(super) encoded: usize,
    /// Bytes of `segments`.
    pub(super) done: usize,
    /// The rest can't be offered with these segments.
    pub(super) failed: bool,
}

impl<K> Preparing<K> {
    pub(super) fn new() -> Self {
        Self { segments: Vec::new(), kept: Vec::new(), copied: 0, encoded: 0, done: 0, failed: false }
    }

    /// Adds `length` bytes of this side's memory.
    pub(super) fn push(&mut self, from: RemoteSegment, kept: K, length: usize) {
        self.segments.push(OfferSegment::Remote { from, length: length as u64 });
        self.kept.push(kept);
        self.done += length;
    }
}

impl<K> SentOffers<K> {
    /// Takes the message that is being prepared for a stream, or begins one.
    pub(super) fn take_preparing(&mut self, stream: &mut Stream) -> Preparing<K> {
        let begun = std::mem::take(&mut stream.sending.is_preparing);
        begun.then(|| self.preparing.remove(&stream.id)).flatten().unwrap_or_else(Preparing::new)
    }

    /// Keeps a message that is being prepared for the next turn of the stream.
    pub(super) fn keep_preparing(&mut self, stream: &mut Stream, prepared: Preparing<K>) {
        stream.sending.is_preparing = true;
        self.preparing.insert(stream.id, prepared);
    }

    /// Adds an offer. Returns its number.
    pub(super) fn add(&mut self, offer: SentOffer<K>) -> u64 {
        let id = self.next;
        self.next += 1;
        self.offers.insert(id, offer);
        id
    }

    /// Removes an offer that the peer gives back.
    pub(super) fn remove(&mut self, id: u64) -> Option<SentOffer<K>> {
        self.offers.remove(&id)
    }

    /// Notes that a call has ended while the peer has `offers` of it, which count `counts`.
    pub(super) fn call_ended(&mut self, stream: u32, offers: u32, counts: usize) {
        if offers > 0 {
            self.ended.insert(stream, (offers, counts));
            self.ended_counts += counts;
        }
    }

    /// Notes that an offer of an ended call was given back. If it was the last one, returns what the call
    /// has counted.
    pub(super) fn returned_after_end(&mut self, stream: u32) -> Option<usize> {
        let (left, counts) = self.ended.get_mut(&stream)?;
        *left -= 1;
        let counts = (*left == 0).then_some(*counts)?;
        self.ended.remove(&stream);
        self.ended_counts -= counts;
        Some(counts)
    }

    /// Returns what ended calls of which the peer has offers count.
    pub(super) fn ended_counts(&self) -> usize {
        self.ended_counts
    }

    pub(super) fn is_empty(&self) -> bool {
        self.offers.is_empty()
    }

    /// Drops all offers, because the connection has ended.
    pub(super) fn end(&mut self) {
        self.offers.clear();
        self.preparing.clear();
        self.ended.clear();
        self.ended_counts = 0;
    }
}

#[cfg(test)]
mod for_tests {
    use super::*;

    impl<K> SentOffers<K> {
        pub(in crate::grpc::core) fn len(&self) -> usize {
            self.offers.len()
        }

        pub(in crate::grpc::core) fn prepares(&self) -> bool {
            !self.preparing.is_empty()
        }

        pub(in crate::grpc::core) fn next(&self) -> u64 {
            self.next
        }
    }
}
