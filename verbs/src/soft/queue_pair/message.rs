//! A message of the peer while its records are taken.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::pulls::Place;
use crate::soft::limits::{MAX_SEGMENTS, PAST_CACHES};
use crate::soft::shared::ring::Record;

/// A message of the peer.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) destination: Destination,
    pub(super) immediate: Option<u32>,
    pub(super) total: u64,
    pub(super) done: u64,
}

/// The destination of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Destination {
    /// The oldest posted receive.
    Receive,
    /// The place that the peer names.
    Memory { address: u64, key: u32 },
}

impl Message {
    /// Returns whether the bytes go past the caches.
    pub(super) fn goes_past_caches(&self) -> bool {
        self.total >= PAST_CACHES
    }
}

/// The places in the peer's memory from which a message is taken.
#[derive(Debug)]
pub(super) struct Pull {
    /// The record of the message.
    pub(super) record: Record,
    places: Vec<Place>,
    /// The place that is being taken, and the bytes of it that were taken.
    index: usize,
    taken: u64,
}

impl Pull {
    /// Reads the places of a message of `total` bytes from its record; `None` if they are no such places.
    pub(super) fn new(record: &Record, ring: &[AtomicU64], total: u64) -> Option<Self> {
        let words = ring.get(record.payload..record.payload + record.header.length as usize / 8)?;
        let places: Vec<Place> = words
            .chunks_exact(3)
            .map(|place| std::array::from_fn(|index| place[index].load(Relaxed)))
            .collect();
        let sum = places.iter().try_fold(0u64, |sum, [_, _, length]| sum.checked_add(*length));
        let good = record.header.length.is_multiple_of(24)
            && places.len() <= MAX_SEGMENTS as usize
            && places.iter().all(|[_, _, length]| *length > 0)
            && sum == Some(total);
        good.then_some(Self { record: *record, places, index: 0, taken: 0 })
    }

    /// Returns the next piece: the segment, the offset in it, and the length, at most `wanted`. Goes on behind the piece.
    pub(super) fn next(&mut self, wanted: u64) -> Option<(u64, u64, u64)> {
        let [id, offset, length] = *self.places.get(self.index)?;
        let piece = (id, offset.checked_add(self.taken)?, (length - self.taken).min(wanted));
        self.taken += piece.2;
        if self.taken == length {
            (self.index, self.taken) = (self.index + 1, 0);
        }
        Some(piece)
    }
}
