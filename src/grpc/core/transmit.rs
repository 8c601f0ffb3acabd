//! Puts messages together: which frames go next.

use super::outbound::Turn;
use super::state::{Block, Core, Role};
use super::stream::{OutHead, Queued, Stream, StreamKey};
use super::wire::{Message, Wire};
use crate::endpoint::SentHead;
use crate::grpc::fault::CallFault;
use crate::grpc::frame::head::fields_length;
use crate::grpc::frame::{END, FrameHeader, Kind, MORE, ResetCode};

impl<K> Core<K> {
    /// The most bytes of the text of a GOAWAY.
    const REASON: usize = 120;
    /// The most bytes that one `transmit` copies for the peer to read, because others wait for it meanwhile.
    const COPIED_AT_ONCE: usize = 256 << 10;
    /// A sender that waits is woken below this number of queued bytes.
    const QUEUED_LOW: usize = 512 << 10;

    /// Starts fetches, and sends messages while there is room and something to send. Tasks to wake are in `wakers` then.
    pub(in crate::grpc) fn transmit<W: Wire<Kept = K>>(&mut self, wire: &mut W) -> Result<(), W::Fault> {
        if self.ended.is_some() {
            return Ok(());
        }
        (self.urgent, self.again, self.copy_budget) = (false, false, Self::COPIED_AT_ONCE);
        self.start_fetches(wire);
        let sent = self.send_all(wire);
        if sent? {
            // The message is on its way, so this delays no peer.
            self.decoder.prepare();
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
            self.message.begin(room);
            let before = (self.copy_budget, self.waiting());
            self.fill(wire);
            if self.message.is_empty() {
                // A head that was refused leaves a reset. A stream that had nothing to send has left its place to another.
                let left_reset = !self.resets.is_empty() && self.peer.is_some();
                if !left_reset && (self.copy_budget, self.waiting()) == before {
                    return Ok(has_sent);
                }
            } else {
                self.message.send(&mut self.unneeded, |slices| wire.send(slices))?;
                has_sent = true;
            }
            if self.copy_budget == 0 {
                self.again = true;
                return Ok(has_sent);
            }
        }
    }

    /// Returns whether `transmit` would do nothing.
    pub(in crate::grpc) fn is_idle(&self) -> bool {
        !self.has_output() && self.fetchable.is_empty() && self.cancels.is_empty()
    }

    /// Returns whether streams wait to send.
    pub(in crate::grpc) fn has_waiting(&self) -> bool {
        !(self.ready.is_empty() && self.bulk.is_empty())
    }

    /// Returns the number of places in the queues of streams that wait to send.
    fn waiting(&self) -> usize {
        self.ready.len() + self.bulk.len() + self.unopened.len()
    }

    /// Returns whether there may be something to send.
    fn has_output(&self) -> bool {
        !self.settings_sent
            || self.block.is_some()
            || !(self.ready.is_empty() && self.bulk.is_empty() && self.resets.is_empty())
            || !(self.credits.is_empty() && self.taken.is_empty() && self.unopened.is_empty())
            || self.going.unsent.is_some()
    }

    /// Fills the message.
    fn fill<W: Wire<Kept = K>>(&mut self, wire: &mut W) {
        if !self.settings_sent {
            self.settings_sent = true;
            let payload = self.limits.encode();
            self.message.frame(&FrameHeader::new(Kind::Settings, 0, payload.len()), &payload);
        }
        if self.peer.is_none() || !self.send_block() {
            return;
        }
        if !self.send_control() {
            return;
        }
        self.open_streams();
        while let Some(&key) = self.ready.front() {
            match self.turn(key, wire, false) {
                Turn::Full => return,
                Turn::Over => self.leave(key, Queued::Ready),
                Turn::Bulk => {
                    self.ready.pop_front();
                    self.streams[key.index()].sending.queued = Queued::Bulk;
                    self.bulk.push_back(key);
                }
            }
        }
        if let Some(&key) = self.bulk.front() {
            match self.turn(key, wire, true) {
                Turn::Full => {}
                Turn::Over => self.leave(key, Queued::Bulk),
                Turn::Bulk => self.bulk.rotate_left(1),
            }
        }
    }

    /// Takes the stream in front out of its queue.
    fn leave(&mut self, key: StreamKey, queue: Queued) {
        if queue == Queued::Ready {
            self.ready.pop_front()
        } else {
            self.bulk.pop_front()
        };
        if let Some(stream) = self.streams.get_mut(key.index()) {
            stream.sending.queued = Queued::No;
            self.remove_if_over(key);
        }
    }

