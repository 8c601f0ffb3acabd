//! A process that other processes call, with `--listen`: the tests of several commands start one.

use std::process::Command;
use std::time::{Duration, Instant};

use tonic_rdma_commands::process::Child;

/// Longest wait for a line or an end. Only a test that hangs takes as long.
const LIMIT: Duration = Duration::from_secs(240);

/// A listening end. The drop of this value kills it.
pub(crate) struct Listening {
    pub(crate) process: Child,
    pub(crate) address: String,
}

impl Listening {
    /// Starts `command`, and waits until it listens.
    pub(crate) fn ready(command: Command) -> Self {
        let (process, line) = Child::ready("the listening end", command, LIMIT).unwrap();
        let address = line.strip_prefix("listening on ").and_then(|rest| rest.split_whitespace().next());
        let address = address.unwrap_or_else(|| panic!("{line}")).to_owned();
        assert!(line.contains("one caller at a time"), "{line}");
        Self { process, address }
    }

    /// Waits for the next line that contains `text`, and returns it.
    pub(crate) fn says(&mut self, text: &str) -> String {
        let end = Instant::now() + LIMIT;
        loop {
            let line = self.process.line(end.saturating_duration_since(Instant::now()));
            let line = line.unwrap_or_else(|error| panic!("no line has {text:?}: {}", error.with_causes()));
            if line.contains(text) {
                return line;
            }
        }
    }
}
