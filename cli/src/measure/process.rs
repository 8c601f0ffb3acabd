//! The processes of a run: their allocator, a container for the server, and limits of a process with many connections.

use std::process::Command;
use std::{fmt, io};

use clap::ValueEnum;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::{Deserialize, Serialize};
use tonic_rdma_commands::{Failure, Named as _, process};
use tonic_rdma_verbs::allocator::{VARIABLE, in_use};

/// The setting `--allocator`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Allocator {
    /// The C library's malloc, which a Rust program has by default.
    System,
    Mimalloc,
}

impl Allocator {
    /// Returns the allocator of this process.
    pub(crate) fn of_this_process() -> Self {
        match in_use() {
            tonic_rdma_verbs::allocator::Allocator::System => Self::System,
            tonic_rdma_verbs::allocator::Allocator::Mimalloc => Self::Mimalloc,
        }
    }

    /// Ensures that this process has the allocator. If it has another, the program starts again, in this process and
    /// with the same arguments; this returns only if that fails. Callers must call this before any other work, which
    /// would be lost.
    pub(crate) fn ensure(self) -> Result<(), Failure> {
        // One restart is enough: a program that was started for this allocator and has another is broken.
        let restarted = std::env::var_os(VARIABLE).is_some_and(|value| value == self.name());
        if Self::of_this_process() == self || restarted {
            return self.verify();
        }
        Err(process::exec_with(VARIABLE, self.name()))
    }

    /// Sets this allocator for a process that is to be started.
    pub(crate) fn choose_for(self, command: &mut Command) {
        command.env(VARIABLE, self.name());
    }

    /// Fails if this process has another allocator.
    pub(crate) fn verify(self) -> Result<(), Failure> {
        let has = Self::of_this_process();
        if has == self {
            return Ok(());
        }
        Err(Failure::run(format!(
            "the allocator is {has} and not {self}, although {VARIABLE} was set to {self}"
        )))
    }
}

impl fmt::Display for Allocator {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// The command of util-linux that makes the namespaces, and its options.
const UNSHARE: &str = "unshare";
const NAMESPACES: [&str; 7] =
    ["--user", "--map-root-user", "--pid", "--ipc", "--mount", "--fork", "--kill-child"];

/// Returns a command that starts `inner` in a container of its own. If the command is killed, so is the program.
pub(crate) fn container(inner: &Command) -> Command {
    let mut command = Command::new(UNSHARE);
    command.args(NAMESPACES).arg(inner.get_program()).args(inner.get_args());
    command
}

/// Fails if this system makes no containers.
pub(crate) fn check_container() -> Result<(), Failure> {
    let failed =
        |reason: String| Failure::run(format!("--container: {UNSHARE} makes no namespaces: {reason}"));
    let tried = container(&Command::new("true")).output().map_err(|error| failed(error.to_string()))?;
    let said = String::from_utf8_lossy(&tried.stderr);
    if tried.status.success() { Ok(()) } else { Err(failed(said.trim().replace('\n', "; "))) }
}

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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use super::*;

    #[test]
    fn names_are_read_back() {
        for allocator in Allocator::value_variants() {
            assert_eq!(Allocator::from_str(allocator.name(), false), Ok(*allocator));
        }
    }

    #[test]
    fn a_wrong_allocator_is_detected() {
        let this = Allocator::of_this_process();
        this.verify().unwrap();
        this.ensure().unwrap();
        for other in Allocator::value_variants().iter().filter(|other| **other != this) {
            assert!(other.verify().unwrap_err().to_string().contains(this.name()));
        }
    }
}

#[cfg(test)]
mod container_tests {
    #![allow(clippy::unwrap_used, clippy::print_stdout, reason = "tests")]

    use std::path::Path;

    use super::*;

    #[test]
    fn a_container_has_namespaces_of_its_own() {
        if check_container().is_err() {
            println!("skipped: a new user namespace is not permitted here");
            return;
        }
        let names = ["user", "pid", "ipc", "mnt", "net"].map(|name| format!("/proc/self/ns/{name}"));
        let output = container(&Command::new("readlink")).args(&names).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let inside: Vec<&str> = text.lines().collect();
        assert_eq!(inside.len(), names.len());
        for (name, inside) in names.iter().zip(inside) {
            let here = std::fs::read_link(name).unwrap();
            assert_eq!(here == Path::new(inside), name.ends_with("net"), "{name}");
        }
    }
}
