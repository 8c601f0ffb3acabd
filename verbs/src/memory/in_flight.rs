//! Operations in flight: this module keeps the memory of each operation until the device is done with it.
//!
//! The memory moves into a [`Transfer`] and comes back with its completion ([`FinishedTransfer`]). Meanwhile
//! there is no reference to the memory, even if the future that waits for the operation is dropped. For this
//! reason the `&mut [u8]` of a region is sound, and the crates above need no `unsafe`.
//!
//! Requests of one queue pair complete in the order of posting, so a completion only needs to carry a number
//! that counts the requests. Long transfers are cut into requests. A request waits until the send queue and
//! the window of bytes have room.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::sync::Arc;

use super::extents::{Block, Lease};
use super::region::{Grant, MemRegion, RemoteRange, SharedRegion};
use super::registrations::{LocalRegistrations, PeerRegion, segment_of};
use crate::{
    Access, CompletionStatus, LocalSegment, MemoryRegion, Operation, Payload, PostError, PostErrorKind,
    QueuePair, RemoteSegment, SendRequest, VerbsError,
};

/// The send queue of one queue pair, and the memory that its requests use. `T` is a token by which the owner
/// of a transfer recognises the transfer.
#[derive(Debug)]
pub struct InFlight<T> {
    queue_pair: Arc<dyn QueuePair>,
    registrations: Arc<LocalRegistrations>,
    limits: TransferLimits,
    /// Oldest first: transfers that wait for their completion, then the transfer being posted, then transfers
    /// that wait for room.
    transfers: VecDeque<Transfer<T>>,
    /// Number of transfers whose requests are all posted.
    posted_transfers: usize,
    /// Number of requests posted so far.
    posted: u64,
    /// Number of requests completed so far.
    completed: u64,
    /// Requests posted since the last signalled one.
    unsignaled: SignaledRequests,
    /// One entry for each outstanding signalled request.
    marks: VecDeque<SignaledRequests>,
    bytes_in_flight: u64,
    /// Whether a request has failed or was refused.
    failed: bool,
}

/// The limits of a send queue.
#[derive(Clone, Copy, Debug)]
pub struct TransferLimits {
    /// Number of requests on the send queue.
    pub requests: u32,
    /// Bytes of one request at most.
    pub message: u64,
    /// Limit of the bytes in flight. When the outstanding requests have this many bytes, no further request
    /// is posted.
    pub window: u64,
}

/// A signalled request, together with the unsignalled ones before it.
#[derive(Clone, Copy, Debug, Default)]
struct SignaledRequests {
    /// Number of the signalled request.
    number: u64,
    /// Number of these requests.
    requests: u32,
    /// Bytes of these requests.
    bytes: u64,
}

/// Number of requests that are posted together at most.
const BATCH: usize = 16;

impl<T> InFlight<T> {
    /// Takes over a connected queue pair, which has receives of its own: one with shared receives would
    /// outlive its drop.
    ///
    /// # Panics
    /// Panics if there is another reference to the queue pair. There must be none, because
    /// [`abandon`](Self::abandon) relies on it: only dropping the last reference proves that the device is
    /// done with the memory of the requests.
    pub fn new(
        queue_pair: Arc<dyn QueuePair>,
        registrations: Arc<LocalRegistrations>,
        limits: TransferLimits,
    ) -> Self {
        assert_eq!(Arc::strong_count(&queue_pair), 1, "a queue pair of one owner");
        Self {
            queue_pair,
            registrations,
            limits,
            transfers: VecDeque::new(),
            posted_transfers: 0,
            posted: 0,
            completed: 0,
            unsignaled: SignaledRequests::default(),
            marks: VecDeque::new(),
            bytes_in_flight: 0,
            failed: false,
        }
    }

    /// Returns the queue pair.
    pub fn queue_pair(&self) -> &dyn QueuePair {
        &*self.queue_pair
    }

    /// Returns the number of transfers that have not ended.
    pub fn unfinished(&self) -> usize {
        self.transfers.len()
    }

