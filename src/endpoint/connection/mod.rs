//! A connection: one queue pair, the protocol that runs over it, and the tasks that may wait for it.
//!
//! All state is under one lock, which is held for the length of a copy at most. The thread that polls the
//! completion queue passes completions in ([`Connection::handle_completions`]); the stream's task writes and
//! reads. After that, each of them also does the work that the protocol asks for
//! ([`Traffic::settle`]), so that no data waits for another task. A supervisor, one task of each connection,
//! watches the TCP connection and the timers.
//!
//! What all connections have is in [`LinkConnection`]. A connection carries a [`ByteStream`], or the messages
//! of native calls, whose state is in `messages`.

mod byte_stream;
mod state;

use std::convert::Infallible;
use std::fmt;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tokio::io::ReadBuf;
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::task::consume_budget;
use tokio::time::{sleep_until, timeout};

use super::deferred::Deferred;
use super::error::ConnectionFault;
use super::info::Counters;
use super::journal::{ConnectionEnd, Journal};
use super::meters::{self, OpenConnection};
use super::polling::{OwnQueue, Participant, Queue, Reactor};
use crate::protocol::AbortCode;
use tonic_rdma_verbs::unstable::{has_unsent, lock, sent_slices, wake_all};
use tonic_rdma_verbs::{QueuePairNumber, WorkCompletion};

pub(super) use self::byte_stream::ByteStream;
pub(super) use self::state::{LinkConnection, Stage, Traffic};

/// One RDMA connection, for its handle, its completion queue and its supervisor.
pub(super) struct Connection<T: ?Sized> {
    number: QueuePairNumber,
    /// All that arrives answers calls of this process.
    answers_callers: bool,
    /// The live counters.
    pub(super) counters: Arc<Counters>,
    /// Wakes the supervisor when the state changed in a way that concerns it.
    changed: Arc<Notify>,
    state: Mutex<T>,
}

impl<T: ?Sized> fmt::Debug for Connection<T> {
    /// Names the connection only, because its whole state would fill pages.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("queue_pair", &self.number).finish_non_exhaustive()
    }
}

impl<T: Traffic> Connection<T> {
    fn new(traffic: T, answers_callers: bool) -> Arc<Self> {
        Arc::new(Self {
            number: traffic.base().link.queue_pair.number(),
            answers_callers,
            counters: Arc::default(),
            changed: Arc::clone(&traffic.base().changed),
            state: Mutex::new(traffic),
        })
    }
}

impl<T: Traffic + ?Sized> Connection<T> {
    /// Time between two additions of a busy connection's counters to the process's metrics.
    const PUBLISH_EVERY: Duration = Duration::from_secs(1);

    async fn check_reachable(&self, own: Option<&OwnQueue>) -> Result<(), ConnectionFault> {
        {
            let mut state = lock(&self.state);
            state.base_mut().protocol.ping();
            state.base_mut().awaits_pong = true;
            state.settle(&self.counters);
        }
        loop {
            if let Some(own) = own {
                own.poll();
            }
            {
                let state = lock(&self.state);
                if state.base().protocol.pongs() > 0 {
                    return Ok(());
                }
                if let Some(fault) = state.base().obstacle() {
                    return Err(fault.clone());
                }
            }
            self.changed.notified().await;
        }
    }

    /// Notes that the handle was dropped, or closes the connection. What was written before is still sent,
    /// flushed or not, as over TCP: the last bytes of a task that gives up, such as a TLS alert, are often
    /// not flushed.
    pub(crate) fn detach(&self) {
        self.settled(|state| {
            state.base_mut().detached = true;
            if let Err(fault) = state.detach(&self.counters) {
                state.end(fault);
            }
        });
        self.changed.notify_one();
    }

    /// Ends the connection with `fault`, and wakes the waiting tasks.
    pub(crate) fn fail(&self, fault: ConnectionFault) {
        self.settled(|state| state.fail(fault));
    }

    /// Sends the peer an abort with `code`, then ends the connection with `fault`.
    pub(crate) fn abort(&self, code: AbortCode, fault: ConnectionFault) {
        self.settled(|state| {
            let base = state.base_mut();
            if base.obstacle().is_none() {
                base.protocol.abort(code);
                // If the abort can't be sent, the end of the TCP connection tells the peer.
                let _ = base.post_control(&self.counters);
            }
            state.fail(fault);
        });
    }