    /// Gives numbers to waiting calls, as many as the peer takes. The calls that come after the last number fail, because they would wait for ever.
    /// They may be sent again over another connection.
    fn open_streams(&mut self) {
        let Some(peer) = self.peer else { return };
        if self.going.last_there.is_some() {
            return;
        }
        // Calls also wait while this client owes the offers of too many ended calls, or the server does.
        while self.index.len() < peer.streams as usize
            && self.lingering.len().max(self.owed_ended) < Self::LINGERING * peer.streams as usize
            && self.next_stream < u32::MAX
            && let Some(key) = self.unopened.pop_front()
        {
            let stream = &mut self.streams[key.index()];
            if stream.closed {
                stream.sending.queued = Queued::No;
                self.unopened_dropped -= 1;
                self.remove_if_over(key);
                continue;
            }
            stream.id = self.next_stream;
            self.next_stream += 1;
            stream.sending.queued = Queued::Ready;
            stream.sending.credit = peer.window.into();
            stream.receiving.allowance = self.limits.window.into();
            stream.receiving.target = self.limits.window.into();
            self.index.insert(stream.id, key);
            self.ready.push_back(key);
        }
        if self.next_stream == u32::MAX && !self.unopened.is_empty() {
            for key in std::mem::take(&mut self.unopened) {
                self.streams[key.index()].sending.queued = Queued::No;
                self.fail(key, CallFault::GoneAway(Self::USED_UP.into()));
            }
            self.unopened_dropped = 0;
        }
    }

    /// Adds what is short and what the peer waits for. Returns false if the message is full.
    fn send_control(&mut self) -> bool {
        let message = &mut self.message;
        while let Some(&(stream, code)) = self.resets.front() {
            if message.left() < FrameHeader::LENGTH {
                return false;
            }
            let extra = code.to_wire();
            message.frame(&FrameHeader { extra, ..FrameHeader::new(Kind::Reset, stream, 0) }, &[]);
            self.resets.pop_front();
        }
        if !self.taken.is_empty() && !self.keeps_taken {
            let count = (message.payload_left() / 8).min(self.taken.len());
            if count == 0 {
                return false;
            }
            let payload = self.taken.drain(..count).flat_map(u64::to_le_bytes);
            self.scratch.clear();
            self.scratch.extend(payload);
            message.frame(&FrameHeader::new(Kind::Taken, 0, self.scratch.len()), &self.scratch);
        }
        while let Some(&(stream, credit)) = self.credits.front() {
            if message.payload_left() < 8 {
                return false;
            }
            message.frame(&FrameHeader::new(Kind::Credit, stream, 8), &credit.to_le_bytes());
            self.credits.pop_front();
        }
        if let Some(reason) = &self.going.unsent {
            // A character that is cut in two is replaced by the reader.
            let text = &reason.as_bytes()[..reason.len().min(Self::REASON)];
            if message.payload_left() < text.len() {
                return false;
            }
            let last = self.going.last_here.unwrap_or_default();
            message.frame(&FrameHeader::new(Kind::GoAway, last, text.len()), text);
            self.going.unsent = None;
        }
        true
    }

    /// Gives a stream its turn. A stream that has used the rest of the message goes behind the others.
    fn turn<W: Wire<Kept = K>>(&mut self, key: StreamKey, wire: &mut W, is_bulk: bool) -> Turn {
        let before = self.message.left();
        let turn = self.send_from(key, wire, is_bulk);
        if turn == Turn::Over || turn == Turn::Full && self.message.left() == before {
            return turn;
        }
        if self.streams[key.index()].can_send() { Turn::Bulk } else { Turn::Over }
    }

    /// Sends from a stream.
    fn send_from<W: Wire<Kept = K>>(&mut self, key: StreamKey, wire: &mut W, is_bulk: bool) -> Turn {
        if !self.streams.get(key.index()).is_some_and(Stream::can_send) {
            return Turn::Over;
        }
        if self.streams[key.index()].sending.head.is_some() && !self.begin(key) {
            // A head that did not fit at all keeps the stream's place. One that was begun ends the turn.
            return Turn::Full;
        }
        loop {
            let sending = &mut self.streams[key.index()].sending;
            if sending.done || !sending.parts.is_empty() && !sending.may_send_parts() {
                return Turn::Over;
            }
            if sending.parts.is_empty() {
                if sending.trailers.is_some() {
                    return if self.send_end(key) { Turn::Over } else { Turn::Full };
                }
                if sending.end {
                    if self.message.left() < FrameHeader::LENGTH {
                        return Turn::Full;
                    }
                    let id = self.streams[key.index()].id;
                    self.message
                        .frame(&FrameHeader { flags: END, ..FrameHeader::new(Kind::Data, id, 0) }, &[]);
                    self.sent_end(key);
                }
                return Turn::Over;
            }
            let turn = self.send_front(key, wire, is_bulk);
            let sending = &mut self.streams[key.index()].sending;
            if sending.bytes < Self::QUEUED_LOW
                && let Some(waker) = sending.waker.take()
            {
                self.wakers.push(waker);
            }
            if let Some(turn) = turn {
                return turn;
            }
        }
    }

