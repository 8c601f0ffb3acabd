//! What only connections of messages have: the handler of their messages, and what it may do while it
//! transmits ([`Sender`]); their memory, both for landing and of the application where the peer may read it;
//! and their fetches, which bring content from the peer's memory by READs.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::fmt::Debug;
use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use foldhash::fast::RandomState;
use slab::Slab;
use tokio::sync::Notify;

use crate::endpoint::connection::{LinkConnection, Traffic};
use crate::endpoint::deferred::Deferred;
use crate::endpoint::error::ConnectionFault;
use crate::endpoint::info::Counters;
use crate::endpoint::link::Link;
use crate::protocol::{self, AbortCode, Blocked, Event, Part, ProtocolViolation};
use tonic_rdma_verbs::memory::{Block, Budget, Lease, Pool, Quota};
use tonic_rdma_verbs::unstable::{
    Landed, Landing, LandingPool, SlabRegistrations, find_sendable, free_for_landings,
};
use tonic_rdma_verbs::{ProtectionDomain, RemoteSegment, VerbsError, VerbsErrorKind};

/// The owner of a connection's messages. It lies in the connection's state, under its lock, and reaches the
/// link through the [`Sender`] only. Tasks to wake, and work that needs no lock, go to [`after`](Self::after).
///
/// A function that returns an error ends the connection with this error.
pub(crate) trait MessageHandler: Any + Send + Debug {
    /// Takes a message. Messages arrive in the order in which the peer sent them. Returns whether
    /// [`transmit`](Self::transmit) would have something to do after that.
    ///
    /// # Errors
    /// The message breaks the rules of the call protocol.
    fn receive(&mut self, message: Bytes) -> Result<bool, ConnectionFault>;

    /// Notes that a fetch is over: no READ of it is in flight, so the peer may free its memory. `content` is
    /// `None` for a fetch that was cancelled.
    fn landed(&mut self, fetch: u64, content: Option<LandedContent>);

    /// Gives messages and fetches to `sender`, a [`Wire`], while it has room and the handler has some. The
    /// connection calls this function again after each [`update`](super::MessageEndpoint::update) that asks
    /// for it, after each group of completions (unless the group brought messages and
    /// [`receive`](Self::receive) says that there is nothing to do), and when there is memory or room again
    /// that `sender` had refused.
    ///
    /// # Errors
    /// The handler can't go on, or an error of `sender`.
    fn transmit(&mut self, sender: &mut Sender<'_>) -> Result<(), ConnectionFault>;

    /// Notes that the peer sends no more messages. All messages of the peer have been received.
    fn peer_finished(&mut self);

    /// Notes that the connection has ended early. There is no such call for a connection that both sides
    /// closed in good order.
    fn ended(&mut self, fault: &ConnectionFault);

    /// Returns what the thread that holds the lock has to do once it does not hold it any more.
    fn after(&mut self) -> &mut Deferred;
}

/// The content of a fetch.
#[derive(Clone, Debug)]
pub(crate) struct LandedContent {
    /// The memory goes back to its pool when the last clone and slice is dropped.
    pub(crate) bytes: Bytes,
    /// The content was copied into ordinary memory.
    pub(crate) is_moved: bool,
}

impl LandedContent {
    /// Landed content is aligned to this number of bytes.
    pub(crate) const ALIGNMENT: usize = Landing::ALIGNMENT;

    /// Copies the content into ordinary memory. Each byte keeps the remainder of its address by
    /// [`ALIGNMENT`](Self::ALIGNMENT).
    pub(crate) fn copy_of(landed: &[u8]) -> Self {
        Self { bytes: Self::joined(&[landed], landed.as_ptr().addr()), is_moved: true }
    }

