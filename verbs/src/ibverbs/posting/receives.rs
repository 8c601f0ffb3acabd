//! Posting receives: builds the device's lists of requests.

use std::ptr;

use ibverbs_sys as sys;

use super::core::Core;
use super::segments::Segments;
use crate::ibverbs::library::post_error_kind;
use crate::ibverbs::ticket::{RequestKind, Slot, Ticket};
use crate::{LocalSegment, PostError, PostErrorKind, QueuePairCapacity, QueuePairState, ReceiveRequest};

/// Most requests handed to the device at a time.
const BATCH: usize = 16;

/// The receive queue of a queue pair: posts batches of receives.
#[derive(Debug)]
pub(crate) struct Receives {
    slot: Slot,
    list: ReceiveList,
}

/// Posts the receive of no bytes that takes the peer's hello.
pub(crate) fn post_hello_receive(pair: &Core, slot: Slot) -> Result<(), PostErrorKind> {
    let ticket = Ticket { kind: RequestKind::Hello, slot, position: 0 };
    // soft-iWARP refuses a receive without a segment.
    let mut nothing = sys::ibv_sge::default();
    let mut hello = sys::ibv_recv_wr {
        wr_id: ticket.to_bits(),
        next: ptr::null_mut(),
        sg_list: &raw mut nothing,
        num_sge: 1,
    };
    hand_over_receives(pair, &mut hello).map_err(|(error, _)| post_error_kind(error))
}

/// A list of receives for the device. It is linked when it is complete, because it may move before.
#[derive(Debug)]
pub(crate) struct ReceiveList {
    requests: Vec<sys::ibv_recv_wr>,
    segments: Segments,
}

// SAFETY: the pointers in the list are to memory of its own.
unsafe impl Send for ReceiveList {}

impl ReceiveList {
    /// Creates a list with room for `requests` requests of `segments` segments each.
    pub(crate) fn new(requests: usize, segments: u32) -> Self {
        let segments = Vec::with_capacity(segments.max(1) as usize * requests);
        Self { requests: Vec::with_capacity(requests), segments: Segments(segments) }
    }

    pub(crate) fn clear(&mut self) {
        self.requests.clear();
        self.segments.0.clear();
    }

    pub(crate) fn len(&self) -> usize {
        self.requests.len()
    }

    /// Appends a receive of at most `most` segments. Adds empty segments up to `least`.
    pub(crate) fn add(
        &mut self,
        ticket: Ticket,
        into: &[LocalSegment],
        least: usize,
        most: u32,
    ) -> Result<(), PostErrorKind> {
        // A receive may be longer than any message.
        let num_sge = self.segments.add(into, least, most, u64::MAX)?;
        let (next, sg_list) = (ptr::null_mut(), ptr::null_mut());
        self.requests.push(sys::ibv_recv_wr { wr_id: ticket.to_bits(), next, sg_list, num_sge });
        Ok(())
    }

    /// Links the list. Returns its head, unless the list is empty.
    pub(crate) fn link(&mut self) -> Option<&mut sys::ibv_recv_wr> {
        let (requests, mut segments) = (self.requests.as_mut_ptr(), self.segments.0.as_mut_ptr());
        let count = self.requests.len();
        for (index, request) in self.requests.iter_mut().enumerate() {
            request.sg_list = segments;
            segments = segments.wrapping_add(request.num_sge as usize);
            request.next = if index + 1 < count { requests.wrapping_add(index + 1) } else { ptr::null_mut() };
        }
        self.requests.first_mut()
    }

    /// Returns the number of receives before the one that the device refused.
    pub(crate) fn position(&self, refused: *const sys::ibv_recv_wr) -> usize {
        self.requests.iter().position(|request| ptr::eq(request, refused)).unwrap_or(0)
    }

    /// Returns the tickets of the receives from `first` on.
    pub(crate) fn tickets_from(&self, first: usize) -> impl Iterator<Item = Ticket> {
        self.requests[first..].iter().map(|request| Ticket::from_bits(request.wr_id))
    }
}

/// Gives the device a list of receives. An error comes with the first receive that failed.
fn hand_over_receives(pair: &Core, head: &mut sys::ibv_recv_wr) -> Result<(), (i32, *mut sys::ibv_recv_wr)> {
    let mut bad = ptr::null_mut();
    // SAFETY:
    // - the queue pair is alive, as the caller holds it, and with it its context, whose table never changes,
    // - the list is linked through memory that the caller holds for the whole call, and
    // - what its segments name is registered memory, which the device checks.
    let result = unsafe {
        let pair = pair.as_ptr();
        match (*(*pair).context).ops.post_recv {
            Some(post) => post(pair, head, &raw mut bad),
            None => libc::EOPNOTSUPP,
        }
    };
    if result == 0 { Ok(()) } else { Err((result, bad)) }
}

impl Receives {
    pub(crate) fn new(capacity: &QueuePairCapacity, slot: Slot) -> Self {
        Self { slot, list: ReceiveList::new(BATCH, capacity.receive_segments) }
    }

    pub(crate) fn post(
        &mut self,
        pair: &Core,
        capacity: &QueuePairCapacity,
        requests: &[ReceiveRequest<'_>],
    ) -> Result<(), PostError> {
        for (batch, requests) in requests.chunks(BATCH).enumerate() {
            let failed = |(index, kind)| PostError { index: batch * BATCH + index, kind };
            self.post_batch(pair, capacity, requests).map_err(failed)?;
        }
        Ok(())
    }

    fn post_batch(
        &mut self,
        pair: &Core,
        capacity: &QueuePairCapacity,
        requests: &[ReceiveRequest<'_>],
    ) -> Result<(), (usize, PostErrorKind)> {
        let first = pair.receives.position();
        let room = pair.receives.room();
        self.list.clear();
        let mut refused = Ok(());
        for (index, request) in requests.iter().enumerate() {
            if pair.state() == QueuePairState::Reset {
                refused = Err((index, PostErrorKind::State(QueuePairState::Reset)));
                break;
            }
            if index as u32 >= room {
                refused = Err((index, PostErrorKind::QueueFull));
                break;
            }
            // soft-iWARP refuses a receive without a segment.
            let least = usize::from(pair.flushes_here);
            let position = first.wrapping_add(index as u32);
            let ticket = Ticket { kind: RequestKind::Receive, slot: self.slot, position };
            if let Err(kind) = self.list.add(ticket, request.into, least, capacity.receive_segments) {
                refused = Err((index, kind));
                break;
            }
            pair.receives.put(position, request.wr_id);
        }
        pair.receives.post(first.wrapping_add(self.list.len() as u32));
        let ended = pair.state() == QueuePairState::Error;
        let head = self.list.link().filter(|_| !(ended && pair.flushes_here));
        let Some(head) = head else {
            pair.wake();
            return refused;
        };
        if let Err((error, bad)) = hand_over_receives(pair, head) {
            let done = self.list.position(bad);
            pair.receives.post(first.wrapping_add(done as u32));
            return Err((done, post_error_kind(error)));
        }
        // Asked again, because the state may have changed meanwhile.
        if pair.state() == QueuePairState::Error {
            pair.flush();
        }
        refused
    }
}
