//! Sends parts of bodies: as data, or by reference.

use bytes::Bytes;

use super::state::{Core, Outstanding};
use super::stream::{OVERHEAD, OutPart, Preparing, StreamKey, discard_piece};
use super::wire::Wire;
use crate::grpc::frame::{END, FrameHeader, Kind, MESSAGE, Offer, OfferPiece};

/// How a stream's turn ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// The message is full. The stream goes on with the next one.
    Full,
    /// The stream has nothing to send now.
    Over,
    /// The stream has much to send, and goes on when it has its turn again.
    Bulk,
}

/// What has become of a message in parts.
enum Prepared {
    /// It goes on when the stream has its turn again.
    Again,
    /// It is sent, or its parts are the next parts of the stream.
    Over,
    Full,
}

impl<K> Core<K> {
    /// The shortest part that is offered from where it lies, in bytes.
    const EXPOSED: usize = 4096;
    /// The length of copied pieces, in bytes.
    const COPIED: usize = 128 << 10;
    /// The longest part of a message that goes inside an offer, in bytes.
    const INLINE: usize = 512;
    /// Most pieces of a message.
    const PIECES: usize = 256;

    /// Sends the first part of a stream's body, or a piece of it. Returns how the turn ends, or `None` if it goes on.
    pub(super) fn send_front<W: Wire<Kept = K>>(
        &mut self,
        key: StreamKey,
        wire: &mut W,
        is_bulk: bool,
    ) -> Option<Turn> {
        let sending = &mut self.streams[key.index()].sending;
        let data = match sending.parts.front_mut() {
            Some(OutPart::Data(data)) => data,
            Some(OutPart::Message { parts, .. }) => {
                let total: usize = parts.iter().map(Bytes::len).sum();
                if total < Self::EXPOSED && sending.preparing.is_none() {
                    // A copy costs less than an offer.
                    let whole = if parts.len() == 1 { parts.swap_remove(0) } else { parts.concat().into() };
                    self.unneeded.append(parts);
                    sending.parts.pop();
                    sending.parts.unpop(OutPart::Data(whole));
                    return None;
                }
                // A message of which nothing has to be copied costs no more than a small one.
                let most_copied = if is_bulk { Self::COPIED } else { 0 };
                return match self.prepare(key, total, most_copied, wire) {
                    Prepared::Again => {
                        self.prepares |= is_bulk;
                        Some(Turn::Bulk)
                    }
                    Prepared::Over => None,
                    Prepared::Full => Some(Turn::Full),
                };
            }
            None => return None,
        };
        if data.len() >= Self::EXPOSED {
            if self.message.left() < FrameHeader::LENGTH + Offer::PREFIX + OfferPiece::REMOTE_LENGTH {
                return Some(Turn::Full);
            }
            if let Some((from, kept)) = wire.expose(data) {
                let data = std::mem::take(data);
                let pieces = vec![OfferPiece::Remote { from, length: data.len() as u64 }];
                self.offer(key, data.len(), 0, pieces, vec![kept], 0, false);
                self.unneeded.push(data);
                return Some(Turn::Bulk);
            }
            if data.len() > wire.room().saturating_sub(Self::SPARE) {
                if !is_bulk {
                    return Some(Turn::Bulk);
                }
                let length = data.len().min(Self::COPIED);
                if let Some((from, kept)) = wire.copy(&data[..length]) {
                    self.copy_budget = self.copy_budget.saturating_sub(length);
                    let copied = data.split_to(length);
                    self.unneeded.push(copied);
                    let pieces = vec![OfferPiece::Remote { from, length: length as u64 }];
                    self.offer(key, length, 0, pieces, vec![kept], length, false);
                    return Some(Turn::Bulk);
                }
            }
        }
        self.send_inline(key)
    }

    /// Bytes of a message that are left for other frames when a part is sent as data.
    const SPARE: usize = 256;

    /// Sends the first part of a stream's body, or a piece of it, as data.
    fn send_inline(&mut self, key: StreamKey) -> Option<Turn> {
        let fits = self.message.payload_left();
        let (is_fresh, stream) = (self.message.is_empty(), &mut self.streams[key.index()]);
        let sending = &mut stream.sending;
        let Some(OutPart::Data(data)) = sending.parts.front_mut() else { return None };
        let allowed = data.len().min(usize::try_from(sending.credit).unwrap_or(0));
        // Parts are not cut to fill the rest of a message.
        if allowed > fits && !is_fresh {
            return Some(Turn::Full);
        }
        let length = allowed.min(fits);
        if length == 0 {
            return Some(Turn::Full);
        }
        sending.credit -= length as i64 + OVERHEAD;
        sending.bytes -= length;
        let taken = data.split_to(length);
        if data.is_empty() {
            sending.parts.pop();
        }
        let is_end = sending.end && sending.parts.is_empty() && sending.trailers.is_none();
        let goes_on = !sending.parts.is_empty() && length == fits;
        let flags = if is_end { END } else { 0 };
        let header = FrameHeader { flags, ..FrameHeader::new(Kind::Data, stream.id, length) };
        self.unneeded.extend(self.message.data(&header, taken));
        if is_end {
            self.sent_end(key);
        }
        // The message is full: others have their turns first.
        goes_on.then_some(Turn::Bulk)
    }

