//! The offers of the peer: reads what they have.

use std::collections::VecDeque;
use std::ops::Range;
use std::task::Waker;

use bytes::Bytes;
use slab::Slab;

use super::Core;
use super::control::Control;
use super::ledger::{Ledger, Room};
use super::stream::{InPart, LandedBytes, NumberMap, OVERHEAD, Part, Queue, Receiving, StreamKey};
use crate::endpoint::{LandedContent, ReadRefused, ReadSegment, Wire};
use crate::grpc::fault::CallFault;
use crate::grpc::frame::{CallViolation, ContentOffer, Kind, OfferSegment};
use tonic_rdma_verbs::RemoteSegment;

/// The offers of the peer that are not given back or not taken, and the reads of their content.
#[derive(Debug, Default)]
pub(super) struct ReceivedOffers {
    offers: Slab<ReceivedOffer>,
    /// The number of the peer's next offer.
    expected: u64,
    /// The index of the offer that a read belongs to, and the length of the read.
    reads: NumberMap<u64, (usize, u64)>,
    next_read: u64,
    /// Reads to cancel.
    cancels: Vec<u64>,
    landed: LandedBytes,
}

/// An offer of the peer, until its bytes are taken.
#[derive(Debug)]
struct ReceivedOffer {
    offer: ContentOffer,
    /// What the offer itself cost the connection.
    cost: i64,
    /// The stream. None once nothing reads the offer any more.
    stream: Option<StreamKey>,
    /// The offer is one whole message.
    is_message: bool,
    /// The offer is delivered in one segment.
    in_one: bool,
    /// The number of bytes for which reads were started.
    requested: u64,
    /// The reads that were not taken, in order.
    reads: VecDeque<ContentRead>,
    /// The number of reads that have not landed.
    under_way: usize,
}

/// A read of offered content.
#[derive(Debug)]
struct ContentRead {
    id: u64,
    length: u64,
    /// The content, once it has landed.
    content: Option<LandedContent>,
}

/// Why a read was not started.
enum NotStarted {
    /// There is nothing to read, or the stream has enough that was not taken.
    Enough,
    /// It does not land now, because so much lands already. The reader asks again when it is woken.
    Full,
    /// There is no memory for so many bytes now.
    Later(u64),
    /// The content can't be read, for this reason.
    Refused(CallFault),
}

/// Content that has landed.
struct Landed {
    bytes: Bytes,
    length: u64,
    /// The content is a whole message in one segment.
    in_one: bool,
    /// The offer has no more.
    is_last: bool,
}

impl ReceivedOffers {
    /// The length of a gRPC message's prefix.
    const MESSAGE_PREFIX: u64 = 5;

    /// Takes the number of an offer, which comes in order.
    pub(super) fn claim(&mut self, id: u64) -> Result<(), CallViolation> {
        if id != self.expected {
            return Err(CallViolation::OfferOrder { seen: id, expected: self.expected });
        }
        self.expected += 1;
        Ok(())
    }

    /// Adds an offer to an open call, which cost the connection `cost`. Returns its index and its cost for the
    /// stream.
    pub(super) fn insert(
        &mut self,
        offer: ContentOffer,
        stream: StreamKey,
        is_message: bool,
        cost: i64,
    ) -> (usize, i64) {
        let offer = ReceivedOffer {
            offer,
            cost,
            stream: Some(stream),
            is_message,
            in_one: false,
            requested: 0,
            reads: VecDeque::new(),
            under_way: 0,
        };
        let cost = offer.cost();
        (self.offers.insert(offer), cost)
    }

    /// Returns the first offer of a stream with bytes for which no read was started.
    fn next_of(&self, receiving: &Receiving) -> Option<usize> {
        receiving.parts.iter().find_map(|part| match part {
            InPart::Offer(offer) if self.offers[*offer].unrequested() > 0 => Some(*offer),
            _ => None,
        })
    }

    /// Returns whether the next bytes of an offer have landed.
    pub(super) fn has_landed(&self, index: usize) -> bool {
        self.offers[index].has_landed()
    }

    /// Returns whether the next bytes of an offer are being read.
    pub(super) fn is_landing(&self, index: usize) -> bool {
        let offer = &self.offers[index];
        offer.under_way > 0 && !offer.has_landed()
    }

