//! The receives that are posted to a queue pair. They are private to this process: the peer learns only their number.

use crate::LocalSegment;

/// The posted receives, in order.
#[derive(Debug)]
pub(super) struct Receives {
    slots: Box<[Posted]>,
    /// The segments of all slots, `width` for each.
    segments: Box<[Option<LocalSegment>]>,
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

impl Receives {
    /// Makes room for `receives` receives of `segments` segments each.
    pub(super) fn new(receives: u32, segments: u32) -> Self {
        let slots = (receives.max(1) as usize).next_power_of_two();
        let width = segments as usize;
        Self {
            slots: vec![Posted::default(); slots].into(),
            segments: vec![None; slots * width].into(),
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
            *place = Some(*segment);
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
    pub(super) fn segments(&self) -> impl Iterator<Item = LocalSegment> + '_ {
        let slot = self.taken as usize & (self.slots.len() - 1);
        let count = self.slots[slot].count;
        self.segments[slot * self.width..][..count].iter().copied().flatten()
    }

    /// Takes the oldest receive.
    #[inline]
    pub(super) fn pop(&mut self) {
        self.taken += 1;
    }
}
