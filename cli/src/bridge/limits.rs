//! Limits of this process: descriptors, and memory to register.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::address::Address;

/// Descriptors for everything except connections: listeners, devices, runtimes.
const OTHERS: u64 = 128;

/// Raises the limit on open files as far as this process may. Returns the number of connections that fit, at most
/// `wanted`.
pub(crate) fn connections(wanted: u32, ends: &[(Address, Address)]) -> u32 {
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_some() && limit.current != limit.maximum {
        let raised = Rlimit { current: limit.maximum, ..limit };
        if let Err(error) = setrlimit(Resource::Nofile, raised) {
            tracing::warn!(%error, "the limit on open files can't be raised");
        }
    }
    let each = ends.iter().map(|(listen, connect)| descriptors(listen) + descriptors(connect)).max();
    let each = each.unwrap_or(1).max(1);
    let Some(limit) = getrlimit(Resource::Nofile).current else { return wanted };
    let possible = u32::try_from((limit.saturating_sub(OTHERS) / each).max(1)).unwrap_or(u32::MAX);
    if possible < wanted {
        tracing::warn!(
            "--max-connections {wanted} needs {} open files, the limit is {limit}: {possible} connections at once, \
             more wait; raise it with `ulimit -n` or LimitNOFILE= in a systemd unit",
            u64::from(wanted) * each + OTHERS
        );
    }
    wanted.min(possible)
}

/// Returns the descriptors that one end of a connection holds.
fn descriptors(address: &Address) -> u64 {
    match address {
        Address::Tcp(_) | Address::Unix(_) => 1,
        // The TCP connection, one descriptor of the software device, and one in reserve.
        Address::Rdma(_) => 3,
    }
}

/// Returns the bytes that the process may register: enough for `connections` busy connections, but at most half of the
/// machine's memory. A page takes memory only after its first use.
pub(crate) fn pinned(connections: u32) -> u64 {
    /// Receive buffers, and memory for rendezvous in both directions.
    const EACH: u64 = 8 << 20;
    const LEAST: u64 = 2 << 30;
    let half = rustix::system::sysinfo();
    let half = (half.totalram as u64).saturating_mul(u64::from(half.mem_unit)) / 2;
    (u64::from(connections) * EACH).max(LEAST).min(half.max(LEAST))
}
