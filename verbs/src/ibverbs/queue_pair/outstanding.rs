//! The requests that are outstanding on one queue.

use std::sync::atomic::{
    AtomicU32, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};

/// The requests that are outstanding on one queue, in the order of posting: their identifiers, and so their count.
///
/// Devices round up the depth of a queue, and only know when a place of theirs is free again; so places are counted
/// here, and the queue is full at exactly what it was created for. One thread posts at a time, and one polls.
#[derive(Debug)]
pub(crate) struct Outstanding {
    /// By position, modulo the length, which is a power of two.
    ids: Box<[AtomicU64]>,
    capacity: u32,
    /// Position of the next request.
    posted: AtomicU32,
    /// Position after the last one that is known to have completed.
    completed: AtomicU32,
}

impl Outstanding {
    pub(crate) fn new(capacity: u32) -> Self {
        let length = capacity.max(1).next_power_of_two() as usize;
        Self {
            ids: (0..length).map(|_| AtomicU64::new(0)).collect(),
            capacity,
            posted: AtomicU32::new(0),
            completed: AtomicU32::new(0),
        }
    }

    /// Position of the next request; for whoever posts.
    pub(crate) fn position(&self) -> u32 {
        self.posted.load(Relaxed)
    }

    /// How many more can be posted; for whoever posts.
    pub(crate) fn room(&self) -> u32 {
        self.capacity.saturating_sub(self.position().wrapping_sub(self.completed.load(Acquire)))
    }

    /// Notes a request's identifier at `position`, where there is room.
    pub(crate) fn put(&self, position: u32, wr_id: u64) {
        self.at(position).store(wr_id, Relaxed);
    }

    /// Has everything before `position` count as posted. Before the device learns of it: the completion may be polled
    /// at once.
    pub(crate) fn post(&self, position: u32) {
        // SYNC: with `complete`, so that identifiers are seen there.
        self.posted.store(position, Release);
    }

    /// The identifier of the request at `position`, which completed, and with it all before it. `None` if no such
    /// request is outstanding.
    pub(crate) fn complete(&self, position: u32) -> Option<u64> {
        let posted = self.posted.load(Acquire);
        let completed = self.completed.load(Relaxed);
        if position.wrapping_sub(completed) >= posted.wrapping_sub(completed) {
            return None;
        }
        let wr_id = self.at(position).load(Relaxed);
        // SYNC: with `room`, so that the identifier was read before its place is used again.
        self.completed.store(position.wrapping_add(1), Release);
        Some(wr_id)
    }

    /// The identifier of the oldest request, for a device that is gone and completes nothing any more.
    pub(crate) fn complete_oldest(&self) -> Option<u64> {
        self.complete(self.oldest())
    }

    /// Position of the oldest request, if there is one.
    pub(crate) fn oldest(&self) -> u32 {
        self.completed.load(Relaxed)
    }

    fn at(&self, position: u32) -> &AtomicU64 {
        &self.ids[position as usize & (self.ids.len() - 1)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_is_full_at_what_it_was_created_for() {
        let queue = Outstanding::new(5);
        queue.post(u32::MAX - 2);
        queue.completed.store(u32::MAX - 2, Relaxed);
        for round in 0..20 {
            assert_eq!(queue.room(), 5, "round {round}");
            let first = queue.position();
            for offset in 0..5 {
                queue.put(first.wrapping_add(offset), u64::from(round * 10 + offset));
            }
            queue.post(first.wrapping_add(5));
            assert_eq!(queue.room(), 0);
            assert_eq!(queue.complete(first.wrapping_sub(1)), None);
            assert_eq!(queue.complete(first.wrapping_add(5)), None);
            assert_eq!(queue.complete(first.wrapping_add(2)), Some(u64::from(round * 10 + 2)));
            assert_eq!(queue.complete(first), None, "already freed");
            assert_eq!(queue.room(), 3);
            assert_eq!(queue.complete_oldest(), Some(u64::from(round * 10 + 3)));
            assert_eq!(queue.complete_oldest(), Some(u64::from(round * 10 + 4)));
            assert_eq!(queue.complete_oldest(), None);
        }
    }
}
