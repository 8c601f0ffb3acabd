//! Ports of sessions that have ended, at which this process still tells the other parts how.
//!
//! A part that has failed answers for a few seconds more, so that parts that call late hear the reason. A program that wants to listen at
//! the same port again need not wait for that: its listener ends the farewell.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use tonic_rdma_verbs::internal::lock;

/// How long a listener waits for the end of a farewell. It takes some milliseconds.
const END: Duration = Duration::from_secs(2);

/// The farewells of this process.
static OPEN: Mutex<Vec<Arc<Open>>> = Mutex::new(Vec::new());

/// A port at which this process still answers, although the session has ended. When this is dropped, nothing listens there any more.
#[derive(Debug)]
pub(super) struct Farewell(Arc<Open>);

#[derive(Debug)]
struct Open {
    port: u16,
    /// Whether a listener wants the port.
    hurries: AtomicBool,
    is_over: Mutex<bool>,
    over: Condvar,
}

impl Farewell {
    /// Begins a farewell.
    pub(super) fn begin(port: u16) -> Self {
        let (hurries, is_over) = (AtomicBool::new(false), Mutex::new(false));
        let open = Arc::new(Open { port, hurries, is_over, over: Condvar::new() });
        lock(&OPEN).push(Arc::clone(&open));
        Self(open)
    }

    /// Returns whether a listener wants the port.
    pub(super) fn hurries(&self) -> bool {
        self.0.hurries.load(Ordering::Relaxed)
    }
}

impl Drop for Farewell {
    fn drop(&mut self) {
        lock(&OPEN).retain(|open| !Arc::ptr_eq(open, &self.0));
        *lock(&self.0.is_over) = true;
        self.0.over.notify_all();
    }
}

impl Open {
    fn hurry(&self) {
        self.hurries.store(true, Ordering::Relaxed);
        // If the farewell does not end in time, the listener finds the port in use, and says so.
        drop(self.over.wait_timeout_while(lock(&self.is_over), END, |is_over| !*is_over));
    }
}

/// Ends the farewells of this process at the port of `address`, `host:port`.
pub(super) fn make_room(address: &str) {
    let port = address.rsplit_once(':').and_then(|(_, port)| port.parse::<u16>().ok());
    let farewells: Vec<_> = lock(&OPEN).iter().filter(|open| Some(open.port) == port).cloned().collect();
    farewells.iter().for_each(|farewell| farewell.hurry());
}
