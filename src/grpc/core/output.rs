//! The message that is being put together, and the parts of bodies in it: as data, or by reference.

use std::io::IoSlice;

use bytes::Bytes;

use super::ledger::{cost_of, offer_cost};
use super::sent_offers::{Preparing, SentOffer, SentOffers};
use super::stream::{OVERHEAD, OutPart, Queue, Stream};
use crate::endpoint::Deferred;
use crate::endpoint::Wire;
use crate::grpc::frame::{ContentOffer, END, FrameHeader, Kind, MESSAGE, OfferSegment};

/// Frames for one message. Long payloads are kept as they are, and the others copied together.
#[derive(Debug, Default)]
pub(super) struct Message {
    bytes: Vec<u8>,
    /// Long payloads, each with its offset in `bytes`.
    long: Vec<(usize, Bytes)>,
    long_bytes: usize,
    room: usize,
}

const _: () = assert!(2 * Message::MOST_LONG < 15);

impl Message {
    /// The shortest payload that is not copied, in bytes. Up to this length the copy costs less than a slice
    /// of its own.
    const LONG: usize = 2048;
    /// The least room for headers that are begun. A shorter rest of a message is left empty.
    pub(super) const LEAST_HEADERS: usize = 64;
    /// Most long payloads. Each has a slice, and so have the bytes before it and after the last one. A
    /// [`Wire`](crate::endpoint::Wire) takes 15.
    const MOST_LONG: usize = 6;

