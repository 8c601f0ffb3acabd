//! Posting sends and receives: builds the device's lists of requests.

use std::{fmt, ptr};

use ibverbs_sys as sys;

use super::core::Core;
use crate::ibverbs::library::post_error_kind;
use crate::ibverbs::ticket::{RequestKind, Slot, Ticket};
use crate::panics::lock;
use crate::{
    DeviceAttributes, LocalSegment, Operation, Payload, PostError, PostErrorKind, QueuePairCapacity,
    QueuePairState, ReceiveRequest, SendRequest,
};

/// Most requests handed to the device at a time.
const BATCH: usize = 16;

/// Passes requests to `post` in batches of at most `most`. An error of `post` has the index in its batch of
/// the request that failed.
pub(crate) fn in_batches<R>(
    requests: &[R],
    most: usize,
    mut post: impl FnMut(&[R]) -> Result<(), (usize, PostErrorKind)>,
) -> Result<(), PostError> {
    requests.chunks(most).enumerate().try_for_each(|(batch, requests)| {
        post(requests).map_err(|(index, kind)| PostError { index: batch * most + index, kind })
    })
}

/// The batch of sends under construction. The lists are linked when they are complete, because they may move
/// before.
pub(crate) struct Sends {
    slot: Slot,
    requests: Vec<sys::ibv_send_wr>,
    segments: Segments,
    /// Inline payloads of more slices than the device takes segments.
    gathered: Vec<u8>,
    gate: Gate,
}

/// Whether the device gets requests already. On iWARP the gate opens when there is a connection; users see
/// the queue pair in Rts long before.
enum Gate {
    Open,
    Shut(Vec<HeldRequest>),
}

/// A request that waits for the gate to open.
struct HeldRequest {
    request: sys::ibv_send_wr,
    segments: Vec<sys::ibv_sge>,
    /// The content of an inline payload when it was posted.
    inline: Option<Vec<u8>>,
}

// SAFETY: the pointers in the list are to memory of this value's own, or of the caller's for as long as the
// call in which they are used.
unsafe impl Send for Sends {}

impl fmt::Debug for Sends {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sends").field("slot", &self.slot).finish_non_exhaustive()
    }
}

impl Sends {
    /// Creates a batch with an open or a shut gate.
    pub(crate) fn new(capacity: &QueuePairCapacity, open: bool) -> Self {
        let segments = capacity.send_segments.max(1) as usize * BATCH;
        Self {
            slot: Slot::default(),
            gate: if open { Gate::Open } else { Gate::Shut(Vec::new()) },
            requests: Vec::with_capacity(BATCH),
            segments: Segments(Vec::with_capacity(segments)),
            gathered: Vec::with_capacity(capacity.inline as usize * BATCH),
        }
    }

    /// Sets the slot of the queue pair in the table of its completion queue.
    pub(crate) fn set_slot(&mut self, slot: Slot) {
        self.slot = slot;
    }

    /// Posts a write of no bytes.
    pub(crate) fn nudge(&mut self, pair: &Core) -> Result<(), PostErrorKind> {
        let ticket = Ticket { kind: RequestKind::Hello, slot: self.slot, position: 0 };
        let mut nothing = sys::ibv_send_wr { wr_id: ticket.to_bits(), ..Default::default() };
        nothing.opcode = sys::ibv_wr_opcode::IBV_WR_RDMA_WRITE;
        hand_over(pair, &mut nothing).map_err(|(error, _)| post_error_kind(error))
    }

    /// Opens the gate: sends the hello, and hands the device all held requests. Does nothing if the gate is
    /// open.
    pub(crate) fn open(&mut self, pair: &Core) -> Result<(), PostErrorKind> {
        let Gate::Shut(held) = std::mem::replace(&mut self.gate, Gate::Open) else { return Ok(()) };
        let ticket = Ticket { kind: RequestKind::Hello, slot: self.slot, position: 0 };
        let mut hello = sys::ibv_send_wr { wr_id: ticket.to_bits(), ..Default::default() };
        hello.opcode = sys::ibv_wr_opcode::IBV_WR_SEND;
        hand_over(pair, &mut hello).map_err(|(error, _)| post_error_kind(error))?;
        for mut held in held {
            if let (Some(inline), Some(segment)) = (&held.inline, held.segments.first_mut()) {
                segment.addr = inline.as_ptr() as u64;
            }
            held.request.sg_list = held.segments.as_mut_ptr();
            hand_over(pair, &mut held.request).map_err(|(error, _)| post_error_kind(error))?;
        }
        Ok(())
    }

