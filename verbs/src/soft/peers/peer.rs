//! The device of another process, or our own device for two queue pairs of one process: the socket to the
//! device, and the memory of the device that this process has mapped. All queue pairs that are connected to
//! the device share a `Peer`. The last of them drops it.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, Weak};
use std::time::Instant;

use super::asking::{Asking, FullAnswer};
use super::clients::ServedQueuePair;
use super::level::{Identity, Level, Policy};
use super::message::{self, Address, Answer, DeviceId, EndAnswer, Object, Request};
use super::received::Socket;
use super::segments::{Offer, Offers};
use super::service::Service;
use super::sockets::Sockets;
use crate::host_memory::MemoryUser;
use crate::panics::lock;
use crate::soft::shared::end::{EndState, PairEnd, is_ring};
use crate::soft::shared::table::RegionTable;
use crate::soft::{closer, system};
use crate::{HostMemory, VerbsError};

/// The device of another process.
#[derive(Debug)]
pub(crate) struct Peer {
    /// The peer's process number, as the kernel states it.
    pub(crate) process: i32,
    level: Level,
    /// Whether the peer runs as our user.
    same_user: bool,
    dead: AtomicBool,
    /// Taken when this value is dropped.
    socket: Option<Socket>,
    asking: Asking,
    table: Mutex<HashMap<u64, Weak<RegionTable>>>,
    event_sockets: Mutex<HashMap<u64, Weak<Socket>>>,
    /// The segments that this process offers to the peer.
    pub(crate) offers: Offers,
    service: Weak<Service>,
    /// Queue pairs that move to Error when the peer dies.
    users: Mutex<HashMap<u32, Weak<dyn ServedQueuePair>>>,
}

impl Peer {
    /// Connects to `device` until `deadline`. Fails if the device can't be found, or if `policy` does not let
    /// it in.
    pub(crate) fn connect(
        device: DeviceId,
        reach: (&Sockets, Policy),
        service: &Arc<Service>,
        deadline: Instant,
    ) -> Result<Self, VerbsError> {
        let (socket, Identity { process, level, same_user, .. }) = dial(device, reach, deadline)?;
        socket.take_descriptors();
        Ok(Self {
            process,
            level,
            same_user,
            dead: AtomicBool::new(false),
            socket: Some(socket),
            asking: Asking::default(),
            table: Mutex::default(),
            event_sockets: Mutex::default(),
            offers: Offers::default(),
            service: Arc::downgrade(service),
            users: Mutex::default(),
        })
    }

    /// Returns the socket. A hang-up of the socket means that the peer died.
    pub(crate) fn socket(&self) -> &Socket {
        // Only `drop` takes the socket.
        self.socket.as_ref().unwrap_or_else(|| unreachable!())
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.dead.load(SeqCst)
    }

    /// Notes that the peer died, and moves its queue pairs to Error.
    pub(crate) fn mark_dead(&self) {
        self.dead.store(true, SeqCst);
        self.offers.peer_died();
        let users: Vec<_> = lock(&self.users).values().filter_map(Weak::upgrade).collect();
        for user in users {
            user.fail();
        }
    }

    pub(crate) fn add_user(&self, user: Arc<dyn ServedQueuePair>) {
        lock(&self.users).insert(user.number(), Arc::downgrade(&user));
        if self.is_dead() {
            user.fail();
        }
    }

    pub(crate) fn remove_user(&self, number: u32) {
        lock(&self.users).remove(&number);
    }

    /// Returns whether this process lets the peer map its memory for reading.
    pub(crate) fn shares_memory(&self) -> bool {
        self.level == Level::User
    }

    /// Takes over the end of the queue pair at `address`, for our queue pair with the token `requester`.
    pub(crate) fn import_end(
        &self,
        address: &Address,
        requester: u64,
        deadline: Instant,
    ) -> Result<(PairEnd, EndAnswer), VerbsError> {
        let action = "connecting to the peer's queue pair";
        match self.ask(address, Object::End { requester }, action, deadline)? {
            (Answer::End(end), Some(fd)) if is_ring(end.ring) => {
                let mapped = PairEnd::import(&fd, end.ring).map_err(|error| VerbsError::os(action, error))?;
                fd.close_mapped();
                Ok((mapped, end))
            }
            _ => Err(VerbsError::unreachable("the peer's device gave no queue pair of that number")),
        }
    }

