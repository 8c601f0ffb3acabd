//! The state machine: commands, inputs and outputs, and the pings of a silent peer.

use std::time::{Duration, Instant};

use super::directions::{Inbound, Outbound, Part, ReadId, ReadRequest, SlotIndex, WriteState};
use super::settings::{AbortCode, ControlMessage, Settings, SettingsError};
use super::violation::ProtocolViolation;
use crate::wire::{Chunk, Header, MAX_CHUNKS, MessageKind};

/// One side of a connection. Callers drive it by commands, inputs (`handle_*`) and outputs (`poll_*`).
#[derive(Debug)]
pub struct Connection {
    outbound: Outbound,
    inbound: Inbound,
    liveness: Liveness,
    abort: AbortState,
    sources_done: u64,
    aborted_by_peer: Option<AbortCode>,
    ping_unanswered: bool,
    /// True if credits that this side does not use are to be returned.
    return_due: bool,
    /// True if [`Event::Idle`] is to be reported.
    idle: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AbortState {
    No,
    /// The abort waits for a credit.
    Wanted(AbortCode),
    /// The abort was sent or received. No more messages are sent.
    Over,
}

/// Something that the caller has to act on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The peer has read the oldest `count` offered chunks that were not reported yet. Their memory is free.
    SourcesDone {
        /// The number of chunks.
        count: u64,
    },
    /// The peer aborted the connection.
    Aborted {
        /// The reason.
        code: AbortCode,
    },
    /// The peer did not answer a ping.
    PingTimeout,
    /// No data was sent for one to two ping intervals. Memory that is kept for sending can be freed.
    Idle,
}

/// The reason why no data may be sent now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blocked {
    /// The peer has no receive slot free.
    Credits,
    /// The local send queue is full.
    SendQueue,
}

/// There is no room for what is to be sent, or it is nothing. [`Connection::eager_room`] and
/// [`Connection::rendezvous_room`] return the room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{asked} asked for, where there is room for {room}")]
pub struct SendError {
    /// The number of bytes or chunks that the caller wants to send.
    pub asked: usize,
    /// The bytes or chunks that there is room for.
    pub room: usize,
}

/// Commands.
impl Connection {
    /// Makes a connection. At this time all slots of both sides are posted.
    ///
    /// # Errors
    /// A setting is out of range. The peer may have sent it.
    pub fn new(settings: Settings, now: Instant) -> Result<Self, SettingsError> {
        settings.check()?;
        Ok(Self {
            outbound: Outbound::new(&settings),
            inbound: Inbound::new(&settings),
            liveness: Liveness::new(settings.ping_interval, settings.ping_timeout, now),
            abort: AbortState::No,
            sources_done: 0,
            aborted_by_peer: None,
            ping_unanswered: false,
            return_due: false,
            idle: false,
        })
    }

    /// Returns the number of bytes that one eager message may carry now; 0 means to wait.
    pub fn eager_room(&self) -> usize {
        if self.abort == AbortState::No { self.outbound.eager_room() } else { 0 }
    }

    /// Returns the number of bytes of the longest eager message.
    pub fn max_payload(&self) -> usize {
        self.outbound.payload
    }

    /// Takes a credit for an eager message of `payload` bytes, and returns its header. The caller posts the
    /// header and the bytes as one Send.
    ///
    /// # Errors
    /// There is no room for so many bytes.
    pub fn send_eager(&mut self, payload: usize) -> Result<[u8; Header::LENGTH], SendError> {
        let room = self.eager_room();
        if payload > room || room == 0 {
            return Err(SendError { asked: payload, room });
        }
        Ok(self.header(MessageKind::Eager, payload).encode())
    }

    /// Returns the number of chunks that one rendezvous may offer now; 0 means to wait.
    pub fn rendezvous_room(&self) -> usize {
        if self.abort == AbortState::No { (self.outbound.rts_room() as usize).min(MAX_CHUNKS) } else { 0 }
    }

    /// Returns the number of messages with data that may be sent now, each of one rendezvous or of eager bytes.
    pub fn data_room(&self) -> u64 {
        if self.abort == AbortState::No { self.outbound.data_room() } else { 0 }
    }

    /// Offers chunks of registered memory, and returns the message to post. The content of the chunks must
    /// stay until [`Event::SourcesDone`].
    ///
    /// # Errors
    /// There is no chunk, or no room for so many.
    pub fn send_rendezvous(&mut self, chunks: &[Chunk]) -> Result<ControlMessage, SendError> {
        let room = self.rendezvous_room();
        if chunks.is_empty() || chunks.len() > room {
            return Err(SendError { asked: chunks.len(), room });
        }
        let mut body = [0; super::MAX_CONTROL_BODY];
        for (place, chunk) in body.chunks_exact_mut(Chunk::LENGTH).zip(chunks) {
            place.copy_from_slice(&chunk.encode());
        }
        let length = chunks.len() * Chunk::LENGTH;
        self.outbound.chunks_sent += chunks.len() as u64;
        let header = self.header(MessageKind::Rts, length);
        Ok(ControlMessage::new(&header, &body[..length]))
    }

