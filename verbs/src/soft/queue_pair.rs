//! Queue pairs: their states, how they connect, fail and go. Their queues are in [`send`](super::send) and
//! [`receive`](super::receive).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering::SeqCst, fence};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Instant;

use super::address::Address;
use super::bell::Bell;
use super::completion_queue::{Queue, Role, Sink};
use super::device::Device;
use super::domain::{Domain, QUIESCENCE};
use super::link::{Link, LinkState, Shape};
use super::message::{Answer, BellName, LinkAnswer, Object};
use super::peer::Peer;
use super::receive::ReceiveQueue;
use super::send::SendQueue;
use super::table::RegionTable;
use super::{lock, system};
use crate::{
    Access, PathSettings, PostError, Probe, QueuePair, QueuePairAddress, QueuePairCapacity, QueuePairNumber,
    QueuePairState, ReceiveRequest, SendRequest, VerbsError,
};

/// A queue pair.
#[derive(Debug)]
pub(super) struct Inner {
    me: Weak<Inner>,
    pub(super) domain: Arc<Domain>,
    number: u32,
    token: u64,
    nonce: u64,
    pub(super) capacity: QueuePairCapacity,
    pub(super) send_queue: Arc<Queue>,
    pub(super) send_slot: u32,
    receive_queue: Arc<Queue>,
    receive_slot: u32,
    pub(super) link: Link,
    grant: Mutex<Grant>,
    state: AtomicU8,
    access: OnceLock<Access>,
    settings: OnceLock<PathSettings>,
    connection: OnceLock<Connection>,
    pub(super) sends: Mutex<SendQueue>,
    /// Number of the section that a send is in, if it is odd; written with `sends` locked.
    pub(super) section: AtomicU64,
    /// Requests that wait in `sends`, for a visitor that need not lock it if there are none.
    pub(super) waiting: AtomicUsize,
    /// Places of the send queue that polled completions have freed.
    pub(super) freed: AtomicU64,
    pub(super) receives: Mutex<ReceiveQueue>,
}

/// The peer's side of a connected queue pair.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) peer: Arc<Peer>,
    pub(super) address: Address,
    pub(super) link: Link,
    pub(super) table: Arc<RegionTable>,
    pub(super) domain: u64,
    pub(super) access: Access,
    send_bell: Arc<Bell>,
    send_slot: u32,
    receive_bell: Arc<Bell>,
    receive_slot: u32,
}

/// The link's descriptor until the peer took it, and who may take it.
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

/// Makes a queue pair in Reset.
pub(super) fn create(
    domain: &Arc<Domain>,
    send_queue: Arc<Queue>,
    receive_queue: Arc<Queue>,
    capacity: &QueuePairCapacity,
) -> Result<Arc<dyn QueuePair>, VerbsError> {
    check_capacity(domain.device(), capacity)?;
    let os = |error| VerbsError::os("creating a queue pair", error);
    let (token, nonce) = (system::random().map_err(os)?, system::random().map_err(os)?);
    let shape = Shape { receives: capacity.receive_requests, segments: capacity.receive_segments };
    let (link, fd) = Link::create(shape, nonce).map_err(os)?;
    let same = Arc::ptr_eq(&send_queue, &receive_queue);
    let send_slot = send_queue.reserve()?;
    let receive_slot = if same {
        send_slot
    } else {
        receive_queue.reserve().inspect_err(|_| send_queue.vacate(send_slot))?
    };
    let inner = Arc::new_cyclic(|me| Inner {
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
        sends: Mutex::default(),
        section: AtomicU64::new(0),
        waiting: AtomicUsize::new(0),
        freed: AtomicU64::new(0),
        receives: Mutex::new(ReceiveQueue::new(capacity.receive_requests)),
    });
    inner.send_queue.occupy(send_slot, &inner, Role { sends: true, receives: same });
    if !same {
        inner.receive_queue.occupy(receive_slot, &inner, Role { sends: false, receives: true });
    }
    domain.add_queue_pair(&inner);
    domain.device().service().add_queue_pair(&inner);
    Ok(Arc::new(Handle(inner)))
}