    /// Registers the slab of `lease` with the device, unless it is registered. Returns false if the budget or
    /// the device refuses that: a transfer from the lease would fail.
    pub fn registers(&mut self, lease: &Lease) -> bool {
        self.registrations.lease(lease).is_ok()
    }

    /// Grants the peer of this queue pair the right to read the bytes of `lease` ([`Grant::in_slab`]).
    ///
    /// # Errors
    /// The device refuses the window.
    pub fn grant_lease(&mut self, lease: &Lease) -> Result<Option<Grant>, VerbsError> {
        self.registrations.with_slabs(|slabs| Grant::in_slab(&*self.queue_pair, slabs, lease))
    }

    /// Grants the peer of this queue pair the rights `access` to all of `shared`, by a window. Returns `None` if the
    /// device has no window for it, or can't register its slab.
    ///
    /// # Errors
    /// The device refuses the window.
    pub fn grant_region(
        &mut self,
        shared: &SharedRegion,
        access: Access,
    ) -> Result<Option<Grant>, VerbsError> {
        Grant::in_region(&*self.queue_pair, &self.registrations, shared, access)
    }

    /// Returns whether more than half of the send queue is in use, so that the caller should poll for
    /// completions.
    pub fn is_crowded(&self) -> bool {
        self.posted - self.completed > u64::from(self.limits.requests / 2)
    }

    /// Posts one small inline request at once. The device copies the bytes before this function returns. The
    /// completion of the request is not reported. If the request would have to wait, this function posts
    /// nothing and returns false.
    ///
    /// # Errors
    /// The device refuses the request.
    pub fn post_now(
        &mut self,
        wr_id: impl Fn(u32) -> u64,
        operation: Operation<'_>,
    ) -> Result<bool, PostError> {
        debug_assert!(matches!(
            operation,
            Operation::Send { data: Payload::Inline(_), .. }
                | Operation::Write { data: Payload::Inline(_), .. }
        ));
        if self.posted_transfers < self.transfers.len() || self.room() == 0 || self.failed {
            return Ok(false);
        }
        let bytes = match operation {
            Operation::Send { data, .. } | Operation::Write { data, .. } => data.length(),
            Operation::Read { .. } => 0,
        };
        let (number, signaled) = self.number(bytes, false);
        let request = SendRequest { wr_id: wr_id(number as u32), operation, signaled };
        self.queue_pair.post_send(&[request]).inspect_err(|_| self.failed = true)?;
        Ok(true)
    }

    /// Accepts a transfer, and posts its requests as far as there is room.
    ///
    /// # Errors
    /// The device refuses a request.
    pub fn submit(&mut self, transfer: Transfer<T>, wr_id: impl Fn(u32) -> u64) -> Result<(), PostError> {
        self.transfers.push_back(transfer);
        self.pump(wr_id)
    }

    /// Posts waiting requests as far as there is room.
    ///
    /// # Errors
    /// The device refuses a request.
    pub fn pump(&mut self, wr_id: impl Fn(u32) -> u64) -> Result<(), PostError> {
        while self.posted_transfers < self.transfers.len()
            && self.room() > 0
            && self.bytes_in_flight < self.limits.window
            && !self.failed
        {
            self.post_batch(&wr_id)?;
        }
        Ok(())
    }

    /// Records that request `number` and all requests before it have completed. `number` is the low 32 bits
    /// of the request's number, because the identifier of a request has room for 32 bits. Passes each
    /// transfer that has ended to `finished`.
    pub fn completed(
        &mut self,
        number: u32,
        status: CompletionStatus,
        mut finished: impl FnMut(FinishedTransfer<T>),
    ) {
        let number = self.completed + u64::from(number.wrapping_sub(self.completed as u32));
        if number > self.posted {
            return;
        }
        self.completed = number;
        while let Some(mark) = self.marks.front().filter(|mark| mark.number <= number) {
            self.bytes_in_flight -= mark.bytes;
            self.marks.pop_front();
        }
        self.failed |= status != CompletionStatus::Success;
        while let Some(first) = self.transfers.front_mut().filter(|first| first.began_before(number)) {
            if status != CompletionStatus::Success && first.covers(number) {
                first.fail(status);
            }
            if first.last.is_none_or(|last| last > number) {
                break;
            }
            self.posted_transfers -= 1;
            if let Some(first) = self.transfers.pop_front() {
                finished(first.finish());
            }
        }
    }