    /// Ends the sending direction after everything sent so far.
    pub fn close_write(&mut self) {
        if self.outbound.state == WriteState::Open {
            self.outbound.state = WriteState::Closing;
        }
    }

    /// Pings the peer now. [`pongs`](Self::pongs) counts the answers.
    pub fn ping(&mut self) {
        self.liveness.ping_due = true;
    }

    /// Returns how many of the pings sent so far are answered. An answer to a later ping also answers the
    /// earlier pings.
    pub fn pongs(&self) -> u64 {
        self.liveness.answered
    }

    /// Aborts both directions, and sends the peer one message if there is a credit.
    pub fn abort(&mut self, code: AbortCode) {
        if self.abort == AbortState::No {
            self.abort = AbortState::Wanted(code);
        }
    }

    /// Removes `count` bytes from the front part. Returns the READ whose memory is free, because all of its bytes
    /// are delivered.
    pub fn consume(&mut self, count: usize) -> Option<ReadId> {
        self.inbound.consume(count)
    }

    /// Notes that `slots` more receive slots are posted for this connection, so that the peer may send more
    /// messages at a time.
    pub fn widen(&mut self, slots: u32) {
        self.inbound.widen(slots);
    }

    /// Returns the number of receive slots that must be kept for this connection, posted or with a message.
    /// [`widen`](Self::widen) makes the number larger. When the peer returns credits, the number shrinks, at
    /// most to its value at the start.
    pub fn window(&self) -> u32 {
        self.inbound.window
    }

    /// Notes that the READ of [`peek_read`](Self::peek_read) was posted.
    pub fn start_read(&mut self) {
        self.inbound.start_read();
    }
}

/// Inputs.
impl Connection {
    /// Takes a message that arrived in `slot`. `body` is the bytes after the header; it is empty for eager
    /// messages, whose body stays in the slot. `byte_len` is the length of the whole message. Messages arrive
    /// in the order in which their slots were posted.
    ///
    /// # Errors
    /// The peer violated the protocol. The connection can't be used any more.
    pub fn handle_receive(
        &mut self,
        slot: SlotIndex,
        header: &Header,
        body: &[u8],
        byte_len: usize,
        now: Instant,
    ) -> Result<(), ProtocolViolation> {
        self.inbound.check(header, byte_len)?;
        self.sources_done += self.outbound.counts(header)?;
        self.liveness.received(now);
        match header.kind {
            MessageKind::Eager => self.inbound.eager(slot, header.body_length as usize),
            MessageKind::Rts => self.inbound.rts(slot, body)?,
            kind => {
                self.handle_control(kind, body)?;
                self.inbound.release.push_back(slot);
                self.inbound.freed_by_control += 1;
            }
        }
        Ok(())
    }

    fn handle_control(&mut self, kind: MessageKind, body: &[u8]) -> Result<(), ProtocolViolation> {
        match kind {
            MessageKind::Fin if self.inbound.fin => return Err(ProtocolViolation::SecondFin),
            MessageKind::Fin => {
                empty(body)?;
                self.inbound.fin = true;
            }
            MessageKind::Abort => {
                let code = AbortCode(u32::from_le_bytes(exactly(body)?));
                self.abort = AbortState::Over;
                self.aborted_by_peer = Some(code);
            }
            MessageKind::Ping => {
                self.liveness.pong_due = Some(u64::from_le_bytes(exactly(body)?));
                // The peer pings because this side has sent nothing for a while.
                self.check_idle();
            }
            MessageKind::Return => self.inbound.returned(u32::from_le_bytes(exactly(body)?))?,
            MessageKind::Pong => {
                let nonce = u64::from_le_bytes(exactly(body)?);
                if nonce == 0 || nonce > self.liveness.pings {
                    return Err(ProtocolViolation::UnexpectedPong);
                }
                self.liveness.answered = self.liveness.answered.max(nonce);
            }
            MessageKind::Eager | MessageKind::Rts | MessageKind::Ack => empty(body)?,
        }
        Ok(())
    }

    /// Notes that `count` released slots are posted again.
    pub fn handle_slots_posted(&mut self, count: u32) {
        self.inbound.posted_slots(count);
    }

