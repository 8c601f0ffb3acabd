//! The cores that ranks run on.

use rustix::thread::CpuSet;

/// Returns the cores that this process may run on.
pub(crate) fn allowed() -> Vec<usize> {
    let set = rustix::thread::sched_getaffinity(None);
    set.map(|set| (0..CpuSet::MAX_CPU).filter(|core| set.is_set(*core)).collect()).unwrap_or_default()
}

/// Keeps this thread, and every thread that it starts, on `core`.
pub(crate) fn pin(core: usize) -> std::io::Result<()> {
    let mut set = CpuSet::new();
    set.set(core);
    Ok(rustix::thread::sched_setaffinity(None, &set)?)
}