    /// Destroys the queue pair, so that no request can access memory any more. Then ends every transfer with
    /// `status`; a transfer that has failed before keeps its own status.
    pub fn abandon(self, status: CompletionStatus, mut finished: impl FnMut(FinishedTransfer<T>)) {
        let Self { queue_pair, transfers, .. } = self;
        queue_pair.to_error();
        // This is the only reference, see `new`.
        drop(queue_pair);
        for mut transfer in transfers {
            transfer.fail(status);
            finished(transfer.finish());
        }
    }

    /// Returns the number of free slots in the send queue.
    fn room(&self) -> usize {
        let outstanding = (self.posted - self.completed) as usize;
        (self.limits.requests as usize).saturating_sub(outstanding)
    }

    /// Assigns a number to the next request, which has `bytes` bytes. Returns the number, and whether the
    /// request must be signalled.
    fn number(&mut self, bytes: u64, wanted: bool) -> (u64, bool) {
        let every = (self.limits.requests / 8).clamp(1, 64);
        self.posted += 1;
        let mark = &mut self.unsignaled;
        mark.number = self.posted;
        mark.requests += 1;
        mark.bytes += bytes;
        self.bytes_in_flight += bytes;
        let signaled = wanted || mark.requests >= every || mark.bytes >= self.limits.window / 4;
        if signaled {
            self.marks.push_back(std::mem::take(mark));
        }
        (self.posted, signaled)
    }

    /// Posts requests of the first transfer that is not posted completely.
    fn post_batch(&mut self, wr_id: &impl Fn(u32) -> u64) -> Result<(), PostError> {
        let index = self.posted_transfers;
        let room = self.room().min(BATCH);
        let message = self.limits.message;
        let mut parts: Vec<(RequestPart, Option<LocalSegment>)> = Vec::with_capacity(room);
        let mut bytes = self.bytes_in_flight;
        let transfer = &mut self.transfers[index];
        if let Err(kind) = transfer.register(&self.registrations) {
            self.failed = true;
            return Err(PostError { index: 0, kind });
        }
        while parts.len() < room && (bytes < self.limits.window || parts.is_empty()) {
            let Some(part) = transfer.next_part(message) else { break };
            bytes += part.length();
            let segment = transfer.segment(&part);
            parts.push((part, segment));
        }
        let first = self.posted + 1;
        let numbers: Vec<_> = parts.iter().map(|(part, _)| self.number(part.length(), part.last)).collect();
        let transfer = &mut self.transfers[index];
        transfer.posted(first, self.posted);
        let words: Vec<_> = parts.iter().map(|(part, _)| word(part)).collect();
        let slices = parts.iter().zip(&words).map(|((part, _), word)| [transfer.inline(part, word)]);
        let slices: Vec<_> = slices.collect();
        let requests = parts.iter().zip(&slices).zip(numbers);
        let requests = requests.map(|(((part, segment), slices), (number, signaled))| SendRequest {
            wr_id: wr_id(number as u32),
            operation: transfer.operation(part, segment, slices),
            signaled,
        });
        let result = self.queue_pair.post_send(&requests.collect::<Vec<_>>());
        if transfer.last.is_some() {
            self.posted_transfers += 1;
        }
        result.inspect_err(|_| self.failed = true)
    }
}

