//! A queue pair, as completion queues, asynchronous events and the connection manager use it.

use std::ops::Deref;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use ibverbs_sys as sys;

use super::raw_pair::RawPair;
use super::sends::Sends;
use crate::QueuePairState;
use crate::ibverbs::device::event_target::EventTarget;
use crate::ibverbs::iwarp::manager::ConnectingPair;
use crate::sync::lock;

/// The device's queue pair, with its sends.
#[derive(Debug)]
pub(crate) struct Core {
    raw: RawPair,
    /// Builds the lists of sends, and holds sends until there is a connection.
    pub(crate) poster: Mutex<Sends>,
    /// On iWARP: whether the peer's hello has come.
    hello: AtomicBool,
}

impl Core {
    pub(crate) fn new(raw: RawPair, poster: Sends) -> Self {
        Self { raw, poster: Mutex::new(poster), hello: AtomicBool::new(false) }
    }

    /// Notes the peer's hello: the peer receives.
    pub(crate) fn hello_arrived(&self) {
        self.hello.store(true, SeqCst);
        self.open_gate();
    }
}

impl Deref for Core {
    type Target = RawPair;

    fn deref(&self) -> &RawPair {
        &self.raw
    }
}

impl EventTarget for Core {
    fn last_receive_reached(&self) {
        self.raw.last_receive_reached();
    }

    fn is_ending(&self) -> bool {
        self.raw.is_ending()
    }

    fn completes_on(&self, queue: *mut sys::ibv_cq) -> bool {
        self.raw.completes_on(queue)
    }

    fn fail(&self, reason: &dyn Fn() -> String) {
        self.raw.fail(reason);
    }
}

impl ConnectingPair for Core {
    fn number(&self) -> u32 {
        self.raw.number
    }

    fn state(&self) -> QueuePairState {
        self.raw.state()
    }

    fn fail(&self, reason: &dyn Fn() -> String) {
        self.raw.fail(reason);
    }

    fn has_hello(&self) -> bool {
        self.hello.load(SeqCst)
    }

    fn nudge(&self) {
        if let Err(error) = lock(&self.poster).nudge(&self.raw) {
            tracing::debug!(queue_pair = self.raw.number, %error, "nudging the peer");
        }
    }

    fn open_gate(&self) {
        if let Err(error) = lock(&self.poster).open(&self.raw) {
            self.raw.fail(|| format!("the device refused the first requests: {error}"));
        }
    }
}
