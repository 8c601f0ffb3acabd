//! A connection: one queue pair, the protocol that runs over it, and the tasks that may wait for it.
//!
//! All state is under one lock, which is held for the length of a copy at most. The thread that polls the
//! completion queue passes completions in ([`Connection::handle_completions`]); the stream's task writes and
//! reads. After that, each of them also does the work that the protocol asks for
//! ([`ConnectionState::settle`]), so that no data waits for another task. A supervisor, one task of each
//! connection, watches the TCP connection and the timers.

mod byte_stream;
mod state;

use std::fmt;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use tokio::io::ReadBuf;
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::{sleep_until, timeout};

use self::state::ConnectionState;
use super::deferred::Deferred;
use super::error::ConnectionFault;
use super::info::Counters;
use super::journal::{ConnectionEnd, Journal};
use super::link::Link;
use super::messages::traffic::{MessageHandler, MessageSettings, Messages};
use super::polling::{OwnQueue, Participant, Queue, Reactor};
use super::tuner::Chooser;
use crate::protocol::{self, AbortCode};
use tonic_rdma_verbs::unstable::{has_unsent, lock, sent_slices, wake_all};
use tonic_rdma_verbs::{ProtectionDomain, QueuePairNumber, WorkCompletion};

pub(super) use self::state::{Limits, Stage};

/// One RDMA connection, for its stream, its completion queue and its supervisor.
pub(crate) struct Connection {
    number: QueuePairNumber,
    /// All that arrives answers calls of this process.
    answers_callers: bool,
    state: Mutex<ConnectionState>,
    /// The completion queue, if the connection has one for itself.
    own: Option<OwnQueue>,
    /// The live counters.
    pub(crate) counters: Arc<Counters>,
    /// Wakes the supervisor when the state changed in a way that concerns it.
    pub(crate) changed: Arc<Notify>,
}

impl fmt::Debug for Connection {
    /// Names the connection only, because its whole state would fill pages.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("queue_pair", &self.number).finish_non_exhaustive()
    }
}

/// What a connection carries.
#[derive(Debug)]
pub(super) enum Traffic {
    /// A byte stream.
    Bytes,
    /// Messages.
    Messages {
        /// The protection domain of the connection's memory.
        domain: Arc<dyn ProtectionDomain>,
        /// Most READs at a time.
        reads: u32,
        /// The role of this side in the calls.
        role: Role,
    },
}

/// The role of one side of a connection of native calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// The side that makes the calls.
    Client,
    /// The side that serves the calls.
    Server,
}

impl Connection {
    /// Time between two additions of a busy connection's counters to the process's metrics.
    const PUBLISH_EVERY: Duration = Duration::from_secs(1);

    pub(super) fn new(
        link: Link,
        protocol: protocol::Connection,
        limits: Limits,
        chooser: Chooser,
        traffic: Traffic,
        own: Option<OwnQueue>,
    ) -> Arc<Self> {
        let changed = own.as_ref().map_or_else(Arc::default, |own| Arc::clone(own.supervisor()));
        let answers_callers = matches!(traffic, Traffic::Messages { role: Role::Client, .. });
        let messages = match traffic {
            Traffic::Bytes => None,
            Traffic::Messages { domain, reads, .. } => {
                let budget = Arc::clone(link.pool.budget());
                Some(Messages::new(domain, budget, reads, Arc::clone(&changed)))
            }
        };
        Arc::new(Self {
            number: link.queue_pair.number(),
            answers_callers,
            state: Mutex::new(ConnectionState::new(link, protocol, limits, chooser, messages)),
            own,
            counters: Arc::default(),
            changed,
        })
    }

    /// Calls `check` until it returns a value or nothing arrives any more. `waiting` is the task that calls.
    fn poll_until<T>(&self, waiting: &Waker, mut check: impl FnMut() -> Poll<T>) -> Poll<T> {
        match &self.own {
            Some(own) => own.poll_until(waiting, check),
            None => check(),
        }
    }

    /// Polls the connection's own queue, if it has one, for tasks that do not come to it themselves.
    fn poll_own_queue(&self) {
        if let Some(own) = &self.own {
            own.poll();
        }
    }

