//! A queue pair with its receive buffers: posts requests, and counts completions. A message is sent from
//! memory of the application that the device can read, or from a copy.
//!
//! Connections use it, and the tuner's loopback, which measures a device with the code that connections run.

pub(super) mod receive;

use std::collections::VecDeque;
use std::io::IoSlice;
use std::ops::Range;
use std::sync::Arc;

use self::receive::Receives;
use crate::endpoint::error::ConnectionFault;
use crate::protocol::{ReadRequest, SlotIndex};
use crate::wire::Header;
use tonic_rdma_verbs::memory::{Block, Lease, Pool, Quota};
use tonic_rdma_verbs::unstable::{Grant, Landing, SlabRegistrations, find_sendable};
use tonic_rdma_verbs::{
    DeviceAttributes, LocalSegment, Operation, Payload, QueuePair, QueuePairCapacity, RemoteSegment, Rkey,
    SendRequest, VerbsError,
};

/// A connected queue pair with receive buffers and memory to send from.
#[derive(Debug)]
pub(crate) struct Link {
    pub(in crate::endpoint) queue_pair: Arc<dyn QueuePair>,
    connection: u32,
    pub(in crate::endpoint) receives: Receives,
    /// Send and rendezvous memory.
    pub(in crate::endpoint) pool: Pool,
    /// Every message of this number asks for a completion.
    signal_every: u32,
    /// Each message asks for a completion, because the connection is about to end, and the queue pair must
    /// exist until the last message has arrived.
    pub(in crate::endpoint) signal_all: bool,
    /// The next message asks for a completion.
    signal_next: bool,
    /// Messages posted since the last message that asked for a completion.
    unsignaled: u32,
    /// Messages posted since the start.
    posted: u64,
    /// Messages completed since the start.
    completed: u64,
    /// Registered memory of the application that messages are sent from.
    registrations: SlabRegistrations,
    /// Memory of messages that were not sent inline, each with the number of its send.
    sources: VecDeque<(u64, Source)>,
}

impl Link {
    /// Most slices of one message.
    pub(crate) const SLICES: usize = MAX_SLICES;
    /// Most outstanding READs of one connection.
    pub(crate) const READS: u32 = 16;
    /// Most messages without a completion, as long as nothing asks for one.
    const SIGNAL_EVERY: u32 = 64;
    /// Most inline bytes, a full receive buffer.
    pub(crate) const MAX_INLINE: u32 = 64 * 1024 + 512;

    /// Returns how many READs of one connection may be outstanding on this device.
    pub(crate) fn reads(attributes: &DeviceAttributes) -> u32 {
        Self::READS.min(attributes.max_outstanding_reads).max(1)
    }

    /// Returns the capacity of a queue pair for `sends` messages beside the READs, as far as the device has
    /// it.
    pub(crate) fn capacity(
        attributes: &DeviceAttributes,
        sends: u32,
        receives: u32,
        max_inline: Option<u32>,
    ) -> QueuePairCapacity {
        let reads = Self::reads(attributes);
        QueuePairCapacity {
            send_requests: sends.min(attributes.max_work_requests - reads) + reads,
            receive_requests: receives,
            send_segments: (Self::SLICES as u32).min(attributes.max_segments),
            receive_segments: 1,
            inline: attributes.max_inline.min(max_inline.unwrap_or(u32::MAX)).min(Self::MAX_INLINE),
        }
    }

    /// Returns how many sends may be outstanding to a peer with `slots` receive buffers so that the sends
    /// never wait for their completions: one for each buffer, as many again that have arrived but have not
    /// completed here, and those that ask for no completion.
    pub(crate) fn sends_for(slots: u32) -> u32 {
        slots.saturating_mul(2).saturating_add(Self::SIGNAL_EVERY)
    }

