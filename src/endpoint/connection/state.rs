//! The state of a connection under its lock, and the work that the protocol asks for.

use std::collections::{HashMap, VecDeque};
use std::io::{self, IoSlice};
use std::task::Waker;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, Timespec, clock_gettime};
use tokio::sync::Notify;

use super::byte_stream::{ReadQuota, Shortage};
use crate::endpoint::deferred::Deferred;
use crate::endpoint::error::ConnectionFault;
use crate::endpoint::info::Counters;
use crate::endpoint::link::{Link, WorkId, WorkKind};
use crate::endpoint::messages::traffic::Messages;
use crate::endpoint::tuner::Chooser;
use crate::protocol::{self, Event, ReadId, SlotIndex};
use crate::wire::{Header, MessageKind};
use tonic_rdma_verbs::memory::Block;
use tonic_rdma_verbs::{CompletionStatus, WorkCompletion};

/// The state of a connection. Reading and writing are in `byte_stream.rs`.
#[derive(Debug)]
pub(super) struct ConnectionState {
    pub(super) protocol: protocol::Connection,
    pub(super) link: Link,
    /// The messages of a connection that carries messages; `None` for a byte stream.
    pub(super) messages: Option<Box<Messages>>,
    pub(super) limits: Limits,
    pub(super) chooser: Chooser,
    /// Small writes, gathered until a flush or until they fill a message.
    pub(super) staging: Vec<u8>,
    pub(super) flush_wanted: bool,
    /// Memory that the peer reads, oldest first.
    pub(super) sources: VecDeque<Block>,
    /// Memory that our READs fill, kept until its bytes are delivered.
    pub(super) landings: HashMap<ReadId, Block>,
    pub(super) reader: Option<Waker>,
    pub(super) writer: Option<Waker>,
    /// The task that waits until all bytes are delivered.
    pub(super) closer: Option<Waker>,
    /// The reason why nothing can be sent any more. The connection has not ended yet, because the queue may
    /// still have completions of messages that the peer sent before: a peer may leave while this side
    /// acknowledges its last message.
    pub(super) lost: Option<ConnectionFault>,
    /// The reason why the connection ended early.
    pub(super) fault: Option<ConnectionFault>,
    /// A writer waited for room when the connection was lost.
    blocked: bool,
    /// A transfer was in progress when the connection ended early.
    pub(super) interrupted: bool,
    /// The stream was dropped: bytes that still arrive are discarded.
    pub(super) detached: bool,
    /// The supervisor was woken for the end of the connection.
    announced: bool,
    /// The supervisor was woken for the end of the peer's writing direction.
    announced_fin: bool,
    /// A task waits for the answer to a ping.
    pub(super) awaits_pong: bool,
    pub(super) quota: ReadQuota,
    pub(super) shortage: Shortage,
    pub(super) clock: Clock,
    /// Time of the last addition of the counters to the process's metrics.
    pub(super) published: Instant,
}

/// Limits of a connection.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    /// Writes are gathered up to this length, in bytes.
    pub(crate) coalesce: usize,
    /// Longest time for the answer to a ping, which the fault names.
    pub(crate) ping_timeout: Duration,
}

/// The stage of a connection's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// In use.
    Open,
    /// The stream was dropped; bytes written before are still being sent.
    Lingering,
    /// Nothing left to do.
    Finished,
}

impl ConnectionState {
    pub(super) fn new(
        link: Link,
        protocol: protocol::Connection,
        limits: Limits,
        chooser: Chooser,
        messages: Option<Box<Messages>>,
    ) -> Self {
        Self {
            staging: Vec::with_capacity(limits.coalesce),
            protocol,
            link,
            messages,
            limits,
            chooser,
            flush_wanted: false,
            sources: VecDeque::new(),
            landings: HashMap::new(),
            reader: None,
            writer: None,
            closer: None,
            lost: None,
            fault: None,
            blocked: false,
            interrupted: false,
            detached: false,
            announced: false,
            announced_fin: false,
            awaits_pong: false,
            quota: ReadQuota::default(),
            shortage: Shortage::default(),
            clock: Clock::default(),
            published: Instant::now(),
        }
    }

