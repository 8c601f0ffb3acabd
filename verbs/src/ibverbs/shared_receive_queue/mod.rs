//! Shared receive queues: receives that many queue pairs take from.

use std::any::Any;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex};

use ibverbs_sys as sys;

use super::core::{RequestKind, Ticket};
use super::device::Device;
use super::library::{check, last_error};
use super::lock;
use super::post::kind_of;
use super::post_receive::ReceiveList;
use super::protection_domain::Domain;
use crate::{Context as _, PostError, PostErrorKind, ReceiveRequest, SharedReceiveQueue, VerbsError};

/// A shared receive queue.
#[derive(Debug)]
pub(super) struct SharedQueue {
    queue: NonNull<sys::ibv_srq>,
    /// What names it in the device's table, and so in the tickets of its receives.
    key: u32,
    segments: u32,
    capacity: u32,
    entries: Arc<Entries>,
    list: Mutex<ReceiveList>,
    domain: Arc<Domain>,
}

// SAFETY: libibverbs is thread-safe, and all else here is Send and Sync itself.
unsafe impl Send for SharedQueue {}
// SAFETY: as above.
unsafe impl Sync for SharedQueue {}

impl SharedQueue {
    /// Receives handed to the device at a time.
    const BATCH: usize = 64;

    pub(super) fn create(domain: Arc<Domain>, capacity: u32, segments: u32) -> Result<Self, VerbsError> {
        let device = domain.device();
        let attributes = device.attributes();
        if attributes.max_shared_receive_queues == 0 {
            return Err(VerbsError::Unsupported("shared receive queue"));
        }
        let limits = [
            ("shared receive queue depth", capacity, attributes.max_shared_receives),
            ("segments of a shared receive", segments, attributes.max_segments),
        ];
        if let Some((what, asked, limit)) = limits.into_iter().find(|(_, asked, limit)| asked > limit) {
            return Err(VerbsError::Limit { what, asked: asked.into(), limit: limit.into() });
        }
        let mut wanted = sys::ibv_srq_init_attr::default();
        wanted.attr.max_wr = capacity.max(1);
        wanted.attr.max_sge = segments.max(1);
        // SAFETY: the domain is alive, and the structure writable.
        let queue = unsafe { (device.library().create_srq)(domain.as_ptr(), &raw mut wanted) };
        let queue = NonNull::new(queue)
            .ok_or_else(|| last_error(format!("creating a shared receive queue of {capacity} entries")))?;
        let entries = Arc::new(Entries::new(capacity));
        let key = lock(&device.shared_receives).insert(&entries);
        let list = Mutex::new(ReceiveList::new(Self::BATCH, segments));
        Ok(Self { queue, key, segments, capacity, entries, list, domain })
    }

    /// The queue behind the trait, if it is of `device`.
    pub(super) fn of(
        queue: &Arc<dyn SharedReceiveQueue>,
        device: &Arc<Device>,
    ) -> Result<Arc<Self>, VerbsError> {
        let any: Arc<dyn Any + Send + Sync> = Arc::clone(queue) as Arc<dyn Any + Send + Sync>;
        match any.downcast::<Self>() {
            Ok(queue) if Arc::ptr_eq(queue.domain.device(), device) => Ok(queue),
            _ => Err(VerbsError::Foreign("shared receive queue")),
        }
    }

    pub(super) fn as_ptr(&self) -> *mut sys::ibv_srq {
        self.queue.as_ptr()
    }