/// A transfer of bytes between memory of this process and memory of a peer, and an optional notice at its
/// end.
///
/// The memory moves into the transfer and comes back with [`FinishedTransfer`]:
///
/// ```
/// # use tonic_rdma_verbs::unstable::{CopyRanges, LocalMemory, RemoteRange, Transfer, TransferKind};
/// # use tonic_rdma_verbs::memory::{Budget, MemRegion};
/// # use tonic_rdma_verbs::{RemoteSegment, Rkey};
/// # let budget = Budget::new(1 << 20);
/// # let remote = RemoteRange { start: RemoteSegment { address: 0, rkey: Rkey(0) }, length: 4096 };
/// # let ranges = CopyRanges::Many(Vec::new());
/// let region = MemRegion::allocate(4096, &budget)?;
/// let transfer = Transfer::new(LocalMemory::Region(region), TransferKind::Write, ranges, remote, ());
/// let finished = transfer.refuse();
/// let LocalMemory::Region(mut region) = finished.local else { panic!("a region") };
/// region[0] = 1;
/// # Ok::<(), tonic_rdma_verbs::VerbsError>(())
/// ```
///
/// Meanwhile the program has no access to the memory. The compiler rejects a program that reads the memory,
///
/// ```compile_fail,E0382
/// # use tonic_rdma_verbs::unstable::{CopyRanges, LocalMemory, RemoteRange, Transfer, TransferKind};
/// # use tonic_rdma_verbs::memory::MemRegion;
/// # fn transfer(region: MemRegion, ranges: CopyRanges, remote: RemoteRange) {
/// let transfer = Transfer::new(LocalMemory::Region(region), TransferKind::Write, ranges, remote, ());
/// let _: &[u8] = region.as_ref(); // moved
/// # let _ = transfer.refuse();
/// # }
/// ```
///
/// writes to it,
///
/// ```compile_fail,E0382
/// # use tonic_rdma_verbs::unstable::{CopyRanges, LocalMemory, RemoteRange, Transfer, TransferKind};
/// # use tonic_rdma_verbs::memory::MemRegion;
/// # fn transfer(mut region: MemRegion, ranges: CopyRanges, remote: RemoteRange) {
/// let transfer = Transfer::new(LocalMemory::Region(region), TransferKind::Write, ranges, remote, ());
/// region[0] = 1; // moved
/// # let _ = transfer.refuse();
/// # }
/// ```
///
/// keeps a reference to it,
///
/// ```compile_fail,E0505
/// # use tonic_rdma_verbs::unstable::{CopyRanges, LocalMemory, RemoteRange, Transfer, TransferKind};
/// # use tonic_rdma_verbs::memory::MemRegion;
/// # fn transfer(region: MemRegion, ranges: CopyRanges, remote: RemoteRange) {
/// let bytes = &region[..];
/// let transfer = Transfer::new(LocalMemory::Region(region), TransferKind::Write, ranges, remote, ()); // borrowed
/// let _ = bytes[0];
/// # let _ = transfer.refuse();
/// # }
/// ```
///
/// frees it,
///
/// ```compile_fail,E0382
/// # use tonic_rdma_verbs::unstable::{CopyRanges, LocalMemory, RemoteRange, Transfer, TransferKind};
/// # use tonic_rdma_verbs::memory::MemRegion;
/// # fn transfer(region: MemRegion, ranges: CopyRanges, remote: RemoteRange) {
/// let transfer = Transfer::new(LocalMemory::Region(region), TransferKind::Write, ranges, remote, ());
/// drop(region); // moved
/// # let _ = transfer.refuse();
/// # }
/// ```
///
/// or uses it in a second transfer:
///
/// ```compile_fail,E0382
/// # use tonic_rdma_verbs::unstable::{CopyRanges, LocalMemory, RemoteRange, Transfer, TransferKind};
/// # use tonic_rdma_verbs::memory::MemRegion;
/// # fn transfer(region: MemRegion, ranges: [CopyRanges; 2], remote: RemoteRange) {
/// let [one, two] = ranges;
/// let first = Transfer::new(LocalMemory::Region(region), TransferKind::Write, one, remote, ());
/// let second = Transfer::new(LocalMemory::Region(region), TransferKind::Write, two, remote, ()); // moved
/// # let _ = (first.refuse(), second.refuse());
/// # }
/// ```
#[derive(Debug)]
pub struct Transfer<T> {
    /// Registration of the local memory, if the transfer needs one. This is the first field, so that it is
    /// dropped first: a peer may write to a sink as long as its registration exists.
    registered: Option<Registered>,
    local: LocalMemory,
    kind: TransferKind,
    ranges: CopyRanges,
    remote: RemoteRange,
    notice: Option<Notice>,
    token: T,
    cursor: Cursor,
    /// Whether the last request of the transfer was made.
    ended: bool,
    /// Number of the first request, once it is posted.
    first: Option<u64>,
    /// Number of the last request, once it is posted.
    last: Option<u64>,
    status: CompletionStatus,
}

