//! Limits of a process with many connections: open files, and memory to register.

use std::io;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the limit on open files as far as this process may.
pub(crate) fn raise_open_files() -> io::Result<()> {
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_some() && limit.current != limit.maximum {
        setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })?;
    }
    Ok(())
}

/// Returns the bytes that the process may register: enough for `connections` busy connections, on each of which `landing` bytes of
/// messages may land, but at most half of the machine's memory. A page takes memory only after its first use.
pub(crate) fn pinned(connections: u32, landing: u64) -> u64 {
    /// Receive buffers, and memory for rendezvous in both directions.
    const EACH: u64 = 8 << 20;
    const LEAST: u64 = 2 << 30;
    // The memory of a message is longer than the message by up to a half.
    let landing = landing.saturating_add(landing / 2);
    let half = rustix::system::sysinfo();
    let half = (half.totalram as u64).saturating_mul(u64::from(half.mem_unit)) / 2;
    let wanted = u64::from(connections).saturating_mul(EACH.saturating_add(landing)).saturating_add(LEAST);
    wanted.min(half.max(LEAST))
}
