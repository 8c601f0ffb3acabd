//! Reads the messages of the peer.

use bytes::Bytes;

use super::ledger::{add_credit, cost_of, headers_cost, offer_cost};
use super::stream::{InPart, Queue, Stream, StreamKey};
use super::{Core, Role};
use crate::grpc::fault::CallFault;
use crate::grpc::frame::{
    CallViolation, ContentOffer, END, FrameHeader, Frames, Kind, Limits, MESSAGE, Payload, RequestHeaders,
    ResetCode,
};

impl<K> Core<K> {
    /// Most answers that wait until the peer takes messages.
    const MOST_ANSWERS: usize = 1 << 17;
    /// With more streams than this, no short part keeps the memory of some KiB that messages share.
    const SHARING: usize = 64;

    /// Takes a message of the peer. Afterwards, tasks to wake are in [`after`](Self::after),
    /// and new calls in [`next_accepted`](Self::next_accepted).
    ///
    /// # Errors
    /// The message breaks the rules. The connection has to end.
    pub(in crate::grpc) fn receive(&mut self, message: Bytes) -> Result<(), CallViolation> {
        if message.is_empty() {
            return Err(CallViolation::Empty);
        }
        if self.ended.is_some() {
            return Ok(());
        }
        let mut frames = Frames::new(message);
        while let Some((header, payload)) = frames.next_frame()? {
            self.frame(&header, &frames, payload)?;
        }
        // A peer that reads nothing, and sends what has to be answered, would fill the memory.
        if self.control.answers() > Self::MOST_ANSWERS {
            return Err(CallViolation::Unread(Self::MOST_ANSWERS));
        }
        Ok(())
    }

    fn frame(
        &mut self,
        header: &FrameHeader,
        frames: &Frames,
        payload: Payload,
    ) -> Result<(), CallViolation> {
        let &FrameHeader { kind, stream, .. } = header;
        if self.peer.is_none() && kind != Kind::Settings {
            return Err(CallViolation::BeforeSettings(kind));
        }
        self.headers.check_order(kind, stream)?;
        let bytes = frames.bytes(payload);
        match kind {
            Kind::Settings => self.settings(bytes),
            Kind::Headers | Kind::Trailers => self.headers_frame(header, bytes),
            Kind::Data => self.data(header, frames, payload),
            Kind::Offer => self.offered(header, frames, payload),
            Kind::Taken => self.offers_taken(bytes),
            Kind::Reset => self.was_reset(header),
            Kind::Credit => self.credit(stream, bytes),
            Kind::GoAway => self.gone_away(stream, bytes),
        }
    }

    fn settings(&mut self, payload: &[u8]) -> Result<(), CallViolation> {
        let limits = Limits::decode(payload, self.ledger.has_windows)?;
        if self.peer.replace(limits).is_some() {
            return Err(CallViolation::SecondSettings);
        }
        self.headers.set_peer(&limits);
        self.ledger.set_peer(&limits);
        self.control.set_urgent();
        Ok(())
    }

    /// Takes a frame of headers or trailers, which are read when they are whole.
    fn headers_frame(&mut self, header: &FrameHeader, payload: &[u8]) -> Result<(), CallViolation> {
        if header.kind == Kind::Trailers && self.role == Role::Server {
            return Err(CallViolation::ServersOnly(header.kind));
        }
        match self.headers.receive(header, payload)? {
            Some(block) => self.headers(header.kind, header.stream, header.has(END), &block),
            None => Ok(()),
        }
    }

    /// Takes whole headers, or trailers.
    fn headers(&mut self, kind: Kind, id: u32, is_end: bool, block: &[u8]) -> Result<(), CallViolation> {
        if self.role == Role::Server {
            return self.request_headers(id, is_end, block);
        }
        let head = self.headers.decode(block)?;
        if head.path.is_some() || head.authority.is_some() {
            return Err(CallViolation::Headers("a response with a path or an authority"));
        }
        let found = self.streams.find(kind, id)?;
        let charged = self.ledger.add(kind, headers_cost(head.counted, &head.headers))?;
        let Some(key) = found else {
            self.ledger.release(kind, charged);
            return Ok(());
        };
        match (kind, self.streams[key].receiving.headers_seen) {
            (Kind::Headers, true) => return Err(CallViolation::SecondHeaders(id)),
            (Kind::Trailers, false) => return Err(CallViolation::BeforeHeaders { kind, stream: id }),
            _ => {}
        }
        self.streams[key].receiving.headers_cost += charged;
        if charged == 0 {
            self.refuse_without_room(key, kind, head.counted as u64);
            return Ok(());
        }
        if head.is_overfull {
            let reason = "its metadata has more fields than a HeaderMap holds".into();
            self.refuse(key, CallFault::NoMemory { length: head.counted as u64, reason });
            return Ok(());
        }
        let receiving = &mut self.streams[key].receiving;
        match kind {
            Kind::Headers => {
                receiving.headers_seen = true;
                receiving.headers = Some(head.headers);
                self.after.wakers.extend(receiving.waker.take());
                if is_end {
                    self.peer_ended(key);
                }
            }
            _ => {
                receiving.trailers = Some(head.headers);
                self.peer_ended(key);
            }
        }
        Ok(())
    }