fn check_capacity(device: &Device, capacity: &QueuePairCapacity) -> Result<(), VerbsError> {
    let limits = device.attributes();
    let checks = [
        ("send queue depth", capacity.send_requests, limits.max_work_requests),
        ("receive queue depth", capacity.receive_requests, limits.max_work_requests),
        ("segments of a send", capacity.send_segments, limits.max_segments),
        ("segments of a receive", capacity.receive_segments, limits.max_segments),
        ("inline bytes", capacity.inline, limits.max_inline),
    ];
    match checks.into_iter().find(|(_, asked, limit)| asked > limit) {
        Some((what, asked, limit)) => {
            Err(VerbsError::Limit { what, asked: asked.into(), limit: limit.into() })
        }
        None => Ok(()),
    }
}

impl Inner {
    pub(super) fn number(&self) -> u32 {
        self.number
    }

    pub(super) fn token(&self) -> u64 {
        self.token
    }

    pub(super) fn connection(&self) -> Option<&Connection> {
        self.connection.get()
    }

    /// The settings given to [`QueuePair::to_rts`].
    pub(super) fn settings(&self) -> Option<&PathSettings> {
        self.settings.get()
    }

    pub(super) fn state(&self) -> QueuePairState {
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

    /// Whether the queue pair is in Error, or belongs there: the peer reported a fault of ours, or died.
    pub(super) fn is_ended(&self) -> bool {
        self.state.load(SeqCst) == ERROR
            || self.link.state() == LinkState::Ended
            || self.connection().is_some_and(|connection| connection.peer.is_dead())
    }

    /// Moves to Error. What is outstanding is flushed by whoever polls next; nothing here waits or locks.
    pub(super) fn fail(&self) {
        // SYNC: the state goes first, then the rings: whoever is rung sees it.
        self.link.advance(LinkState::Ended);
        if self.state.swap(ERROR, SeqCst) != ERROR {
            self.ring_own();
            self.ring_waiting_peer();
        }
    }

    /// Has whoever polls visit this queue pair.
    pub(super) fn ring_own(&self) {
        self.send_queue.bell().ring(self.send_slot);
        if !Arc::ptr_eq(&self.send_queue, &self.receive_queue) {
            self.receive_queue.bell().ring(self.receive_slot);
        }
    }

    /// Rings the peer's send queue if the peer waits for a receive of ours, or for our being ready.
    pub(super) fn ring_waiting_peer(&self) {
        if let Some(connection) = self.connection()
            && self.link.take_waiting()
        {
            connection.send_bell.ring(connection.send_slot);
        }
    }

    /// Has the service ring this queue pair at `when`.
    pub(super) fn ring_at(&self, when: Instant) {
        self.domain.device().service().ring_at(when, &self.me);
    }

    /// A poller comes by: carries out what can be, takes what has come. True if more is left than `sink` has room for.
    pub(super) fn visit(&self, role: Role, sink: &mut Sink<'_>) -> bool {
        if self.is_ended() {
            self.fail();
        }
        if role.sends && self.waiting.load(SeqCst) != 0 {
            self.run_waiting();
        }
        role.receives && self.take_receives(sink)
    }

    /// Waits until a send that may be under way has got to the end of its section.
    pub(super) fn wait_for_own_section(&self) {
        // SYNC: with `Link::enter`: after the key was taken back.
        fence(SeqCst);
        wait_while_odd(|| self.section.load(SeqCst), || false);
    }

    /// Waits until the peer has got to the end of the section that it may be in, or has died. False if that took too
    /// long: it may still be touching our memory.
    pub(super) fn wait_for_peer_section(&self, deadline: Instant) -> bool {
        self.connection().is_none_or(|connection| {
            let given_up = || connection.peer.is_dead() || Instant::now() >= deadline;
            wait_while_odd(|| connection.link.section(), given_up) || connection.peer.is_dead()
        })
    }

    /// Gives a peer what it asks for, if it is this queue pair's to give: `send` sends the answer and descriptors.
    pub(super) fn grant<T>(
        &self,
        object: Object,
        send: impl FnOnce(Answer, &[BorrowedFd<'_>]) -> T,
    ) -> Option<T> {
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
        self.import(address).inspect_err(|_| {
            // If nobody has taken the link yet, another peer may be tried.
            let mut grant = lock(&self.grant);
            if grant.fd.is_some() {
                grant.to = None;
            }
        })
    }

    fn import(&self, address: Address) -> Result<Connection, VerbsError> {
        let peer = self.domain.device().peer(address.device)?;
        let (link, answer) = peer.import_link(&address, self.token)?;
        Ok(Connection {
            table: peer.table(&address)?,
            send_bell: peer.bell(&address, answer.send.object)?,
            send_slot: answer.send.slot,
            receive_bell: peer.bell(&address, answer.receive.object)?,
            receive_slot: answer.receive.slot,
            domain: answer.domain,
            access: answer.access,
            peer,
            address,
            link,
        })
    }

    fn change(&self, call: &'static str, from: u8, to: u8) -> Result<(), VerbsError> {
        match self.state.compare_exchange(from, to, SeqCst, SeqCst) {
            Ok(_) => Ok(()),
            Err(_) => Err(VerbsError::State { call, state: self.state() }),
        }
    }

    /// The user let go of it.
    fn destroy(&self) {
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
            // Kept, so that regions it can still reach are not let go of.
            crate::throttled!(
                warn,
                queue_pair = self.number,
                "the peer stopped in the middle of an operation"
            );
        }
    }
}

impl Connection {
    /// Tells the peer that a receive of its is done.
    pub(super) fn ring_receiver(&self) {
        self.receive_bell.ring(self.receive_slot);
    }

    /// Moves the peer's queue pair to Error, for a fault that ends the connection at both ends.
    pub(super) fn fail_peer(&self) {
        self.link.advance(LinkState::Ended);
        self.receive_bell.ring(self.receive_slot);
        self.send_bell.ring(self.send_slot);
    }
}

/// Waits while `section` is odd and the same; false if `given_up` ended the wait.
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

/// What the user holds; dropping it destroys the queue pair.
#[derive(Debug)]
struct Handle(Arc<Inner>);

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.destroy();
    }
}

