//! The common part of a queue pair's two queues: the state, the link and the peer.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::SeqCst, fence};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Instant;

use super::connection::Connection;
use crate::random::random;
use crate::soft::completion_queue::{CompletionSource, Queue, Role};
use crate::soft::domain::{Domain, QUIESCENCE};
use crate::soft::peers::address::Address;
use crate::soft::peers::local::{LocalQueuePair, SendAnswer};
use crate::soft::peers::message::{Answer, BellName, LinkAnswer, Object};
use crate::soft::shared::link::{Link, LinkState, Shape};
use crate::sync::lock;
use crate::{Access, PathSettings, QueuePairAddress, QueuePairCapacity, QueuePairState, VerbsError};

/// A queue pair without its two queues.
#[derive(Debug)]
pub(crate) struct Core {
    me: Weak<Core>,
    pub(crate) domain: Arc<Domain>,
    number: u32,
    token: u64,
    nonce: u64,
    pub(crate) capacity: QueuePairCapacity,
    pub(crate) send_queue: Arc<Queue>,
    pub(crate) send_slot: u32,
    receive_queue: Arc<Queue>,
    receive_slot: u32,
    pub(crate) link: Link,
    grant: Mutex<Grant>,
    state: AtomicU8,
    access: OnceLock<Access>,
    settings: OnceLock<PathSettings>,
    connection: OnceLock<Connection>,
    /// Number of the current section if it is odd; no send is in a section if it is even. Written with the send queue locked.
    pub(crate) section: AtomicU64,
}

/// The link's descriptor, until the peer has taken it, and the token of the one queue pair that may take the descriptor.
#[derive(Debug)]
struct Grant {
    fd: Option<OwnedFd>,
    to: Option<u64>,
}

const RESET: u8 = 0;
const INIT: u8 = 1;
const RTR: u8 = 2;
const RTS: u8 = 3;
const ERROR: u8 = 4;

impl Core {
    /// Creates a queue pair in Reset. Reserves its slots in the completion queues, but does not occupy them.
    pub(super) fn create(
        domain: &Arc<Domain>,
        send_queue: Arc<Queue>,
        receive_queue: Arc<Queue>,
        capacity: &QueuePairCapacity,
    ) -> Result<Arc<Self>, VerbsError> {
        let os = |error| VerbsError::os("creating a queue pair", error);
        let (token, nonce) = (random().map_err(os)?, random().map_err(os)?);
        let shape = Shape { receives: capacity.receive_requests, segments: capacity.receive_segments };
        let (link, fd) = Link::create(shape, nonce).map_err(os)?;
        let send_slot = send_queue.reserve()?;
        let receive_slot = if Arc::ptr_eq(&send_queue, &receive_queue) {
            send_slot
        } else {
            receive_queue.reserve().inspect_err(|_| send_queue.vacate(send_slot))?
        };
        Ok(Arc::new_cyclic(|me| Self {
            me: me.clone(),
            domain: Arc::clone(domain),
            number: domain.device().queue_pair_number(),
            token,
            nonce,
            capacity: capacity.clone(),
            send_queue,
            send_slot,
            receive_queue,
            receive_slot,
            link,
            grant: Mutex::new(Grant { fd: Some(fd), to: None }),
            state: AtomicU8::new(RESET),
            access: OnceLock::new(),
            settings: OnceLock::new(),
            connection: OnceLock::new(),
            section: AtomicU64::new(0),
        }))
    }

    /// Takes the reserved slots of the completion queues. Polls visit `source` from now on, and peers can find the queue pair.
    pub(super) fn enter(self: &Arc<Self>, source: &Arc<dyn CompletionSource>) {
        let same = Arc::ptr_eq(&self.send_queue, &self.receive_queue);
        let role = Role { sends: true, receives: same };
        self.send_queue.occupy(self.send_slot, Arc::clone(source), role);
        if !same {
            let role = Role { sends: false, receives: true };
            self.receive_queue.occupy(self.receive_slot, Arc::clone(source), role);
        }
        self.domain.add_queue_pair(self);
        self.domain.device().service().add_queue_pair(Arc::clone(self) as Arc<dyn LocalQueuePair>);
    }

    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    pub(crate) fn connection(&self) -> Option<&Connection> {
        self.connection.get()
    }

    /// Returns the settings given to [`to_rts`](Self::to_rts).
    pub(crate) fn settings(&self) -> Option<&PathSettings> {
        self.settings.get()
    }

