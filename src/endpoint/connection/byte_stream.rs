//! The byte stream of a connection. Reading delivers arrived bytes in order. Writing gathers small writes,
//! sends writes eagerly, or offers them by rendezvous, from where they lie or from a copy. The `Chooser` knows
//! the lengths up to which writes are gathered, and from which on they go by rendezvous.

use std::collections::{HashMap, VecDeque};
use std::io::IoSlice;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use tokio::io::ReadBuf;

use super::state::{LinkConnection, Traffic};
use crate::endpoint::deferred::Deferred;
use crate::endpoint::error::ConnectionFault;
use crate::endpoint::info::Counters;
use crate::endpoint::link::{self, Link};
use crate::endpoint::tuner::Chooser;
use crate::protocol::{AbortCode, Blocked, Chunk, Event, MAX_CHUNKS, Part, ReadId};
use tonic_rdma_verbs::VerbsErrorKind;
use tonic_rdma_verbs::memory::{Block, Lease, Quota};
use tonic_rdma_verbs::unstable::{Grant, RemoteRange};

/// The state of a connection that carries a byte stream.
#[derive(Debug)]
pub(in crate::endpoint) struct ByteStream {
    pub(super) base: LinkConnection,
    chooser: Chooser,
    /// Small writes, gathered until a flush or until they fill a message.
    pub(super) staging: Vec<u8>,
    pub(super) flush_wanted: bool,
    /// Memory that the peer reads, oldest first.
    sources: VecDeque<Source>,
    /// Memory that our READs fill, kept until its bytes are delivered.
    landings: HashMap<ReadId, Block>,
    pub(super) reader: Option<Waker>,
    pub(super) writer: Option<Waker>,
    /// The task that waits until all bytes are delivered.
    pub(super) closer: Option<Waker>,
    pub(super) quota: ReadQuota,
    /// Bytes went to the peer since the last flush.
    pub(super) has_sent: bool,
    /// Bytes were read since the last flush.
    pub(super) has_read: bool,
    shortage: Shortage,
}

