//! The offers of the peer: fetches what they have.

use std::collections::VecDeque;
use std::ops::Range;

use bytes::Bytes;

use super::state::{Core, Role};
use super::stream::{InPart, OVERHEAD, Part, StreamKey};
use super::wire::{FetchRefused, Wire};
use crate::endpoint::Piece;
use crate::grpc::fault::CallFault;
use crate::grpc::frame::{Offer, OfferPiece, ResetCode};
use crate::grpc::landing_budget::Charge;
use tonic_rdma_verbs::RemoteSegment;

/// Whether a fetch of a stream was started.
enum Started {
    Yes,
    /// There is nothing to fetch, or the stream has enough that was not taken.
    No,
    /// There is no memory.
    Later,
}

impl<K> Core<K> {
    /// The length of fetches, in bytes, of an offer that is not delivered in one piece.
    const FETCH: u64 = 512 << 10;
    /// The length of a gRPC message's prefix.
    const MESSAGE_PREFIX: u64 = 5;

    /// Queues a stream if it has something to fetch.
    pub(super) fn queue_fetches(&mut self, key: StreamKey) {
        let receiving = &self.streams[key.index()].receiving;
        if receiving.wanted && !receiving.queued && self.next_offer_of(key).is_some() {
            self.streams[key.index()].receiving.queued = true;
            self.fetchable.push_back(key);
            self.urgent = true;
        }
    }

    /// Starts fetches of all streams that have offers and have not enough that was not taken. Streams take turns.
    pub(super) fn start_fetches<W: Wire<Kept = K>>(&mut self, wire: &mut W) {
        for fetch in self.cancels.drain(..) {
            wire.cancel_fetch(fetch);
        }
        while let Some(key) = self.fetchable.pop_front() {
            match self.start_fetch(key, wire) {
                Started::Yes => self.fetchable.push_back(key),
                Started::No => {
                    if let Some(stream) = self.streams.get_mut(key.index()) {
                        stream.receiving.queued = false;
                        self.remove_if_over(key);
                    }
                }
                Started::Later => {
                    self.fetchable.push_front(key);
                    self.note_shortage();
                    return;
                }
            }
        }
    }

    /// Notes that all streams with offers wait for memory.
    fn note_shortage(&mut self) {
        for key in &self.fetchable {
            if let Some(stream) = self.streams.get_mut(key.index()) {
                stream.receiving.starve(Self::FETCH, &mut self.wakers);
            }
        }
    }

    /// Returns the length of the bytes that the stream has no memory for, if there are any.
    pub(in crate::grpc) fn starved(&self, key: StreamKey) -> Option<u64> {
        self.streams[key.index()].receiving.starved
    }

    /// Ends a stream's wait for memory. A client's call ends. A server's reader finds `fault` in the place of the offer.
    pub(in crate::grpc) fn give_up(&mut self, key: StreamKey, fault: &CallFault) {
        if self.role == Role::Client {
            return self.reset(key, ResetCode::ResourceExhausted);
        }
        self.streams[key.index()].receiving.starved = None;
        if let Some(index) = self.next_offer_of(key) {
            self.replace_offer(key, index, fault.clone());
        }
    }

    /// Returns the first offer of a stream with bytes for which no fetch was started.
    fn next_offer_of(&self, key: StreamKey) -> Option<usize> {
        self.streams[key.index()].receiving.parts.iter().find_map(|part| match part {
            InPart::Offer(offer) if self.inbound[*offer].left() > 0 => Some(*offer),
            _ => None,
        })
    }

    /// Says what has the memory of messages.
    pub(in crate::grpc) fn describe_memory(&self) -> String {
        self.budget.describe()
    }

