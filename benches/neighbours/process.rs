//! The processes of a cell: this binary, started again.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, ChildStdout, Command, Stdio};

/// First argument of the server process.
pub(crate) const SERVER: &str = "server";
/// First argument of the process of a bad neighbour.
pub(crate) const BAD: &str = "bad";

/// First argument of the process of an honest client that makes one call.
pub(crate) const VISIT: &str = "visit";

/// A process that is killed when this value is dropped.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Process {
    /// Starts a process. Returns the process, and the first line that it prints.
    pub(crate) fn start(arguments: &[&str]) -> (Self, String) {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut process = Self { output: BufReader::new(child.stdout.take().unwrap()), child };
        let line = process.read_line();
        (process, line)
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// Closes the standard input of the process, which then ends. Returns the last line that it prints.
    pub(crate) fn end(mut self) -> String {
        drop(self.child.stdin.take());
        self.read_line()
    }

    fn read_line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
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

/// Ends this process when the process that started it closes the standard input, or ends. First calls `last`.
#[expect(clippy::disallowed_methods, reason = "a process of a bench")]
pub(crate) fn end_with_parent(last: impl FnOnce() + Send + 'static) {
    std::thread::spawn(|| {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        last();
        std::process::exit(0);
    });
}