/// How requests of a transfer name its memory.
#[derive(Debug)]
enum Registered {
    /// By a registration that covers it.
    Here(Arc<dyn MemoryRegion>),
    /// The bytes of a READ from `start` on arrive in other memory first, because the peer may write there at any
    /// time ([`LocalRegistrations::open_sink`]).
    Elsewhere { sink: PeerRegion, start: usize },
}

/// The memory of this process that a transfer uses.
#[derive(Debug)]
pub enum LocalMemory {
    /// A region, to be read or written.
    Region(MemRegion),
    /// A lease, to be read.
    Lease(Lease),
    /// A block, to be read: a copy of bytes that the device could not read in place.
    Block(Block),
    /// A few bytes, which are sent inline.
    Bytes(Vec<u8>),
}

/// The operation of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransferKind {
    /// RDMA WRITE.
    Write,
    /// RDMA READ.
    Read,
    /// A message into the next receive of the peer. It has one range.
    Send,
}

/// A notice to the peer that all bytes of a write have arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    /// This 64-bit word is written after the bytes.
    Word(RemoteSegment, u64),
    /// The peer gets a receive completion with this value.
    Immediate(u32),
}

/// A transfer that has ended.
#[derive(Debug)]
pub struct FinishedTransfer<T> {
    /// The token of the transfer.
    pub token: T,
    /// The memory, which the device does not access any more.
    pub local: LocalMemory,
    /// Success, or the first reason of failure.
    pub status: CompletionStatus,
}

/// The part of a transfer that becomes one request.
#[derive(Clone, Copy, Debug)]
pub struct RequestPart {
    bytes: Option<CopyRange>,
    notice: Option<Notice>,
    /// Whether this is the last part of the transfer.
    pub(super) last: bool,
}

impl RequestPart {
    fn length(&self) -> u64 {
        self.bytes.map_or(0, |range| range.length)
    }
}

impl<T> Transfer<T> {
    /// Makes a transfer of `ranges` between `local` and `remote`. The caller has checked that the ranges lie
    /// within both.
    pub fn new(
        local: LocalMemory,
        kind: TransferKind,
        ranges: CopyRanges,
        remote: RemoteRange,
        token: T,
    ) -> Self {
        let (cursor, status) = (Cursor::default(), CompletionStatus::Success);
        let (notice, registered, first, last) = (None, None, None, None);
        Self {
            registered,
            local,
            kind,
            ranges,
            remote,
            notice,
            token,
            cursor,
            ended: false,
            first,
            last,
            status,
        }
    }

    /// Makes a transfer of `length` bytes at `offset` of `local`, to or from the start of `remote`.
    pub fn of_range(
        local: LocalMemory,
        offset: u64,
        length: u64,
        kind: TransferKind,
        remote: RemoteRange,
        token: T,
    ) -> Self {
        let range = CopyRange { local: offset, remote: 0, length };
        Self::new(local, kind, CopyRanges::One(range), remote, token)
    }

    /// Returns the kind, and the number of bytes that it moves.
    pub fn moves(&self) -> (TransferKind, u64) {
        (self.kind, self.ranges.all().map(|range| range.length).sum())
    }

    /// Returns whether the transfer uses up a receive of the peer, for the immediate data of its notice.
    pub fn sends_immediate(&self) -> bool {
        matches!(self.notice, Some(Notice::Immediate(_)))
    }

    /// Adds a notice to the peer for the end of a write.
    pub fn notify(mut self, notice: Notice) -> Self {
        self.notice = Some(notice);
        self
    }

