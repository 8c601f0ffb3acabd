//! The offers of the peer: reads what they have.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::task::Waker;

use bytes::Bytes;
use slab::Slab;

use super::control::Control;
use super::stream::{InPart, LandedBytes, NumberMap, OVERHEAD, Part, Queue, Receiving, StreamKey};
use super::{Core, Role};
use crate::endpoint::{ReadRefused, ReadSegment, Wire};
use crate::grpc::fault::CallFault;
use crate::grpc::frame::{CallViolation, ContentOffer, OfferSegment, ResetCode};
use crate::grpc::landing_budget::{Charge, LandingBudget};
use tonic_rdma_verbs::RemoteSegment;

/// The offers of the peer that are not given back or not taken, and the reads of their content.
#[derive(Debug, Default)]
pub(super) struct ReceivedOffers {
    offers: Slab<ReceivedOffer>,
    /// The number of the peer's next offer.
    expected: u64,
    /// The offers that are not given back, by call.
    owed: NumberMap<u32, OwedOffers>,
    /// How many of these calls have ended.
    owed_ended: usize,
    /// The index of the offer that a read belongs to.
    reads: NumberMap<u64, usize>,
    next_read: u64,
    /// Reads to cancel.
    cancels: Vec<u64>,
    /// The memory that messages in one segment may have.
    budget: Arc<LandingBudget>,
    landed: LandedBytes,
}

/// The offers of a call that are not given back.
#[derive(Debug, Default)]
struct OwedOffers {
    count: u32,
    call_ended: bool,
}

/// An offer of the peer, until its bytes are taken.
#[derive(Debug)]
struct ReceivedOffer {
    offer: ContentOffer,
    /// The number of the call.
    call: u32,
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
    /// The memory that the content counts as, if it is delivered in one segment.
    charge: Option<Charge>,
    /// The content, once it has landed.
    memory: Option<Bytes>,
}

/// Why a read was not started.
enum NotStarted {
    /// There is nothing to read, or the stream has enough that was not taken, or its reader waits for memory.
    Enough,
    /// The device has no memory now.
    Later,
    /// The content can't be read, for this reason.
    Refused(CallFault),
}

/// Content that has landed.
struct Landed {
    memory: Bytes,
    length: u64,
    /// The content is a whole message in one segment.
    in_one: bool,
    /// The offer has no more.
    is_last: bool,
}

impl ReceivedOffers {
    /// The length of reads, in bytes, of an offer that is not delivered in one segment.
    const READ: u64 = 512 << 10;
    /// The length of a gRPC message's prefix.
    const MESSAGE_PREFIX: u64 = 5;

    pub(super) fn set_budget(&mut self, budget: Arc<LandingBudget>) {
        self.budget = budget;
    }

    /// Takes the number of an offer, which comes in order.
    pub(super) fn claim(&mut self, id: u64) -> Result<(), CallViolation> {
        if id != self.expected {
            return Err(CallViolation::OfferOrder { seen: id, expected: self.expected });
        }
        self.expected += 1;
        Ok(())
    }