    /// Copies `parts` into one segment of ordinary memory, whose start has the remainder of `address`.
    pub(crate) fn joined(parts: &[impl AsRef<[u8]>], address: usize) -> Bytes {
        let length = parts.iter().map(|part| part.as_ref().len()).sum::<usize>();
        let mut copy: Vec<u8> = Vec::with_capacity(length + Self::ALIGNMENT - 1);
        let start = address.wrapping_sub(copy.as_ptr().addr()) % Self::ALIGNMENT;
        copy.resize(start, 0);
        parts.iter().for_each(|part| copy.extend_from_slice(part.as_ref()));
        Bytes::from(copy).slice(start..)
    }
}

/// Settings of a message connection, which its session chooses.
#[derive(Clone, Debug)]
pub(crate) struct MessageSettings {
    /// The bytes of landed memory that the application can keep, and as many for content that lands meanwhile.
    pub(crate) landing_budget: u64,
    /// The peer may read content in memory of pools for sending from where it lies. The peer can then read
    /// the whole slab that the content is in. Otherwise content is copied.
    pub(crate) expose: bool,
}

/// The state of a connection that carries messages.
#[derive(Debug)]
pub(in crate::endpoint) struct Messages {
    base: LinkConnection,
    /// The handler, once it has taken the connection over.
    handler: Option<Box<dyn MessageHandler>>,
    memory: MessageMemory,
    fetches: Fetches,
    /// Memory that short messages are copied into, one behind the other.
    inbox: BytesMut,
    /// The handler gave all that it had when it was last asked.
    exhausted: bool,
    finish_reported: bool,
}

impl Messages {
    /// Bytes of the memory that short messages share.
    const INBOX: usize = 16 << 10;
    /// Longer messages have memory of their own, so that no short message keeps it.
    const SHORT: usize = 2 << 10;

    /// Makes the state of a connection in `domain` that posts at most `reads` READs at a time.
    ///
    /// # Errors
    /// The budget has no room for the connection's reserve.
    pub(in crate::endpoint) fn new(
        base: LinkConnection,
        domain: Arc<dyn ProtectionDomain>,
        reads: u32,
    ) -> Result<Self, VerbsError> {
        let memory = MessageMemory::new(domain, &base.link.pool, Arc::clone(&base.changed))?;
        Ok(Self {
            handler: None,
            memory,
            base,
            fetches: Fetches::new(reads),
            inbox: BytesMut::new(),
            exhausted: true,
            finish_reported: false,
        })
    }

    /// Returns the counts of landed memory that is lent.
    pub(super) fn lending(&self) -> &Arc<Lending> {
        &self.memory.lending
    }

    /// Takes the handler, unless there was one before.
    pub(super) fn start(&mut self, handler: impl MessageHandler, settings: &MessageSettings) {
        if self.handler.is_none() {
            self.memory.set(settings);
            let local = self.base.link.queue_pair.local();
            self.fetches.start(local.is_some_and(|local| local.reads_by_copy()));
            self.handler = Some(Box::new(handler));
        }
    }

    /// Returns the handler that has [started](Self::start).
    pub(super) fn handler<H: MessageHandler>(&mut self) -> &mut H {
        let handler = self.handler.as_deref_mut().map(|handler| handler as &mut dyn Any);
        match handler.and_then(|handler| handler.downcast_mut()) {
            Some(handler) => handler,
            None => unreachable!("another handler than the one that has started"),
        }
    }

    /// Returns the length of the longest message to the peer.
    #[cfg(test)]
    pub(super) fn max_message(&self) -> usize {
        self.base.protocol.max_payload()
    }

    /// Returns whether the handler had nothing more to send when it was last asked, and no fetch is in
    /// flight.
    fn is_exhausted(&self) -> bool {
        self.exhausted && self.fetches.is_empty() && !self.fetches.has_over()
    }

    /// Hands fetches that are over and messages that have arrived to the handler. Returns whether
    /// [`transmit`](Self::transmit) may have something to do.
    fn deliver(&mut self, counters: &Counters) -> Result<bool, ConnectionFault> {
        let Self { base: LinkConnection { protocol, link, .. }, handler, memory, fetches, inbox, .. } = self;
        let Some(handler) = handler else { return Ok(true) };
        // Only the answer to the last message counts: whatever else changes the handler's state meanwhile
        // drives the connection itself.
        let mut has_work = true;
        while let Some((fetch, landed)) = fetches.poll_over() {
            if let Some(landed) = &landed {
                counters.landed_bytes.add(landed.len() as u64);
            }
            let landed = landed.map(|landed| memory.lend(landed));
            handler.landed(fetch, landed);
        }
        while let Some(part) = protocol.front() {
            let Part::Eager { slot, offset, length } = part else {
                return Err(ProtocolViolation::Rendezvous.into());
            };
            let (block, start) = link.receives.slot(slot.0)?;
            let range = start + offset..start + offset + length;
            let message = if length > Self::SHORT {
                let mut message = Vec::with_capacity(length);
                block.copy_out_to(range, &mut message).map_err(ConnectionFault::local)?;
                Bytes::from(message)
            } else {
                if inbox.capacity() < length {
                    *inbox = BytesMut::with_capacity(Self::INBOX);
                }
                block.copy_out_to(range, inbox).map_err(ConnectionFault::local)?;
                inbox.split().freeze()
            };
            protocol.consume(length);
            has_work = handler.receive(message)?;
        }
        if !self.finish_reported && protocol.is_read_closed() {
            self.finish_reported = true;
            handler.peer_finished();
        }
        Ok(has_work || !self.is_exhausted())
    }

