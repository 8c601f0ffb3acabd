//! What the handles of a session and its connection share, and the endpoint's sender, as the state machine sees it.

use std::io::IoSlice;
use std::sync::{Arc, Mutex, Weak};
use std::task::Waker;

use bytes::Bytes;

use super::Session;
use crate::endpoint::{Aftermath, ConnectionFault, FetchError, MessageHandler, Piece, Sender};
use crate::grpc::core::{Core, FetchRefused, Wire};
use crate::grpc::fault::CallFault;
use tonic_rdma_verbs::RemoteSegment;
use tonic_rdma_verbs::internal::lock;
use tonic_rdma_verbs::memory::{Block, Lease};

/// The state of a session, which the connection's handler and the handles of streams share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) state: Mutex<State>,
    /// The session, for work that is carried out later.
    session: Weak<Session>,
}

/// The state behind the lock.
#[derive(Debug)]
pub(super) struct State {
    pub(super) core: Core<Kept>,
    /// The reason why the connection ended early.
    pub(super) fault: Option<ConnectionFault>,
    /// The connection has ended, or nothing is left to do on it.
    pub(super) is_over: bool,
    /// The session is among the work to carry out.
    pub(super) will_run: bool,
    /// A thread accepts calls until there are no more.
    pub(super) accepts: bool,
    /// A thread transmits until the state machine does not ask for more.
    pub(super) transmits_again: bool,
    /// Tasks that wait for the end.
    pub(super) closing: Vec<Waker>,
}

impl State {
    /// Moves tasks to wake, and what the state machine does not need any more, to `after`, because both have to go without a lock.
    fn move_to(&mut self, after: &mut Aftermath) {
        after.wakers.append(&mut self.core.wakers);
        after.unneeded.append(&mut self.core.unneeded);
        after.add_heads(&mut self.core.spent);
    }

    /// Ends all calls.
    fn end(&mut self, fault: &CallFault, after: &mut Aftermath) {
        self.core.end(fault);
        self.move_to(after);
        self.is_over = true;
        after.wakers.append(&mut self.closing);
    }
}

impl Shared {
    pub(super) fn new(core: Core<Kept>, session: Weak<Session>) -> Arc<Self> {
        let state = State {
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

    /// Adds the session to the work of `after`, if there is some: calls that were opened, bytes that are left to
    /// copy, or the end of the connection.
    fn run_later(&self, state: &mut State, after: &mut Aftermath) {
        let is_due =
            (state.core.has_accepted() && !state.accepts) || (state.core.is_drained() && !state.is_over);
        if (is_due || (state.core.wants_again() && !state.transmits_again))
            && !state.will_run
            && let Some(session) = self.session.upgrade()
        {
            state.will_run = true;
            after.runs.push(session);
        }
    }
}

impl MessageHandler for Shared {
    fn receive(&self, message: Bytes, after: &mut Aftermath) -> Result<bool, ConnectionFault> {
        let mut state = lock(&self.state);
        let received = state.core.receive(message);
        state.move_to(after);
        self.run_later(&mut state, after);
        received.map_err(ConnectionFault::of_calls)?;
        Ok(!state.core.is_idle())
    }

    fn landed(
        &self,
        fetch: u64,
        memory: Option<Bytes>,
        after: &mut Aftermath,
    ) -> Result<(), ConnectionFault> {
        let mut state = lock(&self.state);
        state.core.landed(fetch, memory);
        state.move_to(after);
        Ok(())
    }

    fn transmit(&self, sender: &mut Sender<'_>, after: &mut Aftermath) -> Result<(), ConnectionFault> {
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

    fn peer_finished(&self, after: &mut Aftermath) {
        lock(&self.state).end(&CallFault::PeerClosed, after);
        // This end closes too.
        if let Some(session) = self.session.upgrade() {
            after.runs.push(session);
        }
    }

    fn ended(&self, fault: &ConnectionFault, after: &mut Aftermath) {
        let mut state = lock(&self.state);
        state.fault.get_or_insert_with(|| fault.clone());
        state.end(&CallFault::Connection(fault.clone()), after);
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

    fn fetch(&mut self, id: u64, pieces: &[Piece<'_>], aligned_at: usize) -> Result<(), FetchRefused> {
        self.fetch(id, pieces, aligned_at).map_err(|error| match error {
            FetchError::NoMemory(_) => FetchRefused::Later,
            error @ FetchError::TooLong { .. } => FetchRefused::Never(error.to_string().into()),
        })
    }

    fn cancel_fetch(&mut self, id: u64) {
        self.cancel_fetch(id);
    }
}
