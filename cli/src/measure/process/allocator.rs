//! The allocator of both processes. It is chosen before a process starts, because it can't change later.

use std::fmt;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use clap::ValueEnum;
use tonic_rdma_commands::Failure;
use tonic_rdma_verbs::allocator::{VARIABLE, in_use};

/// The setting `--allocator`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
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

    /// Returns the name on the command line, in the JSON, and in the environment of the process.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::System => tonic_rdma_verbs::allocator::Allocator::System.name(),
            Self::Mimalloc => tonic_rdma_verbs::allocator::Allocator::Mimalloc.name(),
        }
    }

    /// Ensures that this process has the allocator. If it has another, the program starts again, in this process and
    /// with the same arguments; this returns only if that fails. Callers must call this before any other work, which
    /// would be lost.
    pub(crate) fn ensure(self) -> Result<(), Failure> {
        if Self::of_this_process() == self {
            return Ok(());
        }
        // One restart is enough: a program that was started for this allocator and has another is broken.
        if std::env::var_os(VARIABLE).is_some_and(|value| value == self.name()) {
            return Err(self.missing());
        }
        let failed =
            |error| Failure::run(format!("--allocator {self}: can't start the program again")).because(error);
        let program = std::env::current_exe().map_err(failed)?;
        let mut command = Command::new(program);
        self.choose_for(command.args(std::env::args_os().skip(1)));
        Err(failed(command.exec()))
    }

    /// Sets this allocator for a process that is to be started.
    pub(crate) fn choose_for(self, command: &mut Command) {
        command.env(VARIABLE, self.name());
    }

    /// Fails if this process has another allocator.
    pub(crate) fn verify(self) -> Result<(), Failure> {
        if Self::of_this_process() == self { Ok(()) } else { Err(self.missing()) }
    }

    fn missing(self) -> Failure {
        let has = Self::of_this_process();
        Failure::run(format!("the allocator is {has} and not {self}, although {VARIABLE} was set to {self}"))
    }
}

impl fmt::Display for Allocator {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
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