    /// Returns whether the peer has been silent for so long that a ping is due, or its answer may be overdue.
    pub(crate) fn is_silent(&self, now: Instant) -> bool {
        lock(&self.state).base().protocol.poll_timeout().is_some_and(|due| due <= now)
    }

    /// Sends pings that are due, and ends the connection if the answer to a ping is overdue.
    pub(crate) fn handle_timeout(&self, now: Instant) {
        self.settled(|state| state.base_mut().protocol.handle_timeout(now));
    }

    /// Calls `change`, does what is due, and carries out what follows from it without the lock.
    pub(crate) fn settled(&self, change: impl FnOnce(&mut T)) {
        self.update(|state| (change(state), true));
    }

    /// Calls `act`, does what is due if `act` asks for that, and carries out what follows from both without
    /// the lock.
    pub(super) fn update<R>(&self, act: impl FnOnce(&mut T) -> (R, bool)) -> R {
        let mut state = lock(&self.state);
        let (result, settles) = act(&mut state);
        if settles {
            state.settle(&self.counters);
        }
        if state.has_deferred() {
            let mut after = Deferred::reused();
            state.take_deferred(&mut after);
            drop(state);
            after.carry_out();
            after.reuse();
        }
        result
    }

    /// Returns when [`handle_timeout`](Self::handle_timeout) is due.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let state = lock(&self.state);
        [state.base().protocol.poll_timeout(), state.retry()].into_iter().flatten().min()
    }

    /// Returns the connection's stage.
    pub(crate) fn stage(&self) -> Stage {
        lock(&self.state).stage()
    }

    /// Returns whether the peer has closed its writing direction.
    pub(crate) fn peer_finished(&self) -> bool {
        lock(&self.state).base().protocol.is_fin_received()
    }

    /// Returns the reason why nothing can be sent any more, if there is one. The supervisor then drains the
    /// completion queue and ends the connection.
    pub(crate) fn lost(&self) -> Option<ConnectionFault> {
        lock(&self.state).base().lost.clone()
    }

    /// Returns the reason why the connection ended early, if it did.
    pub(crate) fn fault(&self) -> Option<ConnectionFault> {
        lock(&self.state).base().fault.clone()
    }

    /// Returns how the connection ended, for the log.
    pub(crate) fn ending(&self) -> ConnectionEnd {
        let state = lock(&self.state);
        ConnectionEnd {
            fault: state.base().fault.clone(),
            peer_finished: state.base().protocol.is_fin_received(),
            interrupted: state.base().interrupted,
        }
    }
}

impl Connection<ByteStream> {
    /// Writes as many bytes of the slices as there is room for.
    pub(crate) fn poll_write(
        &self,
        context: &Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let mut state = lock(&self.state);
        state.base.check_writable()?;
        let written = state.write(slices, &self.counters);
        let Some(written) = written.map_err(|fault| self.fail_with(&mut state, fault))? else {
            state.writer = Some(context.waker().clone());
            return Poll::Pending;
        };
        if has_unsent() {
            sent_slices(slices, written);
        }
        state.has_sent = true;
        Poll::Ready(Ok(written))
    }

    /// Sends the writes that were gathered. Returns whether the task has sent something, and has read nothing
    /// since the last flush: then it waits for the peer.
    pub(crate) fn poll_flush(&self, context: &Context<'_>) -> Poll<io::Result<bool>> {
        let mut state = lock(&self.state);
        if state.staging.is_empty() {
            return Poll::Ready(Ok(state.take_waits()));
        }
        state.base.check_sending()?;
        state.flush_wanted = true;
        let flushed = state.flush_staging(&self.counters);
        if !flushed.map_err(|fault| self.fail_with(&mut state, fault))? {
            state.writer = Some(context.waker().clone());
            return Poll::Pending;
        }
        Poll::Ready(Ok(state.take_waits()))
    }