    /// Ends a call for which there is no memory, and tells the peer.
    fn refuse(&mut self, key: StreamKey, fault: CallFault) {
        self.control.reset(self.streams[key].id, ResetCode::ResourceExhausted);
        self.fail(key, fault);
    }

    /// Ends a call for whose frame there is no memory: of a peer without windows of the connection, or of a
    /// connection that has its share of what the process may hold.
    fn refuse_without_room(&mut self, key: StreamKey, kind: Kind, length: u64) {
        let limit = match self.ledger.is_full(kind) {
            false => "RDMA_HELD_LIMIT",
            true => "RDMA_CONNECTION_LIMIT, or CallConfig::connection_limit",
        };
        let held = self.ledger.window_of(kind).held;
        let reason = format!(
            "the application has not taken {held} bytes of {kind:?} frames; take them sooner, or raise {limit}"
        );
        self.refuse(key, CallFault::NoMemory { length, reason: reason.into() });
    }

    /// Takes the headers of a request, which opens a call.
    fn request_headers(&mut self, id: u32, is_end: bool, block: &[u8]) -> Result<(), CallViolation> {
        self.streams.check_new(id)?;
        let head = self.headers.decode(block)?;
        let Some(path) = head.path else { return Err(CallViolation::Headers("a request without a path")) };
        let most = self.limits.streams as usize;
        if self.streams.open_len() >= most {
            return Err(CallViolation::TooManyStreams(self.limits.streams));
        }
        self.streams.set_last_number(id);
        let charged = self.ledger.add(Kind::Headers, headers_cost(head.counted, &head.headers))?;
        // Handlers of calls that the client has reset may still be running. A client can't start more of them
        // than this. Of a call after a GOAWAY the client knows that it is not carried out.
        let (is_late, is_crowded) = (self.control.has_gone_away(), self.streams.len() > 2 * most);
        if is_late || is_crowded || head.is_overfull || charged == 0 {
            self.ledger.release(Kind::Headers, charged);
            if !is_late {
                let code = if is_crowded { ResetCode::Refused } else { ResetCode::ResourceExhausted };
                self.control.reset(id, code);
            }
            return Ok(());
        }
        let mut stream = Stream { id, ..Stream::default() };
        stream.receiving.headers_cost = charged;
        stream.sending.credit = self.peer.map_or(0, |peer| peer.window.into());
        self.ledger.open(&mut stream.receiving);
        stream.receiving.headers_seen = true;
        stream.receiving.ended = is_end;
        let key = self.streams.insert_open(stream);
        self.accepted
            .push_back((key, RequestHeaders { path, authority: head.authority, headers: head.headers }));
        Ok(())
    }

    /// Returns the stream of a part of a body, or `None` if its call is closed.
    fn find_open(&self, kind: Kind, id: u32) -> Result<Option<StreamKey>, CallViolation> {
        let Some(key) = self.streams.find(kind, id)? else { return Ok(None) };
        let receiving = &self.streams[key].receiving;
        if receiving.ended {
            return Err(CallViolation::AfterEnd { kind, stream: id });
        }
        if !receiving.headers_seen {
            return Err(CallViolation::BeforeHeaders { kind, stream: id });
        }
        Ok(Some(key))
    }

    fn data(&mut self, header: &FrameHeader, frames: &Frames, payload: Payload) -> Result<(), CallViolation> {
        let found = self.find_open(Kind::Data, header.stream)?;
        let length = header.length as usize;
        if length > 0 {
            let cost = self.ledger.add(Kind::Data, cost_of(length))?;
            let shares_memory = self.streams.len() <= Self::SHARING;
            if let Some(key) = found {
                let receiving = &mut self.streams[key].receiving;
                if receiving.allowance < length as i64 {
                    let (cost, left) = (length as u64, receiving.allowance);
                    return Err(CallViolation::Overdrawn { stream: header.stream, cost, left });
                }
                receiving.allowance -= cost_of(length);
            }
            match found.filter(|key| !self.streams[*key].released) {
                None => self.ledger.release(Kind::Data, cost),
                Some(key) if cost == 0 => {
                    self.refuse_without_room(key, Kind::Data, length as u64);
                    return Ok(());
                }
                Some(key) => {
                    let receiving = &mut self.streams[key].receiving;
                    receiving.unread += cost;
                    let data = frames.keep(payload, shares_memory && receiving.parts.is_empty());
                    receiving.parts.push(InPart::Data(data));
                    self.after.wakers.extend(receiving.waker.take());
                }
            }
        }
        if let Some(key) = found
            && header.has(END)
        {
            self.peer_ended(key);
        }
        Ok(())
    }

