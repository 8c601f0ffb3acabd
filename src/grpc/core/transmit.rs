//! Puts messages together: which frames go next.

use super::ledger::headers_cost;
use super::output::{Message, TurnEnd};
use super::stream::{OutHeaders, Queue, Stream, StreamKey};
use super::{Core, Role, USED_UP};
use crate::endpoint::Wire;
use crate::grpc::fault::CallFault;
use crate::grpc::frame::headers::fields_length;
use crate::grpc::frame::{END, FrameHeader, Kind, ResetCode};

impl<K> Core<K> {
    /// A sender that waits is woken below this number of queued bytes.
    const QUEUED_LOW: usize = 512 << 10;

    /// Starts reads, and sends messages while there is room and something to send. Afterwards, tasks to wake
    /// are in [`after`](Self::after).
    pub(in crate::grpc) fn transmit<W: Wire<Kept = K>>(&mut self, wire: &mut W) -> Result<(), W::Fault> {
        if self.ended.is_some() {
            return Ok(());
        }
        self.control.take_urgent();
        self.again = false;
        self.output.begin();
        self.start_reads(wire);
        if self.send_all(wire)? {
            // The message is on its way, so this delays no peer.
            self.headers.prepare();
        }
        self.wake_senders();
        if self.ledger.waits_for_others() {
            wire.ask_again();
        }
        Ok(())
    }

    /// Sends messages while there is room and something to send. Returns whether it has sent one.
    fn send_all<W: Wire<Kept = K>>(&mut self, wire: &mut W) -> Result<bool, W::Fault> {
        let mut has_sent = false;
        loop {
            let room = wire.room();
            if room == 0 || !self.has_output() {
                return Ok(has_sent);
            }
            self.output.message.begin(room);
            let before = (self.output.copy_budget(), self.streams.waiting());
            self.fill(wire);
            if self.output.message.is_empty() {
                // The loop also goes on if headers were refused, because a reset waits then, and if a stream
                // left its queue without sending, because another stream is the first then.
                let has_reset = self.control.has_resets() && self.peer.is_some();
                if !has_reset && (self.output.copy_budget(), self.streams.waiting()) == before {
                    return Ok(has_sent);
                }
            } else {
                self.output.message.send(&mut self.after.unneeded, |slices| wire.send(slices))?;
                has_sent = true;
            }
            if self.output.copy_budget() == 0 {
                self.again = true;
                return Ok(has_sent);
            }
        }
    }

    /// Returns whether `transmit` would do nothing.
    pub(in crate::grpc) fn is_idle(&self) -> bool {
        !self.has_output()
            && !self.streams.has(Queue::Reads)
            && !self.received_offers.has_cancels()
            && !self.ledger.waits_for_others()
    }

    /// Returns whether streams wait to send.
    pub(in crate::grpc) fn has_waiting(&self) -> bool {
        self.streams.has(Queue::Bulk) || self.next_sender().is_some()
    }

    /// Returns the queue whose first stream sends next, streams with more than a message's worth aside. Those
    /// that have waited for credit of the connection come first.
    fn next_sender(&self) -> Option<Queue> {
        if self.streams.has(Queue::PausedHeaders) && self.ledger.headers.has_credit() {
            return Some(Queue::PausedHeaders);
        }
        if self.streams.has(Queue::PausedParts) && self.ledger.parts.has_credit() {
            return Some(Queue::PausedParts);
        }
        self.streams.has(Queue::Ready).then_some(Queue::Ready)
    }

    /// Returns whether there may be something to send.
    fn has_output(&self) -> bool {
        self.control.has_output()
            || self.ledger.is_due()
            || self.headers.has_unsent()
            || self.has_waiting()
            || self.streams.has(Queue::Unopened)
    }

