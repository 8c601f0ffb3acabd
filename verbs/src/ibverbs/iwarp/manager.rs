//! Connecting on iWARP, where the kernel's connection manager sets up the TCP connection beneath a queue
//! pair.
//!
//! Each device listens at one address. Both sides of a connection know the other side's address and token.
//! The side with the greater pair of these (the *active* side) connects, and the other side accepts, in
//! whichever order they call `to_rtr`. A thread handles the kernel's events, so that a queue pair connects
//! even if no thread polls. The kernel limits how long the active side waits for an answer; this module
//! limits how long the other side waits for the connection. Another thread makes each connecting call,
//! because soft-iWARP's call returns only when TCP has connected, and it takes two minutes to give up an
//! address that does not answer.
//!
//! The side that accepted must not send before it has received something from the other side (RFC 5044,
//! section 7.1.2). So the first message in each direction is a *hello* of no bytes, which users do not see.
//! Earlier requests are held until the active side is connected, and until the other side got its hello. No
//! event reports the hello, so until then the thread looks into the completion queue.
//!
//! soft-iWARP overlooks data that arrives between its answer to the request and its own readiness
//! (`siw_accept`), until more data arrives. So the active side sends a small write (a *nudge*) to a peer
//! whose hello does not come.

use std::collections::{HashMap, VecDeque};
use std::ffi::c_int;
use std::fmt::Debug;
use std::io;
use std::net::SocketAddrV6;
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};

use super::library::{
    ConnectionLibrary, EventChannel, Id, Introduction, Listener, Note, Parameters, connection_library,
    create_id, destroy_id, event, listen, note, socket_address,
};
use crate::ibverbs::completion_queue::Queue;
use crate::ibverbs::library::{check, last_error, set_nonblocking};
use crate::ibverbs::posting::core::Core;
use crate::panics::lock;
use crate::{QueuePairState, VerbsError};

/// Longest time that the accepting side waits for the connection, and that either side waits for the other's
/// hello. (soft-iWARP gives the active side as long to connect.)
pub(super) const TIMEOUT: Duration = Duration::from_secs(10);
/// Time between two checks for a hello.
const TICK: Duration = Duration::from_millis(1);

/// Time until the first nudge of a peer. It doubles with each nudge.
pub(super) const NUDGE: Duration = Duration::from_millis(20);
const NUDGES: u32 = 8;
/// Requests of this module that a send queue needs slots for: the hello and the nudges. (A receive queue has
/// only the hello.)
pub(crate) const OWN_REQUESTS: u32 = 1 + NUDGES;

/// The connection manager of one device.
#[derive(Debug)]
pub(crate) struct Manager {
    pub(super) library: &'static ConnectionLibrary,
    pub(super) channel: NonNull<EventChannel>,
    listener: NonNull<Id>,
    pub(crate) socket: SocketAddrV6,
    /// Wakes the thread for work that is no event.
    nudge: OwnedFd,
    stopped: AtomicBool,
    pub(super) state: Mutex<ConnectionTable>,
    /// Notified when a connecting call has returned.
    pub(super) returned: Condvar,
}

/// A running manager. Dropping it ends the thread.
#[derive(Debug)]
pub(crate) struct Service(Arc<Manager>);

impl Service {
    /// Starts a manager that listens at an address of `device`.
    pub(crate) fn start(device: &str) -> Result<Self, VerbsError> {
        let manager = Arc::new(Manager::open(device)?);
        let worker = Arc::clone(&manager);
        let thread = std::thread::Builder::new().name("tonic-rdma-cm".into());
        thread
            .spawn(move || worker.run())
            .map_err(|error| VerbsError::os("starting the thread of the connection manager", error))?;
        Ok(Self(manager))
    }
}

impl Deref for Service {
    type Target = Manager;

    fn deref(&self) -> &Manager {
        &self.0
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.0.stopped.store(true, SeqCst);
        self.0.nudge();
    }
}

// SAFETY: librdmacm is thread-safe, and all else here is Send and Sync itself.
unsafe impl Send for Manager {}
// SAFETY: the reasons for `Send` hold for `Sync`.
unsafe impl Sync for Manager {}

