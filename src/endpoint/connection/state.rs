//! The state that all connections have under their locks, and what they do with it.

use std::fmt::Debug;
use std::io::{self, IoSlice};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, Timespec, clock_gettime};
use tokio::sync::Notify;

use crate::endpoint::deferred::Deferred;
use crate::endpoint::error::ConnectionFault;
use crate::endpoint::info::Counters;
use crate::endpoint::link::{Link, WorkId, WorkKind};
use crate::protocol::{self, Event, SlotIndex};
use crate::wire::{Header, MessageKind};
use tonic_rdma_verbs::{CompletionStatus, WorkCompletion};

/// The link of a connection with the protocol that runs over it, and how the connection ends.
#[derive(Debug)]
pub(in crate::endpoint) struct LinkConnection {
    pub(in crate::endpoint) protocol: protocol::Connection,
    pub(in crate::endpoint) link: Link,
    /// Longest time for the answer to a ping, which the fault names.
    ping_timeout: Duration,
    /// Wakes the supervisor when the state changed in a way that concerns it.
    pub(in crate::endpoint) changed: Arc<Notify>,
    /// The reason why nothing can be sent any more. The connection has not ended yet, because the queue may
    /// still have completions of messages that the peer sent before: a peer may leave while this side
    /// acknowledges its last message.
    pub(super) lost: Option<ConnectionFault>,
    /// The reason why the connection ended early.
    pub(in crate::endpoint) fault: Option<ConnectionFault>,
    /// A transfer was in progress when the connection was lost.
    blocked: bool,
    /// A transfer was in progress when the connection ended early.
    pub(super) interrupted: bool,
    /// The handle of the connection was dropped, or closed it.
    pub(in crate::endpoint) detached: bool,
    /// The supervisor was woken for the end of the connection.
    announced: bool,
    /// The supervisor was woken for the end of the peer's writing direction.
    announced_fin: bool,
    /// A task waits for the answer to a ping.
    pub(super) awaits_pong: bool,
    pub(super) clock: Clock,
    /// Time of the last addition of the counters to the process's metrics.
    pub(super) published: Instant,
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

impl LinkConnection {
    pub(in crate::endpoint) fn new(
        link: Link,
        protocol: protocol::Connection,
        ping_timeout: Duration,
        changed: Arc<Notify>,
    ) -> Self {
        Self {
            protocol,
            link,
            ping_timeout,
            changed,
            lost: None,
            fault: None,
            blocked: false,
            interrupted: false,
            detached: false,
            announced: false,
            announced_fin: false,
            awaits_pong: false,
            clock: Clock::default(),
            published: Instant::now(),
        }
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

    /// Posts the receive buffers again whose messages are not needed any more.
    pub(in crate::endpoint) fn post_receives(&mut self) -> Result<(), ConnectionFault> {
        while let Some(slot) = self.protocol.poll_release() {
            self.link.post_receive(slot)?;
            self.protocol.handle_slots_posted(1);
        }
        self.link.receives.adjust_window(&mut self.protocol);
        Ok(())
    }

    /// Posts control messages that are due.
    pub(in crate::endpoint) fn post_control(&mut self, counters: &Counters) -> Result<(), ConnectionFault> {
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

    /// Takes the events of the protocol. `handle` gets those that concern what the connection carries.
    pub(in crate::endpoint) fn handle_events(
        &mut self,
        mut handle: impl FnMut(Event),
    ) -> Result<(), ConnectionFault> {
        while let Some(event) = self.protocol.poll_event() {
            match event {
                Event::SourcesDone { .. } => {}
                Event::Aborted { code } => return Err(ConnectionFault::Aborted(code)),
                Event::Idle => self.link.release_idle_memory(),
                Event::PingTimeout => return Err(ConnectionFault::NoAnswer(self.ping_timeout)),
            }
            handle(event);
        }
        Ok(())
    }

    /// Returns an error if the connection ended early.
    pub(super) fn check_fault(&self) -> io::Result<()> {
        self.fault.clone().map_or(Ok(()), |fault| Err(fault.into()))
    }

    /// Returns the reason why nothing can be sent, if there is one.
    pub(in crate::endpoint) fn obstacle(&self) -> Option<&ConnectionFault> {
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
}

/// What a connection carries, a byte stream or messages, with its link. All of it is under one lock.
pub(in crate::endpoint) trait Traffic: Debug + Send + 'static {
    /// Returns the link.
    fn base(&self) -> &LinkConnection;

    /// Returns the link.
    fn base_mut(&mut self) -> &mut LinkConnection;

    /// Delivers what has arrived, and posts receives, reads, writes and control messages that are due, unless
    /// there is an [obstacle](LinkConnection::obstacle).
    fn progress(&mut self, counters: &Counters) -> Result<(), ConnectionFault>;

    /// Takes the completion of the READ `read` of `length` bytes.
    fn read_completed(&mut self, read: u32, length: u64, counters: &Counters);

    /// Returns whether bytes were taken from the application that were not sent.
    fn has_unsent(&self) -> bool;

    /// Returns whether a transfer is in progress of which the protocol does not know.
    fn is_transferring(&self) -> bool;

    /// Notes that the connection has ended. This is called once.
    fn conclude(&mut self) {}

    /// Returns when to try again what failed because there was no memory.
    fn retry(&self) -> Option<Instant>;

    /// Notes that the handle of the connection is gone, and sends what waits to be sent.
    fn detach(&mut self, _: &Counters) -> Result<(), ConnectionFault> {
        Ok(())
    }

    /// Returns whether there may be tasks to wake, or work for the thread that holds the lock.
    fn has_deferred(&mut self) -> bool {
        true
    }

    /// Moves the tasks to wake, and the work for the thread that holds the lock, to `after`.
    fn take_deferred(&mut self, after: &mut Deferred);

    /// Takes one completion.
    fn handle_completion(
        &mut self,
        completion: &WorkCompletion,
        counters: &Counters,
        now: Instant,
    ) -> Result<(), ConnectionFault> {
        let base = self.base_mut();
        let id = WorkId::from_bits(completion.wr_id);
        if id.kind == WorkKind::SharedReceive {
            base.link.receives.hold(id.value);
        }
        if completion.status != CompletionStatus::Success {
            return Err(ConnectionFault::of_completion(completion.opcode, completion.status));
        }
        match id.kind {
            WorkKind::Receive | WorkKind::SharedReceive => {
                let length = completion.byte_len as usize;
                base.handle_message(id.value, length, counters, now)?
            }
            WorkKind::Send => {
                base.link.sends_completed(id.value);
                base.protocol.handle_sends_completed(id.value);
            }
            WorkKind::Read => self.read_completed(id.value, completion.byte_len, counters),
        }
        Ok(())
    }

    /// Does all that the protocol asks for, and wakes the supervisor if that ended the connection.
    fn settle(&mut self, counters: &Counters) {
        if let Err(fault) = self.progress(counters) {
            self.end(fault);
        }
        let ended = self.stage() == Stage::Finished && !self.base().announced;
        if ended {
            self.conclude();
        }
        let base = self.base_mut();
        let ponged = base.awaits_pong && base.protocol.pongs() > 0;
        let fin = !base.announced_fin && base.protocol.is_fin_received();
        base.awaits_pong &= !ponged;
        base.announced_fin |= fin;
        base.announced |= ended;
        if ponged || fin || ended {
            base.changed.notify_one();
        }
    }

    /// Ends the connection with `fault`. If `fault` says only that nothing gets through to the peer, the
    /// supervisor ends the connection later, after it has taken the completions of all messages that had
    /// arrived.
    fn end(&mut self, fault: ConnectionFault) {
        let blocked = self.is_transferring();
        let base = self.base_mut();
        if !fault.is_loss() {
            self.fail(fault);
        } else if base.lost.is_none() {
            // A failed device looks like a peer that left, but the queue pair knows the true reason.
            let failure = base.link.queue_pair.failure();
            base.lost = Some(failure.map_or(fault, |reason| ConnectionFault::DeviceFailed(reason.into())));
            base.blocked = blocked;
            base.changed.notify_one();
        }
    }

    /// Ends the connection with `fault` at once.
    fn fail(&mut self, fault: ConnectionFault) {
        let blocked = self.is_transferring();
        let base = self.base_mut();
        if base.fault.is_none() {
            base.interrupted = base.blocked || blocked || base.protocol.is_transferring();
            base.fault = Some(fault);
            base.link.queue_pair.to_error();
        }
    }

    /// Returns the stage.
    fn stage(&self) -> Stage {
        let base = self.base();
        let all_sent = base.detached && base.protocol.is_closed() && !self.has_unsent();
        if base.fault.is_some() || (all_sent && base.link.is_drained()) {
            Stage::Finished
        } else if base.detached {
            Stage::Lingering
        } else {
            Stage::Open
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
