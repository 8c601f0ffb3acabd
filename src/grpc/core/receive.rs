//! Reads the messages of the peer.

use bytes::Bytes;

use super::landing::InOffer;
use super::state::{Core, Partial, Role};
use super::stream::{InPart, OVERHEAD, Stream, StreamKey};
use crate::grpc::fault::CallFault;
use crate::grpc::frame::{
    CallViolation, END, FrameHeader, Frames, Kind, Limits, MESSAGE, MORE, Offer, Payload, RequestHead,
    ResetCode,
};

impl<K> Core<K> {
    /// Most answers that wait until the peer takes messages.
    const MOST_ANSWERS: usize = 1 << 17;
    /// The most credit of a stream.
    const MOST_CREDIT: i64 = 1 << 50;

    /// Takes a message of the peer. Tasks to wake are in `wakers` then. New calls wait in [`next_accepted`](Self::next_accepted).
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
        if self.taken.len() + self.resets.len() > Self::MOST_ANSWERS {
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
        if let Some(partial) = &self.partial
            && (partial.kind, partial.stream) != (kind, stream)
        {
            return Err(CallViolation::Interleaved { seen: kind, stream, open: partial.stream });
        }
        let bytes = frames.bytes(payload);
        match kind {
            Kind::Settings => self.settings(bytes),
            Kind::Head | Kind::Trailers => self.head_frame(header, bytes),
            Kind::Data => self.data(header, frames, payload),
            Kind::Offer => self.offered(header, frames, payload),
            Kind::Taken => self.offers_taken(bytes),
            Kind::Reset => self.was_reset(header),
            Kind::Credit => self.credit(stream, bytes),
            Kind::GoAway => self.gone_away(stream, bytes),
        }
    }

    fn settings(&mut self, payload: &[u8]) -> Result<(), CallViolation> {
        let limits = Limits::decode(payload)?;
        if self.peer.replace(limits).is_some() {
            return Err(CallViolation::SecondSettings);
        }
        self.encoder.set_room(limits.table_entries, limits.table_bytes);
        self.urgent = true;
        Ok(())
    }

    /// Takes a frame of a head. A head is read when it is whole.
    fn head_frame(&mut self, header: &FrameHeader, payload: &[u8]) -> Result<(), CallViolation> {
        let &FrameHeader { kind, stream, .. } = header;
        if kind == Kind::Trailers && self.role == Role::Server {
            return Err(CallViolation::ServersOnly(kind));
        }
        let limit = self.limits.head_bytes as usize;
        let Some(mut partial) = self.partial.take() else {
            if payload.len() > limit {
                return Err(CallViolation::HeadTooLong(limit));
            }
            if header.has(MORE) {
                self.partial = Some(Partial { kind, stream, bytes: payload.to_vec() });
                return Ok(());
            }
            return self.head(kind, stream, header.has(END), payload);
        };
        // In the compact form a field is shorter than what it counts.
        if partial.bytes.len() + payload.len() > limit {
            return Err(CallViolation::HeadTooLong(limit));
        }
        partial.bytes.extend_from_slice(payload);
        if header.has(MORE) {
            self.partial = Some(partial);
            return Ok(());
        }
        self.head(kind, stream, header.has(END), &partial.bytes)
    }

