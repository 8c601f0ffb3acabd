//! The calls of one connection: handles for tasks on one side, the endpoint's messages on the other.
//!
//! A [`Session`] has one [`Stream`] for each call. Methods of a stream queue what is to be sent.
//! [`Session::drive`] then sends what is queued; a caller that queues several things calls it once, so that
//! they share one message:
//!
//! ```text
//!  client                                         server
//!  open(headers)                                  accept(stream, headers)          on the thread that polled
//!  send_data(request, true), drive ──────────▶    poll_part … None
//!  poll_headers, poll_part …       ◀──────────    send_headers, send_data, send_trailers, drive
//! ```
//!
//! All methods of a stream take `&self`, so that a stream can be shared: one task may send while another
//! reads. A stream has three wakers: one for [`poll_headers`](Stream::poll_headers) and
//! [`poll_part`](Stream::poll_part), one for [`poll_send_ready`](Stream::poll_send_ready), and one for
//! [`poll_reset`](Stream::poll_reset). Each keeps the waker of the latest task that asked.

mod abandoned;
mod local;
mod stream;
#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use bytes::Bytes;

use self::abandoned::{AbandonedRequests, Sends};
use self::local::LocalCalls;
use crate::endpoint::{
    Accepting, ConnectionFault, Deferred, Kept, LandedContent, MessageEndpoint, MessageHandler,
    MessageSettings, Run, Sender, Wire as _,
};
use crate::grpc::calls::CallConfig;
use crate::grpc::core::{Core, Role, StreamKey};
use crate::grpc::fault::CallFault;
use crate::grpc::landed::Landing;
use crate::grpc::times::CallTimes;
use crate::protocol::AbortCode;
use crate::wire::hello::CONNECTION_WINDOWS;

pub(crate) use self::local::LocalCall;
pub(crate) use self::stream::{Sink, Stream};
pub(crate) use crate::grpc::core::{OpenError, Part};
pub(crate) use crate::grpc::frame::{RequestHeaders, ResetCode};

/// Takes the calls that arrive at a server.
pub(crate) trait Accept: std::fmt::Debug + Send + Sync + 'static {
    /// Takes a call. A thread that [accepts](Accepting) calls does this, outside of a runtime's context if it
    /// is a thread of the device's, and without any lock. Replies that are queued here by some calls of
    /// `accept` share messages: the one with `is_last` calls [`Session::drive`], once the reply is queued,
    /// and before it does anything else that takes time. If another thread took the last call, the session
    /// drives.
    fn accept(&self, stream: Stream, head: RequestHeaders, is_last: bool);

    /// Takes a call of this process, and lets a task of its own handle it: the thread is the client's. `call`
    /// is to be dropped when the call has ended. By default that is at once.
    fn accept_local(self: Arc<Self>, stream: Stream, head: Arc<RequestHeaders>, call: LocalCall) {
        drop((stream, head, call));
    }
}

/// The calls of one connection. Their state, a [`SessionState`], lies in the connection, under its lock.
#[derive(Debug)]
pub(crate) struct Session {
    pub(in crate::grpc) endpoint: MessageEndpoint,
    /// Calls can be opened. Each call asks, so the answer is here, too.
    is_usable: Arc<AtomicBool>,
    /// Calls that begin to send have to ask. Each reply looks at this, so it is here, too.
    has_much_to_send: Arc<AtomicBool>,
    acceptor: Option<Arc<dyn Accept>>,
    abandoned: AbandonedRequests,
    limits: CallConfig,
    /// The server's session, if it is in this process and takes the calls of this client's.
    server: Option<Weak<Session>>,
    /// The calls that this server's session has from a client in this process.
    local: LocalCalls,
    /// The times of calls, if they are to be known.
    pub(in crate::grpc) times: Option<Arc<CallTimes>>,
}

impl Session {
    /// Begins the calls of a client, which stay in this process if `server` is there.
    pub(crate) fn client(
        endpoint: MessageEndpoint,
        config: &CallConfig,
        server: Option<Weak<Self>>,
    ) -> Arc<Self> {
        let peer = server.as_ref().and_then(Weak::upgrade);
        let session = Self::start(endpoint, config, Role::Client, None, server);
        for end in peer.iter().chain([&session]).filter(|_| peer.is_some()) {
            end.endpoint.stays_in_process();
        }
        let weak = Arc::downgrade(&session);
        session.abandoned.start(move || {
            let Some(session) = weak.upgrade() else { return false };
            session.drive();
            // The callers do not poll the queue before they wait.
            session.endpoint.poll_queue();
            true
        });
        session
    }

