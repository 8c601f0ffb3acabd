//! The state machine: commands, inputs, outputs.

use std::time::Instant;

use super::control::{AbortCode, ControlMessage};
use super::inbound::{Finished, Inbound, Part, ReadId, ReadRequest, SlotIndex};
use super::liveness::Liveness;
use super::outbound::{Outbound, WriteState};
use super::settings::{Settings, SettingsError};
use super::violation::Violation;
use crate::wire::{Chunk, Header, Kind, MAX_CHUNKS};

/// One end of a connection. See the [module](super) for how to drive it.
#[derive(Debug)]
pub struct Connection {
    outbound: Outbound,
    inbound: Inbound,
    liveness: Liveness,
    abort: Abort,
    sources_done: u64,
    aborted_by_peer: Option<AbortCode>,
    ping_unanswered: bool,
    /// Credits that this end has no use for want to go back.
    return_due: bool,
    /// This end is to be told that it is idle.
    idle: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Abort {
    No,
    /// Waits for a credit.
    Wanted(AbortCode),
    /// Sent or received: nothing more is said.
    Over,
}

/// Something that the caller has to act on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The peer has read the oldest `count` chunks that were offered and not reported yet; their memory is free.
    SourcesDone {
        /// How many.
        count: u64,
    },
    /// The peer has given up.
    Aborted {
        /// Why.
        code: AbortCode,
    },
    /// The peer did not answer a ping.
    PingTimeout,
    /// Nothing was sent for one to two ping intervals: what is kept for sending can go.
    Idle,
}

/// Why no data may be sent now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blocked {
    /// The peer has no receive slot free.
    Credits,
    /// The local send queue is full.
    SendQueue,
}

/// A command that can't be carried out now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// There is not that much room; see [`Connection::eager_room`] and [`Connection::rendezvous_room`].
    #[error("{asked} asked for, where there is room for {room}")]
    NoRoom {
        /// Bytes or chunks asked for.
        asked: usize,
        /// Bytes or chunks that there is room for.
        room: usize,
    },
    /// A rendezvous of no chunks.
    #[error("an offer of nothing")]
    Nothing,
}

/// Commands.
impl Connection {
    /// A connection whose slots are all posted, at both ends.
    ///
    /// # Errors
    /// Settings that no connection can work with; they may have come from the peer.
    pub fn new(settings: Settings, now: Instant) -> Result<Self, SettingsError> {
        settings.check()?;
        Ok(Self {
            outbound: Outbound::new(&settings),
            inbound: Inbound::new(&settings),
            liveness: Liveness::new(settings.ping_interval, settings.ping_timeout, now),
            abort: Abort::No,
            sources_done: 0,
            aborted_by_peer: None,
            ping_unanswered: false,
            return_due: false,
            idle: false,
        })
    }

    /// Bytes that one eager message may carry now; 0 means to wait.
    pub fn eager_room(&self) -> usize {
        if self.abort == Abort::No { self.outbound.eager_room() } else { 0 }
    }

    /// Takes a credit for an eager message of `payload` bytes; the caller posts the header and them as one Send.
    ///
    /// # Errors
    /// More bytes than there is room for.
    pub fn send_eager(
        &mut self,
        payload: usize,
        end_of_message: bool,
        _now: Instant,
    ) -> Result<[u8; Header::LENGTH], SendError> {
        let room = self.eager_room();
        if payload > room || room == 0 {
            return Err(SendError::NoRoom { asked: payload, room });
        }
        Ok(self.header(Kind::Eager, end_of_message, payload).encode())
    }

    /// Chunks that one rendezvous may offer now; 0 means to wait.
    pub fn rendezvous_room(&self) -> usize {
        if self.abort == Abort::No { (self.outbound.offer_room() as usize).min(MAX_CHUNKS) } else { 0 }
    }

    /// Offers chunks of registered memory, whose content must stay until [`Event::SourcesDone`]; the caller posts the
    /// returned message.
    ///
    /// # Errors
    /// No chunk, or more than there is room for.
    pub fn send_rendezvous(
        &mut self,
        chunks: &[Chunk],
        end_of_message: bool,
        _now: Instant,
    ) -> Result<ControlMessage, SendError> {
        let room = self.rendezvous_room();
        if chunks.is_empty() {
            return Err(SendError::Nothing);
        }
        if chunks.len() > room {
            return Err(SendError::NoRoom { asked: chunks.len(), room });
        }
        let mut body = [0; super::MAX_CONTROL_BODY];
        for (place, chunk) in body.chunks_exact_mut(Chunk::LENGTH).zip(chunks) {
            place.copy_from_slice(&chunk.encode());
        }
        let length = chunks.len() * Chunk::LENGTH;
        self.outbound.offer(chunks.len() as u64);
        let header = self.header(Kind::Rts, end_of_message, length);
        Ok(ControlMessage::new(&header, &body[..length]))
    }