    /// Ends a transfer that was not posted, and returns its memory.
    pub fn refuse(self) -> FinishedTransfer<T> {
        debug_assert!(self.first.is_none());
        FinishedTransfer {
            token: self.token,
            local: self.local,
            status: CompletionStatus::WorkRequestFlushed,
        }
    }

    /// Registers the memory with the device, if it needs a registration.
    pub fn register(&mut self, known: &LocalRegistrations) -> Result<(), PostErrorKind> {
        if self.registered.is_none() {
            self.registered = match &self.local {
                LocalMemory::Region(region) => self.register_region(region, known)?,
                LocalMemory::Lease(lease) => {
                    Some(Registered::Here(known.lease(lease).map_err(|error| refused(&error))?))
                }
                LocalMemory::Block(_) | LocalMemory::Bytes(_) => None,
            };
        }
        Ok(())
    }

    fn register_region(
        &self,
        region: &MemRegion,
        known: &LocalRegistrations,
    ) -> Result<Option<Registered>, PostErrorKind> {
        let bytes = self.ranges.local_bytes();
        let bytes = bytes.start as usize..bytes.end as usize;
        let registered = match self.kind {
            TransferKind::Read if bytes.is_empty() => return Ok(None),
            TransferKind::Read => match known.open_sink(bytes.len()) {
                Ok(Some(sink)) => return Ok(Some(Registered::Elsewhere { sink, start: bytes.start })),
                Ok(None) => known.region(region),
                // There is no memory for a second sink.
                Err(_) => known.sink_alone(region, bytes),
            },
            TransferKind::Write | TransferKind::Send => known.region(region),
        };
        registered.map(|by| Some(Registered::Here(by))).map_err(|error| refused(&error))
    }

    /// Returns the part for the next request, or `None` at the end. A transfer of no bytes has one empty
    /// part, so that the transfer completes.
    pub fn next_part(&mut self, most: u64) -> Option<RequestPart> {
        if self.ended {
            return None;
        }
        let bytes = self.ranges.next(&mut self.cursor, most);
        let over = self.ranges.is_over(&self.cursor);
        // The word is a separate request after the bytes.
        let word_follows = matches!(self.notice, Some(Notice::Word(..))) && bytes.is_some();
        self.ended = over && !word_follows;
        let notice = self.notice.filter(|_| self.ended);
        Some(RequestPart { bytes, notice, last: self.ended })
    }

    /// Names the local bytes of a part. Returns `None` if the part has no bytes or its bytes are sent inline.
    pub fn segment(&self, part: &RequestPart) -> Option<LocalSegment> {
        let copied = part.bytes?;
        let range = copied.local as usize..(copied.local + copied.length) as usize;
        match (&self.local, &self.registered) {
            (_, Some(Registered::Elsewhere { sink, start })) => {
                // SAFETY: there is no reference to the bytes of a region that stays open.
                Some(unsafe {
                    segment_of(sink.shared.region(), &*sink.slab, range.start - start..range.end - start)
                })
            }
            (LocalMemory::Region(region), Some(Registered::Here(by))) => {
                debug_assert!(self.kind == TransferKind::Read || self.kind == TransferKind::Write);
                // SAFETY: this transfer owns the region from before the request is posted until the request
                // has completed or its queue pair is destroyed. `InFlight` gives the region out only in
                // `FinishedTransfer`.
                Some(unsafe { segment_of(region, &**by, range) })
            }
            (LocalMemory::Lease(lease), Some(Registered::Here(by))) => Some(lease.segment_in(&**by, range)),
            (LocalMemory::Block(block), _) => block.segment(range).ok(),
            (LocalMemory::Region(_) | LocalMemory::Lease(_) | LocalMemory::Bytes(_), _) => None,
        }
    }