#[derive(Debug, Default)]
pub(super) struct ConnectionTable {
    /// Connections by token.
    pub(super) connections: HashMap<u64, Connection>,
    /// Tokens of connections by their identifier's address.
    pub(super) ids: HashMap<usize, u64>,
    /// Deadlines of the connections that wait for the peer, and their tokens; in order.
    pub(super) deadlines: VecDeque<(Instant, u64)>,
    /// Connections that wait for the peer's hello.
    pub(super) awaited_hellos: Vec<AwaitedHello>,
}

#[derive(Debug)]
pub(super) struct AwaitedHello {
    pub(super) token: u64,
    pub(super) nudges: u32,
    pub(super) next_nudge: Instant,
}

/// A queue pair from Init on.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) pair: Arc<Core>,
    /// The completion queue of its receives.
    pub(super) queue: Arc<Queue>,
    /// The peer, from `to_rtr` on.
    pub(super) peer: Option<Wanted>,
    /// The kernel's identifier of the connection: our own if we connect, that of the peer's request if the
    /// peer connects.
    pub(super) id: Option<NonNull<Id>>,
    /// Whether a thread is in the connecting call and uses the identifier.
    pub(super) connecting: bool,
    /// The token that the request came with.
    pub(super) requester: u64,
}

/// The peer to connect to, and the settings for it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    pub(super) listener: Listener,
    pub(super) served_reads: u8,
    pub(super) outstanding_reads: u8,
    pub(super) active: bool,
}