    /// Takes one completion.
    pub(super) fn handle_completion(
        &mut self,
        completion: &WorkCompletion,
        counters: &Counters,
        now: Instant,
    ) -> Result<(), ConnectionFault> {
        let id = WorkId::from_bits(completion.wr_id);
        if id.kind == WorkKind::SharedReceive {
            self.link.receives.hold(id.value);
        }
        if completion.status != CompletionStatus::Success {
            return Err(ConnectionFault::of_completion(completion.opcode, completion.status));
        }
        match id.kind {
            WorkKind::Receive | WorkKind::SharedReceive => {
                self.handle_message(id.value, completion.byte_len as usize, counters, now)?
            }
            WorkKind::Send => {
                self.link.sends_completed(id.value);
                self.protocol.handle_sends_completed(id.value);
            }
            WorkKind::Read if self.messages.is_some() => {
                counters.rendezvous_received_bytes.add(completion.byte_len);
                if let Some(messages) = &mut self.messages {
                    messages.fetches.completed(id.value);
                }
            }
            WorkKind::Read => {
                let read = ReadId(id.value);
                if let Some(block) = self.landings.get(&read) {
                    counters.rendezvous_received_bytes.add(block.len() as u64);
                }
                self.protocol.handle_read_completed(read);
            }
        }
        Ok(())
    }

    /// Takes the message in the receive buffer `slot`.
    fn handle_message(
        &mut self,
        slot: u32,
        length: usize,
        counters: &Counters,
        now: Instant,
    ) -> Result<(), ConnectionFault> {
        /// Longest body of a control message.
        const BODY: usize = protocol::MAX_CONTROL_BODY;
        let head = self.link.first_bytes::<{ Header::LENGTH }>(slot)?;
        let header = Header::decode(&head).map_err(protocol::ProtocolViolation::from)?;
        if header.kind == MessageKind::Rts && self.messages.is_some() {
            return Err(protocol::ProtocolViolation::Rendezvous.into());
        }
        let mut body = [0; BODY];
        let mut body_length = 0;
        if header.kind == MessageKind::Eager {
            counters.eager_received.add(1);
            counters.eager_received_bytes.add(length.saturating_sub(Header::LENGTH) as u64);
        } else {
            body_length = length.saturating_sub(Header::LENGTH).min(BODY);
            self.link.body(slot, &mut body[..body_length])?;
        }
        self.protocol.handle_receive(SlotIndex(slot), &header, &body[..body_length], length, now)?;
        Ok(())
    }

    /// Does all that the protocol asks for, and wakes the supervisor if that ended the connection.
    pub(super) fn settle(&mut self, counters: &Counters, changed: &Notify) {
        let progress = match self.obstacle() {
            None => self.progress(counters),
            Some(_) => self.handle_events().and_then(|()| self.deliver_messages(counters)),
        };
        if let Err(fault) = progress {
            self.end(fault, changed);
        }
        if self.awaits_pong && self.protocol.pongs() > 0 {
            self.awaits_pong = false;
            changed.notify_one();
        }
        if self.shortage.is_new() {
            changed.notify_one();
        }
        if !self.announced_fin && self.protocol.is_fin_received() {
            self.announced_fin = true;
            changed.notify_one();
        }
        if self.messages.is_some() {
            let finished = self.stage() == Stage::Finished;
            // A peer that has closed, and knows that this side has, may leave before its device has
            // acknowledged our last message.
            let closed = self.protocol.is_read_closed() && self.protocol.is_write_done();
            let fault = self.fault.as_ref().filter(|fault| !(closed && fault.is_loss()));
            if let Some(messages) = &mut self.messages {
                messages.conclude(fault, finished);
            }
        }
        if !self.announced && self.stage() == Stage::Finished {
            self.announced = true;
            changed.notify_one();
        }
    }

