//! The limit on connections that the process's descriptors set.

use rustix::process::{Resource, getrlimit};

use super::address::Address;
use crate::measure::process::raise_open_files;

/// Descriptors for everything except connections: listeners, devices, runtimes.
const OTHERS: u64 = 128;

/// Raises the limit on open files as far as this process may. Returns the number of connections that fit, at most
/// `wanted`.
pub(crate) fn connections(wanted: u32, ends: &[(Address, Address)]) -> u32 {
    if let Err(error) = raise_open_files() {
        tracing::warn!(%error, "the limit on open files can't be raised");
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