    /// Asks the handler for messages and fetches, and sends them.
    fn transmit(&mut self, counters: &Counters) -> Result<(), ConnectionFault> {
        let Self { base: LinkConnection { protocol, link, .. }, handler, memory, fetches, .. } = self;
        let Some(handler) = handler else { return Ok(()) };
        memory.will_ask();
        let mut sender = Sender { link, protocol, memory, fetches, counters, refused: false };
        let sent = handler.transmit(&mut sender);
        let refused = sender.refused;
        self.exhausted = !refused && sender.room() > 0;
        memory.note_refused(refused);
        sent?;
        let (reads, read_at_once) = fetches.post(link)?;
        counters.rendezvous_received_bytes.add(read_at_once);
        counters.reads.add(reads);
        counters.work_requests.add(reads);
        Ok(())
    }

    /// Takes the events of the protocol.
    fn handle_events(&mut self) -> Result<(), ConnectionFault> {
        let memory = &mut self.memory;
        self.base.handle_events(|event| {
            if let Event::Idle = event {
                memory.release_idle();
            }
        })
    }
}

impl Traffic for Messages {
    fn base(&self) -> &LinkConnection {
        &self.base
    }

    fn base_mut(&mut self) -> &mut LinkConnection {
        &mut self.base
    }

    fn progress(&mut self, counters: &Counters) -> Result<(), ConnectionFault> {
        if self.base.obstacle().is_some() {
            self.handle_events()?;
            // What had arrived before the connection was lost.
            return if self.base.fault.is_none() { self.deliver(counters).map(drop) } else { Ok(()) };
        }
        if self.base.protocol.peek_read().is_some() {
            return Err(ProtocolViolation::Rendezvous.into());
        }
        self.fetches.renew();
        loop {
            let has_work = self.deliver(counters)?;
            if self.base.detached && self.handler.is_none() {
                // Nothing takes these messages.
                while let Some(Part::Eager { length, .. }) = self.base.protocol.front() {
                    self.base.protocol.consume(length);
                    self.base.protocol.abort(AbortCode::CLOSED);
                }
            }
            self.base.post_receives()?;
            self.handle_events()?;
            if has_work || self.base.detached {
                self.transmit(counters)?;
            }
            // A fetch may be over at once.
            if !self.fetches.has_over() {
                break;
            }
        }
        if self.base.detached && self.is_exhausted() {
            self.base.protocol.close_write();
        }
        self.base.post_control(counters)
    }

    fn read_completed(&mut self, read: u32, length: u64, counters: &Counters) {
        counters.rendezvous_received_bytes.add(length);
        self.fetches.completed(read);
    }

    fn has_unsent(&self) -> bool {
        false
    }

    fn is_transferring(&self) -> bool {
        !self.fetches.is_empty()
    }

    fn conclude(&mut self) {
        // A peer that has closed, and knows that this side has, may leave before its device has acknowledged
        // our last message.
        let LinkConnection { protocol, fault, .. } = &self.base;
        let closed = protocol.is_read_closed() && protocol.is_write_done();
        if let Some(fault) = fault
            && let Some(handler) = &mut self.handler
            && !(closed && fault.is_loss())
        {
            handler.ended(fault);
        }
    }

    fn retry(&self) -> Option<Instant> {
        self.memory.retry()
    }

    fn has_deferred(&mut self) -> bool {
        self.handler.as_mut().is_some_and(|handler| !handler.after().is_empty())
    }

    fn take_deferred(&mut self, after: &mut Deferred) {
        if let Some(handler) = &mut self.handler {
            after.append(handler.after());
        }
    }
}

/// The sending side of a message connection, during [`MessageHandler::transmit`].
#[derive(Debug)]
pub(crate) struct Sender<'a> {
    link: &'a mut Link,
    protocol: &'a mut protocol::Connection,
    memory: &'a mut MessageMemory,
    fetches: &'a mut Fetches,
    counters: &'a Counters,
    /// Memory was refused, by the device or by the limit of the process.
    refused: bool,
}