    /// Begins the calls of a server. `acceptor` gets each call.
    pub(crate) fn server(
        endpoint: MessageEndpoint,
        config: &CallConfig,
        acceptor: Arc<dyn Accept>,
    ) -> Arc<Self> {
        let session = Self::start(endpoint, config, Role::Server, Some(acceptor), None);
        session.endpoint.meeting().hand(Arc::new(Arc::downgrade(&session)));
        session
    }

    /// Returns the server's session, if it is in this process and takes the calls of a client there.
    pub(crate) async fn in_process(endpoint: &MessageEndpoint) -> Option<Weak<Self>> {
        endpoint.meeting().handed().await?.downcast_ref::<Weak<Self>>().cloned()
    }

    fn start(
        endpoint: MessageEndpoint,
        config: &CallConfig,
        role: Role,
        acceptor: Option<Arc<dyn Accept>>,
        server: Option<Weak<Self>>,
    ) -> Arc<Self> {
        let limit = config.connection_limit.unwrap_or_else(|| endpoint.connection_limit());
        let config = &config.clone().connection_limit(limit);
        let has_windows = endpoint.info().version() >= Some(CONNECTION_WINDOWS);
        let times = endpoint.histograms().map(|histograms| CallTimes::new(role, histograms));
        let core = Core::new(role, config, limit, has_windows, endpoint.share());
        let (is_usable, has_much_to_send) = (Arc::new(AtomicBool::new(true)), Arc::default());
        let session = Arc::new(Self {
            endpoint,
            is_usable: Arc::clone(&is_usable),
            has_much_to_send: Arc::clone(&has_much_to_send),
            acceptor,
            abandoned: AbandonedRequests::default(),
            limits: config.clone(),
            server,
            local: LocalCalls::new(config),
            times: times.clone(),
        });
        let state = SessionState {
            core,
            is_usable,
            has_much_to_send,
            session: Arc::downgrade(&session),
            fault: None,
            is_over: false,
            will_run: false,
            accepts: false,
            transmits_again: false,
            closing: Vec::new(),
            times,
        };
        let settings = MessageSettings { landing_budget: limit, expose: config.send_in_place };
        session.endpoint.start(state, &settings);
        session
    }

    /// Calls `act` with the state, and then, without the lock, wakes tasks and drops memory.
    fn with<T>(&self, act: impl FnOnce(&mut SessionState) -> T) -> T {
        self.endpoint.update(|state| (act(state), false))
    }

    /// Opens a stream for a call of this client. The headers are queued; nothing is sent until
    /// [`drive`](Self::drive). If the server has as many streams as it accepts, the call waits in the queue
    /// until another has ended, so callers need not ask before.
    ///
    /// # Errors
    /// The connection has ended, or accepts no new calls.
    pub(crate) fn open(self: &Arc<Self>, head: impl Into<Arc<RequestHeaders>>) -> Result<Stream, OpenError> {
        if let Some(server) = &self.server {
            return self.open_local(server, head.into(), None, None);
        }
        let (key, is_alone) = self.with(|state| {
            let key = state.core.open(head)?;
            Ok((key, state.note_waiting(key)))
        })?;
        self.note_unqueued(is_alone);
        Ok(Stream::new(Arc::clone(self), key))
    }

