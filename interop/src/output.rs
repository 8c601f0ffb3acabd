//! What the program says. Whoever reads it may be gone, which ends the program like any other failure.

use std::io::Write as _;

use crate::Failure;

/// A line for scripts and people, at once.
pub(crate) fn line(text: &str) -> Result<(), Failure> {
    let mut stdout = std::io::stdout().lock();
    let written = writeln!(stdout, "{text}").and_then(|()| stdout.flush());
    written.map_err(|error| Failure::new(format!("can't write to the standard output: {error}")))
}

/// A line beside those that scripts read.
pub(crate) fn note(text: &str) {
    // There is no other place to say that this failed.
    let _ = writeln!(std::io::stderr(), "{text}");
}
