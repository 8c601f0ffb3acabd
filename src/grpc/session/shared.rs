//! What the handles of a session and its connection share.

use std::sync::{Arc, Mutex, Weak};
use std::task::Waker;

use bytes::Bytes;

use super::fault::CallFault;
use super::wire::{Kept, SenderWire};
use super::{OpenError, RequestHead, Session};
use crate::endpoint::{Aftermath, ConnectionFault, MessageHandler, Sender};
use crate::grpc::core::{Core, OpenRefused, StreamFault, StreamKey};
use tonic_rdma_verbs::internal::lock;

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
    /// Opens a stream.
    pub(super) fn open(&mut self, head: Arc<RequestHead>) -> Result<StreamKey, OpenError> {
        self.core.open(head).map_err(|refused| match refused {
            OpenRefused::GoingAway(reason) => OpenError::GoingAway(reason),
            OpenRefused::Ended(fault) => OpenError::Ended(self.explain(fault)),
        })
    }

    /// Returns a stream's fault with its reason.
    pub(super) fn explain(&self, fault: StreamFault) -> CallFault {
        match fault {
            StreamFault::Connection => match &self.fault {
                Some(fault) => CallFault::Connection(fault.clone()),
                None => CallFault::PeerClosed,
            },
            StreamFault::PeerClosed => CallFault::PeerClosed,
            StreamFault::GoneAway(reason) => CallFault::GoneAway(reason),
            StreamFault::Reset(code) => CallFault::Reset(code),
            StreamFault::ResetHere(code) => CallFault::ResetHere(code),
            StreamFault::HeadTooLarge { length, limit } => CallFault::HeadTooLarge { length, limit },
            StreamFault::MessageTooLarge { length, limit } => CallFault::MessageTooLarge { length, limit },
            StreamFault::NoMemory { length, reason } => CallFault::NoMemory { length, reason },
            StreamFault::Ended => CallFault::Ended,
        }
    }

    /// Moves what the state machine does not need any more to `after`, because it has to be dropped without a lock.
    fn move_unneeded(&mut self, after: &mut Aftermath) {
        after.unneeded.append(&mut self.core.unneeded);
        after.add_heads(&mut self.core.spent);
    }

    /// Ends all calls.
    fn end(&mut self, fault: &StreamFault, after: &mut Aftermath) {
        self.core.end(fault, &mut after.wakers);
        self.move_unneeded(after);
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
        let received = state.core.receive(message, &mut after.wakers);
        state.move_unneeded(after);
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
        lock(&self.state).core.landed(fetch, memory, &mut after.wakers);
        Ok(())
    }

    fn transmit(&self, sender: &mut Sender<'_>, after: &mut Aftermath) -> Result<(), ConnectionFault> {
        let mut state = lock(&self.state);
        let transmitted = state.core.transmit(&mut SenderWire(sender), &mut after.wakers);
        state.move_unneeded(after);
        transmitted?;
        if state.core.has_waiting() && sender.room() == 0 {
            sender.note_stall();
        }
        self.run_later(&mut state, after);
        Ok(())
    }

    fn peer_finished(&self, after: &mut Aftermath) {
        lock(&self.state).end(&StreamFault::PeerClosed, after);
        // This end closes too.
        if let Some(session) = self.session.upgrade() {
            after.runs.push(session);
        }
    }

    fn ended(&self, fault: &ConnectionFault, after: &mut Aftermath) {
        let mut state = lock(&self.state);
        state.fault.get_or_insert_with(|| fault.clone());
        state.end(&StreamFault::Connection, after);
    }
}
