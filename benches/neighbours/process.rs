//! The processes of a cell: this binary, started again.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

/// First argument of the server process.
pub(crate) const SERVER: &str = "server";
/// First argument of the process of a bad neighbour.
pub(crate) const BAD: &str = "bad";

/// A process that is killed when this value is dropped.
#[derive(Debug)]
pub(crate) struct Process(Child);

impl Process {
    /// Starts a process. Returns the process, and the first line that it prints.
    pub(crate) fn start(arguments: &[&str]) -> (Self, String) {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        (Self(child), line.trim().to_owned())
    }

    pub(crate) fn id(&self) -> u32 {
        self.0.id()
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        self.0.try_wait().unwrap().is_some()
    }

    /// Stops the process until it is killed.
    pub(crate) fn stop(&self) {
        let process = Pid::from_child(&self.0);
        kill_process(process, Signal::STOP).unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
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
}

/// Ends this process when the process that started it has ended. A thread waits for the end of the standard input.
#[expect(clippy::disallowed_methods, reason = "a process of a bench")]
pub(crate) fn end_with_parent() {
    std::thread::spawn(|| {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        std::process::exit(0);
    });
}
