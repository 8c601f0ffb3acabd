//! The processes of a cell: this binary, started again.

use std::time::Duration;

use tonic_rdma_commands::process::{self, Child};

/// The longest time for a process to say something.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// Starts a process. Returns the process, and the first line that it prints, or why there is none.
pub(crate) fn start(arguments: &[&str]) -> (Child, String) {
    let mut command = process::again().unwrap();
    command.args(arguments);
    let mut process = Child::with_lines(arguments[0], command).unwrap();
    let line = process.line(LIMIT).unwrap_or_else(|failure| failure.with_causes());
    (process, line)
}

/// The most that a process held: memory in KiB, descriptors and mappings.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Held {
    pub(crate) resident_kib: u64,
    pub(crate) descriptors: u64,
    pub(crate) mappings: u64,
}

impl Held {
    /// Returns what the process `id` holds now; zeros if the process is gone.
    pub(crate) fn by(id: u32) -> Self {
        let status = std::fs::read_to_string(format!("/proc/{id}/status")).unwrap_or_default();
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let resident = resident.and_then(|line| line.trim().trim_end_matches(" kB").parse().ok());
        let maps = std::fs::read_to_string(format!("/proc/{id}/maps")).unwrap_or_default();
        Self {
            resident_kib: resident.unwrap_or_default(),
            descriptors: std::fs::read_dir(format!("/proc/{id}/fd"))
                .map_or(0, |entries| entries.count() as u64),
            mappings: maps.lines().count() as u64,
        }
    }

    /// Returns the greater of each number.
    pub(crate) fn max(self, other: Self) -> Self {
        Self {
            resident_kib: self.resident_kib.max(other.resident_kib),
            descriptors: self.descriptors.max(other.descriptors),
            mappings: self.mappings.max(other.mappings),
        }
    }

    /// Returns what is above `before` and `more`, if anything is.
    pub(crate) fn above(self, before: Self, more: Self) -> Option<String> {
        let above = self.resident_kib > before.resident_kib + more.resident_kib
            || self.descriptors > before.descriptors + more.descriptors
            || self.mappings > before.mappings + more.mappings;
        above.then(|| format!("the server held {self:?}, {before:?} before, and may hold {more:?} more"))
    }
}