    /// Fills the message.
    fn fill<W: Wire<Kept = K>>(&mut self, wire: &mut W) {
        let message = &mut self.output.message;
        // Turns of streams give some back, too, so each message looks again.
        if let Some(credits) = self.ledger.take_credits() {
            self.control.window_credits(credits);
        }
        self.control.write_settings(&self.limits, message);
        if self.peer.is_none() || !self.headers.write_rest(message) || !self.control.write(message) {
            return;
        }
        self.open_streams();
        while let Some(queue) = self.next_sender() {
            // A stream that has waited for credit has its turn at once, also if it has to copy.
            if !self.turn_of(queue, wire, queue != Queue::Ready) || self.output.copy_budget() == 0 {
                return;
            }
        }
        if self.streams.has(Queue::Bulk) {
            self.turn_of(Queue::Bulk, wire, true);
        }
    }

    /// Gives the first stream of a queue its turn. Returns false if the message is full.
    fn turn_of<W: Wire<Kept = K>>(&mut self, queue: Queue, wire: &mut W, is_bulk: bool) -> bool {
        let Some(key) = self.streams.front(queue) else { return true };
        match self.turn(key, wire, is_bulk) {
            TurnEnd::Full => return false,
            TurnEnd::Over => {
                self.streams.pop(queue);
                self.remove_if_over(key);
            }
            TurnEnd::Bulk => self.streams.move_front(queue, Queue::Bulk),
            TurnEnd::Paused(paused) => self.streams.move_front(queue, paused),
        }
        true
    }

    /// Gives numbers to waiting calls, as many as the peer accepts. The calls that come after the last number
    /// fail, because they would wait forever. They may be sent again over another connection.
    fn open_streams(&mut self) {
        let Some(peer) = self.peer else { return };
        if self.control.peer_went_away().is_some() {
            return;
        }
        // Calls also wait while ended calls have too much that the peer has not given back.
        while self.streams.open_len() < peer.streams as usize
            && self.ledger.headers.has_credit()
            && self.ledger.opens_calls(self.output.offers.ended_counts())
            && !self.streams.is_used_up()
            && let Some(key) = self.streams.pop(Queue::Unopened)
        {
            let stream = &mut self.streams[key];
            if stream.closed {
                self.remove_if_over(key);
                continue;
            }
            stream.sending.credit = peer.window.into();
            self.ledger.open(&mut stream.receiving);
            self.streams.open(key);
        }
        if self.streams.is_used_up() {
            while let Some(key) = self.streams.pop(Queue::Unopened) {
                self.fail(key, CallFault::GoneAway(USED_UP.into()));
            }
        }
    }

    /// Gives a stream its turn. A stream that has used the rest of the message goes behind the others.
    fn turn<W: Wire<Kept = K>>(&mut self, key: StreamKey, wire: &mut W, is_bulk: bool) -> TurnEnd {
        let before = self.output.message.left();
        let turn = self.send_from(key, wire, is_bulk);
        let is_sent = self.output.message.left() < before;
        if matches!(turn, TurnEnd::Over | TurnEnd::Paused(_)) || turn == TurnEnd::Full && !is_sent {
            return turn;
        }
        if self.streams[key].can_send() { TurnEnd::Bulk } else { TurnEnd::Over }
    }