    /// Takes a whole head, or trailers.
    fn head(&mut self, kind: Kind, id: u32, is_end: bool, block: &[u8]) -> Result<(), CallViolation> {
        if self.role == Role::Server {
            return self.request_head(id, is_end, block);
        }
        // Heads of closed calls are read too, because they may add to the table.
        let head = self.decoder.decode(block)?;
        if head.path.is_some() || head.authority.is_some() {
            return Err(CallViolation::Head("a response with a path or an authority"));
        }
        let Some(key) = self.find(kind, id)? else { return Ok(()) };
        match (kind, self.streams[key.index()].receiving.head_seen) {
            (Kind::Head, true) => return Err(CallViolation::SecondHead(id)),
            (Kind::Trailers, false) => return Err(CallViolation::BeforeHead { kind, stream: id }),
            _ => {}
        }
        let refused = if head.is_overfull {
            Some("its metadata has more fields than a HeaderMap holds".into())
        } else if !self.charge_head(key, head.counted) {
            Some(format!(
                "heads of responses that the application has not taken have {} bytes; poll the calls sooner, or raise \
                 CallConfig::landing_budget",
                self.heads
            ))
        } else {
            None
        };
        if let Some(reason) = refused {
            self.refuse(key, head.counted, reason);
            return Ok(());
        }
        let receiving = &mut self.streams[key.index()].receiving;
        match kind {
            Kind::Head => {
                receiving.head_seen = true;
                receiving.head = Some(head.headers);
                self.wakers.extend(receiving.waker.take());
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

    /// Ends a call of which a part of `length` bytes has arrived that there is no memory for, and tells the peer.
    fn refuse(&mut self, key: StreamKey, length: usize, reason: String) {
        self.resets.push_back((self.streams[key.index()].id, ResetCode::ResourceExhausted));
        self.urgent = true;
        let fault = CallFault::NoMemory { length: length as u64, reason: reason.into() };
        self.fail(key, fault);
    }

    /// Takes the head of a request, which opens a call.
    fn request_head(&mut self, id: u32, is_end: bool, block: &[u8]) -> Result<(), CallViolation> {
        if self.index.contains_key(&id) {
            return Err(CallViolation::SecondHead(id));
        }
        if id < self.next_stream {
            return Err(CallViolation::StreamOrder { stream: id, last: self.next_stream - 1 });
        }
        let head = self.decoder.decode(block)?;
        let Some(path) = head.path else { return Err(CallViolation::Head("a request without a path")) };
        let most = self.limits.streams as usize;
        if self.index.len() >= most {
            return Err(CallViolation::TooManyStreams(self.limits.streams));
        }
        self.next_stream =
            id.checked_add(1).ok_or(CallViolation::StreamOrder { stream: id, last: u32::MAX })?;
        if self.going.last_here.is_some() {
            // The client learns from the GOAWAY that this call is not carried out.
            return Ok(());
        }
        // Handlers of calls that the client has reset may still be running. A client can't start more of them than this. Nor does it
        // get more responses if it gives none back.
        if self.streams.len() > 2 * most || self.lingering.len() > (Self::LINGERING + 1) * most {
            self.resets.push_back((id, ResetCode::Refused));
            self.urgent = true;
            return Ok(());
        }
        if head.is_overfull || !self.has_room_for_head(head.counted) {
            self.resets.push_back((id, ResetCode::ResourceExhausted));
            self.urgent = true;
            return Ok(());
        }
        let mut stream = Stream { id, ..Stream::default() };
        stream.sending.credit = self.peer.map_or(0, |peer| peer.window.into());
        stream.receiving.allowance = self.limits.window.into();
        stream.receiving.target = self.limits.window.into();
        stream.receiving.head_seen = true;
        stream.receiving.ended = is_end;
        let key = StreamKey(self.streams.insert(stream) as u32);
        self.index.insert(id, key);
        self.charge_head(key, head.counted);
        self.accepted
            .push_back((key, RequestHead { path, authority: head.authority, headers: head.headers }));
        Ok(())
    }

    /// Returns the stream of a frame, or `None` if its call is closed.
    fn find(&self, kind: Kind, stream: u32) -> Result<Option<StreamKey>, CallViolation> {
        if let Some(key) = self.index.get(&stream) {
            return Ok(Some(*key));
        }
        if stream == 0 || stream >= self.next_stream {
            return Err(CallViolation::UnknownStream { kind, stream });
        }
        Ok(None)
    }

    /// Returns the stream of a part of a body, or `None` if its call is closed.
    fn find_open(&self, kind: Kind, id: u32) -> Result<Option<StreamKey>, CallViolation> {
        let Some(key) = self.find(kind, id)? else { return Ok(None) };
        let receiving = &self.streams[key.index()].receiving;
        if receiving.ended {
            return Err(CallViolation::AfterEnd { kind, stream: id });
        }
        if !receiving.head_seen {
            return Err(CallViolation::BeforeHead { kind, stream: id });
        }
        Ok(Some(key))
    }

    fn data(&mut self, header: &FrameHeader, frames: &Frames, payload: Payload) -> Result<(), CallViolation> {
        let Some(key) = self.find_open(Kind::Data, header.stream)? else { return Ok(()) };
        let stream = &mut self.streams[key.index()];
        let receiving = &mut stream.receiving;
        let length = i64::from(header.length);
        if length > 0 {
            if receiving.allowance < length {
                let (cost, left) = (length as u64, receiving.allowance);
                return Err(CallViolation::Overdrawn { stream: header.stream, cost, left });
            }
            receiving.allowance -= length + OVERHEAD;
            if stream.held {
                if self.unread_data + length + OVERHEAD > self.most_unread_data {
                    let reason = format!(
                        "data that the application has not read has {} bytes; read it sooner, or raise \
                         CallConfig::landing_budget",
                        self.unread_data
                    );
                    self.refuse(key, header.length as usize, reason);
                    return Ok(());
                }
                self.unread_data += length + OVERHEAD;
                receiving.unread += length + OVERHEAD;
                let data = frames.keep(payload, receiving.parts.is_empty());
                receiving.parts.push(InPart::Data(data));
                self.wakers.extend(receiving.waker.take());
            }
        }
        if header.has(END) {
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
        let offer = Offer::decode(frames, payload)?;
        if offer.id != self.expected_offer {
            return Err(CallViolation::OfferOrder { seen: offer.id, expected: self.expected_offer });
        }
        self.expected_offer += 1;
        let open = self.find_open(Kind::Offer, header.stream)?;
        let held = open.filter(|key| self.streams[key.index()].held);
        if let Some(key) = open {
            let receiving = &mut self.streams[key.index()].receiving;
            if receiving.allowance <= 0 {
                let (cost, left) = (offer.total, receiving.allowance);
                return Err(CallViolation::Overdrawn { stream: header.stream, cost, left });
            }
        }
        match held {
            None => {
                self.taken.push_back(offer.id);
                self.urgent = true;
            }
            Some(key) => {
                let offer = InOffer::new(offer, header.stream, key, header.has(MESSAGE));
                *self.owed.entry(header.stream).or_default() += 1;
                let cost = offer.cost();
                let index = self.inbound.insert(offer);
                let receiving = &mut self.streams[key.index()].receiving;
                receiving.allowance -= cost;
                receiving.unread += cost;
                receiving.parts.push(InPart::Offer(index));
                self.queue_fetches(key);
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
        let stream = &mut self.streams[key.index()];
        stream.receiving.ended = true;
        self.wakers.extend(stream.receiving.waker.take());
        if self.role == Role::Client {
            self.wakers.extend(stream.sending.waker.take());
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
            let Some(offer) = self.offers.remove(&id) else { return Err(CallViolation::Taken(id)) };
            if let Some(&key) = self.index.get(&offer.stream) {
                let sending = &mut self.streams[key.index()].sending;
                sending.copied -= offer.copied;
                sending.offered -= offer.total;
                sending.offers -= 1;
                self.schedule(key);
                self.urgent = true;
            } else if let Some(left) = self.lingering.get_mut(&offer.stream) {
                *left -= 1;
                if *left == 0 {
                    self.lingering.remove(&offer.stream);
                    // A call may wait for this.
                    self.urgent |= !self.unopened.is_empty();
                }
            }
        }
        Ok(())
    }

    fn was_reset(&mut self, header: &FrameHeader) -> Result<(), CallViolation> {
        if header.length > 0 {
            return Err(CallViolation::Length { kind: Kind::Reset, length: header.length as usize });
        }
        if let Some(key) = self.find(Kind::Reset, header.stream)? {
            self.fail(key, CallFault::Reset(ResetCode::from_wire(header.extra)));
        }
        Ok(())
    }

    fn credit(&mut self, stream: u32, payload: &[u8]) -> Result<(), CallViolation> {
        let Ok(credit) = payload.try_into().map(u64::from_le_bytes) else {
            return Err(CallViolation::Length { kind: Kind::Credit, length: payload.len() });
        };
        let Some(key) = self.find(Kind::Credit, stream)? else { return Ok(()) };
        let sending = &mut self.streams[key.index()].sending;
        let sum = i64::try_from(credit).ok().and_then(|credit| sending.credit.checked_add(credit));
        match sum {
            Some(sum) if sum <= Self::MOST_CREDIT => sending.credit = sum,
            _ => return Err(CallViolation::Credit(credit)),
        }
        self.schedule(key);
        Ok(())
    }

    fn gone_away(&mut self, last: u32, reason: &[u8]) -> Result<(), CallViolation> {
        match self.going.last_there {
            Some((before, _)) if before < last => {
                return Err(CallViolation::GoAwayOrder { seen: last, before });
            }
            Some((before, _)) if before == last => return Ok(()),
            _ => {}
        }
        let reason = String::from_utf8_lossy(reason).into();
        self.going.last_there = Some((last, reason));
        if self.role == Role::Server {
            return Ok(());
        }
        let refused = |stream: &Stream<K>| !stream.closed && (stream.id == 0 || stream.id > last);
        let keys: Vec<_> =
            self.streams.iter().filter(|(_, stream)| refused(stream)).map(|(index, _)| index).collect();
        let Some((_, reason)) = self.going.last_there.clone() else { return Ok(()) };
        for index in keys {
            self.fail(StreamKey(index as u32), CallFault::GoneAway(reason.clone()));
        }
        self.sweep_unopened(0);
        Ok(())
    }
}
