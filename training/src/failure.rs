//! The failure of the program: one line on stderr, and an exit status.

use std::error::Error;
use std::io::{self, Write};
use std::process::ExitCode;

use tonic_rdma_commands::{chain, one_line};

/// The error that caused a failure.
type Cause = Box<dyn Error + Send + Sync>;

/// The reason why the program did not succeed.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub(crate) struct Failure {
    message: String,
    /// Whether the command line is wrong.
    usage: bool,
    source: Option<Cause>,
}

impl Failure {
    /// Makes the failure of a run: exit status 1.
    pub(crate) fn run(message: impl Into<String>) -> Self {
        Self { message: message.into(), usage: false, source: None }
    }

    /// Makes the failure of a command line that can't be satisfied: exit status 2.
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self { message: message.into(), usage: true, source: None }
    }

    /// Adds the error that caused the failure.
    pub(crate) fn because(self, cause: impl Into<Cause>) -> Self {
        Self { source: Some(cause.into()), ..self }
    }

    /// Reports the failure on stderr, and returns the exit status.
    pub(crate) fn report(&self) -> ExitCode {
        // stderr may be closed. The exit status still reports the failure.
        let _ = writeln!(io::stderr(), "tonic-rdma-training: {}", self.with_causes());
        ExitCode::from(if self.usage { 2 } else { 1 })
    }

    /// Returns the message and the messages of all causes, in one line.
    pub(crate) fn with_causes(&self) -> String {
        one_line(&chain(self))
    }
}

impl From<tonic_rdma_commands::Failure> for Failure {
    fn from(failure: tonic_rdma_commands::Failure) -> Self {
        Self { message: failure.to_string(), usage: failure.is_usage(), source: Some(failure.into()) }
    }
}

impl From<candle_core::Error> for Failure {
    fn from(error: candle_core::Error) -> Self {
        Self::run("candle can't compute").because(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_one_line_with_its_causes_once() {
        let inner = Failure::run("first\nline");
        let outer = Failure::run("outer").because(Failure::run("middle").because(inner));
        assert_eq!(outer.with_causes(), "outer: middle: first line");
        assert_eq!(Failure::run("same").because(Failure::run("same")).with_causes(), "same");
    }
}