    /// Sends from a stream.
    fn send_from<W: Wire<Kept = K>>(&mut self, key: StreamKey, wire: &mut W, is_bulk: bool) -> TurnEnd {
        if !self.streams.get(key).is_some_and(Stream::can_send) {
            return TurnEnd::Over;
        }
        if self.streams[key].sending.headers.is_some()
            && let Some(turn) = self.send_headers_of(key, Kind::Headers)
        {
            return turn;
        }
        loop {
            let stream = &mut self.streams[key];
            let sending = &mut stream.sending;
            if sending.done || !sending.parts.is_empty() && !sending.may_send_parts() {
                return TurnEnd::Over;
            }
            if sending.parts.is_empty() {
                if sending.trailers.is_some() {
                    return self.send_headers_of(key, Kind::Trailers).unwrap_or(TurnEnd::Over);
                }
                if sending.end {
                    if !self.output.end(stream.id) {
                        return TurnEnd::Full;
                    }
                    self.sent_end(key);
                }
                return TurnEnd::Over;
            }
            if !self.ledger.parts.has_credit() {
                return TurnEnd::Paused(Queue::PausedParts);
            }
            let before = self.ledger.sent_by(stream);
            let (turn, is_end) = self.output.send_front(stream, &mut self.after, wire, is_bulk);
            self.ledger.resend(before, self.ledger.sent_by(stream));
            self.ledger.parts.spend(self.output.take_spent());
            if is_end {
                self.sent_end(key);
            }
            let sending = &mut self.streams[key].sending;
            if sending.bytes < Self::QUEUED_LOW
                && let Some(waker) = sending.waker.take()
            {
                self.after.wakers.push(waker);
            }
            if let Some(turn) = turn {
                return turn;
            }
        }
    }

    /// Sends the headers of a stream, or its trailers, which are next. Returns how the turn ends, unless it
    /// goes on. Headers that did not fit at all keep the stream's slot in the queue. Headers that were begun
    /// end the turn.
    fn send_headers_of(&mut self, key: StreamKey, kind: Kind) -> Option<TurnEnd> {
        if !self.ledger.headers.has_credit() {
            return Some(TurnEnd::Paused(Queue::PausedHeaders));
        }
        let Some(peer) = self.peer.filter(|_| self.output.message.payload_left() >= Message::LEAST_HEADERS)
        else {
            return Some(TurnEnd::Full);
        };
        let stream = &mut self.streams[key];
        self.sent.extend(stream.waits_since.take());
        let before = self.ledger.sent_by(stream);
        let head = match kind {
            Kind::Trailers => stream.sending.trailers.take().map(OutHeaders::Response),
            _ => stream.sending.headers.take(),
        }?;
        self.ledger.resend(before, self.ledger.sent_by(stream));
        let (length, fields) = match &head {
            OutHeaders::Request(head) => (head.counted_length(), &head.headers),
            OutHeaders::Response(headers) => (fields_length(headers), headers),
        };
        let limit = peer.header_bytes as usize;
        if length > limit {
            // The peer has seen nothing of a request, but expects the rest of a response.
            if self.role == Role::Server {
                self.control.reset(stream.id, ResetCode::ResourceExhausted);
            }
            self.fail(key, CallFault::HeadersTooLarge { length, limit });
            return None;
        }
        self.ledger.headers.spend(headers_cost(length, fields));
        let is_end = stream.sending.is_end_next();
        let flags = if is_end && kind == Kind::Headers { END } else { 0 };
        let header = FrameHeader { flags, ..FrameHeader::new(kind, stream.id, 0) };
        let is_whole = self.headers.write(&mut self.output.message, header, |encoder, out| match &head {
            OutHeaders::Request(head) => encoder.request(head, out),
            OutHeaders::Response(headers) => encoder.fields(headers, out),
        });
        self.after.headers.push(head.into());
        if is_end {
            self.sent_end(key);
        }
        (!is_whole).then_some(TurnEnd::Full)
    }

    /// Notes that the end of this side's half was sent. That of a server closes the call.
    fn sent_end(&mut self, key: StreamKey) {
        self.streams[key].sending.done = true;
        if self.role == Role::Server {
            self.close(key);
            let stream = &mut self.streams[key];
            if !stream.receiving.ended {
                // The client sends no more. A task of the handler's may still read. To tonic, the code of a
                // reset with CANCEL would be the end of the request.
                stream.fault.get_or_insert(CallFault::Ended);
                self.after.wakers.extend(stream.receiving.waker.take());
            }
            // Offers of a request that nothing reads any more.
            if stream.released {
                self.drop_arrived(key);
            }
        }
    }
}
