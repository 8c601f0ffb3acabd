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