    /// Adds an OFFER of `total` bytes to the message. The caller has checked that it fits.
    #[expect(clippy::too_many_arguments, reason = "the fields of an offer")]
    fn offer(
        &mut self,
        key: StreamKey,
        total: usize,
        aligned_at: usize,
        pieces: Vec<OfferPiece>,
        kept: Vec<K>,
        copied: usize,
        is_message: bool,
    ) {
        let stream = &mut self.streams[key.index()];
        let sending = &mut stream.sending;
        let is_over = match sending.parts.front() {
            Some(OutPart::Data(data)) => data.is_empty(),
            _ => false,
        };
        if is_over {
            sending.parts.pop();
        }
        sending.bytes -= total;
        sending.copied += copied;
        sending.offered += total;
        sending.offers += 1;
        sending.credit -= total as i64 + OVERHEAD;
        let is_end = sending.end && sending.parts.is_empty() && sending.trailers.is_none();
        let id = self.next_offer;
        self.next_offer += 1;
        self.offers.insert(id, Outstanding { stream: stream.id, total, copied, kept });
        let offer = Offer { id, total: total as u64, aligned_at: aligned_at as u64, pieces };
        self.scratch.clear();
        offer.encode(&mut self.scratch);
        offer.pieces.into_iter().for_each(|piece| discard_piece(piece, &mut self.unneeded));
        let flags = if is_end { END } else { 0 } | if is_message { MESSAGE } else { 0 };
        let header = FrameHeader { flags, ..FrameHeader::new(Kind::Offer, stream.id, self.scratch.len()) };
        self.message.frame(&header, &self.scratch);
        if is_end {
            self.sent_end(key);
        }
    }

    /// Goes on to prepare a message in parts of `total` bytes, and offers it when all of its bytes can be read. Exposes what lies in
    /// registered memory, and copies the rest, a piece in each turn, until `most_copied` bytes were copied.
    fn prepare<W: Wire<Kept = K>>(
        &mut self,
        key: StreamKey,
        total: usize,
        most_copied: usize,
        wire: &mut W,
    ) -> Prepared {
        let sending = &mut self.streams[key.index()].sending;
        let mut prepared = sending.preparing.take().unwrap_or_default();
        let Some(OutPart::Message { parts, aligned_at }) = sending.parts.front_mut() else {
            return Prepared::Over;
        };
        let aligned_at = *aligned_at;
        let room = wire.room().saturating_sub(FrameHeader::LENGTH + Offer::PREFIX);
        let longest = Self::COPIED.max((total + prepared.done).div_ceil(Self::PIECES));
        let mut copied_now = 0;
        while let Some(part) = parts.first_mut() {
            let length;
            let piece = if part.len() >= Self::EXPOSED
                && let Some((from, kept)) = wire.expose(part)
            {
                length = part.len();
                prepared.kept.push(kept);
                OfferPiece::Remote { from, length: length as u64 }
            } else if part.len() <= Self::INLINE && prepared.encoded + part.len() < room / 2 {
                length = part.len();
                OfferPiece::Inline(part.clone())
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
                OfferPiece::Remote { from, length: length as u64 }
            };
            if prepared.encoded + piece.encoded_length() > room {
                prepared.failed = true;
                break;
            }
            prepared.encoded += piece.encoded_length();
            prepared.pieces.push(piece);
            prepared.done += length;
            self.unneeded.push(part.split_to(length));
            if part.is_empty() {
                parts.remove(0);
            }
        }
        if !parts.is_empty() && !prepared.failed {
            sending.preparing = Some(prepared);
            return Prepared::Again;
        }
        if prepared.done > 0 && FrameHeader::LENGTH + Offer::PREFIX + prepared.encoded > self.message.left() {
            sending.preparing = Some(prepared);
            return Prepared::Full;
        }
        // A message that can't be offered as a whole goes on as plain data.
        let rest = std::mem::take(parts);
        sending.parts.pop();
        for part in rest.into_iter().rev() {
            sending.parts.unpop(OutPart::Data(part));
        }
        let Preparing { pieces, kept, copied, done, failed, .. } = prepared;
        if done > 0 {
            let is_whole = !failed;
            let aligned_at = if aligned_at < done { aligned_at } else { 0 };
            self.offer(key, done, aligned_at, pieces, kept, copied, is_whole);
        }
        Prepared::Over
    }
}