    /// Returns the bytes of a part that are sent inline.
    fn inline<'a>(&'a self, part: &RequestPart, word: &'a [u8]) -> IoSlice<'a> {
        IoSlice::new(match (&self.local, part.bytes) {
            (LocalMemory::Bytes(bytes), Some(range)) => {
                bytes.get(range.local as usize..(range.local + range.length) as usize).unwrap_or_default()
            }
            (_, None) if matches!(part.notice, Some(Notice::Word(..))) => word,
            _ => &[],
        })
    }

    /// Makes the operation of a part.
    fn operation<'a>(
        &self,
        part: &RequestPart,
        segment: &'a Option<LocalSegment>,
        slices: &'a [IoSlice<'a>],
    ) -> Operation<'a> {
        let data = match segment {
            Some(segment) => Payload::Registered(std::slice::from_ref(segment)),
            None => Payload::Inline(slices),
        };
        let immediate = match part.notice {
            Some(Notice::Immediate(value)) => Some(value),
            _ => None,
        };
        let offset = part.bytes.map_or(0, |range| range.remote);
        let remote = RemoteSegment {
            address: self.remote.start.address.wrapping_add(offset),
            rkey: self.remote.start.rkey,
        };
        match (self.kind, part.notice) {
            (TransferKind::Send, _) => Operation::Send { data, immediate },
            (TransferKind::Read, _) => {
                let into = segment.as_ref().map_or(&[][..], std::slice::from_ref);
                Operation::Read { into, remote }
            }
            (TransferKind::Write, Some(Notice::Word(word, _))) if part.bytes.is_none() => {
                Operation::Write { data, remote: word, immediate: None }
            }
            (TransferKind::Write, _) => Operation::Write { data, remote, immediate },
        }
    }

    /// Records that the requests `first..=last` of this transfer are posted.
    pub(crate) fn posted(&mut self, first: u64, last: u64) {
        self.first.get_or_insert(first);
        if self.ended {
            self.last = Some(last);
        }
    }

    /// Returns whether a request of this transfer has a number of at most `number`.
    pub(crate) fn began_before(&self, number: u64) -> bool {
        self.first.is_some_and(|first| first <= number)
    }

    /// Returns whether request `number` belongs to this transfer.
    pub(crate) fn covers(&self, number: u64) -> bool {
        self.began_before(number) && self.last.is_none_or(|last| number <= last)
    }

    /// Records a failure. The first reason is kept.
    pub(crate) fn fail(&mut self, status: CompletionStatus) {
        if self.status == CompletionStatus::Success {
            self.status = status;
        }
    }

    /// Ends the transfer. The device does not access its memory any more.
    pub fn finish(mut self) -> FinishedTransfer<T> {
        if let (Some(Registered::Elsewhere { sink, start }), LocalMemory::Region(region)) =
            (&self.registered, &mut self.local)
            && self.status == CompletionStatus::Success
        {
            for range in self.ranges.all() {
                let local = range.local as usize..(range.local + range.length) as usize;
                // The ranges lie within both, see `new`.
                if sink.shared.copy_out(local.start - start, &mut region[local]).is_err() {
                    self.status = CompletionStatus::LocalLength;
                }
            }
        }
        // Before the memory comes back: a peer may write to a sink as long as its registration exists.
        drop(self.registered);
        FinishedTransfer { token: self.token, local: self.local, status: self.status }
    }
}

/// Returns the word that a part writes, or zeros.
fn word(part: &RequestPart) -> [u8; 8] {
    match part.notice {
        Some(Notice::Word(_, value)) => value.to_ne_bytes(),
        _ => [0; 8],
    }
}

/// Logs the reason why the device refuses the memory of a transfer, and returns the error for the transfer.
fn refused(error: &dyn std::fmt::Display) -> PostErrorKind {
    crate::throttled!(warn, %error, "memory for a transfer can't be registered");
    PostErrorKind::Refused(libc::ENOMEM)
}

/// One range of bytes to copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyRange {
    /// Offset in the local memory, in bytes.
    pub local: u64,
    /// Offset in the remote memory, in bytes.
    pub remote: u64,
    /// Length in bytes.
    pub length: u64,
}