    /// Returns what chooses the transfer mode of writes.
    pub(crate) fn chooser(&self) -> Chooser {
        lock(&self.state).chooser.clone()
    }

    /// Sends a ping over the queue pair, and waits for the answer. Call this before the connection has a
    /// supervisor, because the supervisor waits for changes too.
    pub(crate) async fn check_reachable(&self) -> Result<(), ConnectionFault> {
        {
            let mut state = lock(&self.state);
            state.protocol.ping();
            state.awaits_pong = true;
            state.settle(&self.counters, &self.changed);
        }
        loop {
            self.poll_own_queue();
            {
                let state = lock(&self.state);
                if state.protocol.pongs() > 0 {
                    return Ok(());
                }
                if let Some(fault) = state.obstacle() {
                    return Err(fault.clone());
                }
            }
            self.changed.notified().await;
        }
    }

    /// Writes as many bytes of the slices as there is room for.
    pub(crate) fn poll_write(
        &self,
        context: &Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_until(context.waker(), || self.try_write(context, slices))
    }

    fn try_write(
        &self,
        context: &Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let mut state = lock(&self.state);
        state.check_writable()?;
        match state.write(slices, &self.counters) {
            Ok(Some(written)) => {
                if has_unsent() {
                    sent_slices(slices, written);
                }
                Poll::Ready(Ok(written))
            }
            Ok(None) => {
                state.writer = Some(context.waker().clone());
                Poll::Pending
            }
            Err(fault) => Poll::Ready(Err(self.fail_with(&mut state, fault))),
        }
    }

    /// Sends the writes that were gathered.
    pub(crate) fn poll_flush(&self, context: &Context<'_>) -> Poll<io::Result<()>> {
        self.poll_until(context.waker(), || self.try_flush(context))
    }

    fn try_flush(&self, context: &Context<'_>) -> Poll<io::Result<()>> {
        let mut state = lock(&self.state);
        if state.staging.is_empty() {
            return Poll::Ready(Ok(()));
        }
        state.check_sending()?;
        state.flush_wanted = true;
        match state.flush_staging(&self.counters) {
            Ok(true) => Poll::Ready(Ok(())),
            Ok(false) => {
                state.writer = Some(context.waker().clone());
                Poll::Pending
            }
            Err(fault) => Poll::Ready(Err(self.fail_with(&mut state, fault))),
        }
    }

    /// Closes the writing direction once all bytes written before were sent.
    pub(crate) fn poll_shutdown(&self, context: &Context<'_>) -> Poll<io::Result<()>> {
        if self.poll_flush(context)?.is_pending() {
            return Poll::Pending;
        }
        let mut state = lock(&self.state);
        if state.obstacle().is_none() {
            state.protocol.close_write();
            state.settle(&self.counters, &self.changed);
        }
        Poll::Ready(Ok(()))
    }

