//! A connection: one queue pair, the protocol that runs over it, and the two tasks that may wait for it.
//!
//! Everything is under one lock, which is held for the length of a copy at most. Whoever polls the completion queue
//! feeds completions in ([`Connection::handle_completions`]); the stream's task writes and reads. Each of them then
//! carries out what the protocol wants done ([`State::progress`]), so that no data waits for another task's turn.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::io::{self, IoSlice};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use tokio::io::ReadBuf;
use tokio::sync::Notify;

use super::counters::Counters;
use super::fault::ConnectionFault;
use super::journal::End;
use super::link::Link;
use super::lock;
use super::queue::Participant;
use super::read::{Shortage, Turn};
use super::tuner::{Chooser, Explained};
use super::work_id::{Kind, WorkId};
use crate::protocol::{self, AbortCode, Event, ReadId, SlotIndex};
use crate::wire::{Header, Kind as MessageKind};
use tonic_rdma_verbs::internal::sent_slices;
use tonic_rdma_verbs::memory::Block;
use tonic_rdma_verbs::{CompletionStatus, QueuePairNumber, WorkCompletion};

/// See the module's documentation.
pub(crate) struct Connection {
    number: QueuePairNumber,
    state: Mutex<State>,
    counters: Arc<Counters>,
    /// Tells the supervisor that something changed that it must look at.
    pub(crate) changed: Notify,
}

impl fmt::Debug for Connection {
    /// Names the connection; all that belongs to it would fill pages.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("queue_pair", &self.number).finish_non_exhaustive()
    }
}

/// What the lock guards.
#[derive(Debug)]
pub(super) struct State {
    pub(super) protocol: protocol::Connection,
    pub(super) link: Link,
    pub(super) limits: Limits,
    pub(super) chooser: Chooser,
    /// Small writes, gathered until a flush or until they fill a message.
    pub(super) staging: Vec<u8>,
    pub(super) flush_wanted: bool,
    /// Memory that the peer is reading, oldest first.
    pub(super) sources: VecDeque<Block>,
    /// Memory that our READs fill, until it was delivered.
    pub(super) landings: HashMap<ReadId, Block>,
    pub(super) reader: Option<Waker>,
    pub(super) writer: Option<Waker>,
    /// Who waits for all to be delivered.
    closer: Option<Waker>,
    /// Nothing can be sent any more. Not the end yet: the peer may have said more than was taken in so far, its last word
    /// for one, after which it may leave while we still thank it for that.
    lost: Option<ConnectionFault>,
    pub(super) fault: Option<ConnectionFault>,
    /// A writer waited for room when the connection was lost.
    blocked: bool,
    /// Data was being transferred when the connection ended before its time.
    interrupted: bool,
    /// The stream is gone: what still comes is thrown away.
    detached: bool,
    announced: bool,
    /// Somebody waits for the answer to a ping.
    awaits_pong: bool,
    pub(super) turn: Turn,
    pub(super) shortage: Shortage,
    /// When the counters were last added to the process's metrics.
    published: Instant,
}

/// Lengths that the write path works with, in bytes.
#[derive(Clone, Debug)]
pub(super) struct Limits {
    /// Writes shorter than this are gathered.
    pub(super) coalesce: usize,
    /// How long the peer may take to answer a ping.
    pub(super) ping_timeout: Duration,
}

/// How far a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// In use.
    Open,
    /// The stream was dropped; what it wrote is still on its way.
    Lingering,
    /// Nothing left to do.
    Finished,
}

impl Connection {
    /// How often a busy connection adds its counters to the process's metrics.
    const PUBLISH_EVERY: Duration = Duration::from_secs(1);

    pub(super) fn new(
        link: Link,
        protocol: protocol::Connection,
        limits: Limits,
        chooser: Chooser,
    ) -> Arc<Self> {
        let staging = Vec::with_capacity(limits.coalesce);
        Arc::new(Self {
            number: link.queue_pair().number(),
            state: Mutex::new(State {
                protocol,
                link,
                limits,
                chooser,
                staging,
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
                awaits_pong: false,
                turn: Turn::default(),
                shortage: Shortage::default(),
                published: Instant::now(),
            }),
            counters: Arc::default(),
            changed: Notify::new(),
        })
    }

    pub(crate) fn counters(&self) -> &Arc<Counters> {
        &self.counters
    }

    pub(crate) fn explained(&self) -> Arc<Explained> {
        Arc::clone(lock(&self.state).chooser.explained())
    }

    pub(crate) fn publish_counters(&self) {
        self.counters.publish();
    }

