//! The failures of the command, and the exit status of each.

use std::error::Error;
use std::io::{self, Write};
use std::process::ExitCode;

/// The reason why the command did not succeed. It is reported as one line on stderr.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// The command line makes no sense or can't be satisfied: exit status 2.
    #[error("{0}")]
    Usage(String),
    /// The work itself failed, or a check did not hold: exit status 1.
    #[error("{0}")]
    Run(String),
    /// The reader of stdout has closed it. There is nothing to report: exit status 0.
    #[error("stdout is closed")]
    OutputClosed,
}

impl Failure {
    /// Makes the failure of a command line that can't be satisfied.
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self::Usage(message.into())
    }

    /// Makes the failure of a run.
    pub(crate) fn run(message: impl Into<String>) -> Self {
        Self::Run(message.into())
    }

    /// Makes the failure of a run with the messages of `error` and of its causes.
    pub(crate) fn because(what: &str, error: &dyn Error) -> Self {
        Self::Run(format!("{what}: {}", chain(error)))
    }

    /// Makes the failure of input that can't be used, with the messages of `error` and of its causes.
    pub(crate) fn refused(error: &dyn Error) -> Self {
        Self::Usage(chain(error))
    }

    /// Makes the failure of a write to stdout.
    pub(crate) fn output(error: &io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self::OutputClosed,
            _ => Self::run(format!("can't write to stdout: {error}")),
        }
    }

    /// Reports the failure on stderr, and returns the exit status.
    pub(crate) fn report(&self) -> ExitCode {
        let code = match self {
            Self::Usage(_) => 2,
            Self::Run(_) => 1,
            Self::OutputClosed => return ExitCode::SUCCESS,
        };
        // stderr may be closed. The exit status still reports the failure.
        let _ = writeln!(io::stderr(), "tonic-rdma-graph: {}", one_line(&self.to_string()));
        ExitCode::from(code)
    }
}

/// Joins the messages of `error` and of its causes.
fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let message = cause.to_string();
        // Some errors repeat the message of their cause.
        if !text.contains(&message) {
            text = format!("{text}: {message}");
        }
        next = cause.source();
    }
    text
}

/// Returns `text` without line breaks and other control characters, which a value of the command line may contain.
pub(crate) fn one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for character in text.trim().chars() {
        match character {
            '\n' | '\r' | '\t' => line.push(' '),
            other if other.is_control() => line.extend(other.escape_default()),
            other => line.push(other),
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_stays_on_one_line() {
        assert_eq!(one_line("a\nb\tc\u{1b}[0m\n"), "a b c\\u{1b}[0m");
    }
}
