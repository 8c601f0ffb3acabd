//! The device: one for each process, with the thread that answers peers.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, epoll};

use super::super::{CompletionQueue, Context, DeviceAttributes, ProtectionDomain, VerbsError};
use super::address::Address;
use super::completion::SoftCompletionQueue;
use super::domain::SoftDomain;
use super::lock;
use super::peer::Peer;
use super::queue_pair::SoftQueuePair;
use super::service;
use super::shared::random;

/// What the software device can do. Its limits are generous: it is memory that is used, not a card's.
pub fn attributes() -> DeviceAttributes {
    DeviceAttributes {
        max_message_size: 1 << 30,
        max_work_requests: 1 << 14,
        max_segments: 32,
        max_inline: 256 * 1024,
        max_outstanding_reads: 128,
        max_completions: 1 << 22,
        max_memory_regions: super::layout::table::REGIONS as u32,
        immediate: true,
        locks_memory: false,
        ..DeviceAttributes::new("soft", "soft0")
    }
}

/// The device of this process. Everything made from it holds a reference.
#[derive(Debug)]
pub(super) struct Device {
    attributes: DeviceAttributes,
    directory: Arc<Directory>,
    next: AtomicU64,
    thread: Option<JoinHandle<()>>,
}

/// What the service thread works with, too.
#[derive(Debug)]
pub(super) struct Directory {
    /// Random part of the socket's name.
    pub(super) nonce: u64,
    pub(super) listener: OwnedFd,
    pub(super) epoll: OwnedFd,
    /// Readable when the service thread has to look up.
    pub(super) bell: OwnedFd,
    pub(super) stop: std::sync::atomic::AtomicBool,
    pub(super) queue_pairs: Mutex<HashMap<u32, Weak<SoftQueuePair>>>,
    pub(super) peers: Mutex<Peers>,
    /// Queue pairs whose sends wait for a receive of the peer's, and won't wait for ever.
    pub(super) waiting: Mutex<Vec<Weak<SoftQueuePair>>>,
    next_queue_pair: AtomicU32,
}

/// Links that this device made, by number and by peer.
#[derive(Debug, Default)]
pub(super) struct Peers {
    pub(super) links: HashMap<u64, Weak<Peer>>,
    pub(super) by_device: HashMap<(u32, u64), Weak<Peer>>,
    pub(super) next: u64,
}

impl Device {
    pub(super) fn open() -> Result<Arc<Self>, VerbsError> {
        let failed = |error: rustix::io::Errno| VerbsError::os("opening the software device", error);
        let nonce = random();
        let listener = service::listen(&Address::socket_name(std::process::id(), nonce)).map_err(failed)?;
        let directory = Arc::new(Directory {
            nonce,
            listener,
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?,
            bell: rustix::event::eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)
                .map_err(failed)?,
            stop: false.into(),
            queue_pairs: Mutex::default(),
            peers: Mutex::new(Peers { next: service::FIRST_LINK, ..Peers::default() }),
            waiting: Mutex::default(),
            next_queue_pair: AtomicU32::new(random() as u32 & 0xff_ffff),
        });
        let thread = service::start(Arc::clone(&directory)).map_err(|source| VerbsError::Os {
            action: "starting the software device's thread".into(),
            source,
        })?;
        let (attributes, next) = (attributes(), AtomicU64::new(1));
        Ok(Arc::new(Self { attributes, directory, next, thread: Some(thread) }))
    }

    pub(super) fn attributes(&self) -> &DeviceAttributes {
        &self.attributes
    }

    pub(super) fn directory(&self) -> &Arc<Directory> {
        &self.directory
    }

    /// A number that this device has not given out before.
    pub(super) fn next_id(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }
}

impl Directory {
    /// A queue pair number that is free, of 24 bits as the specification has them.
    pub(super) fn number(&self) -> u32 {
        let queue_pairs = lock(&self.queue_pairs);
        loop {
            let number = self.next_queue_pair.fetch_add(1, Ordering::Relaxed) & 0xff_ffff;
            if number > 1 && !queue_pairs.contains_key(&number) {
                return number;
            }
        }
    }

    /// Has the service thread look up.
    pub(super) fn ring(&self) {
        let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.directory.stop.store(true, Ordering::SeqCst);
        self.directory.ring();
        // The service thread may be the one that held the last reference.
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

/// An opened device, as users hold it.
#[derive(Debug)]
pub(super) struct SoftContext(pub(super) Arc<Device>);

impl Context for SoftContext {
    fn attributes(&self) -> &DeviceAttributes {
        self.0.attributes()
    }

    fn alloc_protection_domain(&self) -> Result<Arc<dyn ProtectionDomain>, VerbsError> {
        Ok(SoftDomain::new(Arc::clone(&self.0))?)
    }

    fn create_completion_queue(&self, capacity: u32) -> Result<Arc<dyn CompletionQueue>, VerbsError> {
        Ok(SoftCompletionQueue::new(Arc::clone(&self.0), capacity)?)
    }
}