    /// Asks the peer for a sign of life over the queue pair, and waits for it. Only before the connection has a
    /// supervisor, which waits for changes too.
    pub(crate) async fn reach(&self) -> Result<(), ConnectionFault> {
        {
            let mut state = lock(&self.state);
            state.protocol.ping();
            state.awaits_pong = true;
            state.settle(Instant::now(), &self.counters, &self.changed);
        }
        loop {
            self.changed.notified().await;
            let state = lock(&self.state);
            if state.protocol.pongs() > 0 {
                return Ok(());
            }
            if let Some(fault) = state.obstacle() {
                return Err(fault.clone());
            }
        }
    }

    /// Writes the slices, or as much of them as there is room for.
    pub(crate) fn poll_write(
        &self,
        context: &Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let mut state = lock(&self.state);
        state.check_writable()?;
        match state.write(slices, &self.counters, Instant::now()) {
            Ok(Some(written)) => {
                sent_slices(slices, written);
                state.chooser.taken(written);
                Poll::Ready(Ok(written))
            }
            Ok(None) => {
                state.writer = Some(context.waker().clone());
                Poll::Pending
            }
            Err(fault) => Poll::Ready(Err(self.fail_with(&mut state, fault))),
        }
    }

    /// Sends what was gathered.
    pub(crate) fn poll_flush(&self, context: &Context<'_>) -> Poll<io::Result<()>> {
        let mut state = lock(&self.state);
        if state.staging.is_empty() {
            return Poll::Ready(Ok(()));
        }
        state.check_sending()?;
        state.flush_wanted = true;
        match state.flush_staging(&self.counters, Instant::now()) {
            Ok(true) => Poll::Ready(Ok(())),
            Ok(false) => {
                state.writer = Some(context.waker().clone());
                Poll::Pending
            }
            Err(fault) => Poll::Ready(Err(self.fail_with(&mut state, fault))),
        }
    }

    /// Closes the writing direction once everything written was sent.
    pub(crate) fn poll_shutdown(&self, context: &Context<'_>) -> Poll<io::Result<()>> {
        if self.poll_flush(context)?.is_pending() {
            return Poll::Pending;
        }
        let mut state = lock(&self.state);
        if state.obstacle().is_none() {
            state.protocol.close_write();
            state.settle(Instant::now(), &self.counters, &self.changed);
        }
        Poll::Ready(Ok(()))
    }

