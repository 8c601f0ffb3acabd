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

/// The farewells of this process: the port, and whether a listener wants it.
static OPEN: Mutex<Vec<(u16, Arc<AtomicBool>)>> = Mutex::new(Vec::new());
static OVER: Condvar = Condvar::new();

/// A port at which this process still answers, although the session has ended. When this is dropped, nothing listens there any more.
#[derive(Debug)]
pub(super) struct Farewell(Arc<AtomicBool>);

impl Farewell {
    /// Begins a farewell.
    pub(super) fn begin(port: u16) -> Self {
        let hurries = Arc::default();
        lock(&OPEN).push((port, Arc::clone(&hurries)));
        Self(hurries)
    }

    /// Returns whether a listener wants the port.
    pub(super) fn hurries(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl Drop for Farewell {
    fn drop(&mut self) {
        lock(&OPEN).retain(|(_, hurries)| !Arc::ptr_eq(hurries, &self.0));
        OVER.notify_all();
    }
}

/// Ends the farewells of this process at the port of `address`, `host:port`.
pub(super) fn make_room(address: &str) {
    let port = address.rsplit_once(':').and_then(|(_, port)| port.parse::<u16>().ok());
    let is_there = |open: &&(u16, Arc<AtomicBool>)| Some(open.0) == port;
    let open = lock(&OPEN);
    open.iter().filter(is_there).for_each(|(_, hurries)| hurries.store(true, Ordering::Relaxed));
    // If the farewell does not end in time, the listener finds the port in use, and says so.
    drop(OVER.wait_timeout_while(open, END, |open| open.iter().any(|open| is_there(&open))));
}
