//! How the connection manager connects a queue pair: as the active end, or as the end that accepts.

use std::ffi::c_int;
use std::io;
use std::net::SocketAddrV6;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::time::Instant;

use super::id::create_id;
use super::introduction::{Introduction, Note};
use super::library::{Id, Parameters, event};
use super::listener::Listener;
use super::manager::{AwaitedHello, Connection, ConnectionTable, Manager, NUDGE, PATIENCE, Wanted};
use super::network::socket_address;
use crate::ibverbs::library::check;
use crate::sync::lock;
use crate::{QueuePairState, VerbsError};

/// Longest time that the kernel looks for a route to the peer, in milliseconds.
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
            return Err(VerbsError::Foreign("queue pair"));
        };
        let (ours, theirs) = ((self.socket, token), (peer.socket, peer.token));
        if ours == theirs {
            return Err(VerbsError::BadAddress("it is the address of this queue pair itself".into()));
        }
        let wanted = Wanted { listener: peer, served_reads, outstanding_reads, active: ours > theirs };
        connection.peer = Some(wanted);
        if wanted.active {
            if let Some(stranger) = connection.id.take() {
                state.ids.remove(&stranger.as_ptr().addr());
                self.refuse(stranger);
            }
            let id = self.start(&peer)?;
            connection.id = Some(id);
            state.ids.insert(id.as_ptr().addr(), token);
        } else {
            state.deadlines.push_back((Instant::now() + PATIENCE, token));
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
            let (ours, theirs) = ((&raw mut ours).cast(), (&raw mut theirs).cast());
            (self.library.resolve_addr)(id.as_ptr(), ours, theirs, RESOLVE)
        };
        check(format!("looking for the way to {}", peer.socket), result).inspect_err(|_| self.destroy(id))?;
        Ok(id)
    }

    fn accept(&self, token: u64, connection: &mut Connection) -> Result<(), VerbsError> {
        let (Some(id), Some(peer)) = (connection.id, connection.peer) else { return Ok(()) };
        if connection.requester != peer.listener.token {
            let error = "another queue pair has connected to this one";
            return Err(VerbsError::Unreachable(error.into()));
        }
        let mut parameters = parameters(connection.pair.number, &peer);
        // SAFETY: the identifier is that of a request that was not answered yet, and the parameters are complete.
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
                    state.deadlines.push_back((now + PATIENCE, token));
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
                Err(VerbsError::Unreachable(match note.kind {
                    event::REJECTED => "the peer refused the connection".into(),
                    _ => error.to_string(),
                }))
            }
            event::DISCONNECTED => Err(VerbsError::Unreachable("the connection has ended".into())),
            event::DEVICE_REMOVAL => Err(VerbsError::Unusable("the device was removed".into())),
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
        // The caller of `start_connecting` holds the lock until `connecting` is set. So the identifier stays until
        // `connecting` is false again.
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
        // SAFETY: the identifier is resolved, and the parameters are complete; the call copies what they point to.
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