impl Manager {
    /// Listens at an address of `device`.
    fn open(device: &str) -> Result<Self, VerbsError> {
        let library = connection_library()?;
        let nudge = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| VerbsError::os("creating a descriptor", error))?;
        // SAFETY: the function takes no arguments.
        let channel = unsafe { (library.create_event_channel)() };
        let channel =
            NonNull::new(channel).ok_or_else(|| last_error("opening the RDMA connection manager"))?;
        match listen(library, channel, device) {
            Ok((listener, socket)) => {
                let (stopped, state, returned) = (AtomicBool::new(false), Mutex::default(), Condvar::new());
                let manager = Self { library, channel, listener, socket, nudge, stopped, state, returned };
                set_nonblocking(manager.fd())?;
                Ok(manager)
            }
            Err(error) => {
                // SAFETY: the channel was just created, and has no identifiers.
                unsafe { (library.destroy_event_channel)(channel.as_ptr()) };
                Err(error)
            }
        }
    }

    /// Handles events and ends waits that were too long, until the manager is stopped.
    fn run(self: &Arc<Self>) {
        while !self.stopped.load(SeqCst) {
            let left = [self.expire(), self.check_for_hellos()].into_iter().flatten().min();
            // Both are at most `TIMEOUT`.
            let left = left.map(|left| Timespec::try_from(left).unwrap_or_default());
            let mut awaited = [
                PollFd::from_borrowed_fd(self.fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(self.nudge.as_fd(), PollFlags::IN),
            ];
            match rustix::event::poll(&mut awaited, left.as_ref()) {
                // The kernel took the device away, and the channel with it.
                Ok(_) if awaited[0].revents().intersects(PollFlags::ERR | PollFlags::NVAL) => return,
                Ok(_) | Err(rustix::io::Errno::INTR) => self.progress(),
                Err(error) => {
                    tracing::error!(%error, "the connection manager's thread ends");
                    return;
                }
            }
            let _ = rustix::io::read(&self.nudge, &mut [0; 8]);
        }
    }

    pub(super) fn nudge(&self) {
        // Writing fails only after 2^64 calls.
        let _ = rustix::io::write(&self.nudge, &1u64.to_ne_bytes());
    }

    /// Ends the queue pairs that have waited too long for the peer. Returns the time until the next deadline.
    fn expire(&self) -> Option<Duration> {
        let state = &mut *lock(&self.state);
        while let Some(&(deadline, token)) = state.deadlines.front() {
            let waiting = state.connections.get(&token).filter(|connection| !connection.pair.has_hello());
            let left = deadline.saturating_duration_since(Instant::now());
            if waiting.is_some() && left > Duration::ZERO {
                return Some(left);
            }
            state.deadlines.pop_front();
            if let Some(connection) = waiting {
                let error = VerbsError::unreachable(format!("the peer sent nothing within {TIMEOUT:?}"));
                connection.pair.fail(|| error.to_string());
            }
        }
        None
    }

    /// Checks for the hellos that connections wait for. Returns the time until the next check.
    fn check_for_hellos(&self) -> Option<Duration> {
        let state = &mut *lock(&self.state);
        state.awaited_hellos.retain_mut(|awaited| {
            let found = state.connections.get(&awaited.token);
            let Some(Connection { pair, queue, peer: Some(peer), .. }) = found else { return false };
            if !pair.has_hello() {
                queue.fetch();
            }
            if pair.has_hello() || pair.state() == QueuePairState::Error {
                return false;
            }
            let now = Instant::now();
            if peer.active && awaited.nudges < NUDGES && awaited.next_nudge <= now {
                pair.nudge();
                awaited.nudges += 1;
                awaited.next_nudge = now + NUDGE * (1 << awaited.nudges);
            }
            true
        });
        (!state.awaited_hellos.is_empty()).then_some(TICK)
    }

    /// Returns the descriptor that is readable when [`progress`](Self::progress) has work.
    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel is alive as long as `self`, and its descriptor with it.
        unsafe { BorrowedFd::borrow_raw(self.channel.as_ref().fd) }
    }

    /// Adds a queue pair: requests for `token` are for it from now on.
    pub(crate) fn add(&self, token: u64, pair: Arc<Core>, queue: Arc<Queue>) {
        let connection = Connection { pair, queue, peer: None, id: None, connecting: false, requester: 0 };
        lock(&self.state).connections.insert(token, connection);
    }

    /// Returns whether [`remove`](Self::remove) may take long, because the kernel waits for the peer.
    pub(crate) fn is_connecting(&self, token: u64) -> bool {
        lock(&self.state).connections.get(&token).is_some_and(|connection| {
            let active = connection.peer.is_some_and(|peer| peer.active);
            active && connection.id.is_some() && !connection.pair.has_hello()
        })
    }

    /// Removes a queue pair that is about to be destroyed.
    pub(crate) fn remove(&self, token: u64) {
        let connecting =
            |state: &mut ConnectionTable| state.connections.get(&token).is_some_and(|found| found.connecting);
        let state = self.returned.wait_while(lock(&self.state), connecting);
        let mut state = state.unwrap_or_else(PoisonError::into_inner);
        let id = state.connections.remove(&token).and_then(|connection| connection.id);
        if let Some(id) = id {
            state.ids.remove(&id.as_ptr().addr());
            drop(state);
            self.destroy(id);
        }
    }

    /// Handles the kernel's events.
    fn progress(self: &Arc<Self>) {
        loop {
            let state = &mut *lock(&self.state);
            let mut event = ptr::null_mut();
            // SAFETY: the channel is alive, and the result writable.
            let result = unsafe { (self.library.get_event)(self.channel.as_ptr(), &raw mut event) };
            if result != 0 {
                return;
            }
            let Some(event) = NonNull::new(event) else { return };
            let note = note(event);
            // SAFETY: the event came from the library, and is acknowledged once; no part of it is used any
            // more.
            let result = unsafe { (self.library.ack_event)(event.as_ptr()) };
            if let Err(error) = check("acknowledging an event", result) {
                tracing::warn!(%error, "an event of the connection manager can't be acknowledged");
            }
            self.apply(state, &note);
        }
    }

    pub(super) fn destroy(&self, id: NonNull<Id>) {
        destroy_id(self.library, id);
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        let connections = std::mem::take(&mut lock(&self.state).connections);
        connections.values().filter_map(|connection| connection.id).for_each(|id| self.destroy(id));
        self.destroy(self.listener);
        // SAFETY: every identifier of the channel is gone.
        unsafe { (self.library.destroy_event_channel)(self.channel.as_ptr()) };
    }
}

/// Longest time that the kernel searches for a route to the peer, in milliseconds.
const RESOLVE: c_int = 1000;