    /// Reads arrived bytes into `buffer`. Adds nothing to `buffer` at the end of the stream.
    pub(crate) fn poll_read(&self, context: &Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        {
            let mut state = lock(&self.state);
            if state.quota.is_used_up() && state.protocol.front().is_some() {
                state.quota.renew();
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
        }
        self.poll_until(context.waker(), || self.try_read(context, buffer))
    }

    fn try_read(&self, context: &Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if buffer.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        let mut state = lock(&self.state);
        match state.read(buffer) {
            Ok(0) => {}
            Ok(_) => {
                state.settle(&self.counters, &self.changed);
                return Poll::Ready(Ok(()));
            }
            Err(fault) => return Poll::Ready(Err(self.fail_with(&mut state, fault))),
        }
        if state.protocol.is_read_closed() {
            let closer = state.closer.take();
            drop(state);
            wake_all(closer);
            return Poll::Ready(Ok(()));
        }
        state.check_fault()?;
        // A task that waits for an answer adds nothing to its request, so the gathered writes go out now.
        if !state.staging.is_empty() {
            state.flush_wanted = true;
            state.settle(&self.counters, &self.changed);
        }
        state.quota.renew();
        state.reader = Some(context.waker().clone());
        Poll::Pending
    }

    /// Waits until both directions are closed and all bytes are delivered.
    pub(crate) fn poll_delivered(&self, context: &Context<'_>) -> Poll<io::Result<()>> {
        self.poll_until(context.waker(), || self.try_delivered(context))
    }

    fn try_delivered(&self, context: &Context<'_>) -> Poll<io::Result<()>> {
        let mut state = lock(&self.state);
        if state.all_delivered() {
            return Poll::Ready(Ok(()));
        }
        // A peer that has sent all its bytes, and has received all of ours, may leave while this side still
        // reads.
        if !(state.protocol.is_fin_received() && state.protocol.is_write_done()) {
            state.check_fault()?;
        }
        state.closer = Some(context.waker().clone());
        Poll::Pending
    }

    /// Lets reads take all bytes that have arrived, without a quota.
    pub(crate) fn read_greedily(&self) {
        lock(&self.state).quota.disable();
    }

    /// Notes that the stream was dropped. Bytes written before are still sent, flushed or not, as over TCP:
    /// the last bytes of a task that gives up, such as a TLS alert, are often not flushed.
    pub(crate) fn detach(&self) {
        if lock(&self.state).messages.is_some() {
            return self.close_messages();
        }
        let mut state = lock(&self.state);
        state.detached = true;
        state.flush_wanted = true;
        (state.reader, state.writer, state.closer) = (None, None, None);
        if state.obstacle().is_none()
            && let Err(fault) = state.flush_staging(&self.counters)
        {
            state.end(fault, &self.changed);
        }
        state.settle(&self.counters, &self.changed);
        self.changed.notify_one();
    }

    /// Takes the handler of the messages, and delivers the messages that have arrived already.
    pub(crate) fn start_messages(&self, handler: Arc<dyn MessageHandler>, settings: &MessageSettings) {
        self.settled(|state| {
            let by_copy = state.link.queue_pair.local().is_some_and(|local| local.reads_by_copy());
            if let Some(messages) = &mut state.messages {
                messages.start(handler, settings, by_copy);
            }
        });
    }

    /// Sends what the handler has.
    pub(crate) fn drive(&self) {
        self.settled(|_| ());
    }

    /// Closes the connection in good order, once the handler has no more messages.
    pub(crate) fn close_messages(&self) {
        self.settled(|state| state.detached = true);
        self.changed.notify_one();
    }

    /// Returns the length of the longest message to the peer.
    #[cfg(test)]
    pub(crate) fn max_message(&self) -> usize {
        lock(&self.state).protocol.max_payload()
    }

    /// Ends the connection with `fault`, and wakes the waiting tasks.
    pub(crate) fn fail(&self, fault: ConnectionFault) {
        self.settled(|state| state.fail(fault));
    }

    /// Sends the peer an abort with `code`, then ends the connection with `fault`.
    pub(crate) fn abort(&self, code: AbortCode, fault: ConnectionFault) {
        let mut state = lock(&self.state);
        if state.obstacle().is_none() {
            state.protocol.abort(code);
            state.settle(&self.counters, &self.changed);
        }
        drop(state);
        self.fail(fault);
    }

    /// Sends pings that are due, and ends the connection if the answer to a ping is overdue.
    pub(crate) fn handle_timeout(&self, now: Instant) {
        self.settled(|state| state.protocol.handle_timeout(now));
    }

    /// Calls `change`, does what is due, and carries out what follows from it without the lock.
    fn settled(&self, change: impl FnOnce(&mut ConnectionState)) {
        let mut after = Deferred::reused();
        let mut state = lock(&self.state);
        change(&mut state);
        state.settle(&self.counters, &self.changed);
        state.take_deferred(&mut after);
        drop(state);
        after.carry_out();
        after.reuse();
    }

    /// Returns when [`handle_timeout`](Self::handle_timeout) is due.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let state = lock(&self.state);
        let messages = state.messages.as_ref().and_then(|messages| messages.memory.retry());
        [state.protocol.poll_timeout(), state.shortage.retry(), messages].into_iter().flatten().min()
    }

    /// Returns the connection's stage.
    pub(crate) fn stage(&self) -> Stage {
        lock(&self.state).stage()
    }