    /// Opens a stream as [`open`](Self::open) does, and sends `body`, which is the whole body: at once if this
    /// is the only call, and otherwise as [`drive_if`](Self::drive_if) says. `landing`: what the call's
    /// wrapper asks for. Returns also whether a task of the session sends.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub(crate) fn send_whole(
        self: &Arc<Self>,
        head: Arc<RequestHeaders>,
        body: Bytes,
        landing: Option<Landing>,
    ) -> Result<(Stream, bool), OpenError> {
        if let Some(server) = &self.server {
            return Ok((self.open_local(server, head, Some(body), landing)?, true));
        }
        let (key, is_alone) = self.endpoint.update(|state: &mut SessionState| {
            let core = &mut state.core;
            let key = match core.open(head) {
                Ok(key) => key,
                Err(error) => return (Err(error), false),
            };
            if let Some(landing) = landing {
                core.deliver_landed(key, landing.limit);
            }
            core.send_data(key, body, true);
            let is_alone = state.note_waiting(key);
            (Ok((key, is_alone)), is_alone)
        })?;
        self.note_unqueued(is_alone);
        let stream = Stream::new(Arc::clone(self), key);
        if let Some(landing) = landing {
            stream.align(landing);
        }
        Ok((stream, !is_alone && self.drive_if(false)))
    }

    /// Notes that the only call was sent at once, if calls are timed.
    fn note_unqueued(&self, is_alone: bool) {
        if is_alone && let Some(times) = &self.times {
            times.queued(Duration::ZERO);
        }
    }

    /// Sends what the streams have queued, as far as there is room. The rest goes when there is room.
    pub(crate) fn drive(&self) {
        self.endpoint.drive();
    }

    /// Notes that this thread [drives](Self::drive) when it has dropped the returned value. Until then it
    /// does not tell the peer by a message of its own that its memory is free.
    pub(crate) fn drives_later(&self) -> WillDrive {
        WillDrive { outer: WILL_DRIVE.replace(std::ptr::from_ref(self).addr()) }
    }

    /// Returns whether this thread [drives later](Self::drives_later).
    fn will_drive(&self) -> bool {
        WILL_DRIVE.get() == std::ptr::from_ref(self).addr()
    }

    /// Sends what is queued if this call is the only one. With others, the request is left to the next poll
    /// of a caller, because calls that are made together then share messages. Returns whether a task of the
    /// session sends it; otherwise the caller should call [`drive_abandoned`](Self::drive_abandoned) with its
    /// next poll, soon. If no caller does, the request goes out some milliseconds later.
    pub(crate) fn drive_if(&self, is_alone: bool) -> bool {
        let sends = if is_alone { Sends::Caller } else { self.abandoned.leave() };
        if sends == Sends::Caller {
            self.drive();
        }
        sends == Sends::Task
    }

    /// Sends requests that [`drive_if`](Self::drive_if) has left.
    pub(crate) fn drive_abandoned(&self) {
        if self.abandoned.take() {
            self.drive();
        }
    }

    /// Takes no new calls from now on, and tells the peer so, with the reason. Calls that run go on; when the
    /// last has ended, the connection is closed. This drives.
    pub(crate) fn go_away(&self, reason: &str) {
        self.local.close(reason);
        self.endpoint.update(|state: &mut SessionState| (state.core.go_away(reason), true));
    }

    /// Ends the connection at once. Calls that run fail at both sides.
    pub(crate) fn abort(&self) {
        self.local.abort("the server ends the connection");
        self.endpoint.abort(AbortCode::RESET);
    }

    /// Returns whether calls can be opened.
    pub(crate) fn is_usable(&self) -> bool {
        // Relaxed: a call that comes too late is refused, and goes to another connection.
        self.is_usable.load(Ordering::Relaxed)
    }

    /// Returns whether the peer has not taken so much that replies have to wait for
    /// [`poll_send_ready`](Stream::poll_send_ready) from the first byte on.
    pub(crate) fn has_much_to_send(&self) -> bool {
        // Relaxed: one reply more or less makes no difference.
        self.has_much_to_send.load(Ordering::Relaxed)
    }

    /// Waits until the connection has ended: with a fault, or because a side went away and the last call has
    /// ended.
    ///
    /// # Errors
    /// The connection ended with a fault.
    pub(crate) async fn closed(&self) -> Result<(), ConnectionFault> {
        let poll = |state: &mut SessionState, waker: &Waker| {
            if state.is_over {
                return Poll::Ready(state.fault.clone().map_or(Ok(()), Err));
            }
            if !state.closing.iter().any(|known| known.will_wake(waker)) {
                state.closing.push(waker.clone());
            }
            Poll::Pending
        };
        let closed = poll_fn(|context| self.with(|state| poll(state, context.waker()))).await;
        // Calls go on if this end has let the connection go.
        if closed.is_err() || !self.local.is_closed() {
            self.local.abort("the connection has ended");
        }
        self.local.ended().await;
        closed
    }

    /// Returns the number of calls that have not ended.
    pub(crate) fn active_streams(&self) -> usize {
        let server = self.server.as_ref().and_then(Weak::upgrade);
        let local = server.as_deref().unwrap_or(self).local.active();
        self.with(|state| state.core.active()) + local
    }

    /// Wakes the tasks that wait for headers and parts of bodies.
    pub(crate) fn wake_readers(&self) {
        if let Some(server) = self.server.as_ref().and_then(Weak::upgrade) {
            server.local.wake_clients();
        }
        self.with(|state| state.core.wake_readers());
    }
}