/// The memory of one chunk that the peer reads.
#[derive(Debug)]
enum Source {
    /// A copy of written bytes.
    Copy(#[expect(dead_code, reason = "held for its drop")] Block),
    /// The application's memory. The last chunk of a write ends the peer's right to read it.
    Lent(#[expect(dead_code, reason = "held for its drop")] Arc<Grant>),
}

impl ByteStream {
    pub(in crate::endpoint) fn new(base: LinkConnection, chooser: Chooser) -> Self {
        Self {
            base,
            chooser,
            staging: Vec::new(),
            flush_wanted: false,
            sources: VecDeque::new(),
            landings: HashMap::new(),
            reader: None,
            writer: None,
            closer: None,
            quota: ReadQuota::default(),
            has_sent: false,
            has_read: false,
            shortage: Shortage::default(),
        }
    }

    /// Takes the events of the protocol.
    fn handle_events(&mut self) -> Result<(), ConnectionFault> {
        let (sources, staging) = (&mut self.sources, &mut self.staging);
        self.base.handle_events(|event| match event {
            // After the end there are no sources any more.
            Event::SourcesDone { count } => drop(sources.drain(..sources.len().min(count as usize))),
            Event::Idle => staging.shrink_to(Chooser::LEAST_GATHERED),
            _ => {}
        })
    }

    /// Returns whether both directions are closed, the peer has all bytes that were written, and this side
    /// has read the peer's last byte. After a fault no acknowledgement to the peer is needed, because none
    /// can be sent.
    pub(super) fn all_delivered(&self) -> bool {
        let LinkConnection { protocol, link, fault, .. } = &self.base;
        let over = match fault {
            None => protocol.is_closed() && link.is_drained(),
            Some(_) => protocol.is_read_closed() && protocol.is_write_done(),
        };
        over && self.staging.is_empty()
    }
}

impl Traffic for ByteStream {
    fn base(&self) -> &LinkConnection {
        &self.base
    }

    fn base_mut(&mut self) -> &mut LinkConnection {
        &mut self.base
    }

    fn progress(&mut self, counters: &Counters) -> Result<(), ConnectionFault> {
        if self.base.obstacle().is_some() {
            return self.handle_events();
        }
        if self.base.detached {
            self.discard();
        }
        self.base.post_receives()?;
        self.handle_events()?;
        self.start_reads(counters)?;
        if self.flush_wanted {
            self.flush_staging(counters)?;
        }
        if self.base.detached && self.staging.is_empty() {
            self.base.protocol.close_write();
        }
        self.base.post_control(counters)
    }

    fn read_completed(&mut self, read: u32, _: u64, counters: &Counters) {
        let read = ReadId(read);
        if let Some(block) = self.landings.get(&read) {
            counters.rendezvous_received_bytes.add(block.len() as u64);
        }
        self.base.protocol.handle_read_completed(read);
    }

    fn has_unsent(&self) -> bool {
        !self.staging.is_empty()
    }

    fn is_transferring(&self) -> bool {
        self.writer.is_some()
    }

    fn conclude(&mut self) {
        // After the end no message of the peer says that chunks were read.
        self.sources.clear();
    }

    fn retry(&self) -> Option<Instant> {
        self.shortage.retry()
    }

    fn detach(&mut self, counters: &Counters) -> Result<(), ConnectionFault> {
        self.flush_wanted = true;
        (self.reader, self.writer, self.closer) = (None, None, None);
        if self.base.obstacle().is_none() {
            self.flush_staging(counters)?;
        }
        Ok(())
    }

    fn take_deferred(&mut self, after: &mut Deferred) {
        let wakers = &mut after.wakers;
        let ended = self.base.fault.is_some();
        if ended || self.base.protocol.front().is_some() || self.base.protocol.is_read_closed() {
            wakers.extend(self.reader.take());
        }
        if ended || self.base.lost.is_some() || (self.writer.is_some() && self.has_room()) {
            wakers.extend(self.writer.take());
        }
        if ended || (self.closer.is_some() && self.all_delivered()) {
            wakers.extend(self.closer.take());
        }
    }
}

impl ByteStream {
    /// Posts READs for the chunks that the peer offered, as far as there is memory for them.
    pub(super) fn start_reads(&mut self, counters: &Counters) -> Result<(), ConnectionFault> {
        while let Some(request) = self.base.protocol.peek_read() {
            let block = match self.base.link.pool.lease(request.length as usize, Quota::Receive) {
                Ok(block) => block,
                Err(error) => match error.kind() {
                    // Delivery of the READs in progress frees memory.
                    VerbsErrorKind::QuotaExhausted if !self.landings.is_empty() => return Ok(()),
                    VerbsErrorKind::NoMemory if self.shortage.keep_waiting(Instant::now()) => {
                        // The supervisor does not know yet when to try again.
                        if self.shortage.is_new() {
                            self.base.changed.notify_one();
                        }
                        return Ok(());
                    }
                    _ => return Err(ConnectionFault::local(error)),
                },
            };
            self.base.link.post_read(&request, &block)?;
            self.base.protocol.start_read();
            counters.reads.add(1);
            counters.work_requests.add(1);
            self.landings.insert(request.id, block);
        }
        self.shortage = Shortage::default();
        Ok(())
    }

    /// Returns whether bytes were written and none were read since the last call.
    pub(super) fn take_waits(&mut self) -> bool {
        let has_read = std::mem::take(&mut self.has_read);
        std::mem::take(&mut self.has_sent) && !has_read
    }

    /// Copies arrived bytes into `buffer`, as many as the reader's quota allows. Returns their number.
    pub(super) fn read(&mut self, buffer: &mut ReadBuf<'_>) -> Result<usize, ConnectionFault> {
        let before = buffer.remaining();
        while buffer.remaining() > 0
            && !self.quota.is_used_up()
            && let Some(part) = self.base.protocol.front()
        {
            let (block, start, offset, length) = match part {
                Part::Eager { slot, offset, length } => {
                    let (buffers, start) = self.base.link.receives.slot(slot.0)?;
                    (buffers, start, offset, length)
                }
                Part::Rendezvous { read, offset, length } => match self.landings.get(&read) {
                    Some(block) => (block, 0, offset, length),
                    None => return Err(ConnectionFault::local("a read without its memory")),
                },
            };
            let count = self.quota.take(length, offset + length, buffer.remaining());
            block
                .copy_out_to(start + offset..start + offset + count, buffer)
                .map_err(ConnectionFault::local)?;
            self.consume(count);
        }
        Ok(before - buffer.remaining())
    }

    /// Discards bytes that arrive after the stream was dropped, and sends the peer an abort.
    pub(super) fn discard(&mut self) {
        while let Some(part) = self.base.protocol.front() {
            let (Part::Eager { length, .. } | Part::Rendezvous { length, .. }) = part;
            self.consume(length);
            self.base.protocol.abort(AbortCode::CLOSED);
            // After an abort nothing more is sent.
            self.staging.clear();
        }
    }

    fn consume(&mut self, count: usize) {
        if let Some(read) = self.base.protocol.consume(count) {
            self.landings.remove(&read);
        }
    }
}

impl ByteStream {
    /// Takes as many bytes of `slices` as there is room for, and returns their number. `None` if there is no
    /// room.
    pub(super) fn write(
        &mut self,
        slices: &[IoSlice<'_>],
        counters: &Counters,
    ) -> Result<Option<usize>, ConnectionFault> {
        let least = self.chooser.registered_threshold();
        let Some((number, lease)) = least.and_then(|least| self.base.link.first_to_lend(slices, least))
        else {
            return self.write_copied(slices, length_of(slices), counters);
        };
        // What is before it goes first, so that the order holds. The caller then writes the rest.
        let before = length_of(&slices[..number]);
        if before > 0 {
            return self.write_copied(&slices[..number], before, counters);
        }
        if self.flush_staging(counters)?
            && let Some(sent) = self.lend(&lease, counters)?
        {
            return Ok(Some(sent));
        }
        self.send_eagerly(slices, counters)
    }

    /// Writes in one mode, to measure it: by rendezvous in chunks of the length `chunk`, or eagerly. Returns the
    /// number of bytes taken, 0 if there is no room. Fails if there is no memory that the peer's READs would free.
    pub(in crate::endpoint) fn write_by(
        &mut self,
        slices: &[IoSlice<'_>],
        chunk: Option<usize>,
        counters: &Counters,
    ) -> Result<usize, ConnectionFault> {
        self.chooser.fix_chunk(chunk);
        let written = match (chunk, self.base.link.first_to_lend(slices, 0)) {
            (None, _) => self.send_eagerly(slices, counters)?,
            (Some(_), None) => self.offer_copies(slices, length_of(slices), counters)?,
            (Some(_), Some((_, lease))) => self.lend(&lease, counters)?,
        };
        if written.is_none()
            && chunk.is_some()
            && self.sources.is_empty()
            && self.base.protocol.rendezvous_room() > 0
        {
            return Err(ConnectionFault::local("no memory, or no grant, for a chunk"));
        }
        Ok(written.unwrap_or(0))
    }

    /// Returns whether a READ waits for memory, and no bytes are here whose delivery frees some.
    pub(in crate::endpoint) fn is_starved(&self) -> bool {
        self.shortage.retry().is_some() && self.landings.is_empty()
    }

    /// Returns whether the peer has memory of writes to read.
    pub(in crate::endpoint) fn is_lending(&self) -> bool {
        !self.sources.is_empty()
    }

    /// Writes `slices`, of `length` bytes, by gathering them, by rendezvous from a copy, or eagerly.
    fn write_copied(
        &mut self,
        slices: &[IoSlice<'_>],
        length: usize,
        counters: &Counters,
    ) -> Result<Option<usize>, ConnectionFault> {
        let gathered = self.staging.len() + length;
        let most = self.chooser.gathered().min(self.base.protocol.max_payload());
        let is_small = gathered <= Chooser::LEAST_GATHERED.min(most);
        if is_small || (gathered <= most && !link::lies_in_place(slices, length)) {
            counters.coalesced_writes.add(1);
            if self.staging.capacity() == 0 {
                self.staging.reserve_exact(Chooser::LEAST_GATHERED);
            }
            slices.iter().for_each(|slice| self.staging.extend_from_slice(slice));
            return Ok(Some(length));
        }
        if self.chooser.by_rendezvous(length)
            && !link::lies_in_place(slices, length)
            && self.flush_staging(counters)?
            && let Some(sent) = self.offer_copies(slices, length, counters)?
        {
            return Ok(Some(sent));
        }
        self.send_eagerly(slices, counters)
    }

    /// Sends as many bytes of `slices` as fit into one message, after the gathered writes.
    fn send_eagerly(
        &mut self,
        slices: &[IoSlice<'_>],
        counters: &Counters,
    ) -> Result<Option<usize>, ConnectionFault> {
        let room = self.base.protocol.eager_room();
        if room > self.staging.len() {
            return self.send(slices, room, counters).map(Some);
        }
        self.flush_wanted |= !self.staging.is_empty();
        match self.base.protocol.blocked_on() {
            Some(Blocked::Credits) => counters.credit_stalls.add(1),
            _ => counters.send_stalls.add(1),
        }
        Ok(None)
    }

    /// Sends the gathered writes as one message. Returns false if the message has to wait.
    pub(super) fn flush_staging(&mut self, counters: &Counters) -> Result<bool, ConnectionFault> {
        if self.staging.is_empty() {
            self.flush_wanted = false;
            return Ok(true);
        }
        let room = self.base.protocol.eager_room();
        if room < self.staging.len() {
            return Ok(false);
        }
        self.send(&[], room, counters)?;
        Ok(true)
    }

    /// Returns whether there is room for a write.
    pub(super) fn has_room(&self) -> bool {
        self.base.protocol.eager_room() > self.staging.len()
    }

    /// Sends the gathered writes and as many bytes of `slices` as fit into one message of `room` bytes.
    /// Returns the number of bytes taken from `slices`.
    fn send(
        &mut self,
        slices: &[IoSlice<'_>],
        room: usize,
        counters: &Counters,
    ) -> Result<usize, ConnectionFault> {
        /// Slices before those of the caller: the header, and the gathered writes.
        const EXTRA: usize = 2;
        let mut room = room - self.staging.len();
        let mut message = [IoSlice::new(&[]); Link::SLICES];
        let mut count = EXTRA;
        let mut taken = 0;
        for slice in slices.iter().filter(|slice| !slice.is_empty()).take(Link::SLICES - EXTRA) {
            let part = slice.len().min(room);
            if part == 0 {
                break;
            }
            message[count] = IoSlice::new(&slice[..part]);
            (count, taken, room) = (count + 1, taken + part, room - part);
        }
        let payload = self.staging.len() + taken;
        let header = self.base.protocol.send_eager(payload).map_err(ConnectionFault::local)?;
        message[0] = IoSlice::new(&header);
        message[1] = IoSlice::new(&self.staging);
        // Header and gathered writes were copied, here or by the device.
        let in_place = self.base.link.post_message(&message[..count])?.min(taken);
        counters.eager_sent.add(1);
        counters.eager_sent_bytes.add(payload as u64);
        counters.work_requests.add(1);
        counters.copies_avoided_bytes.add(in_place as u64);
        self.staging.clear();
        self.flush_wanted = false;
        Ok(taken)
    }

    /// Offers the peer the bytes of `lease` where they lie. Returns the number of bytes; `None` if there is no
    /// room for the offer, or the device allows no more grants.
    fn lend(&mut self, lease: &Lease, counters: &Counters) -> Result<Option<usize>, ConnectionFault> {
        let chunk = self.chooser.chunk();
        let length = lease.len().min(self.offer_room() * chunk);
        if length == 0 {
            return Ok(None);
        }
        let part = lease.part(0..length).map_err(ConnectionFault::local)?;
        let Some(grant) = self.base.link.grant(&part) else { return Ok(None) };
        let RemoteRange { start, .. } = grant.range();
        let grant = Arc::new(grant);
        let mut offer = Offer::default();
        for offset in (0..length).step_by(chunk) {
            let (address, length) = (start.address + offset as u64, chunk.min(length - offset) as u64);
            offer.add(Chunk { address, rkey: start.rkey.0, length }, Source::Lent(Arc::clone(&grant)));
        }
        self.post_offer(&mut offer, counters)?;
        counters.copies_avoided_bytes.add(length as u64);
        Ok(Some(length))
    }

    /// Copies bytes of `slices` into memory that the peer may read, and offers each chunk when it is copied.
    /// Returns the number of bytes; `None` if there is no memory or no room for an offer.
    fn offer_copies(
        &mut self,
        slices: &[IoSlice<'_>],
        length: usize,
        counters: &Counters,
    ) -> Result<Option<usize>, ConnectionFault> {
        let (mut offer, mut taken) = (Offer::default(), 0);
        for _ in 0..self.offer_room() {
            let part = (length - taken).min(self.chooser.chunk());
            if part == 0 {
                break;
            }
            // Without memory the write goes eagerly, or waits.
            let Ok(mut block) = self.base.link.pool.lease(part, Quota::Send) else { break };
            copy_range(&mut block, slices, taken, part)?;
            let remote = block.remote(0);
            let chunk = Chunk { address: remote.address, rkey: remote.rkey.0, length: part as u64 };
            offer.add(chunk, Source::Copy(block));
            taken += part;
            // The peer reads this chunk while the next is copied. When credits are short, the last offer of the
            // write names all chunks that are left.
            if self.base.protocol.data_room() > MAX_CHUNKS as u64 {
                self.post_offer(&mut offer, counters)?;
            }
        }
        self.post_offer(&mut offer, counters)?;
        Ok((taken > 0).then_some(taken))
    }

    /// Returns the number of chunks that may be offered now.
    fn offer_room(&self) -> usize {
        let room = self.chooser.sources().saturating_sub(self.sources.len());
        room.min(self.base.protocol.rendezvous_room())
    }

    /// Sends the peer the addresses of the chunks of `offer`, and empties it. Does nothing if it is empty.
    fn post_offer(&mut self, offer: &mut Offer, counters: &Counters) -> Result<(), ConnectionFault> {
        let chunks = &offer.chunks[..std::mem::take(&mut offer.count)];
        if chunks.is_empty() {
            return Ok(());
        }
        let rts = self.base.protocol.send_rendezvous(chunks).map_err(ConnectionFault::local)?;
        self.base.link.post_message(&[IoSlice::new(rts.as_bytes())])?;
        self.sources.extend(offer.sources.iter_mut().filter_map(Option::take));
        counters.rendezvous_sent.add(1);
        counters.rendezvous_sent_bytes.add(chunks.iter().map(|chunk| chunk.length).sum());
        counters.work_requests.add(1);
        Ok(())
    }
}

fn length_of(slices: &[IoSlice<'_>]) -> usize {
    slices.iter().map(|slice| slice.len()).sum()
}

/// Chunks to be named in one message.
#[derive(Default)]
struct Offer {
    chunks: [Chunk; MAX_CHUNKS],
    sources: [Option<Source>; MAX_CHUNKS],
    count: usize,
}

impl Offer {
    fn add(&mut self, chunk: Chunk, source: Source) {
        self.chunks[self.count] = chunk;
        self.sources[self.count] = Some(source);
        self.count += 1;
    }
}

/// Copies `length` bytes from position `skip` of the slices' concatenation.
fn copy_range(
    block: &mut Block,
    slices: &[IoSlice<'_>],
    mut skip: usize,
    mut length: usize,
) -> Result<(), ConnectionFault> {
    let mut offset = 0;
    for slice in slices {
        if skip >= slice.len() {
            skip -= slice.len();
            continue;
        }
        let part = (slice.len() - skip).min(length);
        block.copy_in(offset, &slice[skip..skip + part]).map_err(ConnectionFault::local)?;
        (offset, length, skip) = (offset + part, length - part, 0);
        if length == 0 {
            break;
        }
    }
    Ok(())
}

/// The number of bytes that a task has read since other tasks last ran.
///
/// HTTP/2 reads all bytes that have arrived before it does anything else. If 32 small calls arrive together,
/// it reads all, then serves all, then sends all answers. Meanwhile the peer has nothing to do. So a reader
/// of small messages goes to the end of the runtime's queue after each [`QUANTUM`](Self::QUANTUM): the calls
/// that it read are served and answered before it reads the next calls (`compare`, 64 B × 32 in flight: more
/// than twice the calls per second).
///
/// A reader of large messages does so after each [`LARGE_QUANTUM`](Self::LARGE_QUANTUM). Otherwise, a client
/// that sends many large messages delays the calls of the other clients by all of them
/// (`cargo bench --bench neighbours`, a busy neighbour).
#[derive(Debug, Default)]
pub(super) struct ReadQuota {
    /// Of small messages.
    taken: usize,
    /// Of large messages.
    large: usize,
    /// There is no quota, because the reader only passes bytes on.
    unlimited: bool,
}

impl ReadQuota {
    /// Bytes of small messages that are read before other tasks run: two or three small calls with their
    /// headers.
    const QUANTUM: usize = 512;
    /// The last bytes of a message, up to this many, are read in several steps, because calls end and begin
    /// there.
    const TAIL: usize = 4096;
    /// Longer messages have a quantum of their own. They are parts of a large message, so their reader gains
    /// little from a wait. The value is most of an HTTP/2 frame of the default size.
    const SMALL: usize = 12 * 1024;
    /// Bytes of large messages that are read before other tasks run: more than a call of 64 KiB has, so such
    /// a call has no wait.
    const LARGE_QUANTUM: usize = 72 * 1024;

    /// Notes that other tasks have run.
    pub(super) fn renew(&mut self) {
        (self.taken, self.large) = (0, 0);
    }

    /// Ends the limit for good.
    pub(super) fn disable(&mut self) {
        *self = Self { unlimited: true, ..Self::default() };
    }

    /// Returns whether other tasks should run now.
    pub(super) fn is_used_up(&self) -> bool {
        self.taken >= Self::QUANTUM || self.large >= Self::LARGE_QUANTUM
    }

    /// Returns how many of the next bytes may be read now, at most `room`, and counts them. They belong to a
    /// message of `whole` bytes of which `left` have not been read.
    pub(super) fn take(&mut self, left: usize, whole: usize, room: usize) -> usize {
        let mut count = left.min(room);
        if self.unlimited {
            return count;
        }
        if whole > Self::SMALL {
            self.large += count;
            return count;
        }
        if left <= Self::TAIL {
            count = count.min(Self::QUANTUM.saturating_sub(self.taken).max(1));
        }
        self.taken += count;
        count
    }
}

/// Tracks READs that wait for memory in use by other connections of this process.
#[derive(Debug, Default)]
pub(super) struct Shortage {
    /// The start of the shortage, and the time of the next attempt.
    times: Option<(Instant, Instant)>,
    is_new: bool,
}

impl Shortage {
    /// Time between two attempts. Connections do not notify one another when they free memory.
    const RETRY: Duration = Duration::from_millis(5);
    /// Longest shortage, after which the connection ends.
    const TIMEOUT: Duration = Duration::from_secs(30);

    /// Notes one more attempt that found no memory. Returns whether to go on waiting.
    pub(super) fn keep_waiting(&mut self, now: Instant) -> bool {
        self.is_new = self.times.is_none();
        let (since, _) = self.times.unwrap_or((now, now));
        self.times = Some((since, now + Self::RETRY));
        now.saturating_duration_since(since) < Self::TIMEOUT
    }

    /// Returns when to try again, if there is a shortage.
    pub(super) fn retry(&self) -> Option<Instant> {
        self.times.map(|(_, retry)| retry)
    }

    /// Returns whether the shortage began since the last call.
    pub(super) fn is_new(&mut self) -> bool {
        std::mem::take(&mut self.is_new)
    }
}

#[cfg(test)]
mod shortage_tests {
    use super::*;

    #[test]
    fn a_shortage_is_waited_out_for_a_while() {
        let (mut shortage, now) = (Shortage::default(), Instant::now());
        assert_eq!((shortage.retry(), shortage.is_new()), (None, false));
        assert!(shortage.keep_waiting(now) && shortage.is_new() && !shortage.is_new());
        assert_eq!(shortage.retry(), Some(now + Shortage::RETRY));
        let later = now + Shortage::TIMEOUT - Duration::from_millis(1);
        assert!(shortage.keep_waiting(later) && !shortage.is_new());
        assert_eq!(shortage.retry(), Some(later + Shortage::RETRY));
        assert!(!shortage.keep_waiting(now + Shortage::TIMEOUT));
    }
}