    /// Posts all that can be posted before the first that can't, and names that.
    fn post_batch(&self, requests: &[ReceiveRequest<'_>]) -> Result<(), (usize, PostErrorKind)> {
        let mut list = lock(&self.list);
        list.clear();
        let mut refused = Ok(());
        for (index, request) in requests.iter().enumerate() {
            let Some(position) = self.entries.put(request.wr_id) else {
                refused = Err((index, PostErrorKind::QueueFull));
                break;
            };
            let ticket = Ticket::shared(self.key, position);
            if let Err(kind) = list.add(ticket, request.into, 0, self.segments) {
                self.entries.take(position);
                refused = Err((index, kind));
                break;
            }
        }
        let Some(head) = list.link() else { return refused };
        let mut bad = ptr::null_mut();
        // SAFETY:
        // - the queue is alive, and with it its context, whose table never changes,
        // - the list is linked through memory that is borrowed for the whole call, and
        // - what its segments name is registered memory, which the device checks.
        let result = unsafe {
            let queue = self.as_ptr();
            match (*(*queue).context).ops.post_srq_recv {
                Some(post) => post(queue, head, &raw mut bad),
                None => libc::EOPNOTSUPP,
            }
        };
        if result != 0 {
            let done = list.position(bad);
            list.tickets_from(done).for_each(|ticket| _ = self.entries.take(ticket.position));
            return Err((done, kind_of(result)));
        }
        refused
    }
}

impl SharedReceiveQueue for SharedQueue {
    fn capacity(&self) -> u32 {
        self.capacity
    }

    fn post_receive(&self, requests: &[ReceiveRequest<'_>]) -> Result<(), PostError> {
        for (batch, requests) in requests.chunks(Self::BATCH).enumerate() {
            let failed = |(index, kind)| PostError { index: batch * Self::BATCH + index, kind };
            self.post_batch(requests).map_err(failed)?;
        }
        Ok(())
    }
}

impl Drop for SharedQueue {
    fn drop(&mut self) {
        let device = self.domain.device();
        lock(&device.shared_receives).remove(self.key);
        // SAFETY: queue pairs hold a reference to the queue that they take from, so none is left.
        let result = unsafe { (device.library().destroy_srq)(self.queue.as_ptr()) };
        if let Err(error) = check("destroying a shared receive queue", result) {
            tracing::warn!(%error, "an object of the device can't be given back");
        }
    }
}

/// The identifiers of the receives that are outstanding on one queue, which complete in any order.
#[derive(Debug)]
pub(super) struct Entries(Mutex<Places>);

#[derive(Debug)]
struct Places {
    ids: Vec<Option<u64>>,
    free: Vec<u32>,
    capacity: u32,
}

impl Entries {
    fn new(capacity: u32) -> Self {
        Self(Mutex::new(Places { ids: Vec::new(), free: Vec::new(), capacity }))
    }

    /// Notes an identifier, and says where; `None` if as many are outstanding as may be.
    fn put(&self, wr_id: u64) -> Option<u32> {
        let mut places = lock(&self.0);
        if let Some(position) = places.free.pop() {
            places.ids[position as usize] = Some(wr_id);
            return Some(position);
        }
        let position = u32::try_from(places.ids.len()).ok().filter(|position| *position < places.capacity)?;
        places.ids.push(Some(wr_id));
        Some(position)
    }

    /// Takes an identifier out; `None` if there is none.
    pub(super) fn take(&self, position: u32) -> Option<u64> {
        let mut places = lock(&self.0);
        let wr_id = places.ids.get_mut(position as usize)?.take()?;
        places.free.push(position);
        Some(wr_id)
    }
}

/// The shared receive queues of a device, by key.
#[derive(Debug, Default)]
pub(super) struct SharedQueues {
    queues: Vec<(u32, Arc<Entries>)>,
    next: u32,
}

impl SharedQueues {
    fn insert(&mut self, entries: &Arc<Entries>) -> u32 {
        let key = self.next & Ticket::SHARED_KEYS;
        self.next = self.next.wrapping_add(1);
        self.queues.push((key, Arc::clone(entries)));
        key
    }

    fn remove(&mut self, key: u32) {
        self.queues.retain(|(other, _)| *other != key);
    }

    /// The identifier of a receive that completed.
    pub(super) fn complete(&self, ticket: Ticket) -> Option<u64> {
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
        assert_eq!(d, b, "the place is free again");
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