/// The ranges of a transfer, in the order of copying.
#[derive(Debug)]
pub enum CopyRanges {
    /// One range.
    One(CopyRange),
    /// Several ranges.
    Many(Vec<CopyRange>),
}

/// The progress of a transfer: a range, and an offset in that range.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Cursor {
    range: usize,
    offset: u64,
}

impl CopyRanges {
    fn as_slice(&self) -> &[CopyRange] {
        match self {
            Self::One(range) => std::slice::from_ref(range),
            Self::Many(ranges) => ranges,
        }
    }

    /// Returns the next range of at most `most` bytes, or `None` at the end. Ranges that are adjacent in both
    /// memories are joined.
    pub(crate) fn next(&self, cursor: &mut Cursor, most: u64) -> Option<CopyRange> {
        let mut found: Option<CopyRange> = None;
        while let Some(range) = self.as_slice().get(cursor.range) {
            let left = range.length - cursor.offset;
            if left == 0 {
                *cursor = Cursor { range: cursor.range + 1, offset: 0 };
                continue;
            }
            let (local, remote) = (range.local + cursor.offset, range.remote + cursor.offset);
            let room = match &found {
                None => most,
                Some(it) if it.local + it.length == local && it.remote + it.length == remote => {
                    most - it.length
                }
                Some(_) => 0,
            };
            if room == 0 {
                break;
            }
            let length = left.min(room);
            cursor.offset += length;
            found = Some(match found {
                None => CopyRange { local, remote, length },
                Some(it) => CopyRange { length: it.length + length, ..it },
            });
        }
        found
    }

    /// Returns the ranges that have bytes.
    fn all(&self) -> impl Iterator<Item = &CopyRange> + Clone {
        self.as_slice().iter().filter(|range| range.length > 0)
    }

    /// Returns the local bytes from the first range to the last; an empty range if there are none.
    fn local_bytes(&self) -> std::ops::Range<u64> {
        let ranges = self.all();
        let start = ranges.clone().map(|range| range.local).min().unwrap_or(0);
        start..ranges.map(|range| range.local + range.length).max().unwrap_or(start)
    }

    /// Returns whether `cursor` is at the end.
    pub(crate) fn is_over(&self, cursor: &Cursor) -> bool {
        let mut rest = *cursor;
        self.next(&mut rest, 1).is_none()
    }
}

#[cfg(test)]
mod ranges_tests {
    use super::*;

    fn all(ranges: &CopyRanges, most: u64) -> Vec<(u64, u64, u64)> {
        let mut cursor = Cursor::default();
        let next = || ranges.next(&mut cursor, most).map(|it| (it.local, it.remote, it.length));
        std::iter::from_fn(next).collect()
    }

    #[test]
    fn long_ranges_are_cut_and_neighbours_are_joined() {
        let one = CopyRanges::One(CopyRange { local: 5, remote: 100, length: 10 });
        assert_eq!(all(&one, 4), [(5, 100, 4), (9, 104, 4), (13, 108, 2)]);
        let range = |local, remote, length| CopyRange { local, remote, length };
        let many = CopyRanges::Many(vec![
            range(0, 50, 3),
            range(3, 53, 3),
            range(6, 60, 0),
            range(6, 70, 2),
            range(20, 72, 1),
        ]);
        assert_eq!(all(&many, 100), [(0, 50, 6), (6, 70, 2), (20, 72, 1)]);
        assert_eq!(all(&many, 4), [(0, 50, 4), (4, 54, 2), (6, 70, 2), (20, 72, 1)]);
        assert_eq!(all(&CopyRanges::Many(Vec::new()), 4), []);
        assert_eq!(all(&CopyRanges::One(range(1, 1, 0)), 4), []);
        assert_eq!(one.local_bytes(), 5..15);
        assert_eq!(many.local_bytes(), 0..21);
        let out_of_order = CopyRanges::Many(vec![range(30, 0, 0), range(20, 0, 2), range(7, 9, 1)]);
        assert_eq!(out_of_order.local_bytes(), 7..22);
        assert!(CopyRanges::Many(Vec::new()).local_bytes().is_empty());
    }
}
