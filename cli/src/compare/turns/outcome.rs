//! The outcome of one turn of a mode.

use std::time::Duration;

use crate::compare::modes::call_error::CallError;

/// The outcome of one turn.
#[derive(Debug, Default)]
pub(crate) struct TurnOutcome {
    /// The latency of each operation that succeeded.
    pub(crate) latencies: Vec<Duration>,
    /// Bytes and messages of these operations.
    pub(crate) bytes: u64,
    pub(crate) messages: u64,
    pub(crate) errors: u64,
    pub(crate) first_error: Option<String>,
    /// Errors about wrong content.
    pub(crate) mismatches: u64,
    /// CPU time that the load generator spent waiting until the next operation was due.
    pub(crate) waiting: Duration,
    /// Operations of an open loop that were sent.
    pub(crate) sent: u64,
    /// Waiting time of each operation that was given up before it was sent.
    pub(crate) unsent: Vec<Duration>,
    /// Operations without an answer at the end of the offering.
    pub(crate) backlog: u64,
}

impl TurnOutcome {
    pub(crate) fn success(&mut self, latency: Duration, bytes: u64, messages: u64) {
        self.latencies.push(latency);
        self.bytes += bytes;
        self.messages += messages;
    }

    pub(crate) fn error(&mut self, count: u64, what: String) {
        self.errors += count;
        self.first_error.get_or_insert(what);
    }

    /// Adds the calls of `other`, which were made at the same time.
    pub(crate) fn merge(&mut self, other: Self) {
        let Self { latencies, bytes, messages, errors, first_error, mismatches, .. } = other;
        self.latencies.extend(latencies);
        self.bytes += bytes;
        self.messages += messages;
        self.errors += errors;
        self.first_error = self.first_error.take().or(first_error);
        self.mismatches += mismatches;
    }

    /// Counts an operation that failed.
    pub(crate) fn call_error(&mut self, error: &CallError) {
        self.mismatches += u64::from(error.is_mismatch());
        self.error(1, error.to_string());
    }

    /// Returns whether there were calls and all of them failed.
    pub(crate) fn failed(&self) -> bool {
        self.latencies.is_empty() && self.errors > 0
    }
}