    /// Returns the length of reads of an offer that were started and not taken, and the cost of what was not
    /// taken of it.
    fn untaken(&self, index: usize) -> (u64, i64) {
        let offer = &self.offers[index];
        (offer.landing(), offer.cost())
    }

    /// Starts the next read of an offer, of less than `refused` bytes. A whole message has one read, unless
    /// there is no memory for it in one segment now. Then it is read in parts, which tonic copies.
    fn start_read<W: Wire>(
        &mut self,
        index: usize,
        receiving: &mut Receiving,
        ledger: &mut Ledger,
        wire: &mut W,
        refused: u64,
    ) -> Result<(), NotStarted> {
        let offer = &mut self.offers[index];
        let rest = offer.unrequested();
        let part = rest.min(ledger.longest_part());
        if offer.requested == 0
            && offer.is_message
            && let Some(limit) = receiving.landed_limit
        {
            let length = offer.offer.total.saturating_sub(Self::MESSAGE_PREFIX);
            if length > limit as u64 {
                return Err(NotStarted::Refused(CallFault::MessageTooLarge { length, limit }));
            }
            offer.in_one = true;
            match self.read(index, rest, receiving, ledger, wire, refused) {
                Err(NotStarted::Full | NotStarted::Later(_)) if rest > part => {
                    self.offers[index].in_one = false;
                }
                started => return started,
            }
        }
        self.read(index, part, receiving, ledger, wire, refused)
    }

    /// Starts a read of the next `length` bytes of an offer.
    fn read<W: Wire>(
        &mut self,
        index: usize,
        length: u64,
        receiving: &mut Receiving,
        ledger: &mut Ledger,
        wire: &mut W,
        refused: u64,
    ) -> Result<(), NotStarted> {
        if length >= refused {
            return Err(NotStarted::Later(length));
        }
        match ledger.land(length, receiving.landing, receiving.waker.as_ref()) {
            Room::Free => {}
            Room::Full => return Err(NotStarted::Full),
            Room::Crowded => {
                wire.ask_again();
                return Err(NotStarted::Later(length));
            }
        }
        let offer = &mut self.offers[index];
        let aligned_at = if offer.in_one { offer.offer.aligned_at as usize } else { 0 };
        let id = self.next_read;
        let segments = offer.segments(offer.requested..offer.requested + length);
        if let Err(refused) = wire.read(id, &segments, aligned_at, receiving.waker.is_some()) {
            ledger.does_not_land(length);
            return Err(match refused {
                ReadRefused::Later => NotStarted::Later(length),
                ReadRefused::Never(reason) => NotStarted::Refused(CallFault::NoMemory { length, reason }),
            });
        }
        self.next_read += 1;
        offer.requested += length;
        offer.under_way += 1;
        offer.reads.push_back(ContentRead { id, length, content: None });
        receiving.landing += length;
        self.reads.insert(id, (index, length));
        Ok(())
    }

    /// Cancels the reads of offers that nothing reads any more.
    fn cancel_reads<W: Wire>(&mut self, wire: &mut W) {
        self.cancels.drain(..).for_each(|read| wire.cancel_read(read));
    }

    /// Returns whether reads are to be cancelled.
    pub(super) fn has_cancels(&self) -> bool {
        !self.cancels.is_empty()
    }

    /// Notes that a read has landed, or was cancelled. Returns the stream if its next bytes have landed.
    fn landed(
        &mut self,
        read: u64,
        content: Option<LandedContent>,
        control: &mut Control,
        ledger: &mut Ledger,
        wakers: &mut Vec<Waker>,
    ) -> Option<StreamKey> {
        let (index, length) = self.reads.remove(&read)?;
        let offer = &mut self.offers[index];
        offer.under_way -= 1;
        let mut next = None;
        match offer.stream {
            None => ledger.landed(length, wakers),
            Some(key) => {
                if let Some(read) = offer.reads.iter_mut().find(|other| other.id == read) {
                    read.content = content;
                    next = offer.has_landed().then_some(key);
                }
            }
        }
        self.give_back(index, control, ledger);
        next
    }

    /// Tells the peer that an offer's memory is free, once nothing reads it any more.
    fn give_back(&mut self, index: usize, control: &mut Control, ledger: &mut Ledger) {
        let offer = &self.offers[index];
        if offer.under_way > 0 || offer.unrequested() > 0 {
            return;
        }
        control.taken(offer.offer.id);
        if offer.stream.is_none() {
            self.remove(index, ledger);
        }
    }

