//! The ways in which a command ends badly, and what each of them is to the shell.

use std::io::{self, Write};
use std::process::ExitCode;

/// Why a command did not succeed. Each is reported as one line on stderr.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// What was asked for makes no sense or can't be had: exit status 2.
    #[error("{0}")]
    Usage(String),
    /// The work itself failed: exit status 1.
    #[error("{0}")]
    Run(String),
    /// The user pressed ctrl-c: exit status 130, as shells have it.
    #[error("interrupted")]
    Interrupted,
    /// Whoever read our output has left: nothing to say, and nobody to say it to.
    #[error("stdout is closed")]
    OutputClosed,
}

impl Failure {
    /// A failed run.
    pub(crate) fn run(what: impl Into<String>) -> Self {
        Self::Run(what.into())
    }

    /// A request that can't be met.
    pub(crate) fn usage(what: impl Into<String>) -> Self {
        Self::Usage(what.into())
    }

    /// An error while writing to stdout.
    pub(crate) fn output(error: &io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self::OutputClosed,
            _ => Self::Run(format!("can't write to stdout: {error}")),
        }
    }

    /// Says what happened on stderr and gives the exit status.
    pub(crate) fn report(&self) -> ExitCode {
        let code = match self {
            Self::Usage(_) => 2,
            Self::Run(_) => 1,
            Self::Interrupted => 130,
            Self::OutputClosed => return ExitCode::SUCCESS,
        };
        // A closed stderr leaves nobody to tell; the exit status still says it.
        let _ = writeln!(io::stderr(), "tonic-rdma: {}", one_line(&self.to_string()));
        ExitCode::from(code)
    }
}

/// `text` without line breaks and other control characters, which a value from the command line may well contain.
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