    /// Adds an offer to an open call. Returns its index and its cost.
    pub(super) fn insert(
        &mut self,
        offer: ContentOffer,
        call: u32,
        stream: StreamKey,
        is_message: bool,
    ) -> (usize, i64) {
        self.owed.entry(call).or_default().count += 1;
        let offer = ReceivedOffer {
            offer,
            call,
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

    /// Notes that a call has ended.
    pub(super) fn call_ended(&mut self, call: u32) {
        if let Some(owed) = self.owed.get_mut(&call) {
            owed.call_ended = true;
            self.owed_ended += 1;
        }
    }

    /// Returns the number of ended calls whose offers are not all given back.
    pub(super) fn ended_calls(&self) -> usize {
        self.owed_ended
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

    /// Starts the next read of an offer, and of a whole message the only one.
    fn start_read<W: Wire>(
        &mut self,
        index: usize,
        receiving: &mut Receiving,
        wakers: &mut Vec<Waker>,
        wire: &mut W,
    ) -> Result<(), NotStarted> {
        let offer = &mut self.offers[index];
        if offer.requested == 0
            && offer.is_message
            && let Some(limit) = receiving.landed_limit
        {
            offer.in_one = true;
            let length = offer.offer.total.saturating_sub(Self::MESSAGE_PREFIX);
            if length > limit as u64 {
                return Err(NotStarted::Refused(CallFault::MessageTooLarge { length, limit }));
            }
        }
        let mut charge = None;
        if offer.in_one {
            let (length, limit) = (offer.offer.total, self.budget.limit());
            if length > limit {
                let reason =
                    format!("the landing budget has {limit} bytes: raise CallConfig::landing_budget");
                return Err(NotStarted::Refused(CallFault::NoMemory { length, reason: reason.into() }));
            }
            let share = receiving.share.get_or_insert_default();
            charge = self.budget.admit(length, share, receiving.waker.as_ref());
            if charge.is_none() {
                // The reader asks again when it is woken.
                receiving.starve(length, wakers);
                return Err(NotStarted::Enough);
            }
        }
        let length = if offer.in_one { offer.unrequested() } else { offer.unrequested().min(Self::READ) };
        let aligned_at = if offer.in_one { offer.offer.aligned_at as usize } else { 0 };
        let id = self.next_read;
        let segments = offer.segments(offer.requested..offer.requested + length);
        if let Err(refused) = wire.read(id, &segments, aligned_at) {
            charge.into_iter().for_each(|charge| charge.release(wakers));
            return Err(match refused {
                ReadRefused::Later => NotStarted::Later,
                ReadRefused::Never(reason) => NotStarted::Refused(CallFault::NoMemory { length, reason }),
            });
        }
        self.next_read += 1;
        offer.requested += length;
        offer.under_way += 1;
        offer.reads.push_back(ContentRead { id, length, charge, memory: None });
        receiving.starved = None;
        receiving.landing += length;
        self.reads.insert(id, index);
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
    fn landed(&mut self, read: u64, memory: Option<Bytes>, control: &mut Control) -> Option<StreamKey> {
        let index = self.reads.remove(&read)?;
        let offer = &mut self.offers[index];
        offer.under_way -= 1;
        let mut next = None;
        if let Some(key) = offer.stream
            && let Some(read) = offer.reads.iter_mut().find(|other| other.id == read)
        {
            read.memory = memory;
            next = offer.has_landed().then_some(key);
        }
        self.give_back(index, control);
        next
    }

    /// Tells the peer that an offer's memory is free, once nothing reads it any more.
    fn give_back(&mut self, index: usize, control: &mut Control) {
        let offer = &self.offers[index];
        if offer.under_way > 0 || offer.unrequested() > 0 {
            return;
        }
        control.taken(offer.offer.id);
        if let Some(owed) = self.owed.get_mut(&offer.call) {
            owed.count -= 1;
            if owed.count == 0 {
                self.owed_ended -= usize::from(owed.call_ended);
                self.owed.remove(&offer.call);
            }
        }
        if offer.stream.is_none() {
            self.offers.remove(index);
        }
    }

    /// Gives an offer up that nothing reads any more.
    pub(super) fn discard(&mut self, index: usize, control: &mut Control, wakers: &mut Vec<Waker>) {
        let Some(offer) = self.offers.get_mut(index) else { return };
        let is_given_back = offer.under_way == 0 && offer.unrequested() == 0;
        offer.stream = None;
        offer.requested = offer.offer.total;
        for ContentRead { id, charge, memory, .. } in offer.reads.drain(..) {
            self.cancels.extend(memory.is_none().then_some(id));
            charge.into_iter().for_each(|charge| charge.release(wakers));
        }
        control.set_urgent();
        if is_given_back {
            self.offers.remove(index);
        } else {
            self.give_back(index, control);
        }
    }

    /// Takes the next bytes of an offer, if they have landed.
    fn take(&mut self, index: usize) -> Option<Landed> {
        let offer = &mut self.offers[index];
        let memory = offer.reads.front_mut()?.memory.take()?;
        let ContentRead { length, charge, .. } = offer.reads.pop_front()?;
        let is_last = offer.unrequested() == 0 && offer.reads.is_empty();
        if is_last {
            self.offers.remove(index);
        }
        let in_one = charge.is_some();
        let taken = if in_one { &mut self.landed.in_place } else { &mut self.landed.copied };
        *taken += length;
        let memory = match charge {
            Some(charge) => charge.hold(memory),
            None => memory,
        };
        Some(Landed { memory, length, in_one, is_last })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.offers.is_empty()
    }

    /// Drops all offers, because the connection has ended.
    pub(super) fn end(&mut self, wakers: &mut Vec<Waker>) {
        let charges = self.offers.drain().flat_map(|offer| offer.reads).filter_map(|read| read.charge);
        charges.for_each(|charge| charge.release(wakers));
        self.owed.clear();
        self.owed_ended = 0;
        self.reads.clear();
        self.cancels.clear();
    }
}

impl<K> Core<K> {
    /// Queues a stream if it has something to read.
    pub(super) fn queue_reads(&mut self, key: StreamKey) {
        let receiving = &self.streams[key].receiving;
        if receiving.wanted && !receiving.queued && self.received_offers.next_of(receiving).is_some() {
            self.streams.queue_reads(key);
            self.control.set_urgent();
        }
    }

    /// Starts reads of all streams that have offers and have not enough that was not taken. Streams take
    /// turns.
    pub(super) fn start_reads<W: Wire<Kept = K>>(&mut self, wire: &mut W) {
        self.received_offers.cancel_reads(wire);
        let window = u64::try_from(self.account.full_window()).unwrap_or(0);
        while let Some(key) = self.streams.front(Queue::Reads) {
            let receiving = &mut self.streams[key].receiving;
            let next = self.received_offers.next_of(receiving).filter(|_| receiving.landing < window);
            let started = match next {
                None => Err(NotStarted::Enough),
                Some(index) => {
                    self.received_offers.start_read(index, receiving, &mut self.after.wakers, wire)
                }
            };
            match (started, next) {
                (Err(NotStarted::Later), _) => {
                    self.streams.starve_readers(ReceivedOffers::READ, &mut self.after.wakers);
                    return;
                }
                (Err(NotStarted::Enough), _) => {
                    self.streams.leave(Queue::Reads);
                    self.remove_if_over(key);
                    continue;
                }
                (Err(NotStarted::Refused(fault)), Some(index)) => self.replace_offer(key, index, fault),
                _ => {}
            }
            self.streams.rotate(Queue::Reads);
        }
    }

    /// Returns the length of the bytes that the stream has no memory for, if there are any.
    pub(in crate::grpc) fn starved(&self, key: StreamKey) -> Option<u64> {
        self.streams[key].receiving.starved
    }

    /// Says what has the memory of messages.
    pub(in crate::grpc) fn describe_memory(&self) -> String {
        self.received_offers.budget.describe()
    }

    /// Ends a stream's wait for memory. A client's call ends. A server's reader finds `fault` in place of the
    /// offer.
    pub(in crate::grpc) fn give_up(&mut self, key: StreamKey, fault: &CallFault) {
        if self.role == Role::Client {
            return self.reset(key, ResetCode::ResourceExhausted);
        }
        let receiving = &mut self.streams[key].receiving;
        receiving.starved = None;
        if let Some(index) = self.received_offers.next_of(receiving) {
            self.replace_offer(key, index, fault.clone());
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
                    self.received_offers.discard(index, &mut self.control, &mut self.after.wakers);
                    self.took(key, cost);
                }
                part => self.streams[key].receiving.parts.push(part),
            }
        }
        self.after.wakers.extend(self.streams[key].receiving.waker.take());
    }

    /// Notes that a read has landed, or was cancelled.
    pub(in crate::grpc) fn landed(&mut self, read: u64, memory: Option<Bytes>) {
        let next = self.received_offers.landed(read, memory, &mut self.control);
        if let Some(key) = next {
            self.after.wakers.extend(self.streams[key].receiving.waker.take());
        }
    }

    /// Takes the next bytes of an offer, which is the first part of the stream, if they have landed.
    pub(super) fn take_landed(&mut self, key: StreamKey, index: usize) -> Option<Part> {
        let Landed { memory, length, in_one, is_last } = self.received_offers.take(index)?;
        let receiving = &mut self.streams[key].receiving;
        receiving.landing -= length;
        if is_last {
            receiving.parts.pop();
        }
        // Offers of more bytes than that are refused when they arrive.
        let cost = i64::try_from(length).unwrap_or(i64::MAX >> 1) + if is_last { OVERHEAD } else { 0 };
        self.took(key, cost);
        self.queue_reads(key);
        Some(if in_one { Part::Message(memory) } else { Part::Data(memory) })
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
        self.reads.front().is_some_and(|read| read.memory.is_some())
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
            self.owed.is_empty() && self.owed_ended == 0 && self.reads.is_empty() && self.cancels.is_empty()
        }
    }
}