    /// Ends the sending direction after everything sent so far.
    pub fn close_write(&mut self) {
        if self.outbound.state == WriteState::Open {
            self.outbound.state = WriteState::Closing;
        }
    }

    /// Asks the peer for a sign of life now; [`pongs`](Self::pongs) tells when it has answered.
    pub fn ping(&mut self) {
        self.liveness.ping_due = true;
    }

    /// How many of the pings sent so far the peer has answered, or passed over with an answer to a later one.
    pub fn pongs(&self) -> u64 {
        self.liveness.answered
    }

    /// Gives up both directions, and tells the peer once if there is a way.
    pub fn abort(&mut self, code: AbortCode) {
        if self.abort == Abort::No {
            self.abort = Abort::Wanted(code);
        }
    }

    /// Takes `count` bytes off the front part; says if that used it up.
    pub fn consume(&mut self, count: usize) -> Option<Finished> {
        self.inbound.consume(count)
    }

    /// `slots` more receive slots are posted for this connection: the peer may send as many messages more at a time.
    pub fn widen(&mut self, slots: u32) {
        self.inbound.widen(slots);
    }

    /// Receive slots that have to be kept for this connection, posted or holding a message. Grows with
    /// [`widen`](Self::widen), and shrinks to what it was at the start when the peer gives credits back.
    pub fn window(&self) -> u32 {
        self.inbound.window()
    }

    /// The READ of [`peek_read`](Self::peek_read) was posted.
    pub fn start_read(&mut self) {
        self.inbound.start_read();
    }
}

/// Inputs.
impl Connection {
    /// A message arrived in `slot`. `body` is what follows its header (nothing for eager ones, whose body stays where
    /// it is), `byte_len` its whole length. Messages come in the order in which their slots were posted.
    ///
    /// # Errors
    /// What the peer did wrong; the connection is of no more use.
    pub fn handle_receive(
        &mut self,
        slot: SlotIndex,
        header: &Header,
        body: &[u8],
        byte_len: usize,
        now: Instant,
    ) -> Result<(), Violation> {
        self.inbound.check(header, byte_len)?;
        self.sources_done += self.outbound.counts(header)?;
        self.liveness.heard(now);
        match header.kind {
            Kind::Eager => self.inbound.eager(slot, header.body_length as usize),
            Kind::Rts => self.inbound.rts(slot, body)?,
            Kind::Ack | Kind::Fin | Kind::Abort | Kind::Ping | Kind::Pong | Kind::Return => {
                self.handle_control(header.kind, body)?;
                self.inbound.control(slot);
            }
        }
        Ok(())
    }

    fn handle_control(&mut self, kind: Kind, body: &[u8]) -> Result<(), Violation> {
        match kind {
            Kind::Fin if self.inbound.fin => return Err(Violation::SecondFin),
            Kind::Fin => {
                empty(body)?;
                self.inbound.fin = true;
            }
            Kind::Abort => {
                let code = AbortCode(u32::from_le_bytes(exactly(body)?));
                self.abort = Abort::Over;
                self.aborted_by_peer = Some(code);
            }
            Kind::Ping => {
                self.liveness.pong_due = Some(u64::from_le_bytes(exactly(body)?));
                // It was sent because this end has long said nothing.
                self.look_idle();
            }
            Kind::Return => self.inbound.returned(u32::from_le_bytes(exactly(body)?))?,
            Kind::Pong => {
                let nonce = u64::from_le_bytes(exactly(body)?);
                if !self.liveness.is_ours(nonce) {
                    return Err(Violation::UnexpectedPong);
                }
                self.liveness.answered = self.liveness.answered.max(nonce);
            }
            Kind::Eager | Kind::Rts | Kind::Ack => empty(body)?,
        }
        Ok(())
    }

    /// `count` slots that had been released are posted again.
    pub fn handle_slots_posted(&mut self, count: u32) {
        self.inbound.posted_slots(count);
    }

    /// `count` sends have left the local queue.
    pub fn handle_sends_completed(&mut self, count: u32) {
        self.outbound.completed(count);
    }

    /// A READ has landed. They may land in any order.
    pub fn handle_read_completed(&mut self, id: ReadId) {
        self.inbound.read_completed(id);
    }

    /// The time of [`poll_timeout`](Self::poll_timeout) has come, perhaps.
    pub fn handle_timeout(&mut self, now: Instant) {
        if self.abort != Abort::No {
            return;
        }
        let ping_was_due = self.liveness.ping_due;
        if self.liveness.handle_timeout(now) {
            self.ping_unanswered = true;
            self.abort = Abort::Over;
        }
        if self.liveness.ping_due && !ping_was_due {
            self.look_idle();
        }
    }

