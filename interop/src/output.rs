//! The program's output. A closed standard output ends the program like any other failure.

use std::io::Write as _;

use tonic_rdma_commands::Failure;

/// Prints a line to the standard output, and flushes it.
pub(crate) fn line(text: &str) -> Result<(), Failure> {
    let mut stdout = std::io::stdout().lock();
    let written = writeln!(stdout, "{text}").and_then(|()| stdout.flush());
    written.map_err(|error| Failure::run(format!("can't write to the standard output: {error}")))
}

/// Prints a line to the standard error, which scripts don't read.
pub(crate) fn note(text: &str) {
    // There is no other place to report a failure to.
    let _ = writeln!(std::io::stderr(), "{text}");
}