    pub(crate) fn state(&self) -> QueuePairState {
        if self.is_ended() {
            return QueuePairState::Error;
        }
        match self.state.load(SeqCst) {
            RESET => QueuePairState::Reset,
            INIT => QueuePairState::Init,
            RTR => QueuePairState::Rtr,
            RTS => QueuePairState::Rts,
            _ => QueuePairState::Error,
        }
    }

    /// Returns whether the queue pair is in Error, or must go to Error because the peer has reported a fault or died.
    pub(crate) fn is_ended(&self) -> bool {
        self.state.load(SeqCst) == ERROR
            || self.link.state() == LinkState::Ended
            || self.connection().is_some_and(|connection| connection.peer.is_dead())
    }

    /// Moves to Error. The next poll flushes the outstanding requests. This function neither waits nor locks.
    pub(crate) fn fail(&self) {
        // SYNC: stores the state before it rings, so that a thread that takes a ring sees the state.
        self.link.advance(LinkState::Ended);
        if self.state.swap(ERROR, SeqCst) != ERROR {
            self.ring_own();
            self.ring_waiting_peer();
        }
    }

    /// Rings our own completion queues, so that the next poll visits this queue pair.
    pub(crate) fn ring_own(&self) {
        self.send_queue.bell().ring(self.send_slot);
        if !Arc::ptr_eq(&self.send_queue, &self.receive_queue) {
            self.receive_queue.bell().ring(self.receive_slot);
        }
    }

    /// Rings the completion queue of the peer's sends, if the peer waits for a receive of ours or for the state Ready of
    /// our link.
    pub(crate) fn ring_waiting_peer(&self) {
        if let Some(connection) = self.connection()
            && self.link.take_waiting()
        {
            connection.ring_sender();
        }
    }

    /// Asks the service to ring this queue pair at `when`.
    pub(crate) fn ring_at(&self, when: Instant) {
        self.domain.device().service().ring_at(when, self.me.clone());
    }

    /// Waits until the section of our own send ends, if a send is under way.
    pub(crate) fn wait_for_own_section(&self) {
        // SYNC: pairs with `Link::enter`. The caller has invalidated the key before this call.
        fence(SeqCst);
        wait_while_odd(|| self.section.load(SeqCst), || false);
    }

    /// Waits until the peer's section ends or the peer dies. Returns false if neither happens before `deadline`. The peer may
    /// then still access our memory.
    pub(crate) fn wait_for_peer_section(&self, deadline: Instant) -> bool {
        self.connection().is_none_or(|connection| {
            let given_up = || connection.peer.is_dead() || Instant::now() >= deadline;
            wait_while_odd(|| connection.link.section(), given_up) || connection.peer.is_dead()
        })
    }

    /// Returns the attributes of this queue pair that its peer needs.
    fn describe(&self, access: Access) -> LinkAnswer {
        LinkAnswer {
            access,
            shape: Shape {
                receives: self.capacity.receive_requests,
                segments: self.capacity.receive_segments,
            },
            domain: self.domain.id(),
            send: BellName { object: self.send_queue.id(), slot: self.send_slot },
            receive: BellName { object: self.receive_queue.id(), slot: self.receive_slot },
        }
    }

    fn connect(&self, address: Address) -> Result<Connection, VerbsError> {
        let mut grant = lock(&self.grant);
        if grant.to.is_some_and(|to| to != address.token) {
            return Err(VerbsError::Unreachable("another queue pair has connected to this one".into()));
        }
        grant.to = Some(address.token);
        drop(grant);
        Connection::import(self.domain.device(), address, self.token).inspect_err(|_| {
            // While no peer has taken the link, this queue pair may try another peer.
            let mut grant = lock(&self.grant);
            if grant.fd.is_some() {
                grant.to = None;
            }
        })
    }

    /// Moves the state from Reset to Init. Peers get `access` at most.
    pub(super) fn to_init(&self, access: Access) -> Result<(), VerbsError> {
        self.change("to_init", RESET, INIT)?;
        self.access.get_or_init(|| access);
        Ok(())
    }

