//! The receives that are posted to a queue pair. They are private to this process: the peer learns only their number.

use crate::{Lkey, LocalSegment};

/// The posted receives, in order.
#[derive(Debug)]
pub(super) struct Receives {
    slots: Box<[Posted]>,
    /// The segments of all slots, `width` for each.
    segments: Box<[Segment]>,
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

/// A segment of a posted receive. It has the address of its end instead of its length, because the callers make their segments just
/// before they post them: a processor can't load two words at once that were just stored one by one, and waits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Segment {
    start: u64,
    end: u64,
    key: Lkey,
}

impl Default for Segment {
    fn default() -> Self {
        Self { start: 0, end: 0, key: Lkey(0) }
    }
}

impl From<&LocalSegment> for Segment {
    #[inline]
    fn from(segment: &LocalSegment) -> Self {
        let end = segment.address().wrapping_add(segment.length());
        Self { start: segment.address(), end, key: segment.lkey() }
    }
}

impl Segment {
    #[inline]
    pub(super) fn address(&self) -> u64 {
        self.start
    }

    #[inline]
    pub(super) fn length(&self) -> u64 {
        self.end.wrapping_sub(self.start)
    }

    #[inline]
    pub(super) fn lkey(&self) -> Lkey {
        self.key
    }
}

impl Receives {
    /// Makes room for `receives` receives of `segments` segments each.
    pub(super) fn new(receives: u32, segments: u32) -> Self {
        let slots = (receives.max(1) as usize).next_power_of_two();
        let width = segments as usize;
        Self {
            slots: vec![Posted::default(); slots].into(),
            segments: vec![Segment::default(); slots * width].into(),
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
        let room = super::source::total(into);
        self.slots[slot] = Posted { wr_id, room, count: into.len() };
        for (place, segment) in self.segments[slot * self.width..].iter_mut().zip(into) {
            *place = Segment::from(segment);
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
    pub(super) fn segments(&self) -> &[Segment] {
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
