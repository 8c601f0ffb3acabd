//! The requests that are outstanding on one queue.

use std::sync::atomic::{
    AtomicU32, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};

/// The identifiers of the requests that are outstanding on one queue, in the order of posting.
///
/// Devices round up the depth of a queue, and only they know when a place of theirs is free again. So this type
/// counts the places, and a queue is full at exactly the depth that it was created for. One thread posts at a time,
/// and one polls.
#[derive(Debug)]
pub(crate) struct Outstanding {
    /// Indexed by position, modulo the length, which is a power of two.
    ids: Box<[AtomicU64]>,
    capacity: u32,
    /// Position of the next request.
    posted: AtomicU32,
    /// Position after the last request that is known to have completed.
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

    /// Returns the position of the next request. Only the posting thread calls this.
    pub(crate) fn position(&self) -> u32 {
        self.posted.load(Relaxed)
    }

    /// Returns how many more requests can be posted. Only the posting thread calls this.
    pub(crate) fn room(&self) -> u32 {
        self.capacity.saturating_sub(self.position().wrapping_sub(self.completed.load(Acquire)))
    }

    /// Stores a request's identifier at `position`. There must be room.
    pub(crate) fn put(&self, position: u32, wr_id: u64) {
        self.at(position).store(wr_id, Relaxed);
    }

    /// Counts all requests before `position` as posted. The caller does this before the device gets them, because a
    /// completion may be polled at once.
    pub(crate) fn post(&self, position: u32) {
        // SYNC: with `complete`, so that identifiers are seen there.
        self.posted.store(position, Release);
    }

    /// Returns the identifier of the request at `position`, which completed together with all requests before it.
    /// `None` if no such request is outstanding.
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

    /// Returns the identifier of the oldest request, for a device that is gone and completes nothing any more.
    pub(crate) fn complete_oldest(&self) -> Option<u64> {
        self.complete(self.oldest())
    }

    /// Returns the position of the oldest request, if there is one.
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
