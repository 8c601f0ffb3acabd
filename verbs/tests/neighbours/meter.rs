//! What this process holds, what a call costs its thread, and the warnings that it writes.

use std::fmt::{self, Write as _};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tracing::field::Field;
use tracing::span;

use crate::system::thread_cost;

/// Memory, descriptors and mappings of this process.
#[derive(Clone, Copy, Debug)]
pub struct Usage {
    pub resident_kib: usize,
    pub descriptors: usize,
    pub mappings: usize,
}

impl Usage {
    pub fn now() -> Self {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        Self {
            resident_kib: resident.trim().trim_end_matches(" kB").parse().unwrap(),
            descriptors: std::fs::read_dir("/proc/self/fd").unwrap().count(),
            mappings: std::fs::read_to_string("/proc/self/maps").unwrap().lines().count(),
        }
    }

    /// Returns the greater of each number.
    pub fn max(self, other: Self) -> Self {
        Self {
            resident_kib: self.resident_kib.max(other.resident_kib),
            descriptors: self.descriptors.max(other.descriptors),
            mappings: self.mappings.max(other.mappings),
        }
    }

    /// Returns whether each number is at most that of `before` plus that of `more`.
    pub fn is_within(&self, before: &Self, more: &Self) -> bool {
        self.resident_kib <= before.resident_kib + more.resident_kib
            && self.descriptors <= before.descriptors + more.descriptors
            && self.mappings <= before.mappings + more.mappings
    }
}

/// What calls cost their thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Processor time. It does not grow because the machine is busy.
    pub cpu: Duration,
    /// Number of times that the thread gave up its processor to wait. On a busy machine it may wait for a
    /// thread of its own process that has a lock and no core.
    pub waits: u64,
    /// Time, with all waits.
    pub time: Duration,
}

impl Cost {
    /// Runs `call`, and adds what it costs.
    pub fn count<T>(&mut self, call: impl FnOnce() -> T) -> T {
        let (begin, before) = (Instant::now(), thread_cost());
        let result = call();
        let after = thread_cost();
        self.time += begin.elapsed();
        self.cpu += after.0 - before.0;
        self.waits += after.1 - before.1;
        result
    }
}

/// Keeps the warnings of this process.
#[derive(Clone, Copy, Debug)]
pub struct Warnings;

static WARNINGS: Mutex<String> = Mutex::new(String::new());

impl Warnings {
    /// Returns whether a warning had `text`.
    pub fn have(text: &str) -> bool {
        WARNINGS.lock().unwrap_or_else(PoisonError::into_inner).contains(text)
    }
}

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.is_event() && *metadata.level() <= tracing::Level::WARN
    }

    fn event(&self, event: &tracing::Event<'_>) {
        let mut warnings = WARNINGS.lock().unwrap_or_else(PoisonError::into_inner);
        event.record(&mut |field: &Field, value: &dyn fmt::Debug| {
            let _ = write!(warnings, "{field}={value:?} ");
        });
        warnings.push('\n');
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}