    /// Starts the next fetch of a stream.
    fn start_fetch<W: Wire<Kept = K>>(&mut self, key: StreamKey, wire: &mut W) -> Started {
        let Some(stream) = self.streams.get(key.index()) else { return Started::No };
        let window = u64::try_from(self.window).unwrap_or(0);
        if stream.receiving.landing >= window {
            return Started::No;
        }
        let Some(index) = self.next_offer_of(key) else { return Started::No };
        let receiving = &mut self.streams[key.index()].receiving;
        let offer = &mut self.inbound[index];
        if offer.fetched == 0
            && offer.is_message
            && let Some(limit) = receiving.landed_limit
        {
            offer.in_one = true;
            let length = offer.offer.total.saturating_sub(Self::MESSAGE_PREFIX);
            if length > limit as u64 {
                self.replace_offer(key, index, CallFault::MessageTooLarge { length, limit });
                return Started::Yes;
            }
        }
        let mut charge = None;
        if offer.in_one {
            let (length, limit) = (offer.offer.total, self.budget.limit());
            if length > limit {
                let reason =
                    format!("the landing budget has {limit} bytes: raise CallConfig::landing_budget");
                let fault = CallFault::NoMemory { length, reason: reason.into() };
                self.replace_offer(key, index, fault);
                return Started::Yes;
            }
            let share = receiving.share.get_or_insert_default();
            charge = self.budget.admit(length, share, receiving.waker.as_ref());
            if charge.is_none() {
                // The reader asks again when it is woken. Others have their turns.
                receiving.starve(length, &mut self.wakers);
                return Started::No;
            }
        }
        let length = if offer.in_one { offer.left() } else { offer.left().min(Self::FETCH) };
        let aligned_at = if offer.in_one { offer.offer.aligned_at as usize } else { 0 };
        let fetch = self.next_fetch;
        let pieces = offer.pieces(offer.fetched..offer.fetched + length);
        match wire.fetch(fetch, &pieces, aligned_at) {
            Ok(()) => {}
            Err(FetchRefused::Later) => return Started::Later,
            Err(FetchRefused::Never(reason)) => {
                drop(pieces);
                self.replace_offer(key, index, CallFault::NoMemory { length, reason });
                return Started::Yes;
            }
        }
        self.next_fetch += 1;
        offer.fetched += length;
        offer.under_way += 1;
        offer.landings.push_back(Landing { fetch, length, charge, memory: None });
        receiving.starved = None;
        receiving.landing += length;
        self.fetches.insert(fetch, index);
        Started::Yes
    }

    /// Puts a fault into the place of an offer, which is not fetched any further. The stream gets back what the offer cost, because a reader
    /// may go on with what follows.
    fn replace_offer(&mut self, key: StreamKey, index: usize, fault: CallFault) {
        let receiving = &mut self.streams[key.index()].receiving;
        let mut parts = std::mem::take(&mut receiving.parts);
        let mut fault = Some(fault);
        while let Some(part) = parts.pop() {
            match part {
                InPart::Offer(offer) if offer == index => {
                    if let Some(fault) = fault.take() {
                        self.streams[key.index()].receiving.parts.push(InPart::Fault(fault));
                    }
                    let (landing, cost) = (self.inbound[offer].landing(), self.inbound[offer].cost());
                    self.discard_offer(offer);
                    self.streams[key.index()].receiving.landing -= landing;
                    self.took(key, cost);
                }
                part => self.streams[key.index()].receiving.parts.push(part),
            }
        }
        self.wakers.extend(self.streams[key.index()].receiving.waker.take());
    }

    /// Notes that a fetch has landed, or was cancelled.
    pub(in crate::grpc) fn landed(&mut self, fetch: u64, memory: Option<Bytes>) {
        let Some(index) = self.fetches.remove(&fetch) else { return };
        let offer = &mut self.inbound[index];
        offer.under_way -= 1;
        if let Some(key) = offer.stream
            && let Some(landing) = offer.landings.iter_mut().find(|landing| landing.fetch == fetch)
        {
            landing.memory = memory;
            let is_next = offer.has_landed();
            if is_next && let Some(stream) = self.streams.get_mut(key.index()) {
                self.wakers.extend(stream.receiving.waker.take());
            }
        }
        self.give_back(index);
    }

    /// Tells the peer that an offer's memory is free, once nothing reads it any more.
    fn give_back(&mut self, index: usize) {
        let offer = &self.inbound[index];
        if offer.under_way > 0 || offer.left() > 0 {
            return;
        }
        self.taken.push_back(offer.offer.id);
        self.urgent = true;
        if let Some(owed) = self.owed.get_mut(&offer.call) {
            *owed -= 1;
            if *owed == 0 {
                self.owed.remove(&offer.call);
                self.owed_ended -= usize::from(!self.index.contains_key(&offer.call));
            }
        }
        if offer.stream.is_none() {
            self.inbound.remove(index);
        }
    }

    /// Gives an offer up that nothing reads any more.
    pub(super) fn discard_offer(&mut self, index: usize) {
        let Some(offer) = self.inbound.get_mut(index) else { return };
        let is_given_back = offer.under_way == 0 && offer.left() == 0;
        offer.stream = None;
        offer.fetched = offer.offer.total;
        let unlanded = offer.landings.drain(..).filter(|landing| landing.memory.is_none());
        self.cancels.extend(unlanded.map(|landing| landing.fetch));
        self.urgent = true;
        if is_given_back {
            self.inbound.remove(index);
        } else {
            self.give_back(index);
        }
    }