    /// Reads what has arrived into `buffer`; nothing at the end of the stream.
    pub(crate) fn poll_read(&self, context: &Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if buffer.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        let mut state = lock(&self.state);
        if state.turn.is_over() && state.protocol.front().is_some() {
            state.turn.begin();
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        match state.read(buffer) {
            Ok(0) => {}
            Ok(_) => {
                state.settle(Instant::now(), &self.counters, &self.changed);
                return Poll::Ready(Ok(()));
            }
            Err(fault) => return Poll::Ready(Err(self.fail_with(&mut state, fault))),
        }
        if state.protocol.is_read_closed() {
            let closer = state.closer.take();
            drop(state);
            closer.into_iter().for_each(Waker::wake);
            return Poll::Ready(Ok(()));
        }
        state.check_fault()?;
        // A task that waits for an answer has nothing to add to what it asked.
        if !state.staging.is_empty() {
            state.flush_wanted = true;
            state.settle(Instant::now(), &self.counters, &self.changed);
        }
        state.turn.begin();
        state.reader = Some(context.waker().clone());
        Poll::Pending
    }

    /// Waits until there is nothing left to say or to hear.
    pub(crate) fn poll_delivered(&self, context: &Context<'_>) -> Poll<io::Result<()>> {
        let mut state = lock(&self.state);
        if state.all_delivered() {
            return Poll::Ready(Ok(()));
        }
        // A peer that has sent all and taken all may leave while we still read what it sent.
        if !(state.protocol.is_fin_received() && state.protocol.is_write_done()) {
            state.check_fault()?;
        }
        state.closer = Some(context.waker().clone());
        Poll::Pending
    }

    pub(crate) fn read_greedily(&self) {
        lock(&self.state).turn.never_end();
    }

    /// The stream is gone. What was written goes out all the same, flushed or not, as it would over TCP: the last words of
    /// somebody who gives up, such as an alert of TLS, are often not flushed.
    pub(crate) fn detach(&self) {
        let (mut state, now) = (lock(&self.state), Instant::now());
        state.detached = true;
        state.flush_wanted = true;
        (state.reader, state.writer, state.closer) = (None, None, None);
        if state.obstacle().is_none()
            && let Err(fault) = state.flush_staging(&self.counters, now)
        {
            state.end(fault, &self.changed);
        }
        state.settle(now, &self.counters, &self.changed);
        self.changed.notify_one();
    }

    /// Ends the connection with `fault`; both tasks are woken.
    pub(crate) fn fail(&self, fault: ConnectionFault) {
        let mut wakers = Vec::new();
        let mut state = lock(&self.state);
        state.fail(fault);
        state.settle(Instant::now(), &self.counters, &self.changed);
        state.take_wakers(&mut wakers);
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Tells the peer that we are leaving, then ends the connection.
    pub(crate) fn abort(&self, code: AbortCode, fault: ConnectionFault) {
        let mut state = lock(&self.state);
        if state.obstacle().is_none() {
            state.protocol.abort(code);
            state.settle(Instant::now(), &self.counters, &self.changed);
        }
        drop(state);
        self.fail(fault);
    }

    /// Time has passed: pings that are due go out, and overdue answers end the connection.
    pub(crate) fn handle_timeout(&self, now: Instant) {
        let mut wakers = Vec::new();
        let mut state = lock(&self.state);
        state.protocol.handle_timeout(now);
        state.settle(now, &self.counters, &self.changed);
        state.take_wakers(&mut wakers);
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// When [`handle_timeout`](Self::handle_timeout) is due.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let state = lock(&self.state);
        [state.protocol.poll_timeout(), state.shortage.retry()].into_iter().flatten().min()
    }

    pub(crate) fn stage(&self) -> Stage {
        lock(&self.state).stage()
    }

    /// Whether the peer has said that it will send nothing more.
    pub(crate) fn peer_finished(&self) -> bool {
        lock(&self.state).protocol.is_fin_received()
    }

    /// Why nothing can be sent any more. Whoever is told takes in what has arrived, then ends the connection.
    pub(crate) fn lost(&self) -> Option<ConnectionFault> {
        lock(&self.state).lost.clone()
    }

    /// Why it ended, if it did before its time.
    pub(crate) fn fault(&self) -> Option<ConnectionFault> {
        lock(&self.state).fault.clone()
    }

    /// How it ended.
    pub(crate) fn ending(&self) -> End {
        let state = lock(&self.state);
        End {
            fault: state.fault.clone(),
            goodbye: state.protocol.is_fin_received(),
            interrupted: state.interrupted,
        }
    }

    fn fail_with(&self, state: &mut State, fault: ConnectionFault) -> io::Error {
        state.end(fault.clone(), &self.changed);
        state.settle(Instant::now(), &self.counters, &self.changed);
        fault.into()
    }
}

impl Participant for Connection {
    fn queue_pair_number(&self) -> QueuePairNumber {
        self.number
    }

    fn handle_completions(&self, completions: &[WorkCompletion], wakers: &mut Vec<Waker>) {
        let now = Instant::now();
        let mut state = lock(&self.state);
        for completion in completions {
            if let Err(fault) = state.handle_completion(completion, &self.counters, now) {
                state.end(fault, &self.changed);
            }
        }
        state.settle(now, &self.counters, &self.changed);
        state.take_wakers(wakers);
        if now.saturating_duration_since(state.published) > Self::PUBLISH_EVERY {
            state.published = now;
            self.counters.publish();
        }
    }

    fn fail_with_device(&self) {
        let failure = lock(&self.state).link.queue_pair().failure();
        if let Some(reason) = failure {
            self.fail(ConnectionFault::DeviceFailed(reason.into()));
        }
    }
}

impl State {
    fn handle_completion(
        &mut self,
        completion: &WorkCompletion,
        counters: &Counters,
        now: Instant,
    ) -> Result<(), ConnectionFault> {
        let id = WorkId::from_bits(completion.wr_id);
        if id.kind == Kind::SharedReceive {
            self.link.hold(id.value);
        }
        if completion.status != CompletionStatus::Success {
            return Err(ConnectionFault::of_completion(completion.opcode, completion.status));
        }
        match id.kind {
            Kind::Receive | Kind::SharedReceive => {
                self.handle_message(id.value, completion.byte_len as usize, counters, now)?
            }
            Kind::Send => {
                self.link.sends_completed(id.value);
                self.protocol.handle_sends_completed(id.value);
            }
            Kind::Read => self.protocol.handle_read_completed(ReadId(id.value)),
        }
        Ok(())
    }

    fn handle_message(
        &mut self,
        slot: u32,
        length: usize,
        counters: &Counters,
        now: Instant,
    ) -> Result<(), ConnectionFault> {
        /// Bodies of control messages are shorter than this.
        const BODY: usize = protocol::MAX_CONTROL_BODY;
        let head = self.link.head::<{ Header::LENGTH }>(slot)?;
        let header = Header::decode(&head).map_err(protocol::Violation::from)?;
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

    /// Carries out all that the protocol wants done, and tells the supervisor if that ended the connection.
    pub(super) fn settle(&mut self, now: Instant, counters: &Counters, changed: &Notify) {
        let progress = match self.obstacle() {
            None => self.progress(now, counters),
            Some(_) => self.handle_events(),
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
        if !self.announced && self.stage() == Stage::Finished {
            self.announced = true;
            changed.notify_one();
        }
    }

    fn progress(&mut self, now: Instant, counters: &Counters) -> Result<(), ConnectionFault> {
        if self.detached {
            self.discard();
        }
        while let Some(slot) = self.protocol.poll_release() {
            self.link.post_receive(slot)?;
            self.protocol.handle_slots_posted(1);
        }
        self.link.follow(&mut self.protocol);
        self.handle_events()?;
        self.start_reads(counters, now)?;
        if self.flush_wanted {
            self.flush_staging(counters, now)?;
        }
        if self.detached && self.staging.is_empty() {
            self.protocol.close_write();
        }
        if self.protocol.is_write_closed() {
            self.link.signal_all();
        }
        while let Some(message) = self.protocol.poll_transmit(now) {
            counters.acks_sent.add(1);
            counters.work_requests.add(1);
            self.link.post_message(&[IoSlice::new(message.as_bytes())])?;
        }
        Ok(())
    }

    fn handle_events(&mut self) -> Result<(), ConnectionFault> {
        while let Some(event) = self.protocol.poll_event() {
            match event {
                Event::SourcesDone { count } => drop(self.sources.drain(..count as usize)),
                Event::Aborted { code } => {
                    return Err(ConnectionFault::Aborted(code));
                }
                Event::Idle => self.link.rest(),
                Event::PingTimeout => return Err(ConnectionFault::NoAnswer(self.limits.ping_timeout)),
            }
        }
        Ok(())
    }

    /// Ends the connection with `fault`, or has the supervisor do so when it has taken in what the peer had said.
    fn end(&mut self, fault: ConnectionFault, changed: &Notify) {
        if !fault.is_loss() {
            self.fail(fault);
        } else if self.lost.is_none() {
            // A device that failed has ended its queue pairs as a peer that leaves does, and knows better why.
            let failure = self.link.queue_pair().failure();
            self.lost = Some(failure.map_or(fault, |reason| ConnectionFault::DeviceFailed(reason.into())));
            self.blocked = self.writer.is_some();
            changed.notify_one();
        }
    }

    pub(super) fn fail(&mut self, fault: ConnectionFault) {
        if self.fault.is_none() {
            self.interrupted = self.blocked || self.writer.is_some() || self.protocol.is_transferring();
            self.fault = Some(fault);
            self.link.queue_pair().to_error();
        }
    }

    pub(super) fn check_fault(&self) -> io::Result<()> {
        self.fault.clone().map_or(Ok(()), |fault| Err(fault.into()))
    }

    /// Why nothing can be sent.
    fn obstacle(&self) -> Option<&ConnectionFault> {
        self.fault.as_ref().or(self.lost.as_ref())
    }

    fn check_sending(&self) -> io::Result<()> {
        self.obstacle().map_or(Ok(()), |fault| Err(fault.clone().into()))
    }

    fn check_writable(&self) -> io::Result<()> {
        self.check_sending()?;
        if self.protocol.is_write_closed() {
            return Err(io::Error::new(io::ErrorKind::BrokenPipe, "written after shutdown"));
        }
        Ok(())
    }

    fn stage(&self) -> Stage {
        let all_said = self.detached && self.staging.is_empty() && self.protocol.is_closed();
        if self.fault.is_some() || (all_said && self.link.is_drained()) {
            Stage::Finished
        } else if self.detached {
            Stage::Lingering
        } else {
            Stage::Open
        }
    }

    /// Whether the peer has all that was written, and its own last was read. After a fault nothing can be told to the peer
    /// any more, nor need it be.
    fn all_delivered(&self) -> bool {
        let over = match self.fault {
            None => self.protocol.is_closed() && self.link.is_drained(),
            Some(_) => self.protocol.is_read_closed() && self.protocol.is_write_done(),
        };
        over && self.staging.is_empty()
    }

    fn take_wakers(&mut self, wakers: &mut Vec<Waker>) {
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
