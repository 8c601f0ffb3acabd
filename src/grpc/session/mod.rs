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
mod stream;
#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::future::poll_fn;
use std::io::IoSlice;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::task::{Poll, Waker};

use bytes::Bytes;

use self::abandoned::{AbandonedRequests, Sends};
use crate::endpoint::{
    Accepting, ConnectionFault, Deferred, FetchError, MessageEndpoint, MessageHandler, MessageSettings,
    ReadSegment, Run, Sender,
};
use crate::grpc::calls::CallConfig;
use crate::grpc::core::{AfterUnlock, Core, ReadRefused, Role, Wire};
use crate::grpc::fault::CallFault;
use crate::grpc::landing_budget::LandingBudget;
use crate::protocol::AbortCode;
use tonic_rdma_verbs::RemoteSegment;
use tonic_rdma_verbs::memory::{Block, Lease};
use tonic_rdma_verbs::unstable::{lock, wake_all};

pub(crate) use self::stream::Stream;
pub(crate) use crate::grpc::core::{OpenError, Part};
pub(crate) use crate::grpc::frame::{RequestHeaders, ResetCode};

pub(in crate::grpc) use self::stream::MemoryTimeout;

/// Takes the calls that arrive at a server.
pub(crate) trait Accept: std::fmt::Debug + Send + Sync + 'static {
    /// Takes a call. A thread that [accepts](Accepting) calls does this, outside of a runtime's context if it
    /// is a thread of the device's, and without any lock. Replies that are queued here by some calls of
    /// `accept` share messages: the one with `is_last` calls [`Session::drive`], once the reply is queued,
    /// and before it does anything else that takes time. If another thread took the last call, the session
    /// drives.
    fn accept(&self, stream: Stream, head: RequestHeaders, is_last: bool);
}

/// The calls of one connection.
#[derive(Debug)]
pub(crate) struct Session {
    pub(in crate::grpc) endpoint: MessageEndpoint,
    shared: Arc<SessionShared>,
    acceptor: Option<Arc<dyn Accept>>,
    abandoned: AbandonedRequests,
}

impl Session {
    /// The number of calls that are accepted before their replies are sent.
    const ACCEPTED: usize = 8;

    /// Begins the calls of a client.
    pub(crate) fn client(endpoint: MessageEndpoint, config: &CallConfig) -> Arc<Self> {
        let session = Self::start(endpoint, config, Role::Client, None);
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
        Self::start(endpoint, config, Role::Server, Some(acceptor))
    }

    fn start(
        endpoint: MessageEndpoint,
        config: &CallConfig,
        role: Role,
        acceptor: Option<Arc<dyn Accept>>,
    ) -> Arc<Self> {
        let mut core =
            Core::new(role, config.max_concurrent_streams, config.max_header_list_size, config.stream_window);
        core.set_landing_budget(LandingBudget::new(config.landing_budget));
        let session = Arc::new_cyclic(|weak| {
            let shared = SessionShared::new(core, weak.clone());
            Self { endpoint, shared, acceptor, abandoned: AbandonedRequests::default() }
        });
        // As much again, so that messages which the application holds leave memory to calls that copy.
        let landing_budget = config.landing_budget.saturating_mul(2);
        let settings = MessageSettings { landing_budget, expose: config.send_in_place };
        session.endpoint.start(session.shared.clone(), settings);
        session.drive();
        session
    }

    /// Opens a stream for a call of this client. The headers are queued; nothing is sent until
    /// [`drive`](Self::drive). If the server has as many streams as it accepts, the call waits in the queue
    /// until another has ended, so callers need not ask before.
    ///
    /// # Errors
    /// The connection has ended, or accepts no new calls.
    pub(crate) fn open(self: &Arc<Self>, head: impl Into<Arc<RequestHeaders>>) -> Result<Stream, OpenError> {
        let key = lock(&self.shared.state).core.open(head)?;
        Ok(Stream::new(Arc::clone(self), key))
    }