/// A part of the content of a fetch, in order.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ReadSegment<'a> {
    /// Bytes of the peer's memory.
    Remote {
        /// The address, and the key of the peer's region.
        from: RemoteSegment,
        /// The length in bytes.
        length: u64,
    },
    /// Bytes that came in a message. They are copied.
    Inline(&'a [u8]),
}

/// Memory that the peer may read, until this is dropped.
#[derive(Debug)]
#[expect(dead_code, reason = "keeps the memory in place")]
pub(crate) enum Kept {
    Copied(Block),
    Exposed(Lease),
}

/// The reason why a fetch was not started.
#[derive(Clone, Debug)]
pub(crate) enum ReadRefused {
    /// There is no memory now; `transmit` is called again when there may be memory.
    Later,
    /// The fetch can never be started.
    Never(Arc<str>),
}

/// The sending side of a connection, which a handler has while it [transmits](MessageHandler::transmit).
pub(crate) trait Wire {
    /// What keeps memory in place that the peer may read.
    type Kept;
    /// The reason why nothing can be sent any more.
    type Fault;

    /// Returns how many bytes one message may have now; 0 means to wait for the next call of `transmit`. The
    /// value is the length of the longest message, or 0.
    fn room(&self) -> usize;

    /// Sends one message, the concatenation of at most 15 `slices`: at least 1 byte, at most
    /// [`room`](Self::room) bytes. The bytes are copied before this function returns.
    ///
    /// # Errors
    /// The message is too long or empty or has too many slices, or the device refuses it.
    fn send(&mut self, slices: &[IoSlice<'_>]) -> Result<(), Self::Fault>;

    /// Lets the peer read `bytes` from where they lie, if that is in memory of a pool for sending
    /// ([`Pool::for_sending`](tonic_rdma_verbs::memory::Pool::for_sending)), and the settings allow it.
    /// Returns `None` if they have to be copied. The caller keeps the result until the peer has read them.
    fn expose(&mut self, bytes: &[u8]) -> Option<(RemoteSegment, Self::Kept)>;

    /// Copies `bytes` into memory that the peer may read. Returns `None` if there is no memory now: then
    /// `transmit` is called again some milliseconds later.
    fn copy(&mut self, bytes: &[u8]) -> Option<(RemoteSegment, Self::Kept)>;

    /// Starts a fetch: reads the concatenation of `segments` into one block of registered memory, whose byte
    /// `aligned_at` lies at a multiple of 64. [`landed`](MessageHandler::landed) gets the memory, with the
    /// number `id`, after `transmit` has returned. Many fetches take turns. `is_awaited`: a reader waits for
    /// the content, so it may land in memory that the connection needs again soon.
    ///
    /// # Errors
    /// There is no memory now, or the system refuses the memory of the connection's own.
    fn read(
        &mut self,
        id: u64,
        segments: &[ReadSegment<'_>],
        aligned_at: usize,
        is_awaited: bool,
    ) -> Result<(), ReadRefused>;

    /// Asks to be called again some milliseconds later, because other connections of the process hold so much
    /// memory.
    fn ask_again(&mut self);

    /// Ends the fetch `id`: no more READs are posted for it. `landed` is called without memory when the READs
    /// in flight are over, maybe at once after `transmit` has returned; until then the peer must keep its
    /// memory. Does nothing if the fetch has landed.
    fn cancel_read(&mut self, id: u64);
}

impl Sender<'_> {
    /// Counts that the handler has messages that have to wait for room.
    pub(crate) fn note_stall(&mut self) {
        match self.protocol.blocked_on() {
            Some(Blocked::Credits) => self.counters.credit_stalls.add(1),
            _ => self.counters.send_stalls.add(1),
        }
    }
}

impl Wire for Sender<'_> {
    type Kept = Kept;
    type Fault = ConnectionFault;

    fn room(&self) -> usize {
        self.protocol.eager_room()
    }

    fn send(&mut self, slices: &[IoSlice<'_>]) -> Result<(), ConnectionFault> {
        let length: usize = slices.iter().map(|slice| slice.len()).sum();
        if length == 0 || slices.len() >= Link::SLICES {
            return Err(ConnectionFault::local("a message without bytes, or in too many slices"));
        }
        let header = self.protocol.send_eager(length).map_err(ConnectionFault::local)?;
        let mut message = [IoSlice::new(&[]); Link::SLICES];
        message[0] = IoSlice::new(&header);
        message[1..=slices.len()].copy_from_slice(slices);
        let in_place = self.link.post_message(&message[..=slices.len()])?.min(length);
        self.counters.eager_sent.add(1);
        self.counters.eager_sent_bytes.add(length as u64);
        self.counters.work_requests.add(1);
        self.counters.copies_avoided_bytes.add(in_place as u64);
        Ok(())
    }

    fn expose(&mut self, bytes: &[u8]) -> Option<(RemoteSegment, Kept)> {
        let (remote, lease) = self.memory.expose(bytes)?;
        self.counters.offered_in_place_bytes.add(bytes.len() as u64);
        Some((remote, Kept::Exposed(lease)))
    }

    fn copy(&mut self, bytes: &[u8]) -> Option<(RemoteSegment, Kept)> {
        let Ok(mut block) = self.memory.copies.lease(bytes.len(), Quota::Send) else {
            self.refused = true;
            return None;
        };
        self.counters.offered_copied_bytes.add(bytes.len() as u64);
        block.copy_in(0, bytes).ok()?;
        Some((block.remote(0), Kept::Copied(block)))
    }

    fn read(
        &mut self,
        id: u64,
        segments: &[ReadSegment<'_>],
        aligned_at: usize,
        is_awaited: bool,
    ) -> Result<(), ReadRefused> {
        let length = segments.iter().fold(0_u64, |sum, segment| sum.saturating_add(segment.length()));
        let landing = self.memory.lease(length, aligned_at, is_awaited);
        let landing = landing.inspect_err(|error| self.refused |= matches!(error, ReadRefused::Later))?;
        self.fetches.add(id, segments, landing);
        Ok(())
    }

    fn ask_again(&mut self) {
        self.refused = true;
    }

    fn cancel_read(&mut self, id: u64) {
        self.fetches.cancel(id);
    }
}

impl ReadSegment<'_> {
    fn length(&self) -> u64 {
        match self {
            Self::Remote { length, .. } => *length,
            Self::Inline(bytes) => bytes.len() as u64,
        }
    }
}

/// The fetches of one connection. They take turns, one READ at a time.
#[derive(Debug)]
pub(crate) struct Fetches {
    all: Slab<Fetch>,
    /// The keys of the fetches, by the handler's numbers.
    by_id: HashMap<u64, usize, RandomState>,
    /// Keys of the fetches with bytes that no READ was posted for.
    turns: VecDeque<u32>,
    /// READs that were posted and have not completed.
    outstanding: u32,
    /// Most READs at a time.
    most: u32,
    /// Longest READ.
    longest: u64,
    /// Bytes that may still be read at once, without a completion, before the thread does other work of the
    /// connection.
    at_once: u64,
    /// Most of these bytes.
    most_at_once: u64,
    /// Fetches that are over, with their memory unless they were cancelled.
    over: VecDeque<(u64, Option<Landed>)>,
}

/// One fetch.
#[derive(Debug)]
struct Fetch {
    /// The handler's number.
    id: u64,
    landing: Landing,
    /// Bytes of the peer, each with its offset in the content, that no READ was posted for; the next at the
    /// end.
    rest: Vec<(RemoteSegment, u64, usize)>,
    /// The handler does not want the content any more.
    cancelled: bool,
}

impl Fetches {
    /// The longest READ, and most READs at a time, where a device or the peer moves the bytes while this CPU
    /// does other work. Together they are more than a fast network has in flight.
    const BESIDE: (u64, u32) = (256 << 10, 8);
    /// The same where a READ is a copy by the thread that posts it. Messages wait for this copy.
    const BY_COPY: (u64, u32) = (128 << 10, 1);

    /// Makes an empty list, which posts at most `most` READs at a time.
    pub(crate) fn new(most: u32) -> Self {
        Self {
            all: Slab::new(),
            by_id: HashMap::default(),
            turns: VecDeque::new(),
            outstanding: 0,
            most,
            longest: 0,
            at_once: 0,
            most_at_once: 0,
            over: VecDeque::new(),
        }
    }

    /// Chooses the length and the number of READs, before the first fetch. `by_copy`: a READ is a copy by the
    /// thread that posts it.
    pub(crate) fn start(&mut self, by_copy: bool) {
        let (longest, most) = if by_copy { Self::BY_COPY } else { Self::BESIDE };
        self.longest = longest;
        self.most = self.most.min(most);
        self.most_at_once = if by_copy { longest } else { 0 };
    }

    /// Adds a fetch of `segments` into `landing`, which has room for all of them.
    pub(crate) fn add(&mut self, id: u64, segments: &[ReadSegment<'_>], mut landing: Landing) {
        let mut rest = Vec::with_capacity(segments.len());
        let mut at = 0;
        for segment in segments {
            match segment {
                ReadSegment::Inline(bytes) => {
                    // The landing was leased for all segments, so they fit.
                    let _ = landing.copy_in(at, bytes);
                    at += bytes.len();
                }
                ReadSegment::Remote { length: 0, .. } => {}
                ReadSegment::Remote { from, length } => {
                    rest.push((*from, *length, at));
                    at += *length as usize;
                }
            }
        }
        rest.reverse();
        let fetch = Fetch { id, landing, rest, cancelled: false };
        let is_over = fetch.rest.is_empty();
        let key = self.all.insert(fetch);
        self.by_id.insert(id, key);
        match is_over {
            true => self.finish(key),
            false => self.turns.push_back(key as u32),
        }
    }

    /// Allows more bytes to be read at once. The connection calls this when it begins to progress.
    pub(crate) fn renew(&mut self) {
        self.at_once = self.most_at_once;
    }

    /// Posts READs, as many as may be outstanding. Returns their number, and the bytes of those without a
    /// completion. Where a READ is a copy, short fetches, and the ends of long ones, are read at once, and
    /// are over when this returns.
    pub(crate) fn post(&mut self, link: &Link) -> Result<(u64, u64), ConnectionFault> {
        let (mut posted, before) = (0, self.at_once);
        while self.outstanding < self.most
            && let Some(key) = self.turns.pop_front()
        {
            let Some(fetch) = self.all.get_mut(key as usize) else { continue };
            posted += fetch.land(&mut self.at_once, link);
            if fetch.rest.is_empty() {
                if fetch.landing.reads() == 0 {
                    self.finish(key as usize);
                }
                continue;
            }
            let Some((from, length, at)) = fetch.rest.last_mut() else { continue };
            let now = (*length).min(self.longest);
            link.post_landing(&mut fetch.landing, key, *at..*at + now as usize, *from)?;
            from.address = from.address.wrapping_add(now);
            (*length, *at) = (*length - now, *at + now as usize);
            if *length == 0 {
                fetch.rest.pop();
            }
            if !fetch.rest.is_empty() {
                self.turns.push_back(key);
            }
            self.outstanding += 1;
            posted += 1;
        }
        Ok((posted, before - self.at_once))
    }

    /// Notes that a READ of the fetch `key` has completed with success.
    pub(crate) fn completed(&mut self, key: u32) {
        let Some(fetch) = self.all.get_mut(key as usize) else { return };
        fetch.landing.read_completed();
        self.outstanding = self.outstanding.saturating_sub(1);
        if fetch.landing.reads() == 0 && fetch.rest.is_empty() {
            self.finish(key as usize);
        }
    }

    /// Ends the fetch with the handler's number `id`, if it has not landed.
    pub(crate) fn cancel(&mut self, id: u64) {
        let Some(&key) = self.by_id.get(&id) else { return };
        let Some(fetch) = self.all.get_mut(key) else { return };
        fetch.cancelled = true;
        fetch.rest.clear();
        if fetch.landing.reads() == 0 {
            self.finish(key);
        }
    }

    /// Returns a fetch that is over, and its content unless it was cancelled.
    pub(crate) fn poll_over(&mut self) -> Option<(u64, Option<Landed>)> {
        self.over.pop_front()
    }

    /// Returns whether a fetch is over that [`poll_over`](Self::poll_over) has not returned.
    pub(crate) fn has_over(&self) -> bool {
        !self.over.is_empty()
    }

    /// Returns whether there is no fetch in flight.
    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    fn finish(&mut self, key: usize) {
        let Fetch { id, landing, cancelled, .. } = self.all.remove(key);
        self.by_id.remove(&id);
        let landed = if cancelled { None } else { landing.finish().ok() };
        self.over.push_back((id, landed));
    }
}

impl Fetch {
    /// Reads the rest at once, if it has at most `most` bytes, and subtracts it from `most`. Returns the
    /// number of READs.
    fn land(&mut self, most: &mut u64, link: &Link) -> u64 {
        let left = self.rest.iter().fold(0_u64, |sum, (_, length, _)| sum.saturating_add(*length));
        if left > *most {
            return 0;
        }
        let mut count = 0;
        while let Some(&(from, length, at)) = self.rest.last()
            && self.landing.read_at_once(&*link.queue_pair, at..at + length as usize, from)
        {
            *most -= length;
            self.rest.pop();
            count += 1;
        }
        count
    }
}

/// The memory of a message connection.
#[derive(Debug)]
pub(crate) struct MessageMemory {
    domain: Arc<dyn ProtectionDomain>,
    budget: Arc<Budget>,
    landing: LandingPool,
    /// Copies of content that the peer reads.
    copies: Pool,
    /// Memory of the application that the peer may read, if the settings allow that.
    exposed: Option<SlabRegistrations>,
    lending: Arc<Lending>,
    /// When to ask the handler again.
    retry: Option<Instant>,
    /// The time between two attempts.
    pause: Duration,
}

/// The landed memory of a connection that its handler and the application have, and whether memory is short.
/// A shortage ends when landed memory is dropped.
#[derive(Debug)]
pub(crate) struct Lending {
    shortage: AtomicU8,
    changed: Arc<Notify>,
    budget: Arc<Budget>,
    /// Bytes of content.
    lent: AtomicU64,
    /// The most of them that the application may keep.
    most: AtomicU64,
}

impl Lending {
    /// Memory was enough.
    const NONE: u8 = 0;
    /// Memory was refused.
    const SHORT: u8 = 1;
    /// Memory was refused, and some was given back since.
    const EASED: u8 = 2;

    /// Returns whether the application may keep landed memory. If not, it gets copies, because the memory is
    /// needed for what arrives next: the lent memory is more than the settings allow, or more than half of
    /// what it leaves to other connections.
    pub(crate) fn may_be_kept(&self) -> bool {
        // Relaxed: the counts guard no other memory. What they say may change at any time.
        let most = self.most.load(Ordering::Relaxed).min(free_for_landings(&self.budget) / 2);
        self.lent.load(Ordering::Relaxed) <= most
    }
}

/// Landed memory that is lent. Dropping it gives the memory back, and then ends a shortage: so `landed` is
/// the first field.
struct LentMemory {
    landed: Landed,
    _loan: Loan,
}

struct Loan {
    lending: Arc<Lending>,
    bytes: u64,
}

impl AsRef<[u8]> for LentMemory {
    fn as_ref(&self) -> &[u8] {
        &self.landed
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        let Lending { shortage, changed, lent, .. } = &*self.lending;
        lent.fetch_sub(self.bytes, Ordering::Relaxed);
        // SYNC: the memory was given back under the pool's lock before; a connection that then finds none
        // sets SHORT later.
        let eased =
            shortage.compare_exchange(Lending::SHORT, Lending::EASED, Ordering::AcqRel, Ordering::Relaxed);
        if eased.is_ok() {
            changed.notify_one();
        }
    }
}

impl MessageMemory {
    /// Time between the first two attempts, because other connections do not tell when they free memory. It
    /// doubles with each that has no success.
    const RETRY: Duration = Duration::from_millis(5);
    /// The most of this time.
    const LONGEST_RETRY: Duration = Duration::from_millis(80);

    /// Bytes of registered memory that each connection has for itself, so that its content arrives, a part of
    /// 512 KiB at a time, however much memory others take. A page more is for the alignment of the part.
    pub(in crate::endpoint) const RESERVE: usize = (512 << 10) + (4 << 10);

    /// Makes the memory of a connection in `domain`, with the budget and the quota for sending of `pool`.
    /// `changed` wakes the connection's supervisor.
    fn new(domain: Arc<dyn ProtectionDomain>, pool: &Pool, changed: Arc<Notify>) -> Result<Self, VerbsError> {
        let budget = Arc::clone(pool.budget());
        let lending = Arc::new(Lending {
            shortage: AtomicU8::new(Lending::NONE),
            changed,
            budget: Arc::clone(&budget),
            lent: AtomicU64::new(0),
            most: AtomicU64::new(0),
        });
        let landing = LandingPool::new(Arc::clone(&domain), Arc::clone(&budget), Self::RESERVE)?;
        let copies = landing.for_peer(pool.settings().send_quota);
        Ok(Self { domain, budget, landing, copies, exposed: None, lending, retry: None, pause: Self::RETRY })
    }

    /// Takes the settings of the session.
    fn set(&mut self, settings: &MessageSettings) {
        self.landing.limit(settings.landing_budget.saturating_mul(2));
        self.lending.most.store(settings.landing_budget, Ordering::Relaxed);
        self.exposed = settings
            .expose
            .then(|| SlabRegistrations::exposing(Arc::clone(&self.domain), Arc::clone(&self.budget)));
    }

    /// Leases memory for content of `length` bytes that READs will fill. Content that a reader waits for
    /// finds the reserve, which is free again when the content has landed.
    fn lease(&mut self, length: u64, aligned_at: usize, is_awaited: bool) -> Result<Landing, ReadRefused> {
        let lease = || self.landing.lease(length as usize, aligned_at, is_awaited);
        lease().or_else(|_| {
            // The flag is set before another attempt, so that memory that is given back meanwhile is not
            // missed.
            self.lending.shortage.store(Lending::SHORT, Ordering::SeqCst);
            lease().map_err(|error| match error.kind() {
                VerbsErrorKind::QuotaExhausted | VerbsErrorKind::TooLarge => ReadRefused::Later,
                _ if !is_awaited => ReadRefused::Later,
                // Nothing else has the reserve, so the system refuses it.
                _ => ReadRefused::Never(error.to_string().into()),
            })
        })
    }

    /// Lends landed memory to the handler, and so to the application. The reserve is not lent, because a
    /// reader may never take what has landed for it.
    fn lend(&self, landed: Landed) -> LandedContent {
        if landed.is_reserve() {
            return LandedContent::copy_of(&landed);
        }
        let (lending, bytes) = (Arc::clone(&self.lending), landed.len() as u64);
        lending.lent.fetch_add(bytes, Ordering::Relaxed);
        let bytes = Bytes::from_owner(LentMemory { landed, _loan: Loan { lending, bytes } });
        LandedContent { bytes, is_moved: false }
    }

    /// Gives the peer the right to read `bytes`, if they lie in memory of a pool for sending.
    fn expose(&mut self, bytes: &[u8]) -> Option<(RemoteSegment, Lease)> {
        let registrations = self.exposed.as_mut()?;
        let lease = find_sendable(bytes)?;
        let remote = registrations.remote(&lease)?;
        Some((remote, lease))
    }

    /// Notes that the handler is asked now. Memory that is given back from here on is a reason to ask once
    /// more.
    pub(crate) fn will_ask(&mut self) {
        let shortage = &self.lending.shortage;
        // SYNC: the memory that eased the shortage was given back before, so the handler finds it.
        if shortage.load(Ordering::Acquire) == Lending::EASED {
            shortage.store(Lending::SHORT, Ordering::Release);
            self.pause = Self::RETRY;
        }
    }

    /// Notes whether the handler was refused memory. Wakes the supervisor when a shortage begins, because the
    /// supervisor does not know yet when to ask again.
    pub(crate) fn note_refused(&mut self, refused: bool) {
        if refused && self.retry.is_none() {
            self.lending.changed.notify_one();
        }
        let now = refused.then(Instant::now);
        match (now, self.retry) {
            // Attempts before that have another cause, and say nothing of how long the shortage lasts.
            (Some(now), Some(retry)) if retry <= now => {
                self.pause = (2 * self.pause).min(Self::LONGEST_RETRY)
            }
            (Some(_), _) => {}
            (None, _) => self.pause = Self::RETRY,
        }
        self.retry = now.map(|now| now + self.pause);
        if !refused && self.lending.shortage.load(Ordering::Relaxed) != Lending::NONE {
            self.lending.shortage.store(Lending::NONE, Ordering::Relaxed);
        }
    }

    /// Returns when to ask the handler again.
    pub(crate) fn retry(&self) -> Option<Instant> {
        let retry = self.retry?;
        let eased = self.lending.shortage.load(Ordering::Acquire) == Lending::EASED;
        Some(if eased { retry - self.pause } else { retry })
    }

    /// Frees memory that is kept for later, because nothing was sent for a while.
    pub(crate) fn release_idle(&mut self) {
        self.landing.trim();
        self.copies.trim();
        if let Some(exposed) = &mut self.exposed {
            exposed.prune();
        }
    }
}