    pub(crate) fn post(
        &mut self,
        pair: &Core,
        capacity: &QueuePairCapacity,
        device: &DeviceAttributes,
        requests: &[SendRequest<'_>],
    ) -> Result<(), PostError> {
        in_batches(requests, BATCH, |requests| self.post_batch(pair, capacity, device, requests))
    }

    /// Posts all requests before the first one that can't be posted. The error has the index of that request.
    fn post_batch(
        &mut self,
        pair: &Core,
        capacity: &QueuePairCapacity,
        device: &DeviceAttributes,
        requests: &[SendRequest<'_>],
    ) -> Result<(), (usize, PostErrorKind)> {
        let first = pair.sends.position();
        let room = pair.sends.room();
        self.requests.clear();
        self.segments.0.clear();
        self.gathered.clear();
        let mut refused = Ok(());
        for (index, request) in requests.iter().enumerate() {
            if let Err(kind) = may_send(pair, room, index) {
                refused = Err((index, kind));
                break;
            }
            let position = first.wrapping_add(index as u32);
            if let Err(kind) = self.add(request, position, capacity, device) {
                refused = Err((index, kind));
                break;
            }
            if let (Operation::Read { .. }, Some(order)) = (&request.operation, &pair.order) {
                lock(order).post_read(position, request.signaled);
            }
            pair.sends.put(position, request.wr_id);
        }
        self.link();
        let count = self.requests.len();
        pair.sends.post(first.wrapping_add(count as u32));
        if count == 0 || self.keep_back(pair) {
            return refused;
        }
        if let Err((error, bad)) = hand_over(pair, &mut self.requests[0]) {
            let done = self.requests.iter().position(|request| ptr::eq(request, bad)).unwrap_or(0);
            pair.sends.post(first.wrapping_add(done as u32));
            if let Some(order) = &pair.order {
                let refused = (done..count).map(|index| first.wrapping_add(index as u32));
                refused.for_each(|position| lock(order).take_back_read(position));
            }
            return Err((done, post_error_kind(error)));
        }
        refused
    }

    /// Returns whether the batch does not go to the device: held by the gate, or flushed by the poll.
    fn keep_back(&mut self, pair: &Core) -> bool {
        if pair.flushes_here && pair.state() == QueuePairState::Error {
            pair.wake();
            return true;
        }
        let Gate::Shut(held) = &mut self.gate else { return false };
        let mut segments = &self.segments.0[..];
        for request in &self.requests {
            let (mine, rest) = segments.split_at(request.num_sge as usize);
            segments = rest;
            held.push(HeldRequest::new(request, mine));
        }
        true
    }

    /// Appends a request, or returns why it can't be posted.
    fn add(
        &mut self,
        request: &SendRequest<'_>,
        position: u32,
        capacity: &QueuePairCapacity,
        device: &DeviceAttributes,
    ) -> Result<(), PostErrorKind> {
        use sys::{ibv_send_flags as flag, ibv_wr_opcode as opcode};
        let mut wr = sys::ibv_send_wr::default();
        // A device without order must report the end of every READ.
        let is_read = matches!(request.operation, Operation::Read { .. });
        if request.signaled || (is_read && !device.immediate) {
            wr.send_flags = flag::IBV_SEND_SIGNALED.0;
        }
        let (data, remote, immediate, kind) = match request.operation {
            Operation::Send { data, immediate } => (data, None, immediate, RequestKind::Send),
            Operation::Write { data, remote, immediate } => {
                (data, Some(remote), immediate, RequestKind::Write)
            }
            Operation::Read { into, remote } => {
                (Payload::Registered(into), Some(remote), None, RequestKind::Read)
            }
        };
        if immediate.is_some() && !device.immediate {
            return Err(PostErrorKind::Unsupported);
        }
        wr.opcode = match (kind, immediate) {
            (RequestKind::Read, _) => opcode::IBV_WR_RDMA_READ,
            (RequestKind::Write, None) => opcode::IBV_WR_RDMA_WRITE,
            (RequestKind::Write, Some(_)) => opcode::IBV_WR_RDMA_WRITE_WITH_IMM,
            (_, None) => opcode::IBV_WR_SEND,
            (_, Some(_)) => opcode::IBV_WR_SEND_WITH_IMM,
        };
        wr.__bindgen_anon_1.imm_data = immediate.unwrap_or(0).to_be();
        if let Some(remote) = remote {
            wr.wr.rdma = sys::ibv_send_wr__bindgen_ty_2__bindgen_ty_1 {
                remote_addr: remote.address,
                rkey: remote.rkey.0,
            };
        }
        wr.wr_id = Ticket { kind, slot: self.slot, position }.to_bits();
        wr.num_sge = match data {
            Payload::Registered(segments) => {
                let is_read = kind == RequestKind::Read;
                let most = if is_read { device.max_read_segments } else { u32::MAX };
                let most = capacity.send_segments.min(most);
                // iWARP names the sink of a READ to the peer, even if it is empty.
                let least = usize::from(is_read && !device.immediate);
                self.segments.add(segments, least, most, device.max_message_size)?
            }
            Payload::Inline(slices) => {
                if data.length() > capacity.inline.into() {
                    return Err(PostErrorKind::InlineTooLong);
                }
                wr.send_flags |= flag::IBV_SEND_INLINE.0;
                self.add_inline(slices, capacity)
            }
        };
        self.requests.push(wr);
        Ok(())
    }

    /// Appends the segments of an inline payload. The caller has checked its length.
    fn add_inline(&mut self, slices: &[std::io::IoSlice<'_>], capacity: &QueuePairCapacity) -> i32 {
        let filled = slices.iter().filter(|slice| !slice.is_empty());
        let count = filled.clone().count();
        if count <= capacity.send_segments as usize {
            self.segments.0.extend(filled.map(|slice| inline_segment(slice.as_ptr(), slice.len())));
            return count as i32;
        }
        // The bytes fit in the capacity that `new` reserved, so bytes that are there already do not move.
        let start = self.gathered.len();
        filled.for_each(|slice| self.gathered.extend_from_slice(slice));
        let gathered = &self.gathered[start..];
        self.segments.0.push(inline_segment(gathered.as_ptr(), gathered.len()));
        1
    }

    fn link(&mut self) {
        let (requests, mut segments) = (self.requests.as_mut_ptr(), self.segments.0.as_mut_ptr());
        let count = self.requests.len();
        for (index, request) in self.requests.iter_mut().enumerate() {
            request.sg_list = segments;
            segments = segments.wrapping_add(request.num_sge as usize);
            request.next = if index + 1 < count { requests.wrapping_add(index + 1) } else { ptr::null_mut() };
        }
    }
}

impl HeldRequest {
    fn new(request: &sys::ibv_send_wr, segments: &[sys::ibv_sge]) -> Self {
        let mut held = Self {
            request: sys::ibv_send_wr { next: ptr::null_mut(), ..*request },
            segments: segments.to_vec(),
            inline: None,
        };
        if request.send_flags & sys::ibv_send_flags::IBV_SEND_INLINE.0 != 0 && !segments.is_empty() {
            let mut content = Vec::new();
            for segment in segments {
                let start: *const u8 = ptr::with_exposed_provenance(segment.addr as usize);
                // SAFETY: the segment is of an inline payload, which the caller's borrow keeps alive for the
                // call.
                content
                    .extend_from_slice(unsafe { std::slice::from_raw_parts(start, segment.length as usize) });
            }
            held.segments = vec![inline_segment(content.as_ptr(), content.len())];
            held.request.num_sge = 1;
            held.inline = Some(content);
        }
        held
    }
}

/// Gives the device a list of requests. An error comes with the first request that failed.
pub(crate) fn hand_over(
    pair: &Core,
    head: &mut sys::ibv_send_wr,
) -> Result<(), (i32, *mut sys::ibv_send_wr)> {
    let mut bad = ptr::null_mut();
    // SAFETY:
    // - the queue pair is alive, as the caller holds it, and with it its context, whose table never changes,
    // - the list is linked through memory that the caller holds for the whole call, and
    // - what its segments name is either registered memory, which the device checks, or an inline payload,
    //   which is borrowed for the call; and the window and the region of a bind are alive.
    let result = unsafe {
        let pair = pair.as_ptr();
        match (*(*pair).context).ops.post_send {
            Some(post) => post(pair, head, &raw mut bad),
            None => libc::EOPNOTSUPP,
        }
    };
    if result == 0 { Ok(()) } else { Err((result, bad)) }
}

fn inline_segment(start: *const u8, length: usize) -> sys::ibv_sge {
    sys::ibv_sge { addr: start as u64, length: length as u32, lkey: 0 }
}

/// Checks that the request at `index` of a batch may be posted.
fn may_send(pair: &Core, room: u32, index: usize) -> Result<(), PostErrorKind> {
    match pair.state() {
        QueuePairState::Rts | QueuePairState::Error if (index as u32) < room => Ok(()),
        QueuePairState::Rts | QueuePairState::Error => Err(PostErrorKind::QueueFull),
        state => Err(PostErrorKind::State(state)),
    }
}

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
        in_batches(requests, BATCH, |requests| self.post_batch(pair, capacity, requests))
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

/// Segments of all requests of a batch, one after the other.
#[derive(Debug, Default)]
pub(crate) struct Segments(pub(crate) Vec<sys::ibv_sge>);

impl Segments {
    /// Appends segments of registered memory, and empty ones up to `least`. Returns their number.
    pub(crate) fn add(
        &mut self,
        segments: &[LocalSegment],
        least: usize,
        most: u32,
        max_bytes: u64,
    ) -> Result<i32, PostErrorKind> {
        if segments.len() > most as usize {
            return Err(PostErrorKind::TooManySegments);
        }
        if LocalSegment::total(segments) > max_bytes
            || segments.iter().any(|segment| segment.length() > u32::MAX.into())
        {
            return Err(PostErrorKind::MessageTooLong);
        }
        // Some devices take a segment of no bytes for one of 2 GiB (man 3 ibv_post_send does not mention it).
        let filled = segments.iter().filter(|segment| segment.length() > 0);
        let before = self.0.len();
        self.0.extend(filled.map(|segment| sys::ibv_sge {
            addr: segment.address(),
            length: segment.length() as u32,
            lkey: segment.lkey().0,
        }));
        self.0.resize(self.0.len().max(before + least), sys::ibv_sge::default());
        Ok((self.0.len() - before) as i32)
    }
}