    /// Opens a stream as [`open`](Self::open) does, and queues `body`, which is the whole body. Returns also
    /// whether this is the only call.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub(crate) fn open_with(
        self: &Arc<Self>,
        head: Arc<RequestHeaders>,
        body: Bytes,
    ) -> Result<(Stream, bool), OpenError> {
        let mut state = lock(&self.shared.state);
        let key = state.core.open(head)?;
        state.core.send_data(key, body, true);
        let is_alone = state.core.active() <= 1;
        drop(state);
        Ok((Stream::new(Arc::clone(self), key), is_alone))
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
        lock(&self.shared.state).core.go_away(reason);
        self.drive();
    }

    /// Ends the connection at once. Calls that run fail at both sides.
    pub(crate) fn abort(&self) {
        self.endpoint.abort(AbortCode::RESET);
    }

    /// Returns whether calls can be opened.
    pub(crate) fn is_usable(&self) -> bool {
        let core = &lock(&self.shared.state).core;
        !core.has_ended() && core.going_away().is_none()
    }

    /// Waits until the connection has ended: with a fault, or because a side went away and the last call has
    /// ended.
    ///
    /// # Errors
    /// The connection ended with a fault.
    pub(crate) async fn closed(&self) -> Result<(), ConnectionFault> {
        poll_fn(|context| {
            let mut state = lock(&self.shared.state);
            if state.is_over {
                return Poll::Ready(state.fault.clone().map_or(Ok(()), Err));
            }
            if !state.closing.iter().any(|waker| waker.will_wake(context.waker())) {
                state.closing.push(context.waker().clone());
            }
            Poll::Pending
        })
        .await
    }

    /// Returns the number of calls that have not ended.
    pub(crate) fn active_streams(&self) -> usize {
        lock(&self.shared.state).core.active()
    }

    /// Wakes the tasks that wait for headers and parts of bodies.
    pub(crate) fn wake_readers(&self) {
        let wakers = {
            let core = &mut lock(&self.shared.state).core;
            core.wake_readers();
            std::mem::take(&mut core.after_unlock().wakers)
        };
        wake_all(wakers);
    }

    /// Transmits as long as the state machine asks for it. Between two times other threads may have the
    /// connection. A connection that has ended transmits nothing, so each wish counts once.
    fn transmit_again<'a>(&'a self, mut state: MutexGuard<'a, SessionState>) -> MutexGuard<'a, SessionState> {
        if state.transmits_again {
            return state;
        }
        loop {
            state.transmits_again = state.core.take_again();
            if !state.transmits_again {
                return state;
            }
            drop(state);
            self.drive();
            state = lock(&self.shared.state);
        }
    }

    /// Hands calls that the peer has opened to the acceptor, which sends their replies.
    fn accept<'a>(
        self: &'a Arc<Self>,
        acceptor: &dyn Accept,
        mut state: MutexGuard<'a, SessionState>,
    ) -> MutexGuard<'a, SessionState> {
        let (mut accepted, mut is_unsent) = (0_usize, false);
        state.accepts = true;
        let mut accepts = Accepts { shared: &self.shared, is_over: false };
        loop {
            let Some((key, head)) = state.core.next_accepted() else {
                if !is_unsent {
                    // Under the same lock, so that calls that come later are taken.
                    state.accepts = false;
                    accepts.is_over = true;
                    return state;
                }
                // The last call has ended before it began.
                is_unsent = false;
                drop(state);
                self.drive();
                state = lock(&self.shared.state);
                continue;
            };
            accepted += 1;
            let is_last = !state.core.has_accepted() || accepted.is_multiple_of(Self::ACCEPTED);
            is_unsent = !is_last;
            drop(state);
            acceptor.accept(Stream::new(Arc::clone(self), key), head, is_last);
            state = lock(&self.shared.state);
        }
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

/// The note that a thread accepts the calls of a session. A panic drops this before it is over, which takes
/// the note back.
struct Accepts<'a> {
    shared: &'a SessionShared,
    is_over: bool,
}

impl Drop for Accepts<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            lock(&self.shared.state).accepts = false;
        }
    }
}

impl Run for Session {
    /// Accepts calls, if this thread may, and closes the connection if nothing is left to do.
    fn run(self: Arc<Self>) {
        let mut state = lock(&self.shared.state);
        state.will_run = false;
        // A call that is being polled in place has driven, to read its request. New calls are taken when that
        // call has been polled. Here they would become tasks.
        if self.will_drive() {
            return;
        }
        match &self.acceptor {
            Some(acceptor) if Accepting::is_here() && !state.accepts => {
                state = self.accept(&**acceptor, state)
            }
            Some(_) if state.core.has_accepted() && !state.accepts => {
                state.will_run = true;
                let session = Arc::downgrade(&self);
                self.endpoint.leave(session);
            }
            _ => {}
        }
        state = self.transmit_again(state);
        if !state.is_over && !state.core.is_drained() {
            return;
        }
        state.is_over = true;
        let wakers = std::mem::take(&mut state.closing);
        drop(state);
        self.endpoint.close();
        wake_all(wakers);
    }
}

/// The state of a session, which the connection's handler and the handles of streams share.
#[derive(Debug)]
struct SessionShared {
    state: Mutex<SessionState>,
    /// The session, for work that is carried out later.
    session: Weak<Session>,
}

/// The state behind the lock.
#[derive(Debug)]
struct SessionState {
    core: Core<Kept>,
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
}

