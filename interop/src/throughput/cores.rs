//! The cores of client and servers.

use rustix::thread::CpuSet;

use crate::Failure;

/// The cores of client and servers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cores {
    pub(super) client: usize,
    pub(super) server: usize,
}

impl Cores {
    /// Returns the first and the last core that this process may run on, because hardware threads of one core mostly have
    /// neighbouring numbers. Returns `None` if there is only one.
    pub(super) fn choose() -> Option<Self> {
        let set = rustix::thread::sched_getaffinity(None).ok()?;
        let mut allowed = (0..CpuSet::MAX_CPU).filter(|core| set.is_set(*core));
        Some(Self { client: allowed.next()?, server: allowed.next_back()? })
    }
}

/// Binds this thread, and every thread and process that it starts, to `core`.
pub(super) fn pin(core: usize) -> Result<(), Failure> {
    let refused = |reason: String| Failure::new(format!("can't run on core {core}: {reason}"));
    if core >= CpuSet::MAX_CPU {
        return Err(refused(format!("cores are 0 to {}", CpuSet::MAX_CPU - 1)));
    }
    let mut set = CpuSet::new();
    set.set(core);
    rustix::thread::sched_setaffinity(None, &set).map_err(|error| refused(error.to_string()))
}