impl Manager {
    /// Connects the queue pair to the peer, or waits until the peer connects.
    pub(crate) fn connect(
        &self,
        token: u64,
        peer: Listener,
        served_reads: u8,
        outstanding_reads: u8,
    ) -> Result<(), VerbsError> {
        let state = &mut *lock(&self.state);
        let Some(connection) = state.connections.get_mut(&token) else {
            return Err(VerbsError::foreign("queue pair"));
        };
        let (ours, theirs) = ((self.socket, token), (peer.socket, peer.token));
        if ours == theirs {
            return Err(VerbsError::bad_address("it is the address of this queue pair itself"));
        }
        let wanted = Wanted { listener: peer, served_reads, outstanding_reads, active: ours > theirs };
        connection.peer = Some(wanted);
        if wanted.active {
            if let Some(unknown) = connection.id.take() {
                state.ids.remove(&unknown.as_ptr().addr());
                self.refuse(unknown);
            }
            let id = self.start(&peer)?;
            connection.id = Some(id);
            state.ids.insert(id.as_ptr().addr(), token);
        } else {
            state.deadlines.push_back((Instant::now() + TIMEOUT, token));
            self.nudge();
            self.accept(token, connection)?;
        }
        Ok(())
    }

    /// Asks the kernel for the route to a peer.
    fn start(&self, peer: &Listener) -> Result<NonNull<Id>, VerbsError> {
        let id = create_id(self.library, self.channel)?;
        let mut ours = socket_address(SocketAddrV6::new(*self.socket.ip(), 0, 0, 0));
        let mut theirs = socket_address(peer.socket);
        // SAFETY: the identifier is alive, and both addresses are complete, of the length of their family.
        let result = unsafe {
            let (ours, theirs) = (ours.as_mut_ptr().cast(), theirs.as_mut_ptr().cast());
            (self.library.resolve_addr)(id.as_ptr(), ours, theirs, RESOLVE)
        };
        check(format!("looking for the way to {}", peer.socket), result).inspect_err(|_| self.destroy(id))?;
        Ok(id)
    }

    fn accept(&self, token: u64, connection: &mut Connection) -> Result<(), VerbsError> {
        let (Some(id), Some(peer)) = (connection.id, connection.peer) else { return Ok(()) };
        if connection.requester != peer.listener.token {
            let error = "another queue pair has connected to this one";
            return Err(VerbsError::unreachable(error));
        }
        let mut parameters = parameters(connection.pair.number, &peer);
        // SAFETY: the identifier is that of a request that was not answered yet, and the parameters are
        // complete.
        let result = unsafe { (self.library.accept)(id.as_ptr(), &raw mut parameters) };
        tracing::trace!(token, "accepted");
        check("accepting an iWARP connection", result)
    }

    /// Applies an event to its connection.
    pub(super) fn apply(self: &Arc<Self>, state: &mut ConnectionTable, note: &Note) {
        let Some(id) = note.id else { return };
        if note.kind == event::CONNECT_REQUEST {
            return self.requested(state, id, note.introduction);
        }
        let Some(&token) = state.ids.get(&id.as_ptr().addr()) else { return };
        let Some(connection) = state.connections.get_mut(&token) else { return };
        let result = match note.kind {
            event::ADDRESS_RESOLVED => {
                // SAFETY: the identifier is alive as long as it is in the table.
                let result = unsafe { (self.library.resolve_route)(id.as_ptr(), RESOLVE) };
                check("looking for a route", result)
            }
            event::ROUTE_RESOLVED => self.start_connecting(token, connection),
            event::ESTABLISHED => {
                let now = Instant::now();
                if connection.peer.is_some_and(|peer| peer.active) {
                    state.deadlines.push_back((now + TIMEOUT, token));
                    connection.pair.open_gate();
                }
                state.awaited_hellos.push(AwaitedHello { token, nudges: 0, next_nudge: now + NUDGE });
                Ok(())
            }
            event::ADDRESS_ERROR
            | event::ROUTE_ERROR
            | event::CONNECT_ERROR
            | event::UNREACHABLE
            | event::REJECTED => {
                let error = io::Error::from_raw_os_error(note.status.saturating_abs());
                Err(VerbsError::unreachable(match note.kind {
                    event::REJECTED => "the peer refused the connection".into(),
                    _ => error.to_string(),
                }))
            }
            event::DISCONNECTED => Err(VerbsError::unreachable("the connection has ended")),
            event::DEVICE_REMOVAL => Err(VerbsError::unusable("the device was removed")),
            _ => Ok(()),
        };
        if let Err(error) = result {
            connection.pair.fail(|| error.to_string());
        }
    }

