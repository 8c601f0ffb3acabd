//! The receives that are outstanding on the shared receive queues of a device.

use std::sync::{Arc, Mutex};

use slab::Slab;

use crate::ibverbs::ticket::{RequestKind, Ticket};
use crate::panics::lock;

/// The identifiers of the receives that are outstanding on one queue, which complete in any order.
#[derive(Debug)]
pub(crate) struct Entries {
    ids: Mutex<Slab<u64>>,
    capacity: u32,
}

impl Entries {
    pub(crate) fn new(capacity: u32) -> Self {
        Self { ids: Mutex::default(), capacity }
    }

    /// Stores an identifier and returns its position; `None` if the queue is full.
    pub(crate) fn put(&self, wr_id: u64) -> Option<u32> {
        let mut ids = lock(&self.ids);
        (ids.len() < self.capacity as usize).then(|| ids.insert(wr_id) as u32)
    }

    /// Takes an identifier out; `None` if the position is empty.
    pub(crate) fn take(&self, position: u32) -> Option<u64> {
        lock(&self.ids).try_remove(position as usize)
    }
}

/// The shared receive queues of a device, by key.
#[derive(Debug, Default)]
pub(crate) struct SharedQueues {
    queues: Vec<(u32, Arc<Entries>)>,
    next: u32,
}

impl SharedQueues {
    pub(crate) fn insert(&mut self, entries: &Arc<Entries>) -> u32 {
        let key = self.next & Ticket::SHARED_KEYS;
        self.next = self.next.wrapping_add(1);
        self.queues.push((key, Arc::clone(entries)));
        key
    }

    pub(crate) fn remove(&mut self, key: u32) {
        self.queues.retain(|(other, _)| *other != key);
    }

    /// Returns the identifier of a receive that completed.
    pub(crate) fn complete(&self, ticket: Ticket) -> Option<u64> {
        debug_assert_eq!(ticket.kind, RequestKind::SharedReceive);
        let (_, entries) = self.queues.iter().find(|(key, _)| *key == ticket.shared_key())?;
        entries.take(ticket.position)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn receives_complete_in_any_order_and_once() {
        let entries = Entries::new(3);
        let [a, b, c] = [10, 20, 30].map(|wr_id| entries.put(wr_id).unwrap());
        assert_eq!(entries.put(40), None, "full");
        assert_eq!(entries.take(b), Some(20));
        assert_eq!(entries.take(b), None, "taken already");
        assert_eq!(entries.take(99), None);
        let d = entries.put(40).unwrap();
        assert_eq!(d, b, "the slot is free again");
        assert_eq!([a, d, c].map(|position| entries.take(position)), [Some(10), Some(40), Some(30)]);
    }

    #[test]
    fn a_ticket_names_its_queue() {
        let mut queues = SharedQueues { next: Ticket::SHARED_KEYS, ..SharedQueues::default() };
        let [one, other] = [1, 2].map(|capacity| Arc::new(Entries::new(capacity)));
        let keys = [queues.insert(&one), queues.insert(&other)];
        assert_eq!(keys, [Ticket::SHARED_KEYS, 0]);
        let (a, b) = (one.put(1).unwrap(), other.put(2).unwrap());
        let ticket = |key, position| Ticket::from_bits(Ticket::shared(key, position).to_bits());
        assert_eq!(queues.complete(ticket(keys[1], b)), Some(2));
        assert_eq!(queues.complete(ticket(keys[0], a)), Some(1));
        queues.remove(keys[0]);
        assert_eq!(queues.complete(ticket(keys[0], a)), None);
    }
}