    fn remove(&mut self, index: usize, ledger: &mut Ledger) {
        let offer = self.offers.remove(index);
        ledger.release(Kind::Offer, offer.cost);
    }

    /// Gives an offer up that nothing reads any more. Memory of reads that have not landed counts until they
    /// have.
    pub(super) fn discard(
        &mut self,
        index: usize,
        control: &mut Control,
        ledger: &mut Ledger,
        wakers: &mut Vec<Waker>,
    ) {
        let Some(offer) = self.offers.get_mut(index) else { return };
        let is_given_back = offer.under_way == 0 && offer.unrequested() == 0;
        offer.stream = None;
        offer.requested = offer.offer.total;
        for ContentRead { id, length, content } in offer.reads.drain(..) {
            match content {
                Some(_) => ledger.landed(length, wakers),
                None => self.cancels.push(id),
            }
        }
        control.set_urgent();
        if is_given_back {
            self.remove(index, ledger);
        } else {
            self.give_back(index, control, ledger);
        }
    }

    /// Takes the next bytes of an offer, if they have landed.
    fn take(&mut self, index: usize, ledger: &mut Ledger, wakers: &mut Vec<Waker>) -> Option<Landed> {
        let offer = &mut self.offers[index];
        let LandedContent { bytes, is_moved } = offer.reads.front_mut()?.content.take()?;
        let ContentRead { length, .. } = offer.reads.pop_front()?;
        // The application has it from now on.
        ledger.landed(length, wakers);
        let (in_one, is_last) = (offer.in_one, offer.unrequested() == 0 && offer.reads.is_empty());
        if is_last {
            self.remove(index, ledger);
        }
        let landed = &mut self.landed;
        landed.moved += if is_moved { length } else { 0 };
        *(if in_one { &mut landed.in_place } else { &mut landed.copied }) += length;
        Some(Landed { bytes, length, in_one, is_last })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.offers.is_empty()
    }

    /// Drops all offers, because the connection has ended.
    pub(super) fn end(&mut self, ledger: &mut Ledger) {
        self.offers.drain().for_each(|offer| ledger.release(Kind::Offer, offer.cost));
        self.reads.clear();
        self.cancels.clear();
    }
}

impl<K> Core<K> {
    /// Most streams without memory that are looked at before others have memory again.
    const LOOKED_AT: usize = 64;

    /// Queues a stream if it has something to read.
    pub(super) fn queue_reads(&mut self, key: StreamKey) {
        let receiving = &self.streams[key].receiving;
        if receiving.wanted && !receiving.queued && self.received_offers.next_of(receiving).is_some() {
            self.streams.queue_reads(key);
            self.control.set_urgent();
        }
    }

    /// Starts reads of all streams that have offers and have not enough that was not taken. Streams take
    /// turns. A read that there is no memory for holds up no smaller one behind it.
    pub(super) fn start_reads<W: Wire<Kept = K>>(&mut self, wire: &mut W) {
        self.received_offers.cancel_reads(wire);
        let window = u64::try_from(self.ledger.full_window).unwrap_or(0);
        // Without and with a reader that waits, because only that gets the connection's reserve.
        let (mut refused, mut waiting) = ([u64::MAX; 2], 0);
        while let Some(key) = self.streams.front(Queue::Reads)
            && waiting < self.streams.reading().min(Self::LOOKED_AT)
        {
            let receiving = &mut self.streams[key].receiving;
            let next = self.received_offers.next_of(receiving).filter(|_| receiving.landing < window);
            let refused = &mut refused[usize::from(receiving.waker.is_some())];
            let started = match next {
                None => Err(NotStarted::Enough),
                Some(index) => {
                    self.received_offers.start_read(index, receiving, &mut self.ledger, wire, *refused)
                }
            };
            match (started, next) {
                (Err(NotStarted::Later(length)), _) => {
                    *refused = length.min(*refused);
                    waiting += 1;
                }
                (Err(NotStarted::Enough | NotStarted::Full), _) => {
                    self.streams.pop(Queue::Reads);
                    self.remove_if_over(key);
                    continue;
                }
                (Err(NotStarted::Refused(fault)), Some(index)) => self.replace_offer(key, index, fault),
                _ => waiting = 0,
            }
            self.streams.rotate(Queue::Reads);
        }
    }

