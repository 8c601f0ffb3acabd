//! Addresses for programs that have to agree on one before any of them listens, and addresses that swallow packets.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{AddressFamily, SocketType};

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

/// An address whose packets vanish, as behind a firewall: a listener with a full backlog, for which the kernel drops each SYN.
pub struct BlackHole {
    /// The address.
    pub address: SocketAddr,
    _listener: TcpListener,
    _waiting: TcpStream,
}

impl BlackHole {
    /// Takes a port of 127.0.0.1.
    #[expect(clippy::new_without_default, reason = "it takes a port")]
    pub fn new() -> Self {
        Self::at(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap()
    }

    /// Takes `address`, which no listener may have yet.
    pub fn at(address: SocketAddr) -> io::Result<Self> {
        let family = if address.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
        let socket = rustix::net::socket(family, SocketType::STREAM, None)?;
        rustix::net::bind(&socket, &address)?;
        // The queue of such a listener has room for one connection.
        rustix::net::listen(&socket, 0)?;
        let listener = TcpListener::from(socket);
        let address = listener.local_addr()?;
        let waiting = TcpStream::connect(address)?;
        poll(&mut [PollFd::new(&listener, PollFlags::IN)], None)?;
        Ok(Self { address, _listener: listener, _waiting: waiting })
    }
}