    /// Posts receives, reads, writes and control messages that are due.
    fn progress(&mut self, counters: &Counters) -> Result<(), ConnectionFault> {
        if let Some(mut messages) = self.messages.take() {
            let progress = self.progress_messages(&mut messages, counters);
            self.messages = Some(messages);
            return progress;
        }
        if self.detached {
            self.discard();
        }
        self.post_receives()?;
        self.handle_events()?;
        self.start_reads(counters)?;
        if self.flush_wanted {
            self.flush_staging(counters)?;
        }
        if self.detached && self.staging.is_empty() {
            self.protocol.close_write();
        }
        self.post_control(counters)
    }

    /// Does all that is due on a message connection: delivers, lets the handler send, and posts receives,
    /// READs and control messages.
    fn progress_messages(
        &mut self,
        messages: &mut Messages,
        counters: &Counters,
    ) -> Result<(), ConnectionFault> {
        messages.fetches.renew();
        loop {
            let has_work = messages.deliver(&self.link, &mut self.protocol, counters)?;
            if self.detached && !messages.started {
                self.discard();
            }
            self.post_receives()?;
            self.handle_events()?;
            if has_work || self.detached {
                messages.transmit(&mut self.link, &mut self.protocol, counters)?;
            }
            // A fetch may be over at once.
            if !messages.fetches.has_over() {
                break;
            }
        }
        if self.detached && messages.is_exhausted() {
            self.protocol.close_write();
        }
        self.post_control(counters)
    }

    /// Delivers what had arrived before the connection was lost.
    fn deliver_messages(&mut self, counters: &Counters) -> Result<(), ConnectionFault> {
        if self.fault.is_some() {
            return Ok(());
        }
        match &mut self.messages {
            Some(messages) => messages.deliver(&self.link, &mut self.protocol, counters).map(drop),
            None => Ok(()),
        }
    }

    /// Posts the receive buffers again whose messages are not needed any more.
    pub(super) fn post_receives(&mut self) -> Result<(), ConnectionFault> {
        while let Some(slot) = self.protocol.poll_release() {
            self.link.post_receive(slot)?;
            self.protocol.handle_slots_posted(1);
        }
        self.link.receives.adjust_window(&mut self.protocol);
        Ok(())
    }

    /// Posts control messages that are due.
    pub(super) fn post_control(&mut self, counters: &Counters) -> Result<(), ConnectionFault> {
        if self.protocol.is_write_closed() {
            self.link.signal_all = true;
        }
        while let Some(message) = self.protocol.poll_transmit() {
            counters.acks_sent.add(1);
            counters.work_requests.add(1);
            self.link.post_message(&[IoSlice::new(message.as_bytes())])?;
        }
        Ok(())
    }

    /// Takes the events of the protocol.
    pub(super) fn handle_events(&mut self) -> Result<(), ConnectionFault> {
        while let Some(event) = self.protocol.poll_event() {
            match event {
                Event::SourcesDone { count } => drop(self.sources.drain(..count as usize)),
                Event::Aborted { code } => {
                    return Err(ConnectionFault::Aborted(code));
                }
                Event::Idle => {
                    self.link.release_idle_memory();
                    if let Some(messages) = &mut self.messages {
                        messages.memory.release_idle();
                    }
                }
                Event::PingTimeout => return Err(ConnectionFault::NoAnswer(self.limits.ping_timeout)),
            }
        }
        Ok(())
    }

    /// Ends the connection with `fault`. If `fault` says only that nothing gets through to the peer, the
    /// supervisor ends the connection later, after it has taken the completions of all messages that had
    /// arrived.
    pub(super) fn end(&mut self, fault: ConnectionFault, changed: &Notify) {
        if !fault.is_loss() {
            self.fail(fault);
        } else if self.lost.is_none() {
            // A failed device looks like a peer that left, but the queue pair knows the true reason.
            let failure = self.link.queue_pair.failure();
            self.lost = Some(failure.map_or(fault, |reason| ConnectionFault::DeviceFailed(reason.into())));
            self.blocked = self.writer.is_some();
            changed.notify_one();
        }
    }