    fn offered(
        &mut self,
        header: &FrameHeader,
        frames: &Frames,
        payload: Payload,
    ) -> Result<(), CallViolation> {
        // A peer of version 3 knows no such bound.
        let most = if self.ledger.has_windows { ContentOffer::SEGMENTS } else { usize::MAX };
        let offer = ContentOffer::decode(frames, payload, most)?;
        self.received_offers.claim(offer.id)?;
        let open = self.find_open(Kind::Offer, header.stream)?;
        let held = open.filter(|key| !self.streams[*key].released);
        let charged =
            self.ledger.add(Kind::Offer, offer_cost(header.length as usize, offer.segments.len()))?;
        if let Some(key) = open {
            let receiving = &mut self.streams[key].receiving;
            if receiving.allowance <= 0 {
                let (cost, left) = (offer.total, receiving.allowance);
                return Err(CallViolation::Overdrawn { stream: header.stream, cost, left });
            }
        }
        match held {
            Some(key) if charged > 0 => {
                let (index, cost) = self.received_offers.insert(offer, key, header.has(MESSAGE), charged);
                let receiving = &mut self.streams[key].receiving;
                receiving.allowance -= cost;
                receiving.unread += cost;
                receiving.parts.push(InPart::Offer(index));
                self.queue_reads(key);
            }
            _ => {
                self.control.taken(offer.id);
                self.ledger.release(Kind::Offer, charged);
                if let Some(key) = held {
                    self.refuse_without_room(key, Kind::Offer, offer.total);
                    return Ok(());
                }
            }
        }
        if let Some(key) = open
            && header.has(END)
        {
            self.peer_ended(key);
        }
        Ok(())
    }

    /// Notes that the peer's half of a call has ended. That of the server closes the call.
    fn peer_ended(&mut self, key: StreamKey) {
        let stream = &mut self.streams[key];
        stream.receiving.ended = true;
        self.after.wakers.extend(stream.receiving.waker.take());
        if self.role == Role::Client {
            self.after.wakers.extend(stream.sending.waker.take());
            self.close(key);
            self.remove_if_over(key);
        }
    }

    fn offers_taken(&mut self, payload: &[u8]) -> Result<(), CallViolation> {
        let (ids, rest) = payload.as_chunks::<8>();
        if !rest.is_empty() || ids.is_empty() {
            return Err(CallViolation::Length { kind: Kind::Taken, length: payload.len() });
        }
        for id in ids {
            let id = u64::from_le_bytes(*id);
            let offer = self.output.offers.remove(id).ok_or(CallViolation::Taken(id))?;
            if let Some(key) = self.streams.by_number(offer.stream) {
                let stream = &mut self.streams[key];
                let before = self.ledger.sent_by(stream);
                stream.sending.copied -= offer.copied;
                stream.sending.offered -= offer.total;
                stream.sending.offers -= 1;
                self.ledger.resend(before, self.ledger.sent_by(stream));
                if stream.sending.bytes < Self::QUEUED {
                    self.after.wakers.extend(stream.sending.waker.take());
                }
                self.streams.schedule(key);
                self.control.set_urgent();
            } else if let Some(counts) = self.output.offers.returned_after_end(offer.stream) {
                self.ledger.resend(counts, 0);
                if self.streams.has(Queue::Unopened) {
                    // A call may wait for this.
                    self.control.set_urgent();
                }
            }
        }
        Ok(())
    }

    fn was_reset(&mut self, header: &FrameHeader) -> Result<(), CallViolation> {
        if header.length > 0 {
            return Err(CallViolation::Length { kind: Kind::Reset, length: header.length as usize });
        }
        if let Some(key) = self.streams.find(Kind::Reset, header.stream)? {
            self.fail(key, CallFault::Reset(ResetCode::from_wire(header.extra)));
            self.sweep();
        }
        Ok(())
    }

    fn credit(&mut self, stream: u32, payload: &[u8]) -> Result<(), CallViolation> {
        if stream == 0 && self.ledger.has_windows {
            let ([parts, headers], []) = payload.as_chunks::<8>() else {
                return Err(CallViolation::Length { kind: Kind::Credit, length: payload.len() });
            };
            self.ledger.parts.add_credit(u64::from_le_bytes(*parts))?;
            self.control.set_urgent();
            return self.ledger.headers.add_credit(u64::from_le_bytes(*headers));
        }
        let Ok(credit) = payload.try_into().map(u64::from_le_bytes) else {
            return Err(CallViolation::Length { kind: Kind::Credit, length: payload.len() });
        };
        let Some(key) = self.streams.find(Kind::Credit, stream)? else { return Ok(()) };
        add_credit(&mut self.streams[key].sending.credit, credit)?;
        self.streams.schedule(key);
        Ok(())
    }

    fn gone_away(&mut self, last: u32, reason: &[u8]) -> Result<(), CallViolation> {
        let Some(reason) = self.control.went_away(last, reason)? else { return Ok(()) };
        if self.role == Role::Server {
            return Ok(());
        }
        let refused = |stream: &Stream| !stream.closed && (stream.id == 0 || stream.id > last);
        let keys: Vec<_> =
            self.streams.iter().filter(|(_, stream)| refused(stream)).map(|(key, _)| key).collect();
        for key in keys {
            self.fail(key, CallFault::GoneAway(reason.clone()));
        }
        self.sweep();
        Ok(())
    }
}
