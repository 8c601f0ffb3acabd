//! The receives that are posted to a queue pair, and a message of the peer while its records are taken. Both
//! are private to this process: the peer learns only the number of receives.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::pulls::SegmentAddress;
use crate::soft::device::{MAX_SEGMENTS, PAST_CACHES};
use crate::soft::shared::ring::Record;
use crate::{Lkey, LocalSegment};

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
    /// The address that the peer names.
    Memory { address: u64, key: u32 },
}

impl Message {
    /// Returns whether the bytes go past the caches.
    pub(super) fn goes_past_caches(&self) -> bool {
        self.total >= PAST_CACHES
    }
}

/// The addresses in the peer's memory from which a message is taken.
#[derive(Debug)]
pub(super) struct Pull {
    /// The record of the message.
    pub(super) record: Record,
    addresses: Vec<SegmentAddress>,
    /// The address that is being taken, and the bytes of it that were taken.
    index: usize,
    taken: u64,
}

impl Pull {
    /// Reads the addresses of a message of `total` bytes from its record; `None` if they are no such
    /// addresses.
    pub(super) fn new(record: &Record, ring: &[AtomicU64], total: u64) -> Option<Self> {
        let words = ring.get(record.payload..record.payload + record.header.length as usize / 8)?;
        let addresses: Vec<SegmentAddress> = words
            .chunks_exact(3)
            .map(|address| std::array::from_fn(|index| address[index].load(Relaxed)))
            .collect();
        let sum = addresses.iter().try_fold(0u64, |sum, [_, _, length]| sum.checked_add(*length));
        let good = record.header.length.is_multiple_of(24)
            && addresses.len() <= MAX_SEGMENTS as usize
            && addresses.iter().all(|[_, _, length]| *length > 0)
            && sum == Some(total);
        good.then_some(Self { record: *record, addresses, index: 0, taken: 0 })
    }

    /// Returns the next chunk: the segment, the offset in it, and the length, at most `wanted`. Continues
    /// behind the chunk.
    pub(super) fn next(&mut self, wanted: u64) -> Option<(u64, u64, u64)> {
        let [id, offset, length] = *self.addresses.get(self.index)?;
        let chunk = (id, offset.checked_add(self.taken)?, (length - self.taken).min(wanted));
        self.taken += chunk.2;
        if self.taken == length {
            (self.index, self.taken) = (self.index + 1, 0);
        }
        Some(chunk)
    }
}

/// The posted receives, in order.
#[derive(Debug)]
pub(super) struct Receives {
    slots: Box<[Posted]>,
    /// The segments of all slots, `width` for each.
    segments: Box<[ReceiveSegment]>,
    width: usize,
    /// Numbers of the next receive to post, and of the next to take.
    next: u64,
    taken: u64,
}

/// A posted receive.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Posted {
    pub(super) wr_id: u64,
    /// Bytes of all its segments.
    pub(super) room: u64,
    count: usize,
}

/// A segment of a posted receive. It has the address of its end instead of its length, because the callers
/// make their segments just before they post them: a processor can't load two words at once that were just
/// stored one by one, and waits.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReceiveSegment {
    pub(super) start: u64,
    end: u64,
    pub(super) key: Lkey,
}

impl Default for ReceiveSegment {
    fn default() -> Self {
        Self { start: 0, end: 0, key: Lkey(0) }
    }
}

impl From<&LocalSegment> for ReceiveSegment {
    #[inline]
    fn from(segment: &LocalSegment) -> Self {
        let end = segment.address().wrapping_add(segment.length());
        Self { start: segment.address(), end, key: segment.lkey() }
    }
}

impl ReceiveSegment {
    #[inline]
    pub(super) fn length(&self) -> u64 {
        self.end.wrapping_sub(self.start)
    }
}

impl Receives {
    /// Makes room for `receives` receives of `segments` segments each.
    pub(super) fn new(receives: u32, segments: u32) -> Self {
        let slots = (receives.max(1) as usize).next_power_of_two();
        let width = segments as usize;
        Self {
            slots: vec![Posted::default(); slots].into(),
            segments: vec![ReceiveSegment::default(); slots * width].into(),
            width,
            next: 0,
            taken: 0,
        }
    }

    /// Returns the number of receives that were posted and not taken.
    #[inline]
    pub(super) fn outstanding(&self) -> u32 {
        (self.next - self.taken) as u32
    }

    /// Returns the number of receives posted so far.
    #[inline]
    pub(super) fn posted(&self) -> u64 {
        self.next
    }

    /// Adds a receive. The caller has checked that there is room, and that the segments are not too many.
    #[inline]
    pub(super) fn push(&mut self, wr_id: u64, into: &[LocalSegment]) {
        let slot = self.next as usize & (self.slots.len() - 1);
        let room = LocalSegment::total(into);
        self.slots[slot] = Posted { wr_id, room, count: into.len() };
        for (slot, segment) in self.segments[slot * self.width..].iter_mut().zip(into) {
            *slot = ReceiveSegment::from(segment);
        }
        self.next += 1;
    }

    /// Returns the oldest receive that was not taken.
    #[inline]
    pub(super) fn first(&self) -> Option<Posted> {
        (self.outstanding() > 0).then(|| self.slots[self.taken as usize & (self.slots.len() - 1)])
    }

    /// Returns the segments of the oldest receive.
    #[inline]
    pub(super) fn segments(&self) -> &[ReceiveSegment] {
        let slot = self.taken as usize & (self.slots.len() - 1);
        let count = self.slots[slot].count;
        &self.segments[slot * self.width..][..count]
    }

    /// Takes the oldest receive.
    #[inline]
    pub(super) fn pop(&mut self) {
        self.taken += 1;
    }
}