    /// Returns whether the peer has closed its writing direction.
    pub(crate) fn peer_finished(&self) -> bool {
        lock(&self.state).protocol.is_fin_received()
    }

    /// Returns the reason why nothing can be sent any more, if there is one. The supervisor then drains the
    /// completion queue and ends the connection.
    pub(crate) fn lost(&self) -> Option<ConnectionFault> {
        lock(&self.state).lost.clone()
    }

    /// Returns the reason why the connection ended early, if it did.
    pub(crate) fn fault(&self) -> Option<ConnectionFault> {
        lock(&self.state).fault.clone()
    }

    /// Returns how the connection ended, for the log.
    pub(crate) fn ending(&self) -> ConnectionEnd {
        let state = lock(&self.state);
        ConnectionEnd {
            fault: state.fault.clone(),
            peer_finished: state.protocol.is_fin_received(),
            interrupted: state.interrupted,
        }
    }

    /// Ends the connection with `fault`; returns the error for the caller.
    fn fail_with(&self, state: &mut ConnectionState, fault: ConnectionFault) -> io::Error {
        state.end(fault.clone(), &self.changed);
        state.settle(&self.counters, &self.changed);
        fault.into()
    }
}

impl Participant for Connection {
    fn queue_pair_number(&self) -> QueuePairNumber {
        self.number
    }

    fn handle_completions(&self, completions: &[WorkCompletion], after: &mut Deferred) {
        let mut state = lock(&self.state);
        let now = state.clock.now();
        for completion in completions {
            if let Err(fault) = state.handle_completion(completion, &self.counters, now) {
                state.end(fault, &self.changed);
            }
        }
        state.settle(&self.counters, &self.changed);
        state.take_deferred(after);
        if now.saturating_duration_since(state.published) > Self::PUBLISH_EVERY {
            state.published = now;
            self.counters.publish();
        }
    }

    fn answers_callers(&self) -> bool {
        self.answers_callers
    }

    fn fail_with_device(&self) {
        let failure = lock(&self.state).link.queue_pair.failure();
        if let Some(reason) = failure {
            self.fail(ConnectionFault::DeviceFailed(reason.into()));
        }
    }

    fn fail_after_panic(&self) {
        self.abort(AbortCode::RESET, ConnectionFault::local("code panicked that handles what has arrived"));
    }
}

/// Watches one connection.
#[derive(Debug)]
pub(crate) struct Supervisor {
    pub(crate) member: Member,
    /// The TCP connection of the negotiation. It stays open and silent; its end is the surest sign that the
    /// peer is gone.
    pub(crate) tcp: TcpStream,
    pub(crate) peer: SocketAddr,
    pub(crate) linger: Duration,
    pub(crate) counted: Counted,
    pub(crate) journal: Arc<Journal>,
}

/// Counts a connection in the metric of connections in use, until dropped.
#[derive(Debug)]
pub(crate) struct Counted(());

impl Counted {
    pub(crate) fn new() -> Self {
        metrics::gauge!("tonic_rdma_connections").increment(1.0);
        Self(())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        metrics::gauge!("tonic_rdma_connections").decrement(1.0);
    }
}

impl Supervisor {
    /// Time for messages that are still in the network when the TCP connection ends, because RDMA and TCP may
    /// take different paths.
    const GRACE: Duration = Duration::from_millis(200);
    /// Time after which the supervisor polls the connection's own queue, although an event has woken a task
    /// for that: the task may have stopped to wait.
    const UNATTENDED: Duration = Duration::from_secs(1);
    /// Longest wait of a connection without a timer.
    const DAY: Duration = Duration::from_secs(24 * 3600);