thread_local! {
    /// The address of the session that this thread is about to drive; 0 if there is none.
    static WILL_DRIVE: Cell<usize> = const { Cell::new(0) };
}

/// The note that this thread drives a session when it has done what it does now, until this is dropped.
pub(crate) struct WillDrive {
    /// What was noted before.
    outer: usize,
}

impl Drop for WillDrive {
    fn drop(&mut self) {
        // A thread that ends has no notes.
        let _ = WILL_DRIVE.try_with(|session| session.set(self.outer));
    }
}

/// What a thread has to do next for a session, without the lock.
enum Step {
    /// Hand a call to the acceptor, with the time when it came if it is timed. The flag says whether it is the
    /// last one whose reply shares a message.
    Accept(StreamKey, RequestHeaders, Option<Instant>, bool),
    /// Leave the calls to a thread that [accepts](Accepting) them.
    Leave,
    Drive,
    Close,
    Nothing,
}

/// The turn of a thread that runs a session. A panic drops this, which takes its notes in the state back.
struct Turn<'a> {
    session: &'a Session,
    /// The session is a server's.
    serves: bool,
    /// This thread accepts calls.
    accepts: bool,
    /// The number of calls that it has accepted.
    accepted: usize,
    /// The reply of the last one waits for those of further calls.
    is_unsent: bool,
    /// This thread transmits until the state machine does not ask for more.
    transmits: bool,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if self.accepts || self.transmits {
            self.session.with(|state| {
                state.accepts &= !self.accepts;
                state.transmits_again &= !self.transmits;
            });
        }
    }
}

impl Run for Session {
    /// Accepts calls, if this thread may, and closes the connection if nothing is left to do.
    fn run(self: Arc<Self>) {
        if self.end_local() {
            return;
        }
        let acceptor = self.acceptor.as_deref();
        let mut turn = Turn {
            session: &self,
            serves: acceptor.is_some(),
            accepts: false,
            accepted: 0,
            is_unsent: false,
            transmits: false,
        };
        let mut step = self.with(|state| state.begin(&mut turn));
        loop {
            match (step, acceptor) {
                (Step::Accept(key, head, came, is_last), Some(acceptor)) => {
                    acceptor.accept(Stream::new(Arc::clone(&self), key).that_came(came), head, is_last);
                }
                (Step::Leave, _) => {
                    let session = Arc::downgrade(&self);
                    self.endpoint.leave(session);
                }
                (Step::Drive, _) => self.drive(),
                (Step::Close, _) => return self.endpoint.close(),
                (Step::Accept(..), None) | (Step::Nothing, _) => return,
            }
            step = self.with(|state| state.next(&mut turn));
        }
    }
}

/// The state of a session, which handles the messages of its connection.
#[derive(Debug)]
struct SessionState {
    core: Core<Kept>,
    is_usable: Arc<AtomicBool>,
    has_much_to_send: Arc<AtomicBool>,
    /// The session, for work that is carried out later.
    session: Weak<Session>,
    /// The reason why the connection ended early.
    fault: Option<ConnectionFault>,
    /// The connection has ended, or nothing is left to do on it.
    is_over: bool,
    /// The session is among the work to carry out.
    will_run: bool,
    /// A thread accepts calls until there are no more.
    accepts: bool,
    /// A thread transmits until the state machine does not ask for more.
    transmits_again: bool,
    /// Tasks that wait for the end.
    closing: Vec<Waker>,
    times: Option<Arc<CallTimes>>,
}

impl SessionState {
    /// The number of calls that are accepted before their replies are sent.
    const ACCEPTED: usize = 8;

    /// Ends all calls.
    fn end(&mut self, fault: &CallFault) {
        self.core.end(fault);
        self.is_usable.store(false, Ordering::Relaxed);
        self.is_over = true;
        self.core.after().wakers.append(&mut self.closing);
    }

    /// Notes that a call waits to be sent, if it is timed, and returns whether it is the only call. That is sent
    /// at once, so the clock is not read for it.
    fn note_waiting(&mut self, key: StreamKey) -> bool {
        let is_alone = self.core.active() <= 1;
        if self.times.is_some() && !is_alone {
            self.core.note_waiting(key, Instant::now());
        }
        is_alone
    }

