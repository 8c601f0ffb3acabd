//! Shared receive queues, from which many queue pairs take receives.

use std::any::Any;
use std::ptr;
use std::sync::{Arc, Mutex};

use ibverbs_sys as sys;

use super::device::Device;
use super::device::shared_receives::Entries;
use super::domain::Domain;
use super::library::{Owned, last_error, post_error_kind};
use super::posting::lists::{ReceiveList, in_batches};
use super::ticket::Ticket;
use crate::panics::lock;
use crate::{Context as _, PostError, PostErrorKind, ReceiveRequest, SharedReceiveQueue, VerbsError};

/// A shared receive queue.
#[derive(Debug)]
pub(crate) struct SharedQueue {
    queue: Owned<sys::ibv_srq>,
    /// Names the queue in the device's table, and in the tickets of its receives.
    key: u32,
    segments: u32,
    capacity: u32,
    entries: Arc<Entries>,
    list: Mutex<ReceiveList>,
    domain: Arc<Domain>,
}

impl SharedQueue {
    /// Receives handed to the device at a time.
    const BATCH: usize = 64;

    pub(crate) fn create(domain: Arc<Domain>, capacity: u32, segments: u32) -> Result<Self, VerbsError> {
        let device = &domain.device;
        let attributes = device.attributes();
        if attributes.max_shared_receive_queues == 0 {
            return Err(VerbsError::unsupported("shared receive queue"));
        }
        VerbsError::check_limits([
            ("shared receive queue depth", capacity, attributes.max_shared_receives),
            ("segments of a shared receive", segments, attributes.max_segments),
        ])?;
        let mut wanted = sys::ibv_srq_init_attr::default();
        wanted.attr.max_wr = capacity.max(1);
        wanted.attr.max_sge = segments.max(1);
        let library = device.library();
        // SAFETY:
        // - the structure is writable,
        // - the domain is alive, and dropped after the queue; and
        // - queue pairs hold a reference to the queue that they take from, so none is left when the queue is
        //   dropped.
        let queue = unsafe {
            let queue = (library.create_srq)(domain.as_ptr(), &raw mut wanted);
            Owned::new(queue, library.destroy_srq, "destroying a shared receive queue")
        };
        let queue = queue
            .ok_or_else(|| last_error(format!("creating a shared receive queue of {capacity} entries")))?;
        let entries = Arc::new(Entries::new(capacity));
        let key = lock(&device.shared_receives).insert(&entries);
        let list = Mutex::new(ReceiveList::new(Self::BATCH, segments));
        Ok(Self { queue, key, segments, capacity, entries, list, domain })
    }

    /// Returns the queue behind the trait object, if it is one of `device`.
    pub(crate) fn of(
        queue: &Arc<dyn SharedReceiveQueue>,
        device: &Arc<Device>,
    ) -> Result<Arc<Self>, VerbsError> {
        let any: Arc<dyn Any + Send + Sync> = Arc::clone(queue) as _;
        let own = any.downcast().ok().filter(|queue: &Arc<Self>| Arc::ptr_eq(&queue.domain.device, device));
        own.ok_or_else(|| VerbsError::foreign("shared receive queue"))
    }

    pub(crate) fn as_ptr(&self) -> *mut sys::ibv_srq {
        self.queue.as_ptr()
    }

    /// Posts all requests before the first one that can't be posted. The error has the index of that request.
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
            return Err((done, post_error_kind(result)));
        }
        refused
    }
}

impl crate::sealed::Sealed for SharedQueue {}

impl SharedReceiveQueue for SharedQueue {
    fn capacity(&self) -> u32 {
        self.capacity
    }

    fn post_receive(&self, requests: &[ReceiveRequest<'_>]) -> Result<(), PostError> {
        in_batches(requests, Self::BATCH, |requests| self.post_batch(requests))
    }
}

impl Drop for SharedQueue {
    fn drop(&mut self) {
        lock(&self.domain.device.shared_receives).remove(self.key);
    }
}