    /// Ends the connection with `fault` at once.
    pub(super) fn fail(&mut self, fault: ConnectionFault) {
        if self.fault.is_none() {
            let fetching = self.messages.as_ref().is_some_and(|messages| !messages.fetches.is_empty());
            self.interrupted =
                self.blocked || fetching || self.writer.is_some() || self.protocol.is_transferring();
            self.fault = Some(fault);
            self.link.queue_pair.to_error();
        }
    }

    /// Returns an error if the connection ended early.
    pub(super) fn check_fault(&self) -> io::Result<()> {
        self.fault.clone().map_or(Ok(()), |fault| Err(fault.into()))
    }

    /// Returns the reason why nothing can be sent, if there is one.
    pub(super) fn obstacle(&self) -> Option<&ConnectionFault> {
        self.fault.as_ref().or(self.lost.as_ref())
    }

    /// Returns an error if nothing can be sent.
    pub(super) fn check_sending(&self) -> io::Result<()> {
        self.obstacle().map_or(Ok(()), |fault| Err(fault.clone().into()))
    }

    /// Returns an error if nothing can be written.
    pub(super) fn check_writable(&self) -> io::Result<()> {
        self.check_sending()?;
        if self.protocol.is_write_closed() {
            return Err(io::Error::new(io::ErrorKind::BrokenPipe, "written after shutdown"));
        }
        Ok(())
    }

    /// Returns the stage.
    pub(super) fn stage(&self) -> Stage {
        let all_sent = self.detached && self.staging.is_empty() && self.protocol.is_closed();
        if self.fault.is_some() || (all_sent && self.link.is_drained()) {
            Stage::Finished
        } else if self.detached {
            Stage::Lingering
        } else {
            Stage::Open
        }
    }

    /// Returns whether both directions are closed, the peer has all bytes that were written, and this side
    /// has read the peer's last byte. After a fault no acknowledgement to the peer is needed, because none
    /// can be sent.
    pub(super) fn all_delivered(&self) -> bool {
        let over = match self.fault {
            None => self.protocol.is_closed() && self.link.is_drained(),
            Some(_) => self.protocol.is_read_closed() && self.protocol.is_write_done(),
        };
        over && self.staging.is_empty()
    }

    /// Moves the work for the thread that holds the lock to `after`: that of the messages, or for a byte
    /// stream the wakers of all tasks that can go on.
    pub(super) fn take_deferred(&mut self, after: &mut Deferred) {
        if let Some(messages) = &mut self.messages {
            return after.append(&mut messages.after);
        }
        let wakers = &mut after.wakers;
        let ended = self.fault.is_some();
        if ended || self.protocol.front().is_some() || self.protocol.is_read_closed() {
            wakers.extend(self.reader.take());
        }
        if ended || self.lost.is_some() || (self.writer.is_some() && self.has_room()) {
            wakers.extend(self.writer.take());
        }
        if ended || (self.closer.is_some() && self.all_delivered()) {
            wakers.extend(self.closer.take());
        }
    }
}

/// A coarse clock, for timers that count in seconds. Each message reads it, so it must be cheap: its time is
/// some milliseconds old at most.
#[derive(Debug, Default)]
pub(super) struct Clock {
    /// The system's coarse time when the exact clock was read last, and the exact time then.
    last: Option<(Timespec, Instant)>,
}

impl Clock {
    /// Returns the time.
    pub(super) fn now(&mut self) -> Instant {
        let coarse = clock_gettime(ClockId::MonotonicCoarse);
        match self.last {
            Some((last, exact)) if last == coarse => exact,
            _ => {
                let exact = Instant::now();
                self.last = Some((coarse, exact));
                exact
            }
        }
    }
}

#[cfg(test)]
mod clock_tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_clock_goes_on() {
        let mut clock = Clock::default();
        let (first, start) = (clock.now(), Instant::now());
        assert!(clock.now() >= first);
        std::thread::sleep(Duration::from_millis(50));
        assert!(clock.now() > start, "a tick of the system is shorter");
    }
}