    /// Takes the next bytes of an offer, which is the first part of the stream, if they have landed.
    pub(super) fn take_landed(&mut self, key: StreamKey, index: usize) -> Option<Part> {
        let offer = &mut self.inbound[index];
        let memory = offer.landings.front_mut()?.memory.take()?;
        let Landing { length, charge, .. } = offer.landings.pop_front()?;
        let is_over = offer.left() == 0 && offer.landings.is_empty();
        let in_one = offer.in_one;
        let receiving = &mut self.streams[key.index()].receiving;
        receiving.landing -= length;
        if is_over {
            receiving.parts.pop();
            self.inbound.remove(index);
        }
        // Offers of more bytes than that are refused when they are read.
        let cost = i64::try_from(length).unwrap_or(i64::MAX >> 1) + if is_over { OVERHEAD } else { 0 };
        self.took(key, cost);
        self.queue_fetches(key);
        Some(match charge {
            Some(charge) if in_one => {
                self.landed_bytes.in_place += length;
                Part::Message(charge.hold(memory))
            }
            _ => {
                self.landed_bytes.copied += length;
                Part::Data(memory)
            }
        })
    }

    /// Notes that the application took parts of a stream of this cost, and gives the peer credit for more.
    pub(super) fn took(&mut self, key: StreamKey, cost: i64) {
        let stream = &mut self.streams[key.index()];
        let receiving = &mut stream.receiving;
        receiving.unread -= cost;
        if receiving.ended || stream.closed {
            return;
        }
        // This stream is being read, so its window becomes full-sized. The number of full windows has a limit, because the reader may stop
        // later, and then all bytes of the window stay in memory.
        let more = self.window - receiving.target;
        if more > 0 && more <= self.most_full_windows - self.full_windows {
            self.full_windows += more;
            receiving.target = self.window;
        }
        let missing = receiving.target - receiving.allowance - receiving.unread;
        if missing >= receiving.target / 2 {
            receiving.allowance += missing;
            self.credits.push_back((stream.id, missing as u64));
            self.urgent = true;
        }
    }
}

impl InOffer {
    /// Returns the length of fetches that were started and not taken.
    fn landing(&self) -> u64 {
        self.landings.iter().map(|landing| landing.length).sum()
    }

    /// Returns the cost of what was not taken of the offer.
    pub(super) fn cost(&self) -> i64 {
        i64::try_from(self.left() + self.landing()).unwrap_or(i64::MAX >> 1) + OVERHEAD
    }
}

/// An offer of the peer, until its bytes are taken.
#[derive(Debug)]
pub(super) struct InOffer {
    pub(super) offer: Offer,
    /// The number of the call.
    pub(super) call: u32,
    /// The stream. None once nothing reads the offer any more.
    pub(super) stream: Option<StreamKey>,
    /// The offer is one whole message.
    pub(super) is_message: bool,
    /// The offer is delivered in one piece.
    pub(super) in_one: bool,
    /// The number of bytes for which fetches were started.
    pub(super) fetched: u64,
    /// The fetches that were not taken, in order.
    pub(super) landings: VecDeque<Landing>,
    /// The fetches that have not landed.
    pub(super) under_way: usize,
}

/// A fetch of an offer.
#[derive(Debug)]
pub(super) struct Landing {
    pub(super) fetch: u64,
    pub(super) length: u64,
    /// The memory that the content counts as, if it is delivered in one piece.
    pub(super) charge: Option<Charge>,
    /// The content, once it has landed.
    pub(super) memory: Option<Bytes>,
}

impl InOffer {
    pub(super) fn new(offer: Offer, call: u32, stream: StreamKey, is_message: bool) -> Self {
        Self {
            offer,
            call,
            stream: Some(stream),
            is_message,
            in_one: false,
            fetched: 0,
            landings: VecDeque::new(),
            under_way: 0,
        }
    }

    /// Returns the number of bytes for which no fetch was started.
    pub(super) fn left(&self) -> u64 {
        self.offer.total - self.fetched
    }

    /// Returns whether the next bytes have landed.
    pub(super) fn has_landed(&self) -> bool {
        self.landings.front().is_some_and(|landing| landing.memory.is_some())
    }

    /// Returns where a range of the offered bytes lies.
    pub(super) fn pieces(&self, range: Range<u64>) -> Vec<Piece<'_>> {
        let (mut at, mut found) = (0, Vec::with_capacity(2));
        for piece in &self.offer.pieces {
            let (start, end) = (range.start.max(at), range.end.min(at + piece.length()));
            if start < end {
                let (offset, length) = (start - at, end - start);
                found.push(match piece {
                    OfferPiece::Remote { from, .. } => {
                        let from = RemoteSegment { address: from.address + offset, ..*from };
                        Piece::Remote { from, length }
                    }
                    // Offsets of inline pieces are below 65 536.
                    OfferPiece::Inline(bytes) => {
                        Piece::Inline(&bytes[offset as usize..(offset + length) as usize])
                    }
                });
            }
            at += piece.length();
        }
        found
    }
}