    /// Sends the head of a stream. Returns false if it did not fit into the message.
    fn begin(&mut self, key: StreamKey) -> bool {
        let Some(peer) = self.peer else { return false };
        if self.message.payload_left() < Message::LEAST_HEAD {
            return false;
        }
        let stream = &mut self.streams[key.index()];
        let Some(head) = stream.sending.head.take() else { return true };
        let length = match &head {
            OutHead::Request(head) => head.counted_length(),
            OutHead::Response(headers) => fields_length(headers),
        };
        let limit = peer.head_bytes as usize;
        if length > limit {
            self.refuse_head(key, length, limit);
            return true;
        }
        self.scratch.clear();
        match &head {
            OutHead::Request(head) => self.encoder.request(head, &mut self.scratch),
            OutHead::Response(headers) => self.encoder.fields(headers, &mut self.scratch),
        }
        let sending = &stream.sending;
        let is_end = sending.end && sending.parts.is_empty() && sending.trailers.is_none();
        let (id, flags) = (stream.id, if is_end { END } else { 0 });
        self.spent.push(head.into());
        let is_whole = self.send_scratch(Kind::Head, id, flags);
        if is_end {
            self.sent_end(key);
        }
        is_whole
    }

    /// Ends a call whose head or trailers are too long for the peer.
    fn refuse_head(&mut self, key: StreamKey, length: usize, limit: usize) {
        let fault = CallFault::HeadTooLarge { length, limit };
        // The peer has seen nothing of a request, but expects the rest of a response.
        if self.role == Role::Server {
            let id = self.streams[key.index()].id;
            self.resets.push_back((id, ResetCode::ResourceExhausted));
        }
        self.fail(key, fault);
    }

    /// Sends the trailers of a stream. Returns false if they did not fit into the message.
    fn send_end(&mut self, key: StreamKey) -> bool {
        if self.message.payload_left() < Message::LEAST_HEAD {
            return false;
        }
        let stream = &mut self.streams[key.index()];
        let Some(trailers) = stream.sending.trailers.take() else { return true };
        let id = stream.id;
        let limit = self.peer.map_or(0, |peer| peer.head_bytes as usize);
        let length = fields_length(&trailers);
        if length > limit {
            self.refuse_head(key, length, limit);
            return true;
        }
        self.scratch.clear();
        self.encoder.fields(&trailers, &mut self.scratch);
        self.spent.push(SentHead::Fields(trailers));
        let is_whole = self.send_scratch(Kind::Trailers, id, 0);
        self.sent_end(key);
        is_whole
    }

    /// Adds the head in `scratch` to the message. Returns false if the rest has to go with the next message.
    fn send_scratch(&mut self, kind: Kind, stream: u32, flags: u8) -> bool {
        if self.scratch.len() <= self.message.payload_left() {
            let header = FrameHeader { flags, ..FrameHeader::new(kind, stream, self.scratch.len()) };
            self.message.frame(&header, &self.scratch);
            return true;
        }
        self.block = Some(Block { kind, flags, stream, bytes: std::mem::take(&mut self.scratch), at: 0 });
        self.send_block()
    }

    /// Goes on with a head that did not fit. Nothing else may come between. Returns whether it is over.
    fn send_block(&mut self) -> bool {
        let Some(block) = &mut self.block else { return true };
        let rest = &block.bytes[block.at..];
        let length = rest.len().min(self.message.payload_left());
        if length == 0 {
            return false;
        }
        let is_last = length == rest.len();
        // A head's first frame says whether the call ends with it, as its last does.
        let flags = block.flags | if is_last { 0 } else { MORE };
        let header = FrameHeader { flags, ..FrameHeader::new(block.kind, block.stream, length) };
        self.message.frame(&header, &rest[..length]);
        block.at += length;
        if is_last {
            self.block = None;
        }
        is_last
    }

    /// Notes that the end of this end's half was sent. That of a server closes the call.
    pub(super) fn sent_end(&mut self, key: StreamKey) {
        self.streams[key.index()].sending.done = true;
        if self.role == Role::Server {
            self.close(key);
            let stream = &mut self.streams[key.index()];
            if !stream.receiving.ended {
                // The client sends no more. A task of the handler's may still read.
                stream.fault.get_or_insert(CallFault::ResetHere(ResetCode::Cancel));
                self.wakers.extend(stream.receiving.waker.take());
            }
            // Offers of a request that nothing reads any more.
            if !self.streams[key.index()].held {
                self.drop_arrived(key);
            }
        }
    }
}
