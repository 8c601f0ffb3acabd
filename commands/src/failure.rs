//! The failures of a command, with the exit status of each, and the errors of option values, for which clap
//! refuses a command line.

use std::error::Error;
use std::fmt::Display;
use std::io;
use std::process::ExitCode;

pub use tonic_rdma_verbs::unstable::chain;

/// The error that caused a failure.
type Cause = Box<dyn Error + Send + Sync>;

/// The reason why a command did not succeed. Each is reported as one line on stderr.
#[expect(missing_docs, reason = "the texts say what each is")]
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The command line makes no sense or can't be satisfied: exit status 2.
    #[error("{message}")]
    Usage { message: String, source: Option<Cause> },
    /// The work itself failed: exit status 1.
    #[error("{message}")]
    Run { message: String, source: Option<Cause> },
    /// The work succeeded, and what the command was asked about does not hold: exit status 3.
    #[error("{message}")]
    Unmet { message: String },
    /// The user pressed ctrl-c: exit status 130, the convention of shells.
    #[error("interrupted")]
    Interrupted,
    /// The reader of stdout has closed it. There is nothing to report: exit status 0.
    #[error("stdout is closed")]
    OutputClosed,
}

impl Failure {
    /// Makes the failure of a run.
    pub fn run(message: impl Into<String>) -> Self {
        Self::Run { message: message.into(), source: None }
    }

    /// Makes the failure of a command line that can't be satisfied.
    pub fn usage(message: impl Into<String>) -> Self {
        Self::Usage { message: message.into(), source: None }
    }

    /// Makes the failure of a question whose answer is no.
    pub fn unmet(message: impl Into<String>) -> Self {
        Self::Unmet { message: message.into() }
    }

    /// Adds the error that caused the failure.
    pub fn because(self, cause: impl Into<Cause>) -> Self {
        let source = Some(cause.into());
        match self {
            Self::Usage { message, .. } => Self::Usage { message, source },
            Self::Run { message, .. } => Self::Run { message, source },
            other => other,
        }
    }

    /// Makes the failure of input that can't be used, with the messages of `error` and of its causes.
    pub fn refused(error: &dyn Error) -> Self {
        Self::usage(chain(error))
    }

    /// Makes the failure of a write to stdout.
    pub fn output(error: &io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self::OutputClosed,
            _ => Self::run(format!("can't write to stdout: {error}")),
        }
    }

    /// Returns whether the command line is wrong.
    pub const fn is_usage(&self) -> bool {
        matches!(self, Self::Usage { .. })
    }

    /// Returns the message with the messages of all causes, in one line.
    pub fn with_causes(&self) -> String {
        one_line(&chain(self))
    }

    /// Reports the failure on stderr with the name of the command, and returns the exit status.
    pub fn report(&self, command: &str) -> ExitCode {
        let code = match self {
            Self::Usage { .. } => 2,
            Self::Run { .. } => 1,
            Self::Unmet { .. } => 3,
            Self::Interrupted => 130,
            Self::OutputClosed => return ExitCode::SUCCESS,
        };
        crate::output::note(&format!("{command}: {}", self.with_causes()));
        ExitCode::from(code)
    }
}

/// Says what failed.
pub trait Context<T> {
    /// Makes the error the cause of the failure of a run with this message.
    ///
    /// # Errors
    ///
    /// Fails with that failure if there is an error.
    fn context(self, message: impl Into<String>) -> Result<T, Failure>;
}

impl<T, E: Into<Cause>> Context<T> for Result<T, E> {
    fn context(self, message: impl Into<String>) -> Result<T, Failure> {
        self.map_err(|cause| Failure::run(message).because(cause))
    }
}

/// A text is the failure of a run.
impl From<String> for Failure {
    fn from(message: String) -> Self {
        Self::run(message)
    }
}

impl From<&str> for Failure {
    fn from(message: &str) -> Self {
        Self::run(message)
    }
}

/// The error of a library or of the system becomes the failure of a run, with its causes.
impl From<Box<dyn Error>> for Failure {
    fn from(error: Box<dyn Error>) -> Self {
        Self::run(chain(&*error))
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::run(error.to_string())
    }
}

/// The reason why the value of an option is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ValueError(pub String);

impl ValueError {
    /// Makes the error of a value that is none of the words of `accepted`.
    pub fn unknown(accepted: impl Display) -> Self {
        Self(format!("accepted: {accepted}"))
    }

    /// Makes the error of an item that is none of the names of `accepted`.
    pub fn unknown_name(kind: &str, given: &str, accepted: impl Display) -> Self {
        Self(format!("unknown {kind} {given:?}; accepted: {accepted}"))
    }

    /// Makes the error of a bad number.
    pub fn number(kind: &str, given: &str, accepted: impl Display) -> Self {
        Self(format!("bad {kind} {given:?}; accepted: {accepted}"))
    }
}

/// Returns `text` without line breaks and other control characters, which a value of the command line may
/// contain.
pub fn one_line(text: &str) -> String {
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

    #[test]
    fn a_report_has_every_cause_once() {
        let lost = Failure::run("the connection is lost").because(io::Error::other("reset"));
        let failure = Failure::run("can't measure").because(lost);
        assert_eq!(failure.with_causes(), "can't measure: the connection is lost: reset");
        let failure = Failure::usage("can't write: no space").because(io::Error::other("no space"));
        assert_eq!(failure.with_causes(), "can't write: no space");
    }
}
