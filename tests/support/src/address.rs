//! Addresses for programs that have to agree on one before any of them listens.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering};

/// Ports below those that Linux gives to connections and to listeners of port 0. So no other socket takes one between the search and
/// its use.
const PORTS: std::ops::Range<u32> = 10_240..32_768;
/// Ports of one test process, before those of the next process begin.
const STEP: u32 = 64;

/// Returns an address of this host that no process listens at, and that no other call of this process returns.
pub fn free_address() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let count = PORTS.end - PORTS.start;
    let first = std::process::id().wrapping_mul(STEP) % count;
    for _ in 0..count {
        let port = PORTS.start + (first + NEXT.fetch_add(1, Ordering::Relaxed)) % count;
        if TcpListener::bind(("127.0.0.1", port as u16)).is_ok() {
            return format!("127.0.0.1:{port}");
        }
    }
    panic!("all ports from {} to {} are in use", PORTS.start, PORTS.end - 1);
}