    /// Takes over a queue pair in Init or a later state. Posts the receive buffers, unless they are shared.
    pub(crate) fn new(
        queue_pair: Arc<dyn QueuePair>,
        connection: u32,
        pool: Pool,
        registrations: SlabRegistrations,
        receives: Receives,
    ) -> Result<Self, ConnectionFault> {
        receives.post_first(&*queue_pair, connection)?;
        let signal_every = (queue_pair.capacity().send_requests / 8).clamp(1, Self::SIGNAL_EVERY);
        Ok(Self {
            queue_pair,
            connection,
            receives,
            pool,
            signal_every,
            signal_all: false,
            signal_next: false,
            unsignaled: 0,
            posted: 0,
            completed: 0,
            registrations,
            sources: VecDeque::new(),
        })
    }

    /// Posts the receive buffer of `slot` again.
    pub(crate) fn post_receive(&self, slot: SlotIndex) -> Result<(), ConnectionFault> {
        self.receives.post(slot.0, &*self.queue_pair, self.connection)
    }

    /// Sends one message, the concatenation of `slices`. Returns how many of its bytes were not copied on
    /// this side.
    pub(crate) fn post_message(&mut self, slices: &[IoSlice<'_>]) -> Result<usize, ConnectionFault> {
        let length: usize = slices.iter().map(|slice| slice.len()).sum();
        let inline = length <= self.queue_pair.capacity().inline as usize;
        self.unsignaled += 1;
        let signaled = self.signal_all || self.signal_next || self.unsignaled >= self.signal_every;
        let wr_id = self.id(WorkKind::Send, self.unsignaled);
        let in_place = if inline {
            self.post_send(wr_id, Payload::Inline(slices), signaled)?;
            length
        } else {
            let (number, most) = (self.posted + 1, self.queue_pair.capacity().send_segments as usize);
            let keep = |source| self.sources.push_back((number, source));
            let gathered = gather(slices, most, &self.pool, &mut self.registrations, keep)?;
            self.post_send(wr_id, Payload::Registered(gathered.segments()), signaled)?;
            gathered.in_place
        };
        self.posted += 1;
        if signaled {
            self.unsignaled = 0;
            self.signal_next = false;
        }
        Ok(in_place)
    }

    fn post_send(&self, wr_id: u64, data: Payload<'_>, signaled: bool) -> Result<(), ConnectionFault> {
        let operation = Operation::Send { data, immediate: None };
        Ok(self.queue_pair.post_send(&[SendRequest { wr_id, operation, signaled }])?)
    }

    /// Frees memory that is kept for sending, because nothing was sent for a while. Memory of messages
    /// without a completion is freed later: the next message asks for a completion.
    pub(crate) fn release_idle_memory(&mut self) {
        self.signal_next = !self.sources.is_empty();
        self.pool.trim();
        self.registrations.prune();
    }

    /// Returns whether all posted messages have completed.
    pub(crate) fn is_drained(&self) -> bool {
        self.completed == self.posted
    }

    /// Notes that the `count` oldest outstanding sends have completed.
    pub(crate) fn sends_completed(&mut self, count: u32) {
        self.completed += u64::from(count);
        while self.sources.front().is_some_and(|(sends, _)| *sends <= self.completed) {
            self.sources.pop_front();
        }
    }

    /// Posts a READ of a chunk that the peer offered, into `block`.
    pub(crate) fn post_read(&mut self, request: &ReadRequest, block: &Block) -> Result<(), ConnectionFault> {
        let into = block.segment(0..request.length as usize).map_err(ConnectionFault::local)?;
        let remote = RemoteSegment { address: request.address, rkey: Rkey(request.rkey) };
        let operation = Operation::Read { into: &[into], remote };
        let wr_id = self.id(WorkKind::Read, request.id.0);
        Ok(self.queue_pair.post_send(&[SendRequest { wr_id, operation, signaled: true }])?)
    }

    /// Posts a READ of `remote` into `range` of `landing`. Its completion carries `value`.
    pub(crate) fn post_landing(
        &self,
        landing: &mut Landing,
        value: u32,
        range: Range<usize>,
        remote: RemoteSegment,
    ) -> Result<(), ConnectionFault> {
        let wr_id = self.id(WorkKind::Read, value);
        Ok(landing.post_read(&*self.queue_pair, wr_id, range, remote)?)
    }

    /// Finds the first of `slices` that has at least `least` bytes, and that the peer can be granted where it
    /// lies. Returns its number and its memory.
    pub(crate) fn first_to_lend(&self, slices: &[IoSlice<'_>], least: usize) -> Option<(usize, Lease)> {
        if !self.can_lend() {
            return None;
        }
        let mut long = slices.iter().enumerate().filter(|(_, slice)| slice.len() >= least.max(SMALLEST));
        long.find_map(|(number, slice)| Some((number, find_sendable(slice)?)))
    }

    /// Returns whether the peer can be granted memory of the application without a registration.
    pub(crate) fn can_lend(&self) -> bool {
        self.queue_pair.has_windows()
    }

    /// Grants the peer the right to read the bytes of `lease`, and no others. Returns `None` if the device
    /// allows no more grants.
    pub(crate) fn grant(&mut self, lease: &Lease) -> Option<Grant> {
        Grant::in_slab(&*self.queue_pair, &mut self.registrations, lease).ok().flatten()
    }

    /// Returns the first bytes of a received message.
    pub(crate) fn first_bytes<const LENGTH: usize>(
        &self,
        slot: u32,
    ) -> Result<[u8; LENGTH], ConnectionFault> {
        let mut bytes = [0; LENGTH];
        let (block, start) = self.receives.slot(slot)?;
        block.copy_out(start, &mut bytes).map_err(ConnectionFault::local)?;
        Ok(bytes)
    }

    /// Fills `body` with the bytes after the header of a received message.
    pub(crate) fn body(&self, slot: u32, body: &mut [u8]) -> Result<(), ConnectionFault> {
        let (block, start) = self.receives.slot(slot)?;
        block.copy_out(start + Header::LENGTH, body).map_err(ConnectionFault::local)
    }

    fn id(&self, kind: WorkKind, value: u32) -> u64 {
        WorkId { kind, connection: self.connection, value }.to_bits()
    }
}

/// Memory that is kept until a message was sent.
#[derive(Debug)]
enum Source {
    /// The copy of slices that could not be sent in place.
    Copy(#[expect(dead_code, reason = "held for its drop")] Block),
    /// The application's memory.
    Lease(#[expect(dead_code, reason = "held for its drop")] Lease),
}

/// A message in memory that the device can read.
#[derive(Debug)]
struct Gathered {
    segments: [LocalSegment; MAX_SLICES],
    count: usize,
    /// Bytes that were not copied.
    in_place: usize,
}

/// Most slices of one message.
const MAX_SLICES: usize = 16;
/// Shorter slices are copied, because a segment of their own costs the device more.
const SMALLEST: usize = 1024;

/// Returns whether most of `length` bytes lie in memory that can be sent in place.
pub(in crate::endpoint) fn lies_in_place(slices: &[IoSlice<'_>], length: usize) -> bool {
    let found = slices.iter().filter(|slice| slice.len() >= SMALLEST && find_sendable(slice).is_some());
    found.map(|slice| slice.len()).sum::<usize>() > length / 2
}

/// Describes `slices` by as few segments as possible, at most `most`. Slices in memory for sending stay in
/// place; the others are copied into a block of `pool`. Passes the memory that has to be kept until the
/// message was sent to `keep`.
fn gather(
    slices: &[IoSlice<'_>],
    most: usize,
    pool: &Pool,
    registrations: &mut SlabRegistrations,
    mut keep: impl FnMut(Source),
) -> Result<Gathered, ConnectionFault> {
    let mut placed = [None; MAX_SLICES];
    let mut in_place = 0;
    // Each slice in place takes two segments: its own, and one for the copied bytes before it. One more
    // segment is for the copied bytes at the end.
    let mut room = most.min(MAX_SLICES).saturating_sub(1) / 2;
    for (slice, place) in slices.iter().zip(&mut placed).filter(|(slice, _)| slice.len() >= SMALLEST) {
        if room > 0
            && let Some(lease) = find_sendable(slice)
            && let Some(segment) = registrations.segment(&lease)
        {
            *place = Some(segment);
            in_place += slice.len();
            room -= 1;
            keep(Source::Lease(lease));
        }
    }
    let length: usize = slices.iter().map(|slice| slice.len()).sum();
    let mut block = pool.lease(length - in_place, Quota::Send).map_err(ConnectionFault::local)?;
    let segments = arrange(slices, &placed, &mut block).map_err(ConnectionFault::local)?;
    keep(Source::Copy(block));
    Ok(Gathered { in_place, ..segments })
}

/// Copies the slices that are not in `placed` into `block`, and lists all segments in order.
fn arrange(
    slices: &[IoSlice<'_>],
    placed: &[Option<LocalSegment>],
    block: &mut Block,
) -> Result<Gathered, VerbsError> {
    let nothing = block.segment(0..0)?;
    let mut gathered = Gathered { segments: [nothing; MAX_SLICES], count: 0, in_place: 0 };
    let (mut from, mut at) = (0, 0);
    for (slice, place) in slices.iter().zip(placed) {
        if let Some(segment) = place {
            gathered.add(block, from..at)?;
            gathered.push(*segment);
            from = at;
        } else {
            block.copy_in(at, slice)?;
            at += slice.len();
        }
    }
    gathered.add(block, from..at)?;
    Ok(gathered)
}

impl Gathered {
    fn segments(&self) -> &[LocalSegment] {
        &self.segments[..self.count]
    }

    fn add(&mut self, block: &Block, range: std::ops::Range<usize>) -> Result<(), VerbsError> {
        if !range.is_empty() {
            self.push(block.segment(range)?);
        }
        Ok(())
    }

    fn push(&mut self, segment: LocalSegment) {
        self.segments[self.count] = segment;
        self.count += 1;
    }
}

/// The content of the 64 bits of `wr_id`: kind (8 bits), connection (24 bits), value (32 bits).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkId {
    /// Kind of the request.
    pub kind: WorkKind,
    /// Key of the connection within its queue.
    pub connection: u32,
    /// A number whose meaning depends on the kind.
    pub value: u32,
}

/// The kind of a work request, which gives the value its meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkKind {
    /// A receive; the value is its slot.
    Receive,
    /// A send; the value is how many sends this completion stands for.
    Send,
    /// A READ; the value is the read's number.
    Read,
    /// A receive of a shared receive queue; the value is its slot. The completion names the queue pair.
    SharedReceive,
}

impl WorkId {
    /// Most connections of a queue.
    pub const MAX_CONNECTIONS: u32 = 1 << 24;

    /// Packs the identifier into a `wr_id`.
    #[inline]
    pub fn to_bits(self) -> u64 {
        let kind: u64 = match self.kind {
            WorkKind::Receive => 0,
            WorkKind::Send => 1,
            WorkKind::Read => 2,
            WorkKind::SharedReceive => 3,
        };
        kind << 56 | u64::from(self.connection % Self::MAX_CONNECTIONS) << 32 | u64::from(self.value)
    }

    /// Unpacks a `wr_id`. [`to_bits`](Self::to_bits) makes all identifiers, so there is no unknown kind. It
    /// would count as a READ.
    #[inline]
    pub fn from_bits(bits: u64) -> Self {
        let kind = match bits >> 56 {
            0 => WorkKind::Receive,
            1 => WorkKind::Send,
            3 => WorkKind::SharedReceive,
            _ => WorkKind::Read,
        };
        Self { kind, connection: (bits >> 32) as u32 % Self::MAX_CONNECTIONS, value: bits as u32 }
    }
}

#[cfg(test)]
mod work_id_tests {
    use super::*;

    #[test]
    fn from_bits_reverses_to_bits() {
        for kind in [WorkKind::Receive, WorkKind::Send, WorkKind::Read, WorkKind::SharedReceive] {
            for (connection, value) in [(0, 0), (1, u32::MAX), (WorkId::MAX_CONNECTIONS - 1, 7)] {
                let id = WorkId { kind, connection, value };
                assert_eq!(WorkId::from_bits(id.to_bits()), id);
            }
        }
    }
}