    /// Handles the request of a peer to connect to one of our queue pairs.
    fn requested(&self, state: &mut ConnectionTable, id: NonNull<Id>, introduction: Option<Introduction>) {
        let target = introduction
            .and_then(|introduction| Some((introduction, state.connections.get_mut(&introduction.target)?)));
        let Some((introduction, connection)) = target else { return self.refuse(id) };
        let passive = connection.peer.is_none_or(|peer| !peer.active);
        if connection.id.is_some() || !passive || connection.pair.state() == QueuePairState::Error {
            return self.refuse(id);
        }
        connection.id = Some(id);
        connection.requester = introduction.source;
        if let Err(error) = self.accept(introduction.target, connection) {
            connection.id = None;
            tracing::debug!(%error, "refused an iWARP connection");
            return self.refuse(id);
        }
        state.ids.insert(id.as_ptr().addr(), introduction.target);
    }

    /// Starts a thread that connects to the peer.
    fn start_connecting(self: &Arc<Self>, token: u64, connection: &mut Connection) -> Result<(), VerbsError> {
        let manager = Arc::clone(self);
        let thread = std::thread::Builder::new().name("tonic-rdma-connect".into());
        thread
            .spawn(move || manager.introduce(token))
            .map_err(|error| VerbsError::os("starting the thread that connects", error))?;
        connection.connecting = true;
        Ok(())
    }

    /// Connects to the peer.
    fn introduce(&self, token: u64) {
        // The caller of `start_connecting` holds the lock until `connecting` is set. So the identifier stays
        // until `connecting` is false again.
        let found = lock(&self.state)
            .connections
            .get(&token)
            .and_then(|connection| Some((connection.id?, connection.pair.number, connection.peer?)));
        let result = match found {
            Some((id, number, peer)) => self.connect_to(&peer, token, id, number),
            None => Ok(()),
        };
        let state = &mut *lock(&self.state);
        if let Some(connection) = state.connections.get_mut(&token) {
            connection.connecting = false;
            if let Err(error) = result {
                connection.pair.fail(|| error.to_string());
            }
        }
        self.returned.notify_all();
    }

    fn connect_to(&self, peer: &Wanted, token: u64, id: NonNull<Id>, number: u32) -> Result<(), VerbsError> {
        let introduction = Introduction { target: peer.listener.token, source: token }.to_bytes();
        let mut parameters = Parameters {
            private_data: introduction.as_ptr().cast(),
            private_data_length: Introduction::LENGTH as u8,
            ..parameters(number, peer)
        };
        // SAFETY: the identifier is resolved, and the parameters are complete; the call copies what they
        // point to.
        let result = unsafe { (self.library.connect)(id.as_ptr(), &raw mut parameters) };
        check(format!("connecting to {}", peer.listener.socket), result)
    }

    fn refuse(&self, id: NonNull<Id>) {
        // SAFETY: the identifier is that of a request that was not answered yet.
        let result = unsafe { (self.library.reject)(id.as_ptr(), ptr::null(), 0) };
        if let Err(error) = check("refusing an iWARP connection", result) {
            tracing::debug!(%error);
        }
        self.destroy(id);
    }
}

fn parameters(number: u32, peer: &Wanted) -> Parameters {
    Parameters {
        private_data: ptr::null(),
        private_data_length: 0,
        responder_resources: peer.served_reads,
        initiator_depth: peer.outstanding_reads.min(peer.listener.reads),
        flow_control: 0,
        retry_count: 7,
        rnr_retry_count: 7,
        shared_receive_queue: 0,
        queue_pair_number: number,
    }
}
