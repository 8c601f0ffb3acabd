//! The address of a queue pair on iWARP.

use std::net::SocketAddrV6;

/// A queue pair on iWARP: the listener that its peer connects to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Listener {
    /// RDMA READs that the queue pair serves at a time.
    pub(crate) reads: u8,
    pub(crate) socket: SocketAddrV6,
    /// Names the queue pair.
    pub(crate) token: u64,
}