    /// Notes that `count` sends have left the local queue.
    pub fn handle_sends_completed(&mut self, count: u32) {
        self.outbound.queued = self.outbound.queued.saturating_sub(count);
    }

    /// Notes that a READ has landed. READs may land in any order.
    pub fn handle_read_completed(&mut self, id: ReadId) {
        self.inbound.read_completed(id);
    }

    /// Checks the timers. The caller calls this at the time of [`poll_timeout`](Self::poll_timeout), or
    /// earlier.
    pub fn handle_timeout(&mut self, now: Instant) {
        if self.abort != AbortState::No {
            return;
        }
        let ping_was_due = self.liveness.ping_due;
        if self.liveness.handle_timeout(now) {
            self.ping_unanswered = true;
            self.abort = AbortState::Over;
        }
        if self.liveness.ping_due && !ping_was_due {
            self.check_idle();
        }
    }

    /// Checks for idleness after a time of silence.
    fn check_idle(&mut self) {
        if self.outbound.is_idle() {
            self.idle = true;
            self.return_due = self.outbound.surplus() > 0;
        }
    }
}

/// Outputs.
impl Connection {
    /// Returns a message to post now.
    pub fn poll_transmit(&mut self) -> Option<ControlMessage> {
        if self.abort == AbortState::Over || !self.outbound.may_send_control() {
            return None;
        }
        if let AbortState::Wanted(code) = self.abort {
            let message = self.control(MessageKind::Abort, &code.0.to_le_bytes());
            self.abort = AbortState::Over;
            return Some(message);
        }
        if self.outbound.state == WriteState::Closing {
            self.outbound.state = WriteState::Closed;
            return Some(self.control(MessageKind::Fin, &[]));
        }
        if let Some(nonce) = self.liveness.pong_due.take() {
            return Some(self.control(MessageKind::Pong, &nonce.to_le_bytes()));
        }
        if self.liveness.ping_due {
            let nonce = self.liveness.ping();
            return Some(self.control(MessageKind::Ping, &nonce.to_le_bytes()));
        }
        let surplus = self.outbound.surplus();
        if std::mem::take(&mut self.return_due) && surplus > 0 {
            let message = self.control(MessageKind::Return, &surplus.to_le_bytes());
            // Returned credits count as used.
            self.outbound.sent += u64::from(surplus);
            return Some(message);
        }
        self.inbound.ack_due().then(|| self.control(MessageKind::Ack, &[]))
    }

    /// Returns the RDMA READ to post next, if one may be posted. The caller reports it with
    /// [`start_read`](Self::start_read).
    pub fn peek_read(&self) -> Option<ReadRequest> {
        if self.abort == AbortState::No { self.inbound.next_read() } else { None }
    }

    /// Returns a slot whose content is not needed any more. The caller posts it again, and reports that with
    /// [`handle_slots_posted`](Self::handle_slots_posted).
    pub fn poll_release(&mut self) -> Option<SlotIndex> {
        self.inbound.release.pop_front()
    }

    /// Returns an event that the caller has to act on.
    pub fn poll_event(&mut self) -> Option<Event> {
        if self.sources_done > 0 {
            return Some(Event::SourcesDone { count: std::mem::take(&mut self.sources_done) });
        }
        if let Some(code) = self.aborted_by_peer.take() {
            return Some(Event::Aborted { code });
        }
        if std::mem::take(&mut self.ping_unanswered) {
            return Some(Event::PingTimeout);
        }
        std::mem::take(&mut self.idle).then_some(Event::Idle)
    }

    /// Returns the time when [`handle_timeout`](Self::handle_timeout) is due.
    pub fn poll_timeout(&self) -> Option<Instant> {
        if self.abort == AbortState::No { self.liveness.deadline() } else { None }
    }

    /// Returns the next bytes to deliver, as far as they have arrived.
    pub fn front(&self) -> Option<Part> {
        self.inbound.front()
    }

    /// Returns what prevents sending data now.
    pub fn blocked_on(&self) -> Option<Blocked> {
        self.outbound.blocked()
    }

    /// Returns true if the peer sends no more data.
    pub fn is_fin_received(&self) -> bool {
        self.inbound.fin
    }

    /// Returns true if the peer sends no more data, and all of its data was delivered.
    pub fn is_read_closed(&self) -> bool {
        self.inbound.is_finished()
    }

    /// Returns true if this side has closed its sending direction, or aborted.
    pub fn is_write_closed(&self) -> bool {
        self.outbound.state != WriteState::Open || self.abort != AbortState::No
    }

    /// Returns true if this side's Fin was sent, and the peer has read all offered chunks.
    pub fn is_write_done(&self) -> bool {
        self.abort == AbortState::No && self.outbound.is_done()
    }