    /// Closes the writing direction once all bytes written before were sent.
    pub(crate) fn poll_shutdown(&self, context: &Context<'_>) -> Poll<io::Result<()>> {
        if self.poll_flush(context)?.is_pending() {
            return Poll::Pending;
        }
        let mut state = lock(&self.state);
        if state.base.obstacle().is_none() {
            state.base.protocol.close_write();
            state.settle(&self.counters);
        }
        Poll::Ready(Ok(()))
    }

    /// Reads arrived bytes into `buffer`. Adds nothing to `buffer` at the end of the stream. Returns
    /// `Ready(Pending)` if other tasks should run first: the task has been woken already.
    pub(crate) fn poll_read(
        &self,
        context: &Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<Poll<io::Result<()>>> {
        if buffer.remaining() == 0 {
            return Poll::Ready(Poll::Ready(Ok(())));
        }
        let mut state = lock(&self.state);
        if state.quota.is_used_up() && state.base.protocol.front().is_some() {
            state.quota.renew();
            context.waker().wake_by_ref();
            return Poll::Ready(Poll::Pending);
        }
        match state.read(buffer) {
            Ok(0) => {}
            Ok(_) => {
                state.has_read = true;
                state.settle(&self.counters);
                return Poll::Ready(Poll::Ready(Ok(())));
            }
            Err(fault) => return Poll::Ready(Poll::Ready(Err(self.fail_with(&mut state, fault)))),
        }
        if state.base.protocol.is_read_closed() {
            let closer = state.closer.take();
            drop(state);
            wake_all(closer);
            return Poll::Ready(Poll::Ready(Ok(())));
        }
        if let Err(error) = state.base.check_fault() {
            return Poll::Ready(Poll::Ready(Err(error)));
        }
        // A task that waits for an answer adds nothing to its request, so the gathered writes go out now.
        if !state.staging.is_empty() {
            state.flush_wanted = true;
            state.settle(&self.counters);
        }
        state.quota.renew();
        state.reader = Some(context.waker().clone());
        Poll::Pending
    }

    /// Waits until both directions are closed and all bytes are delivered.
    pub(crate) fn poll_delivered(&self, context: &Context<'_>) -> Poll<io::Result<()>> {
        let mut state = lock(&self.state);
        if state.all_delivered() {
            return Poll::Ready(Ok(()));
        }
        // A peer that has sent all its bytes, and has received all of ours, may leave while this side still
        // reads.
        if !(state.base.protocol.is_fin_received() && state.base.protocol.is_write_done()) {
            state.base.check_fault()?;
        }
        state.closer = Some(context.waker().clone());
        Poll::Pending
    }

    /// Lets reads take all bytes that have arrived, without a quota.
    pub(crate) fn read_greedily(&self) {
        lock(&self.state).quota.disable();
    }

    /// Ends the connection with `fault`; returns the error for the caller.
    fn fail_with(&self, state: &mut ByteStream, fault: ConnectionFault) -> io::Error {
        state.end(fault.clone());
        state.settle(&self.counters);
        fault.into()
    }
}

impl<T: Traffic + ?Sized> Participant for Connection<T> {
    fn queue_pair_number(&self) -> QueuePairNumber {
        self.number
    }

    fn handle_completions(&self, completions: &[WorkCompletion], after: &mut Deferred) {
        let mut state = lock(&self.state);
        let now = state.base_mut().clock.now();
        for completion in completions {
            if let Err(fault) = state.handle_completion(completion, &self.counters, now) {
                state.end(fault);
            }
        }
        state.settle(&self.counters);
        state.take_deferred(after);
        let publishes = now.saturating_duration_since(state.base().published) > Self::PUBLISH_EVERY;
        if publishes {
            state.base_mut().published = now;
        }
        // A recorder runs code of the application.
        drop(state);
        if publishes {
            self.counters.publish();
            meters::refresh_memory(now);
        }
    }

    fn answers_callers(&self) -> bool {
        self.answers_callers
    }

    fn fail_with_device(&self) {
        let failure = lock(&self.state).base().link.queue_pair.failure();
        if let Some(reason) = failure {
            self.fail(ConnectionFault::DeviceFailed(reason.into()));
        }
    }

