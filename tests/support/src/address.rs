//! Addresses for programs that have to agree on one before any of them listens, addresses that swallow
//! packets, and devices that do not answer.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

/// Ports below those that Linux gives to connections and to listeners of port 0. So no other socket takes one
/// between the search and its use.
const PORTS: std::ops::Range<u32> = 10_240..32_768;
/// Ports of one test process, before those of the next process begin.
const STEP: u32 = 64;

/// Returns an address of this host that no process listens at, and that no other call of this process
/// returns.
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

/// An address whose packets vanish, as behind a firewall: a listener with a full backlog, for which the
/// kernel drops each SYN.
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

/// A software device that connects no queue pair: only its socket listens.
pub struct SilentDevice {
    nonce: u64,
    _sockets: Vec<OwnedFd>,
}

/// What a [`SilentDevice`] does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Silence {
    /// It takes no connection.
    Full,
    /// It takes connections, and answers nothing.
    Accepts,
    /// It says that each queue pair waits for its peer, and answers no other request.
    Refuses,
}

impl SilentDevice {
    /// Begins to listen.
    pub fn new(silence: Silence) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let nonce = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("tonic-rdma-soft-{}-{nonce:016x}", std::process::id());
        let name = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
        let socket = |flags| {
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
        };
        let mut sockets = vec![socket(SocketFlags::CLOEXEC)];
        rustix::net::bind(&sockets[0], &name).unwrap();
        rustix::net::listen(&sockets[0], if silence == Silence::Full { 0 } else { 4096 }).unwrap();
        if silence == Silence::Refuses {
            let listener = sockets[0].try_clone().unwrap();
            std::thread::spawn(move || refuse(&listener));
        }
        if silence == Silence::Full {
            let fillers = std::iter::repeat_with(|| socket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK));
            sockets.extend(fillers.take_while(|filler| rustix::net::connect(filler, &name).is_ok()));
        }
        Self { nonce, _sockets: sockets }
    }

    /// Names this device in the address of a queue pair.
    pub fn replace_in(&self, address: &mut [u8]) {
        // The address begins with its kind and version. The process and the number of the device follow.
        address[2..6].copy_from_slice(&std::process::id().to_le_bytes());
        address[6..14].copy_from_slice(&self.nonce.to_le_bytes());
    }
}

fn refuse(listener: &OwnedFd) {
    /// The kind of the question whether a queue pair waits for its peer.
    const WAITS: u8 = 9;
    let mut connections = Vec::new();
    while let Ok(connection) = rustix::net::accept(listener) {
        let mut request = [0; 64];
        // The version and the kind of the request, two bytes of zero, the number of the queue pair, and the
        // number of the request.
        if rustix::net::recv(&connection, &mut request, RecvFlags::empty()).is_ok() && request[1] == WAITS {
            let mut reply = [0; 72];
            reply[..8].copy_from_slice(&request[8..16]);
            reply[8..10].copy_from_slice(&[1, request[0]]);
            let _ = rustix::net::send(&connection, &reply, SendFlags::NOSIGNAL);
        }
        connections.push(connection);
    }
}