impl SessionState {
    /// Moves tasks to wake, and what the state machine does not need any more, to `after`, because both have
    /// to go without a lock.
    fn move_to(&mut self, after: &mut Deferred) {
        let AfterUnlock { wakers, memory, headers } = self.core.after_unlock();
        after.wakers.append(wakers);
        after.unneeded.append(memory);
        after.add_headers(headers);
    }

    /// Ends all calls.
    fn end(&mut self, fault: &CallFault, after: &mut Deferred) {
        self.core.end(fault);
        self.move_to(after);
        self.is_over = true;
        after.wakers.append(&mut self.closing);
    }
}

impl SessionShared {
    fn new(core: Core<Kept>, session: Weak<Session>) -> Arc<Self> {
        let state = SessionState {
            core,
            fault: None,
            is_over: false,
            will_run: false,
            accepts: false,
            transmits_again: false,
            closing: Vec::new(),
        };
        Arc::new(Self { state: Mutex::new(state), session })
    }

    /// Adds the session to the work of `after`, if there is some: calls that were opened, bytes that are left
    /// to copy, or the end of the connection.
    fn run_later(&self, state: &mut SessionState, after: &mut Deferred) {
        let is_due =
            (state.core.has_accepted() && !state.accepts) || (state.core.is_drained() && !state.is_over);
        if (is_due || (state.core.transmits_again() && !state.transmits_again))
            && !state.will_run
            && let Some(session) = self.session.upgrade()
        {
            state.will_run = true;
            after.runs.push(session);
        }
    }
}

impl MessageHandler for SessionShared {
    fn receive(&self, message: Bytes, after: &mut Deferred) -> Result<bool, ConnectionFault> {
        let mut state = lock(&self.state);
        let received = state.core.receive(message);
        state.move_to(after);
        self.run_later(&mut state, after);
        received.map_err(ConnectionFault::of_calls)?;
        Ok(!state.core.is_idle())
    }

    fn landed(&self, fetch: u64, memory: Option<Bytes>, after: &mut Deferred) -> Result<(), ConnectionFault> {
        let mut state = lock(&self.state);
        state.core.landed(fetch, memory);
        state.move_to(after);
        Ok(())
    }

    fn transmit(&self, sender: &mut Sender<'_>, after: &mut Deferred) -> Result<(), ConnectionFault> {
        let mut state = lock(&self.state);
        let transmitted = state.core.transmit(sender);
        state.move_to(after);
        transmitted?;
        if state.core.has_waiting() && sender.room() == 0 {
            sender.note_stall();
        }
        self.run_later(&mut state, after);
        Ok(())
    }

    fn peer_finished(&self, after: &mut Deferred) {
        lock(&self.state).end(&CallFault::PeerClosed, after);
        // This side closes too.
        if let Some(session) = self.session.upgrade() {
            after.runs.push(session);
        }
    }

    fn ended(&self, fault: &ConnectionFault, after: &mut Deferred) {
        let mut state = lock(&self.state);
        state.fault.get_or_insert_with(|| fault.clone());
        state.end(&CallFault::Connection(fault.clone().into()), after);
    }
}

/// Memory that the peer may read.
#[derive(Debug)]
#[expect(dead_code, reason = "keeps the memory in place")]
pub(in crate::grpc) enum Kept {
    Copied(Block),
    Exposed(Lease),
}

// Inherent functions of `Sender` go before those of the trait.
impl Wire for Sender<'_> {
    type Kept = Kept;
    type Fault = ConnectionFault;

    fn room(&self) -> usize {
        self.room()
    }

    fn send(&mut self, slices: &[IoSlice<'_>]) -> Result<(), ConnectionFault> {
        self.send(slices)
    }

    fn expose(&mut self, bytes: &[u8]) -> Option<(RemoteSegment, Kept)> {
        let exposed = self.expose(bytes)?;
        Some((exposed.remote, Kept::Exposed(exposed.lease)))
    }

    fn copy(&mut self, bytes: &[u8]) -> Option<(RemoteSegment, Kept)> {
        let mut block = self.lease(bytes.len()).ok()?;
        block.copy_in(0, bytes).ok()?;
        Some((block.remote(0), Kept::Copied(block)))
    }

    fn read(&mut self, id: u64, segments: &[ReadSegment<'_>], aligned_at: usize) -> Result<(), ReadRefused> {
        self.fetch(id, segments, aligned_at).map_err(|error| match error {
            FetchError::NoMemory(_) => ReadRefused::Later,
            error @ FetchError::TooLong { .. } => ReadRefused::Never(error.to_string().into()),
        })
    }

    fn cancel_read(&mut self, id: u64) {
        self.cancel_fetch(id);
    }
}