    fn fail_after_panic(&self) {
        self.abort(AbortCode::RESET, ConnectionFault::local("code panicked that handles what has arrived"));
    }
}

/// Watches one connection. Its memory is free before it counts as closed.
#[derive(Debug)]
pub(crate) struct Supervisor {
    pub(crate) member: Member,
    /// The TCP connection of the negotiation. It stays open and silent; its end is the surest sign that the
    /// peer is gone.
    pub(crate) tcp: TcpStream,
    pub(crate) peer: SocketAddr,
    pub(crate) linger: Duration,
    pub(crate) _opened: Arc<OpenConnection>,
    pub(crate) journal: Arc<Journal>,
}

impl Supervisor {
    /// Time for messages that are still in the network when the TCP connection ends, because RDMA and TCP may
    /// take different paths.
    const GRACE: Duration = Duration::from_millis(200);
    /// Longest wait of a connection without a timer.
    const DAY: Duration = Duration::from_secs(24 * 3600);

    /// Runs until the connection has ended.
    pub(crate) async fn run(self) {
        let mut give_up: Option<Instant> = None;
        while self.member.connection.stage() != Stage::Finished {
            self.member.poll_own_queue();
            if let Some(fault) = self.member.connection.lost() {
                // All messages that the peer sent before have arrived already.
                self.member.queue.drain();
                self.conclude(fault);
                break;
            }
            if self.member.connection.stage() == Stage::Lingering {
                give_up.get_or_insert_with(|| Instant::now() + self.linger);
            }
            let now = Instant::now();
            let due = if self.member.own.is_some() { OwnQueue::next_round(now) } else { now + Self::DAY };
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
                    meters::refresh();
                    if give_up.is_some_and(|give_up| now >= give_up) {
                        self.member.connection.abort(AbortCode::CLOSED, ConnectionFault::Closed);
                    } else {
                        if self.member.connection.is_silent(now) {
                            // If nothing has polled here for a while, the answer may be there.
                            self.member.queue.drain();
                        }
                        self.member.connection.handle_timeout(now);
                    }
                }
            }
        }
        self.journal.ended(self.peer, &self.member.connection.ending());
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
                self.member.poll_own_queue();
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
    pub(super) connection: Arc<Connection<dyn Traffic>>,
    pub(crate) queue: Arc<Queue>,
    /// The queue, if the connection has one for itself.
    pub(super) own: Option<Arc<OwnQueue>>,
    key: u32,
    /// Keeps the queue polled.
    pub(super) reactor: Arc<Reactor>,
}

impl Member {
    /// Adds a connection of what `make` builds, and returns it, too. `make` gets the key that the connection's
    /// work requests have to carry. `completions` is the number of requests that the connection may have
    /// posted at a time. `answers_callers`: all that arrives answers calls of this process.
    pub(super) fn new<T: Traffic>(
        reactor: Arc<Reactor>,
        queue: Arc<Queue>,
        completions: u32,
        answers_callers: bool,
        make: impl FnOnce(u32) -> Result<T, ConnectionFault>,
    ) -> Result<(Self, Arc<Connection<T>>), ConnectionFault> {
        let make = |key| Ok(Connection::new(make(key)?, answers_callers));
        let added: Result<_, ConnectionFault> =
            queue.add(completions, make).map_err(ConnectionFault::local)?;
        let (key, connection) = added?;
        Ok((Self { connection: connection.clone(), queue, own: None, key, reactor }, connection))
    }

    /// Sends a ping over the queue pair, and waits for the answer. Call this before the connection has a
    /// supervisor, because the supervisor waits for changes too.
    pub(super) async fn check_reachable(&self) -> Result<(), ConnectionFault> {
        self.connection.check_reachable(self.own.as_deref()).await
    }

    /// Polls the connection's own queue, if it has one, so that the peer's pings are answered. Call this before
    /// the connection has a supervisor, which does so otherwise.
    pub(super) async fn attend(&self) -> Infallible {
        loop {
            // A peer may send as fast as this side polls.
            consume_budget().await;
            self.poll_own_queue();
            self.connection.changed.notified().await;
        }
    }

    /// Polls the connection's own queue, if it has one, for tasks that do not come to the connection.
    fn poll_own_queue(&self) {
        if let Some(own) = &self.own {
            own.poll();
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