    /// Returns true if no message is left to send or to receive.
    pub fn is_closed(&self) -> bool {
        match self.abort {
            AbortState::Over => true,
            AbortState::Wanted(_) => false,
            AbortState::No => {
                self.outbound.is_done() && self.inbound.is_finished() && self.inbound.reads_settled()
            }
        }
    }

    /// Returns true if one side has offered memory that the other has not read to its end.
    pub fn is_transferring(&self) -> bool {
        self.outbound.has_unread_chunks() || self.inbound.awaits_reads()
    }

    fn control(&mut self, kind: MessageKind, body: &[u8]) -> ControlMessage {
        ControlMessage::new(&self.header(kind, body.len()), body)
    }

    fn header(&mut self, kind: MessageKind, body: usize) -> Header {
        let (granted, reads_done) = self.inbound.announce();
        let sequence = self.outbound.take(kind.is_data());
        Header { kind, end_of_message: false, body_length: body as u32, sequence, granted, reads_done }
    }
}

fn empty(body: &[u8]) -> Result<(), ProtocolViolation> {
    if body.is_empty() { Ok(()) } else { Err(ProtocolViolation::ControlBody(body.len())) }
}

fn exactly<const LENGTH: usize>(body: &[u8]) -> Result<[u8; LENGTH], ProtocolViolation> {
    body.try_into().map_err(|_| ProtocolViolation::ControlBody(body.len()))
}

/// The state of pings and answers.
#[derive(Debug)]
pub(super) struct Liveness {
    interval: Option<Duration>,
    timeout: Duration,
    last_received: Instant,
    /// True if a ping is to be sent.
    pub(super) ping_due: bool,
    /// How long the answer to a ping has been missing, as far as that counts; `None` if none is due.
    missing: Option<Duration>,
    /// The times of the last check and of the next one, while an answer is due. An answer that arrives wakes no
    /// task, so a check finds it.
    last_check: Instant,
    next_check: Instant,
    /// The number of checks that came late since the ping.
    late_checks: u32,
    /// The number of pings sent, which is the nonce of the last one.
    pub(super) pings: u64,
    /// The nonce of the newest ping that was answered.
    pub(super) answered: u64,
    /// The nonce of the peer's ping, until it is sent back.
    pub(super) pong_due: Option<u64>,
}

impl Liveness {
    /// A check is late after this part of the time for an answer: then this process did not run, and may not
    /// have taken an answer that is there. Its peer may have been stopped with it.
    const LATE: u32 = 10;
    /// The most late checks after which the time before them does not count.
    const MOST_LATE: u32 = 3;

    pub(super) fn new(interval: Option<Duration>, timeout: Duration, now: Instant) -> Self {
        Self {
            interval,
            timeout,
            last_received: now,
            ping_due: false,
            missing: None,
            last_check: now,
            next_check: now,
            late_checks: 0,
            pings: 0,
            answered: 0,
            pong_due: None,
        }
    }

    /// Notes that a message arrived. Any message is a sign of life.
    pub(super) fn received(&mut self, now: Instant) {
        self.last_received = now;
        self.missing = None;
        self.ping_due = false;
    }

    /// Notes that a ping is sent, and returns its nonce.
    pub(super) fn ping(&mut self) -> u64 {
        self.ping_due = false;
        self.pings += 1;
        self.pings
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        let interval = self.interval?;
        Some(self.missing.map_or(self.last_received + interval, |_| self.next_check))
    }

    /// Returns true if the peer did not answer in time.
    pub(super) fn handle_timeout(&mut self, now: Instant) -> bool {
        let Some(interval) = self.interval else { return false };
        let missing = match self.missing {
            Some(_) if now < self.next_check => return false,
            Some(missing) => missing + self.counted(now),
            None if now < self.last_received + interval => return false,
            // The time also runs while the ping waits for a credit: a peer that gives no credits is as bad as a
            // silent one.
            None => {
                (self.ping_due, self.late_checks) = (true, 0);
                Duration::ZERO
            }
        };
        let left = self.timeout.saturating_sub(missing);
        self.missing = Some(missing);
        (self.last_check, self.next_check) = (now, now + left.min(interval).min(self.timeout / 2));
        left.is_zero()
    }

    /// Returns how much of the time since the last check counts.
    fn counted(&mut self, now: Instant) -> Duration {
        let is_late = now - self.next_check > self.timeout / Self::LATE;
        if is_late && self.late_checks < Self::MOST_LATE {
            self.late_checks += 1;
            return Duration::ZERO;
        }
        now - self.last_check
    }
}