    /// Connects to the queue pair with the address `peer`, and moves the state from Init to Rtr.
    pub(super) fn to_rtr(&self, peer: &QueuePairAddress, settings: &PathSettings) -> Result<(), VerbsError> {
        let state = self.state();
        if state != QueuePairState::Init || self.connection().is_some() {
            return Err(VerbsError::State { call: "to_rtr", state });
        }
        let connection = self.connect(Address::decode(peer)?)?;
        if self.connection.set(connection).is_err() {
            return Err(VerbsError::State { call: "to_rtr", state: self.state() });
        }
        self.link.set_rnr_timer(settings.min_rnr_timer);
        self.change("to_rtr", INIT, RTR)?;
        self.link.advance(LinkState::Ready);
        if let (Some(connection), Some(me)) = (self.connection(), self.me.upgrade()) {
            connection.peer.add_user(me);
        }
        self.ring_waiting_peer();
        Ok(())
    }

    /// Moves the state from Rtr to Rts.
    pub(super) fn to_rts(&self, settings: &PathSettings) -> Result<(), VerbsError> {
        self.settings.get_or_init(|| settings.clone());
        self.change("to_rts", RTR, RTS)
    }

    /// Returns the address that peers connect to.
    pub(super) fn address(&self) -> Address {
        Address { device: self.domain.device().id(), number: self.number, token: self.token }
    }

    /// Returns the nonce that this queue pair wrote to its link.
    pub(super) fn nonce(&self) -> u64 {
        self.nonce
    }

    fn change(&self, call: &'static str, from: u8, to: u8) -> Result<(), VerbsError> {
        match self.state.compare_exchange(from, to, SeqCst, SeqCst) {
            Ok(_) => Ok(()),
            Err(_) => Err(VerbsError::State { call, state: self.state() }),
        }
    }

    /// Destroys the queue pair, because its user dropped it.
    pub(super) fn destroy(&self) {
        self.state.store(ERROR, SeqCst);
        self.link.advance(LinkState::Ended);
        self.ring_waiting_peer();
        let quiet = self.wait_for_peer_section(Instant::now() + QUIESCENCE);
        self.domain.device().service().remove_queue_pair(self.number);
        if let Some(connection) = self.connection() {
            connection.peer.remove_user(self.number);
        }
        self.send_queue.vacate(self.send_slot);
        if !Arc::ptr_eq(&self.send_queue, &self.receive_queue) {
            self.receive_queue.vacate(self.receive_slot);
        }
        if quiet {
            self.domain.remove_queue_pair(self.number);
        } else {
            // The domain keeps the queue pair, so that regions which the peer can still reach are never freed.
            crate::throttled!(
                warn,
                queue_pair = self.number,
                "the peer stopped in the middle of an operation"
            );
        }
    }
}

impl LocalQueuePair for Core {
    fn number(&self) -> u32 {
        self.number
    }

    fn token(&self) -> u64 {
        self.token
    }

    fn grant(&self, object: Object, send: &mut SendAnswer<'_>) -> Option<io::Result<()>> {
        let plain = Answer::Object { length: 0 };
        let device = self.domain.device();
        match object {
            Object::Link { requester } => {
                let access = *self.access.get()?;
                let mut grant = lock(&self.grant);
                if grant.to.is_some_and(|to| to != requester) {
                    return None;
                }
                let fd = grant.fd.take()?;
                grant.to = Some(requester);
                Some(send(Answer::Link(self.describe(access)), &[fd.as_fd()]))
            }
            Object::Table => Some(send(plain, &[device.table_fd().as_fd()])),
            Object::Bell(id) => {
                let queue =
                    [&self.send_queue, &self.receive_queue].into_iter().find(|queue| queue.id() == id)?;
                Some(send(plain, &[queue.page().as_fd(), queue.bell().event()]))
            }
            Object::Segment(id) => {
                self.domain.with_segment(id, |fd, length| send(Answer::Object { length }, &[fd]))
            }
        }
    }

    fn ring_own(&self) {
        Self::ring_own(self);
    }

    fn fail(&self) {
        Self::fail(self);
    }
}

/// Waits while `section` stays at one odd value. Returns false if `given_up` ended the wait.
fn wait_while_odd(section: impl Fn() -> u64, given_up: impl Fn() -> bool) -> bool {
    let first = section();
    let mut rounds = 0u32;
    while first % 2 == 1 && section() == first {
        if given_up() {
            return false;
        }
        rounds += 1;
        if rounds < 100 { std::hint::spin_loop() } else { std::thread::yield_now() }
    }
    true
}