    /// Puts a fault in place of an offer, which is not read any further. The stream gets back what the offer
    /// cost, because a reader may go on with what follows.
    fn replace_offer(&mut self, key: StreamKey, index: usize, fault: CallFault) {
        let receiving = &mut self.streams[key].receiving;
        let mut parts = std::mem::take(&mut receiving.parts);
        let mut fault = Some(fault);
        while let Some(part) = parts.pop() {
            match part {
                InPart::Offer(offer) if offer == index => {
                    let (landing, cost) = self.received_offers.untaken(index);
                    let receiving = &mut self.streams[key].receiving;
                    fault.take().into_iter().for_each(|fault| receiving.parts.push(InPart::Fault(fault)));
                    receiving.landing -= landing;
                    self.discard_part(InPart::Offer(index));
                    self.took(key, cost);
                }
                part => self.streams[key].receiving.parts.push(part),
            }
        }
        self.after.wakers.extend(self.streams[key].receiving.waker.take());
    }

    /// Notes that a read has landed, or was cancelled.
    pub(in crate::grpc) fn landed(&mut self, read: u64, content: Option<LandedContent>) {
        let wakers = &mut self.after.wakers;
        let next = self.received_offers.landed(read, content, &mut self.control, &mut self.ledger, wakers);
        if let Some(key) = next {
            wakers.extend(self.streams[key].receiving.waker.take());
        }
    }

    /// Takes the next bytes of an offer, which is the first part of the stream, if they have landed.
    pub(super) fn take_landed(&mut self, key: StreamKey, index: usize) -> Option<Part> {
        let Landed { bytes, length, in_one, is_last } =
            self.received_offers.take(index, &mut self.ledger, &mut self.after.wakers)?;
        let receiving = &mut self.streams[key].receiving;
        receiving.landing -= length;
        if is_last {
            receiving.parts.pop();
        }
        // Offers of more bytes than that are refused when they arrive.
        let cost = i64::try_from(length).unwrap_or(i64::MAX >> 1) + if is_last { OVERHEAD } else { 0 };
        self.took(key, cost);
        self.queue_reads(key);
        Some(if in_one { Part::Message(bytes) } else { Part::Data(bytes) })
    }

    /// Returns the landed bytes that were taken since the last call.
    pub(in crate::grpc) fn take_landed_bytes(&mut self) -> LandedBytes {
        std::mem::take(&mut self.received_offers.landed)
    }
}

impl ReceivedOffer {
    /// Returns the number of bytes for which no read was started.
    fn unrequested(&self) -> u64 {
        self.offer.total - self.requested
    }

    /// Returns the length of reads that were started and not taken.
    fn landing(&self) -> u64 {
        self.reads.iter().map(|read| read.length).sum()
    }

    /// Returns the cost of what was not taken of the offer.
    fn cost(&self) -> i64 {
        i64::try_from(self.unrequested() + self.landing()).unwrap_or(i64::MAX >> 1) + OVERHEAD
    }

    /// Returns whether the next bytes have landed.
    fn has_landed(&self) -> bool {
        self.reads.front().is_some_and(|read| read.content.is_some())
    }

    /// Returns where a range of the offered bytes lies.
    fn segments(&self, range: Range<u64>) -> Vec<ReadSegment<'_>> {
        let (mut at, mut found) = (0, Vec::with_capacity(2));
        for segment in &self.offer.segments {
            let (start, end) = (range.start.max(at), range.end.min(at + segment.length()));
            if start < end {
                let (offset, length) = (start - at, end - start);
                found.push(match segment {
                    OfferSegment::Remote { from, .. } => {
                        let from = RemoteSegment { address: from.address + offset, ..*from };
                        ReadSegment::Remote { from, length }
                    }
                    // Offsets of inline segments are below 65 536.
                    OfferSegment::Inline(bytes) => {
                        ReadSegment::Inline(&bytes[offset as usize..(offset + length) as usize])
                    }
                });
            }
            at += segment.length();
        }
        found
    }
}

#[cfg(test)]
mod for_tests {
    use super::*;

    impl ReceivedOffers {
        /// Returns whether nothing is owed, read or to be cancelled.
        pub(in crate::grpc::core) fn is_settled(&self) -> bool {
            self.reads.is_empty() && self.cancels.is_empty()
        }
    }
}