impl QueuePair for Handle {
    fn number(&self) -> QueuePairNumber {
        QueuePairNumber(self.0.number)
    }

    fn state(&self) -> QueuePairState {
        self.0.state()
    }

    fn capacity(&self) -> &QueuePairCapacity {
        &self.0.capacity
    }

    fn local_address(&self) -> QueuePairAddress {
        let device = self.0.domain.device().id();
        Address { device, number: self.0.number, token: self.0.token }.into()
    }

    fn to_init(&self, access: Access) -> Result<(), VerbsError> {
        self.0.change("to_init", RESET, INIT)?;
        self.0.access.get_or_init(|| access);
        Ok(())
    }

    fn to_rtr(&self, peer: &QueuePairAddress, settings: &PathSettings) -> Result<(), VerbsError> {
        let inner = &self.0;
        let state = inner.state();
        if state != QueuePairState::Init || inner.connection().is_some() {
            return Err(VerbsError::State { call: "to_rtr", state });
        }
        let connection = inner.connect(Address::decode(peer)?)?;
        if inner.connection.set(connection).is_err() {
            return Err(VerbsError::State { call: "to_rtr", state: inner.state() });
        }
        inner.link.set_rnr_timer(settings.min_rnr_timer);
        inner.change("to_rtr", INIT, RTR)?;
        inner.link.advance(LinkState::Ready);
        if let Some(connection) = inner.connection() {
            connection.peer.add_user(inner);
        }
        inner.ring_waiting_peer();
        Ok(())
    }

    fn to_rts(&self, settings: &PathSettings) -> Result<(), VerbsError> {
        self.0.settings.get_or_init(|| settings.clone());
        self.0.change("to_rts", RTR, RTS)
    }

    fn to_error(&self) {
        self.0.fail();
    }

    fn post_send(&self, requests: &[SendRequest<'_>]) -> Result<(), PostError> {
        self.0.post_send(requests)
    }

    fn post_receive(&self, requests: &[ReceiveRequest<'_>]) -> Result<(), PostError> {
        self.0.post_receive(requests)
    }

    fn probe(&self) -> Probe {
        Probe {
            ours: Some(self.0.nonce),
            peers: self.0.connection().map(|connection| connection.link.nonce()),
        }
    }

    fn places_in_order(&self) -> bool {
        true
    }
}
