//! Another process's device, as seen from here: the link to it, and what of its memory is mapped.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use rustix::event::epoll;
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{SocketAddrUnix, SocketFlags};

use super::super::VerbsError;
use super::address::Address;
use super::completion::Ring;
use super::device::{Device, Directory};
use super::layout::{pair_page, queue_page, table};
use super::link::{self, Grant, Request};
use super::lock;
use super::queue_pair::SoftQueuePair;
use super::service;
use super::shared::{Imported, Words};

/// See the module's documentation. Shared by all queue pairs that are connected to it.
#[derive(Debug)]
pub(super) struct Peer {
    directory: Arc<Directory>,
    number: u64,
    /// Its process, in our process namespace.
    pid: i32,
    socket: OwnedFd,
    /// One request at a time.
    asking: Mutex<()>,
    dead: AtomicBool,
    segments: Mutex<HashMap<u64, Weak<Imported>>>,
    queues: Mutex<HashMap<u64, Weak<PeerQueue>>>,
    queue_pairs: Mutex<Vec<Weak<SoftQueuePair>>>,
}

/// A completion queue of the peer's.
#[derive(Debug)]
pub(super) struct PeerQueue {
    page: Words,
    event: OwnedFd,
}

impl PeerQueue {
    /// Tells the peer to look at its queue pair of bit `slot`.
    pub(super) fn mark(&self, slot: usize) {
        Ring { page: &self.page, event: self.event.as_fd() }.mark(slot);
    }
}

/// A queue pair of the peer's.
#[derive(Debug)]
pub(super) struct PeerPair {
    pub(super) peer: Arc<Peer>,
    pub(super) page: Words,
    pub(super) rings: pair_page::Rings,
    pub(super) table: Words,
    pub(super) address: Address,
    /// Where its receives complete, and its bit there.
    pub(super) receives: (Arc<PeerQueue>, usize),
    /// Where its sends complete, and its bit there.
    pub(super) sends: (Arc<PeerQueue>, usize),
}

impl Peer {
    /// Longest wait for an answer.
    const PATIENCE: Duration = Duration::from_millis(900);

    /// The device that `address` names; the link to it is made if there is none.
    pub(super) fn connect(device: &Device, address: &Address) -> Result<Arc<Self>, VerbsError> {
        let directory = device.directory();
        let key = (address.pid, address.device);
        if let Some(peer) = lock(&directory.peers).by_device.get(&key).and_then(Weak::upgrade)
            && !peer.is_dead()
        {
            return Ok(peer);
        }
        let socket = Self::dial(address)?;
        let failed = |error| VerbsError::os("watching the link to the peer's device", error);
        let credentials = sockopt::socket_peercred(&socket).map_err(failed)?;
        let mut peers = lock(&directory.peers);
        peers.next += 2;
        let number = peers.next;
        let peer = Arc::new(Self {
            directory: Arc::clone(directory),
            number,
            pid: credentials.pid.as_raw_nonzero().get(),
            socket,
            asking: Mutex::default(),
            dead: AtomicBool::new(false),
            segments: Mutex::default(),
            queues: Mutex::default(),
            queue_pairs: Mutex::default(),
        });
        peers.links.insert(number, Arc::downgrade(&peer));
        peers.by_device.insert(key, Arc::downgrade(&peer));
        drop(peers);
        // Nothing but the end of the link is of interest to the service thread; answers are for who asked.
        epoll::add(
            &directory.epoll,
            &peer.socket,
            epoll::EventData::new_u64(number),
            epoll::EventFlags::RDHUP,
        )
        .map_err(failed)?;
        Ok(peer)
    }