    pub(crate) fn table(&self, address: &Address, deadline: Instant) -> Result<Arc<RegionTable>, VerbsError> {
        let action = "mapping the peer's region table";
        cached(&self.table, 0, || {
            let (_, fd) = self.ask(address, Object::Table, action, deadline)?;
            let fd = fd.ok_or_else(missing)?;
            let table = RegionTable::import(&fd).map_err(|error| VerbsError::os(action, error))?;
            fd.close_mapped();
            Ok(table)
        })
    }

    /// Returns the socket that wakes the poller of the peer's completion queue `id`. It is a connection of
    /// its own, so that neither end has a descriptor of the other's socket.
    pub(crate) fn event_socket(
        &self,
        address: &Address,
        id: u64,
        reach: (&Sockets, Policy),
        deadline: Instant,
    ) -> Result<Arc<Socket>, VerbsError> {
        let action = "connecting to the peer's completion queue";
        cached(&self.event_sockets, id, || {
            let (socket, _) = dial(address.device, reach, deadline)?;
            let object = Object::EventSocket(id);
            let request = Request { sequence: 0, number: address.number, token: address.token, object };
            let answer = Asking::default().ask(&socket, request, deadline);
            match answer.map_err(|error| self.failure(action, error))? {
                (Answer::Object, None) => Ok(socket),
                _ => Err(missing()),
            }
        })
    }

    /// Asks the peer's device to carry out the records for the queue pair at `address`. Does not wait.
    /// Returns false if the socket is full.
    pub(crate) fn poke(&self, address: &Address) -> bool {
        let sent = self.send(address, Object::Nothing, None);
        !sent.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
    }

    /// Returns the offer of `memory`, and sends the offer if it is due; `None` if the memory can't be offered
    /// now. Does not wait.
    pub(crate) fn offer(self: &Arc<Self>, address: &Address, memory: &HostMemory) -> Option<Arc<Offer>> {
        let fd = memory.shared_fd()?;
        let (offer, new) = self.offers.get(memory.id(), || memory.charge())?;
        if new {
            let user: Weak<dyn MemoryUser> = Arc::downgrade(self) as Weak<dyn MemoryUser>;
            memory.add_user(user);
        }
        if offer.is_due() {
            let object = Object::Offer { id: memory.id(), length: memory.len() as u64 };
            // If the socket is full, the offer is sent again later.
            let _ = self.send(address, object, Some(fd));
        }
        Some(offer)
    }

    /// Takes news of the peer about the segments that this process has offered.
    pub(crate) fn take_news(&self, news: Object) {
        match news {
            Object::Mapped { id } => self.offers.mapped(id),
            Object::Unmapped { id } => self.offers.unmapped(id),
            _ => {}
        }
    }

    /// Tells the peer once more of segments that are withdrawn, and that it has not confirmed to have
    /// unmapped. Returns when it is to be notified next. Does not wait.
    pub(crate) fn remind(&self, now: Instant) -> Option<Instant> {
        for id in self.offers.reminders(now) {
            self.send_by_any(Object::Withdraw { id });
        }
        self.offers.next_reminder()
    }

    /// Sends a request without a reply by any connection to the peer, because the first one may be gone. The
    /// request is lost if the socket is full, or if no queue pair of the peer can take it now.
    pub(crate) fn send_by_any(&self, object: Object) {
        let users: Vec<_> = lock(&self.users).values().filter_map(Weak::upgrade).collect();
        let addresses = users.iter().filter_map(|user| user.peer_address());
        // A queue pair that is not connected to this process yet, or is gone, sends no confirmation.
        let best = addresses.max_by_key(|(_, state)| *state == EndState::Ready);
        if let Some((address, _)) = best {
            let _ = self.send(&address, object, None);
        }
    }

    /// Sends a request without a reply. Does not wait.
    pub(crate) fn send(
        &self,
        address: &Address,
        object: Object,
        fd: Option<BorrowedFd<'_>>,
    ) -> io::Result<()> {
        let request = Request { sequence: 0, number: address.number, token: address.token, object };
        message::send_request(self.socket(), &request, fd)
    }