    /// Notes whether calls can be opened. Adds the session to the work to carry out, if there is some: calls
    /// that were opened, bytes that are left to copy, or the end of the connection.
    fn run_later(&mut self) {
        if !self.core.takes_calls() {
            self.is_usable.store(false, Ordering::Relaxed);
        }
        // Replies of other threads read this often, and it changes seldom.
        if self.has_much_to_send.load(Ordering::Relaxed) != self.core.has_much_to_send() {
            self.has_much_to_send.store(self.core.has_much_to_send(), Ordering::Relaxed);
        }
        let is_due = (self.core.has_accepted() && !self.accepts) || (self.core.is_drained() && !self.is_over);
        if (is_due || (self.core.transmits_again() && !self.transmits_again))
            && !self.will_run
            && let Some(session) = self.session.upgrade()
        {
            self.will_run = true;
            self.core.after().runs.push(session);
        }
    }

    /// Begins a turn, and returns its first step.
    fn begin(&mut self, turn: &mut Turn<'_>) -> Step {
        self.will_run = false;
        // A call that is being polled in place has driven, to read its request. New calls are taken when that
        // call has been polled. Here they would become tasks.
        if turn.session.will_drive() {
            return Step::Nothing;
        }
        if turn.serves && !self.accepts {
            if Accepting::is_here() {
                turn.accepts = true;
            } else if self.core.has_accepted() {
                self.will_run = true;
                return Step::Leave;
            }
        }
        self.next(turn)
    }

    /// Returns the next step of a turn.
    fn next(&mut self, turn: &mut Turn<'_>) -> Step {
        if turn.accepts {
            if let Some((key, head)) = self.core.next_accepted() {
                let came = self.times.as_ref().and_then(|_| self.core.take_waits_since(key));
                turn.accepted += 1;
                let is_last = !self.core.has_accepted() || turn.accepted.is_multiple_of(Self::ACCEPTED);
                (self.accepts, turn.is_unsent) = (true, !is_last);
                return Step::Accept(key, head, came, is_last);
            }
            if std::mem::take(&mut turn.is_unsent) {
                // The last call has ended before it began.
                return Step::Drive;
            }
            // Under the same lock, so that calls that come later are taken.
            (self.accepts, turn.accepts) = (false, false);
        }
        // Transmits as long as the state machine asks for it. Between two times other threads may have the
        // connection. A connection that has ended transmits nothing, so each wish counts once.
        if turn.transmits || !self.transmits_again {
            let again = self.core.take_again();
            (self.transmits_again, turn.transmits) = (again, again);
            if again {
                return Step::Drive;
            }
        }
        if !self.is_over && !self.core.is_drained() {
            return Step::Nothing;
        }
        self.is_over = true;
        self.core.after().wakers.append(&mut self.closing);
        Step::Close
    }
}

impl MessageHandler for SessionState {
    fn receive(&mut self, message: Bytes) -> Result<bool, ConnectionFault> {
        let known = self.core.accepted();
        let received = self.core.receive(message);
        if self.times.is_some() && self.core.accepted() > known {
            self.core.note_accepted(known, Instant::now());
        }
        self.run_later();
        received.map_err(ConnectionFault::of_calls)?;
        Ok(!self.core.is_idle())
    }

    fn landed(&mut self, fetch: u64, content: Option<LandedContent>) {
        self.core.landed(fetch, content);
    }

    fn transmit(&mut self, sender: &mut Sender<'_>) -> Result<(), ConnectionFault> {
        self.core.transmit(sender)?;
        if let Some(times) = &self.times {
            let mut sent = self.core.take_sent().peekable();
            if sent.peek().is_some() {
                let now = Instant::now();
                sent.for_each(|since| times.queued(now.saturating_duration_since(since)));
            }
        }
        if self.core.has_waiting() && sender.room() == 0 {
            sender.note_stall();
        }
        self.run_later();
        Ok(())
    }

    fn peer_finished(&mut self) {
        self.end(&CallFault::PeerClosed);
        // This side closes too.
        if let Some(session) = self.session.upgrade() {
            self.core.after().runs.push(session);
        }
    }

    fn ended(&mut self, fault: &ConnectionFault) {
        self.fault.get_or_insert_with(|| fault.clone());
        self.end(&CallFault::Connection(fault.clone().into()));
        // Calls within the process end with their connection.
        if let Some(session) = self.session.upgrade().filter(|session| session.server.is_some()) {
            self.core.after().runs.push(session);
        }
    }

    fn after(&mut self) -> &mut Deferred {
        self.core.after()
    }
}