    /// Begins a message of at most `room` bytes.
    pub(super) fn begin(&mut self, room: usize) {
        self.bytes.clear();
        self.long.clear();
        (self.long_bytes, self.room) = (0, room);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Returns how many bytes still fit.
    pub(super) fn left(&self) -> usize {
        self.room.saturating_sub(self.bytes.len() + self.long_bytes)
    }

    /// Returns how many bytes of payload fit into one more frame.
    pub(super) fn payload_left(&self) -> usize {
        self.left().saturating_sub(FrameHeader::LENGTH)
    }

    /// Adds a frame whose payload is copied. The caller has checked that it fits.
    pub(super) fn frame(&mut self, header: &FrameHeader, payload: &[u8]) {
        self.bytes.extend_from_slice(&header.encode());
        self.bytes.extend_from_slice(payload);
    }

    /// Adds a frame whose payload `encode` makes. The caller has checked that it fits.
    pub(super) fn frame_by(&mut self, mut header: FrameHeader, encode: impl FnOnce(&mut Vec<u8>)) {
        let start = self.bytes.len() + FrameHeader::LENGTH;
        self.bytes.resize(start, 0);
        encode(&mut self.bytes);
        header.length = (self.bytes.len() - start) as u32;
        self.bytes[start - FrameHeader::LENGTH..start].copy_from_slice(&header.encode());
    }

    /// Adds a frame of data. The caller has checked that it fits. Returns the data if the message does not
    /// keep it.
    pub(super) fn data(&mut self, header: &FrameHeader, data: Bytes) -> Option<Bytes> {
        self.bytes.extend_from_slice(&header.encode());
        if data.len() < Self::LONG || self.long.len() == Self::MOST_LONG {
            self.bytes.extend_from_slice(&data);
            return Some(data);
        }
        self.long_bytes += data.len();
        self.long.push((self.bytes.len(), data));
        None
    }

    /// Hands the slices of the message to `send`, and the memory of the long ones to `unneeded`.
    pub(super) fn send<T>(&mut self, unneeded: &mut Vec<Bytes>, send: impl FnOnce(&[IoSlice<'_>]) -> T) -> T {
        let sent = if self.long.is_empty() {
            send(&[IoSlice::new(&self.bytes)])
        } else {
            let mut slices = [IoSlice::new(&[]); 2 * Self::MOST_LONG + 1];
            let (mut count, mut at) = (0, 0);
            for (place, long) in &self.long {
                slices[count] = IoSlice::new(&self.bytes[at..*place]);
                slices[count + 1] = IoSlice::new(long);
                (count, at) = (count + 2, *place);
            }
            if at < self.bytes.len() {
                slices[count] = IoSlice::new(&self.bytes[at..]);
                count += 1;
            }
            send(&slices[..count])
        };
        unneeded.extend(self.long.drain(..).map(|(_, data)| data));
        self.begin(0);
        sent
    }
}

/// How a stream's turn ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TurnEnd {
    /// The message is full. The stream goes on with the next one.
    Full,
    /// The stream has nothing to send now.
    Over,
    /// The stream has much to send, and goes on when it has its turn again.
    Bulk,
    /// The stream waits in this queue for credit of the connection.
    Paused(Queue),
}

/// The message that is being put together, and how much may still be copied for it.
#[derive(Debug)]
pub(super) struct Output<K> {
    pub(super) message: Message,
    pub(super) offers: SentOffers<K>,
    /// Bytes that may still be copied in this `transmit`.
    copy_budget: usize,
    /// What the parts that were sent have cost the connection.
    spent: i64,
}

impl<K> Output<K> {
    /// The shortest part that is offered from where it lies, in bytes.
    const EXPOSED: usize = 4096;
    /// The length of copied chunks, in bytes.
    const COPIED: usize = 128 << 10;
    /// The most bytes that one `transmit` copies for the peer to read, because others wait for it meanwhile.
    const COPIED_AT_ONCE: usize = 256 << 10;
    /// The longest part of a message that goes inside an offer, in bytes.
    const INLINE: usize = 512;
    /// Bytes of a message that are left for other frames when a part is sent as data.
    const SPARE: usize = 256;

    pub(super) fn new() -> Self {
        Self { message: Message::default(), offers: SentOffers::default(), copy_budget: 0, spent: 0 }
    }

    /// Begins a `transmit`.
    pub(super) fn begin(&mut self) {
        self.copy_budget = Self::COPIED_AT_ONCE;
    }

    /// Returns the number of bytes that may still be copied in this `transmit`.
    pub(super) fn copy_budget(&self) -> usize {
        self.copy_budget
    }

    /// Takes what the parts have cost the connection that were sent since the last call.
    pub(super) fn take_spent(&mut self) -> i64 {
        std::mem::take(&mut self.spent)
    }

    /// Adds the end of a stream to the message. Returns false if it does not fit.
    pub(super) fn end(&mut self, stream: u32) -> bool {
        let fits = self.message.left() >= FrameHeader::LENGTH;
        if fits {
            self.message.frame(&FrameHeader { flags: END, ..FrameHeader::new(Kind::Data, stream, 0) }, &[]);
        }
        fits
    }

    /// Sends the first part of a stream's body, or a chunk of it. Returns how the turn ends, or `None` if it
    /// goes on, and whether the end of the stream was sent.
    pub(super) fn send_front<W: Wire<Kept = K>>(
        &mut self,
        stream: &mut Stream,
        after: &mut Deferred,
        wire: &mut W,
        is_bulk: bool,
    ) -> (Option<TurnEnd>, bool) {
        let sending = &mut stream.sending;
        let data = match sending.parts.front_mut() {
            Some(OutPart::Data(data)) => data,
            Some(OutPart::Message { parts, .. }) => {
                let total: usize = parts.iter().map(Bytes::len).sum();
                if total < Self::EXPOSED && !sending.is_preparing {
                    // A copy costs less than an offer.
                    let whole = if parts.len() == 1 { parts.swap_remove(0) } else { parts.concat().into() };
                    after.unneeded.append(parts);
                    sending.parts.pop();
                    sending.parts.unpop(OutPart::Data(whole));
                    return (None, false);
                }
                // A message of which nothing has to be copied costs no more than a small one.
                let most_copied = if is_bulk { Self::COPIED } else { 0 };
                return self.prepare(stream, after, wire, total, most_copied);
            }
            None => return (None, false),
        };
        if data.len() >= Self::EXPOSED {
            if self.message.left() < FrameHeader::LENGTH + ContentOffer::PREFIX + OfferSegment::REMOTE_LENGTH
            {
                return (Some(TurnEnd::Full), false);
            }
            if let Some((from, kept)) = wire.expose(data) {
                let data = std::mem::take(data);
                let mut prepared = Preparing::new();
                prepared.push(from, kept, data.len());
                let is_end = self.offer(stream, after, prepared, 0, false);
                after.unneeded.push(data);
                return (Some(TurnEnd::Bulk), is_end);
            }
            if data.len() > wire.room().saturating_sub(Self::SPARE) {
                if !is_bulk {
                    return (Some(TurnEnd::Bulk), false);
                }
                let length = data.len().min(Self::COPIED);
                if let Some((from, kept)) = wire.copy(&data[..length]) {
                    self.copy_budget = self.copy_budget.saturating_sub(length);
                    after.unneeded.push(data.split_to(length));
                    let mut prepared = Preparing { copied: length, ..Preparing::new() };
                    prepared.push(from, kept, length);
                    return (Some(TurnEnd::Bulk), self.offer(stream, after, prepared, 0, false));
                }
            }
        }
        self.send_inline(stream, after)
    }

    /// Sends the first part of a stream's body, or a chunk of it, as data.
    fn send_inline(&mut self, stream: &mut Stream, after: &mut Deferred) -> (Option<TurnEnd>, bool) {
        let fits = self.message.payload_left();
        let sending = &mut stream.sending;
        let Some(OutPart::Data(data)) = sending.parts.front_mut() else { return (None, false) };
        let allowed = data.len().min(usize::try_from(sending.credit).unwrap_or(0));
        // Parts are not cut to fill the rest of a message.
        if allowed > fits && !self.message.is_empty() {
            return (Some(TurnEnd::Full), false);
        }
        let length = allowed.min(fits);
        if length == 0 {
            return (Some(TurnEnd::Full), false);
        }
        sending.credit -= cost_of(length);
        self.spent += cost_of(length);
        sending.bytes -= length;
        let taken = data.split_to(length);
        if data.is_empty() {
            sending.parts.pop();
        }
        let is_end = sending.is_end_next();
        let goes_on = !sending.parts.is_empty() && length == fits;
        let flags = if is_end { END } else { 0 };
        let header = FrameHeader { flags, ..FrameHeader::new(Kind::Data, stream.id, length) };
        after.unneeded.extend(self.message.data(&header, taken));
        // The message is full: others have their turns first.
        (goes_on.then_some(TurnEnd::Bulk), is_end)
    }

    /// Adds an OFFER to the message. The caller has checked that it fits. Returns whether it ends the stream.
    fn offer(
        &mut self,
        stream: &mut Stream,
        after: &mut Deferred,
        prepared: Preparing<K>,
        aligned_at: usize,
        is_message: bool,
    ) -> bool {
        let Preparing { segments, kept, copied, done: total, .. } = prepared;
        let sending = &mut stream.sending;
        if let Some(OutPart::Data(data)) = sending.parts.front()
            && data.is_empty()
        {
            sending.parts.pop();
        }
        sending.bytes -= total;
        sending.copied += copied;
        sending.offered += total;
        sending.offers += 1;
        sending.credit -= total as i64 + OVERHEAD;
        let is_end = sending.is_end_next();
        let id = self.offers.add(SentOffer { stream: stream.id, total, copied, kept });
        let offer = ContentOffer { id, total: total as u64, aligned_at: aligned_at as u64, segments };
        let flags = if is_end { END } else { 0 } | if is_message { MESSAGE } else { 0 };
        let header = FrameHeader { flags, ..FrameHeader::new(Kind::Offer, stream.id, 0) };
        self.spent += offer_cost(offer.encoded_length(), offer.segments.len());
        self.message.frame_by(header, |payload| offer.encode(payload));
        after.unneeded.extend(offer.segments.into_iter().filter_map(OfferSegment::into_inline));
        is_end
    }

    /// Goes on to prepare a message in parts of `total` bytes, and offers it when all of its bytes can be
    /// read. Exposes what lies in registered memory, and copies the rest, a chunk in each turn, until
    /// `most_copied` bytes were copied.
    fn prepare<W: Wire<Kept = K>>(
        &mut self,
        stream: &mut Stream,
        after: &mut Deferred,
        wire: &mut W,
        total: usize,
        most_copied: usize,
    ) -> (Option<TurnEnd>, bool) {
        let mut prepared = self.offers.take_preparing(stream);
        let Some(OutPart::Message { parts, aligned_at }) = stream.sending.parts.front_mut() else {
            return (None, false);
        };
        let aligned_at = *aligned_at;
        let room = wire.room().saturating_sub(FrameHeader::LENGTH + ContentOffer::PREFIX);
        let longest = Self::COPIED.max((total + prepared.done).div_ceil(ContentOffer::SEGMENTS / 2));
        let mut copied_now = 0;
        while let Some(part) = parts.first_mut() {
            let length;
            let segment = if part.len() >= Self::EXPOSED
                && let Some((from, kept)) = wire.expose(part)
            {
                length = part.len();
                prepared.kept.push(kept);
                OfferSegment::Remote { from, length: length as u64 }
            } else if part.len() <= Self::INLINE && prepared.encoded + part.len() < room / 2 {
                length = part.len();
                OfferSegment::Inline(part.clone())
            } else {
                if copied_now >= most_copied {
                    break;
                }
                length = part.len().min(longest);
                let Some((from, kept)) = wire.copy(&part[..length]) else {
                    prepared.failed = true;
                    break;
                };
                copied_now += length;
                self.copy_budget = self.copy_budget.saturating_sub(length);
                prepared.copied += length;
                prepared.kept.push(kept);
                OfferSegment::Remote { from, length: length as u64 }
            };
            if prepared.encoded + segment.encoded_length() > room
                || prepared.segments.len() == ContentOffer::SEGMENTS
            {
                prepared.failed = true;
                break;
            }
            prepared.encoded += segment.encoded_length();
            prepared.segments.push(segment);
            prepared.done += length;
            after.unneeded.push(part.split_to(length));
            if part.is_empty() {
                parts.remove(0);
            }
        }
        if !parts.is_empty() && !prepared.failed {
            // It goes on when the stream has its turn again.
            self.offers.keep_preparing(stream, prepared);
            return (Some(TurnEnd::Bulk), false);
        }
        if prepared.done > 0
            && FrameHeader::LENGTH + ContentOffer::PREFIX + prepared.encoded > self.message.left()
        {
            self.offers.keep_preparing(stream, prepared);
            return (Some(TurnEnd::Full), false);
        }
        // A message that can't be offered as a whole goes on as plain data.
        let rest = std::mem::take(parts);
        stream.sending.parts.pop();
        rest.into_iter().rev().for_each(|part| stream.sending.parts.unpop(OutPart::Data(part)));
        let (done, is_whole) = (prepared.done, !prepared.failed);
        let aligned_at = if aligned_at < done { aligned_at } else { 0 };
        (None, done > 0 && self.offer(stream, after, prepared, aligned_at, is_whole))
    }
}