    /// A time of silence has passed.
    fn look_idle(&mut self) {
        if self.outbound.is_idle() {
            self.idle = true;
            self.return_due = self.outbound.surplus() > 0;
        }
    }
}

/// Outputs.
impl Connection {
    /// A message to post now.
    pub fn poll_transmit(&mut self, _now: Instant) -> Option<ControlMessage> {
        if self.abort == Abort::Over || !self.outbound.may_send_control() {
            return None;
        }
        if let Abort::Wanted(code) = self.abort {
            let message = self.control(Kind::Abort, &code.0.to_le_bytes());
            self.abort = Abort::Over;
            return Some(message);
        }
        if self.outbound.state == WriteState::Closing {
            self.outbound.state = WriteState::Closed;
            return Some(self.control(Kind::Fin, &[]));
        }
        if let Some(nonce) = self.liveness.pong_due.take() {
            return Some(self.control(Kind::Pong, &nonce.to_le_bytes()));
        }
        if self.liveness.ping_due {
            let nonce = self.liveness.ping();
            return Some(self.control(Kind::Ping, &nonce.to_le_bytes()));
        }
        let surplus = self.outbound.surplus();
        if std::mem::take(&mut self.return_due) && surplus > 0 {
            let message = self.control(Kind::Return, &surplus.to_le_bytes());
            self.outbound.give_back(surplus);
            return Some(message);
        }
        self.inbound.ack_due().then(|| self.control(Kind::Ack, &[]))
    }

    /// The RDMA READ to post next, if any may be; [`start_read`](Self::start_read) says that it was.
    pub fn peek_read(&self) -> Option<ReadRequest> {
        if self.abort == Abort::No { self.inbound.next_read() } else { None }
    }

    /// A slot whose content is of no more use; to be posted again, and reported with
    /// [`handle_slots_posted`](Self::handle_slots_posted).
    pub fn poll_release(&mut self) -> Option<SlotIndex> {
        self.inbound.poll_release()
    }

    /// What the caller has to act on.
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

    /// When [`handle_timeout`](Self::handle_timeout) is due.
    pub fn poll_timeout(&self) -> Option<Instant> {
        if self.abort == Abort::No { self.liveness.deadline() } else { None }
    }

    /// The bytes that come next, as far as they are there.
    pub fn front(&self) -> Option<Part> {
        self.inbound.front()
    }

    /// Why no data may be sent now.
    pub fn blocked_on(&self) -> Option<Blocked> {
        self.outbound.blocked()
    }

    /// Whether the peer has said that it will send no more data.
    pub fn is_fin_received(&self) -> bool {
        self.inbound.fin
    }

    /// Whether the peer will send no more data and all of it was delivered.
    pub fn is_read_closed(&self) -> bool {
        self.inbound.is_finished()
    }

    /// Whether this end has closed its sending direction, or given up.
    pub fn is_write_closed(&self) -> bool {
        self.outbound.state != WriteState::Open || self.abort != Abort::No
    }

    /// Whether this end's last word was sent, and the peer has read all that it was offered.
    pub fn is_write_done(&self) -> bool {
        self.abort == Abort::No && self.outbound.is_done()
    }

    /// Whether nothing is left to say or to hear.
    pub fn is_closed(&self) -> bool {
        match self.abort {
            Abort::Over => true,
            Abort::Wanted(_) => false,
            Abort::No => {
                self.outbound.is_done() && self.inbound.is_finished() && self.inbound.reads_settled()
            }
        }
    }

    /// Returns whether one end has offered memory that the other has not read to its end.
    pub fn is_transferring(&self) -> bool {
        self.outbound.is_offering() || self.inbound.awaits_reads()
    }

    fn control(&mut self, kind: Kind, body: &[u8]) -> ControlMessage {
        ControlMessage::new(&self.header(kind, false, body.len()), body)
    }

    fn header(&mut self, kind: Kind, end_of_message: bool, body: usize) -> Header {
        let (granted, reads_done) = self.inbound.tell();
        let sequence = self.outbound.take(kind.is_data());
        Header { kind, end_of_message, body_length: body as u32, sequence, granted, reads_done }
    }
}

fn empty(body: &[u8]) -> Result<(), Violation> {
    if body.is_empty() { Ok(()) } else { Err(Violation::ControlBody(body.len())) }
}

fn exactly<const LENGTH: usize>(body: &[u8]) -> Result<[u8; LENGTH], Violation> {
    body.try_into().map_err(|_| Violation::ControlBody(body.len()))
}