    /// Sends one request and waits for its answer until `deadline`. Other threads may ask at the same time.
    fn ask(
        &self,
        address: &Address,
        object: Object,
        action: &'static str,
        deadline: Instant,
    ) -> Result<FullAnswer, VerbsError> {
        let request = Request { sequence: 0, number: address.number, token: address.token, object };
        self.asking.ask(self.socket(), request, deadline).map_err(|error| self.failure(action, error))
    }

    /// Returns the error for a request that failed.
    fn failure(&self, action: &'static str, error: io::Error) -> VerbsError {
        match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => {
                if self.same_user {
                    VerbsError::unreachable("the peer's process has ended")
                } else {
                    VerbsError::not_admitted(
                        "the peer's process runs as another user, and does not let this one in, or has ended: set \
                         RDMA_SOFT_PEERS=any at both ends",
                    )
                }
            }
            _ => VerbsError::os(action, error),
        }
    }
}

impl MemoryUser for Peer {
    fn memory_is_gone(&self, id: u64) {
        if !self.offers.withdraw(id) {
            return;
        }
        if self.is_dead() {
            self.offers.unmapped(id);
            return;
        }
        self.send_by_any(Object::Withdraw { id });
        if let Some(service) = self.service.upgrade() {
            service.remind_later();
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let Some(socket) = self.socket.take() else { return };
        let charges = self.offers.charges();
        if let Some(service) = self.service.upgrade()
            && !charges.is_empty()
            && !self.is_dead()
        {
            // The request is about all segments, so it names no queue pair.
            let request = Request { sequence: message::LEAVE, number: 0, token: 0, object: Object::Leave };
            if message::send_request(&socket, &request, None).is_err() {
                // The socket is full. The peer finds its end, and closes its own.
                let _ = rustix::net::shutdown(&socket, rustix::net::Shutdown::Write);
            }
            service.keep_until_unmapped(socket, charges, self.asking.late_answers());
        }
    }
}

/// Returns the entry `id`, or makes the entry. The map is not locked while `make` runs. If two threads make
/// one entry, the second thread drops its result and returns that of the first.
fn cached<T>(
    map: &Mutex<HashMap<u64, Weak<T>>>,
    id: u64,
    make: impl FnOnce() -> Result<T, VerbsError>,
) -> Result<Arc<T>, VerbsError> {
    if let Some(found) = lock(map).get(&id).and_then(Weak::upgrade) {
        return Ok(found);
    }
    let made = Arc::new(make()?);
    let mut map = lock(map);
    if let Some(found) = map.get(&id).and_then(Weak::upgrade) {
        return Ok(found);
    }
    map.retain(|_, entry| entry.strong_count() > 0);
    map.insert(id, Arc::downgrade(&made));
    Ok(made)
}

fn missing() -> VerbsError {
    VerbsError::unreachable("the peer's device refused to share its memory")
}

/// Connects to `device` until `deadline`. Returns the socket, and the process at its other side.
fn dial(
    device: DeviceId,
    (sockets, policy): (&Sockets, Policy),
    deadline: Instant,
) -> Result<(Socket, Identity), VerbsError> {
    let waits = || VerbsError::unreachable("too many descriptors of peers are not closed yet");
    if closer::is_full() {
        return Err(waits());
    }
    let socket = sockets.connect(device, policy, deadline)?;
    let identity = check_owner(&socket, policy)?;
    if system::source(&socket).is_ok_and(closer::refuses) {
        return Err(waits());
    }
    Ok((socket, identity))
}

/// Returns the process at the other side of the socket. Fails if `policy` does not let it in.
pub(crate) fn check_owner(fd: &impl AsFd, policy: Policy) -> Result<Identity, VerbsError> {
    let identity = Identity::of(fd, policy.trusts_user())
        .map_err(|error| VerbsError::os("asking for the peer's process", error))?;
    policy.admit(&identity)?;
    tracing::debug!(process = identity.process, level = ?identity.level, "the soft device has a peer");
    Ok(identity)
}
