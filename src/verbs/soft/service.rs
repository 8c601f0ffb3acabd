//! The device's thread: answers peers that ask for descriptors, notices when they die, and ends waits that have a limit.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;

use rustix::event::{Timespec, epoll};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

use super::device::Directory;
use super::link::{self, Incoming, Request};
use super::lock;
use super::peer::Peer;
use super::queue_pair::SoftQueuePair;

const LISTENER: u64 = 0;
const BELL: u64 = 1;
/// Numbers from here on are links: even ones this device made, odd ones it accepted.
pub(super) const FIRST_LINK: u64 = 2;
/// Links accepted at most.
const LINKS: usize = 4096;

/// Listens on a name in the abstract namespace.
pub(super) fn listen(name: &[u8]) -> rustix::io::Result<OwnedFd> {
    let listener = socket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
    rustix::net::bind(&listener, &SocketAddrUnix::new_abstract_name(name)?)?;
    rustix::net::listen(&listener, 1024)?;
    Ok(listener)
}

pub(super) fn socket(flags: SocketFlags) -> rustix::io::Result<OwnedFd> {
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

/// Starts the thread; it ends when the directory's `stop` is set and its bell rung.
pub(super) fn start(directory: Arc<Directory>) -> io::Result<JoinHandle<()>> {
    let readable = epoll::EventFlags::IN;
    epoll::add(&directory.epoll, &directory.listener, epoll::EventData::new_u64(LISTENER), readable)?;
    epoll::add(&directory.epoll, &directory.bell, epoll::EventData::new_u64(BELL), readable)?;
    let service = Service { directory, accepted: HashMap::new(), next: FIRST_LINK + 1 };
    std::thread::Builder::new().name("rdma-soft0".into()).spawn(move || service.run())
}

struct Service {
    directory: Arc<Directory>,
    accepted: HashMap<u64, OwnedFd>,
    next: u64,
}

impl Service {
    /// How often waits with a limit are looked at.
    const TICK: Timespec = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };

    fn run(mut self) {
        let mut events = Vec::with_capacity(64);
        while !self.directory.stop.load(Ordering::SeqCst) {
            let timeout = self.tick().then_some(&Self::TICK);
            events.clear();
            match epoll::wait(&self.directory.epoll, rustix::buffer::spare_capacity(&mut events), timeout) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "the software device's thread ends; new connections will fail");
                    return;
                }
            }
            for event in &events {
                match event.data.u64() {
                    LISTENER => self.accept(),
                    BELL => drop(rustix::io::read(&self.directory.bell, &mut [0; 8])),
                    link if link % 2 == 0 => self.peer_died(link),
                    link => self.answer(link),
                }
            }
        }
    }

    /// Ends waits whose time is over; whether any go on.
    fn tick(&self) -> bool {
        let mut waiting = lock(&self.directory.waiting);
        if waiting.is_empty() {
            return false;
        }
        let all: Vec<Weak<SoftQueuePair>> = std::mem::take(&mut *waiting);
        drop(waiting);
        let still: Vec<_> =
            all.into_iter().filter(|pair| pair.upgrade().is_some_and(|pair| pair.still_waits())).collect();
        let mut waiting = lock(&self.directory.waiting);
        waiting.extend(still);
        !waiting.is_empty()
    }

    fn accept(&mut self) {
        while let Ok(link) =
            rustix::net::accept_with(&self.directory.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)
        {
            if let Err(reason) = self.admit(&link) {
                link::refuse(link.as_fd(), &reason);
                continue;
            }
            let number = self.next;
            let readable = epoll::EventFlags::IN | epoll::EventFlags::RDHUP;
            if epoll::add(&self.directory.epoll, &link, epoll::EventData::new_u64(number), readable).is_ok() {
                self.next += 2;
                self.accepted.insert(number, link);
            }
        }
    }

    /// Memory is shared with processes of the same user alone.
    fn admit(&self, link: &OwnedFd) -> Result<(), String> {
        let peer = sockopt::socket_peercred(link).map_err(|error| error.to_string())?;
        let ours = rustix::process::geteuid();
        if peer.uid != ours {
            return Err(format!(
                "it is of user {}, and this process of user {}",
                ours.as_raw(),
                peer.uid.as_raw()
            ));
        }
        if self.accepted.len() >= LINKS {
            return Err(format!("it has {LINKS} links already"));
        }
        Ok(())
    }

    fn answer(&mut self, number: u64) {
        let Some(link) = self.accepted.get(&number) else { return };
        let goes_on = match link::receive(link.as_fd()) {
            Incoming::Request(request) => self.fulfil(link.as_fd(), request),
            Incoming::Nonsense | Incoming::Ended => false,
        };
        if !goes_on {
            self.accepted.remove(&number);
        }
    }

    fn fulfil(&self, link: BorrowedFd<'_>, request: Request) -> bool {
        let queue_pair = lock(&self.directory.queue_pairs).get(&request.queue_pair).and_then(Weak::upgrade);
        // One answer for a number that is free and for a wrong token: guessing teaches nothing.
        let Some(queue_pair) = queue_pair.filter(|pair| pair.token() == request.token) else {
            return link::refuse(link, "no such queue pair");
        };
        queue_pair.export(link, request.segment)
    }

    fn peer_died(&self, link: u64) {
        let mut peers = lock(&self.directory.peers);
        let peer = peers.links.remove(&link);
        peers.by_device.retain(|_, other| other.strong_count() > 0);
        drop(peers);
        if let Some(peer) = peer.and_then(|peer: Weak<Peer>| peer.upgrade()) {
            // The descriptor stays open until the last queue pair lets go, and would be reported again and again.
            let _ = epoll::delete(&self.directory.epoll, peer.socket());
            peer.died();
        }
    }
}