    fn dial(address: &Address) -> Result<OwnedFd, VerbsError> {
        let failed = |error: rustix::io::Errno| VerbsError::os("making a link to the peer's device", error);
        let socket = service::socket(SocketFlags::CLOEXEC).map_err(failed)?;
        for timeout in [Timeout::Recv, Timeout::Send] {
            sockopt::set_socket_timeout(&socket, timeout, Some(Self::PATIENCE)).map_err(failed)?;
        }
        let name = Address::socket_name(address.pid, address.device);
        let name = SocketAddrUnix::new_abstract_name(&name).map_err(failed)?;
        rustix::net::connect(&socket, &name).map_err(|error| {
            VerbsError::Unreachable(format!(
                "process {} has no software device in this network namespace ({error})",
                address.pid
            ))
        })?;
        Ok(socket)
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    pub(super) fn pid(&self) -> i32 {
        self.pid
    }

    pub(super) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    /// The link has ended.
    pub(super) fn died(&self) {
        self.dead.store(true, Ordering::SeqCst);
        for queue_pair in lock(&self.queue_pairs).drain(..).filter_map(|pair| pair.upgrade()) {
            queue_pair.peer_died();
        }
    }

    fn ask(&self, address: &Address, segment: u64) -> Result<Grant, VerbsError> {
        let _turn = lock(&self.asking);
        let request = Request { queue_pair: address.queue_pair, token: address.token, segment };
        link::ask(self.socket.as_fd(), request)
    }

    /// Maps a queue pair of the peer's.
    pub(super) fn import(self: &Arc<Self>, address: &Address) -> Result<PeerPair, VerbsError> {
        let odd = || VerbsError::Unreachable("its process answered something else than was asked".into());
        let grant = self.ask(address, 0)?;
        let [entries, segments, receive_queue, receive_slot, send_queue, send_slot] = grant.numbers[..]
        else {
            return Err(odd());
        };
        let rings = pair_page::Rings::checked(entries, segments).ok_or_else(odd)?;
        let slot = |slot: u64| usize::try_from(slot).ok().filter(|slot| *slot < queue_page::QUEUE_PAIRS);
        let (receive_slot, send_slot) = slot(receive_slot).zip(slot(send_slot)).ok_or_else(odd)?;
        let mut descriptors = grant.descriptors.into_iter();
        let mut next = || descriptors.next().ok_or_else(odd);
        let page = Words::import(&next()?, rings.words())?;
        let table = Words::import(&next()?, table::WORDS)?;
        let receives = self.queue(receive_queue, next()?, next()?)?;
        let sends = if send_queue == receive_queue {
            Arc::clone(&receives)
        } else {
            self.queue(send_queue, next()?, next()?)?
        };
        Ok(PeerPair {
            peer: Arc::clone(self),
            page,
            rings,
            table,
            address: *address,
            receives: (receives, receive_slot),
            sends: (sends, send_slot),
        })
    }

    fn queue(&self, id: u64, page: OwnedFd, event: OwnedFd) -> Result<Arc<PeerQueue>, VerbsError> {
        let mut queues = lock(&self.queues);
        if let Some(known) = queues.get(&id).and_then(Weak::upgrade) {
            return Ok(known);
        }
        // What is written there must never block: whatever kind of descriptor the peer passed.
        rustix::io::ioctl_fionbio(&event, true)
            .map_err(|error| VerbsError::os("looking at the peer's event descriptor", error))?;
        let queue = Arc::new(PeerQueue { page: Words::import(&page, queue_page::WORDS)?, event });
        queues.retain(|_, queue| queue.strong_count() > 0);
        queues.insert(id, Arc::downgrade(&queue));
        Ok(queue)
    }

    /// Maps a segment of the domain of the peer's queue pair.
    pub(super) fn segment(&self, address: &Address, number: u64) -> Result<Arc<Imported>, VerbsError> {
        let known = |segments: &HashMap<u64, Weak<Imported>>| segments.get(&number).and_then(Weak::upgrade);
        if let Some(known) = known(&lock(&self.segments)) {
            return Ok(known);
        }
        let grant = self.ask(address, number)?;
        let [descriptor] = &grant.descriptors[..] else {
            return Err(VerbsError::Unreachable(
                "its process did not pass the memory that was asked for".into(),
            ));
        };
        let imported = Arc::new(Imported::map(descriptor, 1)?);
        let mut segments = lock(&self.segments);
        segments.retain(|_, segment| segment.strong_count() > 0);
        segments.insert(number, Arc::downgrade(&imported));
        Ok(imported)
    }

    /// Has `queue_pair` told when the peer dies.
    pub(super) fn attach(&self, queue_pair: Weak<SoftQueuePair>) {
        let mut queue_pairs = lock(&self.queue_pairs);
        queue_pairs.retain(|other| other.strong_count() > 0);
        queue_pairs.push(queue_pair);
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let mut peers = lock(&self.directory.peers);
        peers.links.remove(&self.number);
        peers.by_device.retain(|_, peer| peer.strong_count() > 0);
    }
}