    /// Runs until the connection has ended.
    pub(crate) async fn run(self) {
        let mut give_up: Option<Instant> = None;
        while self.member.connection.stage() != Stage::Finished {
            self.member.connection.poll_own_queue();
            if let Some(fault) = self.member.connection.lost() {
                // All messages that the peer sent before have arrived already.
                self.member.queue.drain();
                self.conclude(fault);
                break;
            }
            if self.member.connection.stage() == Stage::Lingering {
                give_up.get_or_insert_with(|| Instant::now() + self.linger);
            }
            let longest = if self.member.connection.own.is_some() { Self::UNATTENDED } else { Self::DAY };
            let due = Instant::now() + longest;
            let due = self.member.connection.deadline().map_or(due, |deadline| deadline.min(due));
            let due = give_up.map_or(due, |give_up| due.min(give_up));
            tokio::select! {
                biased;
                () = self.member.connection.changed.notified() => {}
                end = self.tcp_ended() => {
                    self.peer_left(end).await;
                    break;
                }
                () = sleep_until(due.into()) => {
                    let now = Instant::now();
                    if give_up.is_some_and(|give_up| now >= give_up) {
                        self.member.connection.abort(AbortCode::CLOSED, ConnectionFault::Closed);
                    } else {
                        self.member.connection.handle_timeout(now);
                    }
                }
            }
        }
        self.journal.ended(self.peer, &self.member.connection.ending());
        drop(self.counted);
    }

    /// Waits for the end of the TCP connection; returns the reason.
    async fn tcp_ended(&self) -> String {
        loop {
            if let Err(error) = self.tcp.readable().await {
                return error.to_string();
            }
            match self.tcp.try_read(&mut [0; 64]) {
                Ok(0) => return "its TCP connection ended".into(),
                Ok(_) => return "it spoke on the TCP connection after negotiation".into(),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return error.to_string(),
            }
        }
    }

    /// Takes the messages that the peer sent before it left, then ends the connection.
    async fn peer_left(&self, how: String) {
        self.member.queue.drain();
        let connection = &self.member.connection;
        let over = async {
            while !connection.peer_finished() && connection.fault().is_none() {
                connection.poll_own_queue();
                connection.changed.notified().await;
            }
        };
        // After the time is over, the connection ends in any case.
        let _ = timeout(Self::GRACE, over).await;
        self.member.queue.drain();
        self.conclude(ConnectionFault::PeerLost(how.into()));
    }

    /// Ends the connection with `fault`, unless it has finished.
    fn conclude(&self, fault: ConnectionFault) {
        if self.member.connection.stage() != Stage::Finished {
            self.member.connection.fail(fault);
        }
    }
}

/// A connection that is polled. Dropping this ends the connection, if it has not ended, and removes it from
/// its queue.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) connection: Arc<Connection>,
    pub(crate) queue: Arc<Queue>,
    key: u32,
    /// Keeps the queue polled.
    reactor: Arc<Reactor>,
}

/// A connection with its queue and its reactor, for a handle that makes progress itself.
#[derive(Debug)]
pub(crate) struct Carrier {
    pub(crate) connection: Arc<Connection>,
    pub(crate) queue: Arc<Queue>,
    pub(crate) reactor: Arc<Reactor>,
}

impl Member {
    /// Adds the connection that `make` builds. `make` gets the key that the connection's work requests have
    /// to carry. `completions` is the number of requests that the connection may have posted at a time.
    pub(crate) fn new(
        reactor: Arc<Reactor>,
        queue: Arc<Queue>,
        completions: u32,
        make: impl FnOnce(u32) -> Result<Arc<Connection>, ConnectionFault>,
    ) -> Result<Self, ConnectionFault> {
        let (key, connection) = queue.add(completions, make).map_err(ConnectionFault::local)??;
        Ok(Self { connection, queue, key, reactor })
    }

    /// Returns the connection with its queue and its reactor.
    pub(crate) fn carrier(&self) -> Carrier {
        Carrier {
            connection: Arc::clone(&self.connection),
            queue: Arc::clone(&self.queue),
            reactor: Arc::clone(&self.reactor),
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        // A runtime that shuts down drops connections before they have finished. If possible, written bytes
        // and the end of the stream are still sent, so that the peer sees an orderly end.
        self.connection.detach();
        self.connection.fail(ConnectionFault::Closed);
        // Completions that are still in the queue name shared buffers, which have to be posted again.
        if self.queue.shared().is_some() {
            self.queue.drain();
        }
        self.connection.counters.publish();
        self.queue.remove(self.key, &*self.connection);
    }
}
