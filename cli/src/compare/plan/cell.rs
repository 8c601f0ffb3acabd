//! A cell: one combination of load, calls in flight, and rate.

use std::fmt;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use tonic_rdma_commands::{Named as _, units};

use crate::compare::modes::mode::Mode;
use crate::workload::Workload;

/// The largest payload on the command line. The machine's memory and the modes set lower limits.
pub(crate) const MAX_BYTES: u64 = 1 << 40;

/// The largest number of calls in flight on the command line.
pub(crate) const MAX_INFLIGHT: u64 = 16_384;

/// The largest number of calls in flight in an open loop without `--inflight`, and of bytes in them. With some
/// thousands of small calls at once h2 takes a peer for hostile and ends the connection (`too_many_data_frames`).
const OPEN_LOOP_CALLS: usize = 1024;
const OPEN_LOOP_BYTES: u64 = 256 << 20;

/// A cell of the plan: a row of every mode.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Cell {
    pub(crate) load: Workload,
    /// Calls in flight at once, on one connection: exactly as many in a closed loop, at most as many in an open loop.
    pub(crate) inflight: usize,
    /// Operations offered each second, even if answers are late (open loop). Without a rate each operation begins when
    /// one has ended (closed loop).
    pub(crate) rate: Option<f64>,
}

/// Returns the largest number of calls in flight of `load` in an open loop without `--inflight`. Sets have one call at a time, as
/// in a closed loop.
pub(crate) fn open_loop_inflight(load: Workload) -> usize {
    if load.is_set() {
        return 1;
    }
    let calls = OPEN_LOOP_BYTES / load.largest_message().max(1);
    usize::try_from(calls).unwrap_or(OPEN_LOOP_CALLS).clamp(1, OPEN_LOOP_CALLS)
}

impl Cell {
    /// Makes the cell of a closed loop of payloads of `bytes`.
    pub(crate) const fn closed(bytes: u64, inflight: usize) -> Self {
        Self { load: Workload::Size(bytes), inflight, rate: None }
    }

    /// Returns the cell's name in tables and messages: `64 B × 32`, `skew × 1 at 500/s`.
    pub(crate) fn label(self) -> String {
        let rate = self.rate.map(|rate| format!(" at {}/s", units::count(rate))).unwrap_or_default();
        format!("{} × {}{rate}", self.load, self.inflight)
    }

    /// Returns the number of operations at once, and of calls at once in each. Sets follow one another, as mini-batches
    /// do, and the calls of a set are concurrent.
    pub(crate) const fn concurrency(self) -> (usize, usize) {
        if self.load.is_set() { (1, self.inflight) } else { (self.inflight, 1) }
    }

    /// Returns the reason why `mode` can't carry the cell's messages, or `None` if the mode can.
    pub(crate) fn beyond(self, mode: Mode) -> Option<String> {
        let (limit, reason) = mode.limit()?;
        (self.load.largest_message() > limit)
            .then(|| format!("it carries messages up to {} ({reason})", units::size(limit)))
    }
}

/// The setting `--direction`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Direction {
    /// From the client to the server, which checks the payload: requests carry payloads, and replies are small.
    #[default]
    Up,
    /// From the server to the client, which checks the payload: requests are small, and replies carry payloads.
    Down,
}

impl Direction {
    /// Returns whether `mode` can carry payloads in this direction.
    pub(crate) const fn is_for(self, mode: Mode) -> bool {
        match self {
            Self::Up => true,
            // The sender writes a tensor when it has one. No request asks for it.
            Self::Down => !mode.carries_tensors(),
        }
    }

    /// Describes the direction in words.
    pub(crate) const fn describe(self) -> &'static str {
        match self {
            Self::Up => "up: requests carry the payload, the server checks it, replies are small",
            Self::Down => "down: requests are small, replies carry the payload, the client checks it",
        }
    }
}

impl fmt::Display for Direction {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// The largest number of connections on the command line.
pub(crate) const MAX_CONNECTIONS: u64 = 10_000;

/// Returns the numbers of connections to measure: powers of two below `most`, and `most`.
pub(crate) fn counts(most: usize) -> Vec<usize> {
    let powers = std::iter::successors(Some(1_usize), |count| count.checked_mul(2));
    powers.take_while(|count| *count < most).chain([most]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::{Mix, Model};

    const VGG: Workload = Workload::Model(Model::Vgg16);

    #[test]
    fn labels_have_load_rate_and_calls_in_flight() {
        assert_eq!(Cell::closed(64, 32).label(), "64 B × 32");
        let skew = Workload::Mix(Mix::Skew);
        assert_eq!(Cell { load: skew, inflight: 8, rate: Some(500.0) }.label(), "skew × 8 at 500/s");
    }

    #[test]
    fn the_calls_of_a_set_are_concurrent() {
        let cell = |inflight| Cell { load: VGG, inflight, rate: None };
        assert_eq!(cell(8).concurrency(), (1, 8));
        assert_eq!(Cell::closed(64, 8).concurrency(), (8, 1));
        let blocks = Cell { load: Workload::Blocks, inflight: 16, rate: None };
        assert_eq!((blocks.concurrency(), blocks.load.most_messages()), ((1, 16), 4096));
    }

    #[test]
    fn a_cell_beyond_a_mode_has_a_reason() {
        let limit = Cell::closed(2047 << 20, 1);
        assert!(Mode::all().iter().all(|mode| limit.beyond(*mode).is_none()));
        let beyond = Cell::closed(3 << 30, 1);
        assert!(beyond.beyond(Mode::GrpcTcp).is_some_and(|reason| reason.contains("2047 MiB")));
        assert_eq!(beyond.beyond(Mode::Memcpy), None);
    }

    #[test]
    fn an_open_loop_has_bounded_calls_and_bytes() {
        let calls = |bytes| open_loop_inflight(Workload::Size(bytes));
        assert_eq!([calls(1), calls(64 << 10), calls(1 << 20), calls(1 << 30)], [1024, 1024, 256, 1]);
        assert_eq!(open_loop_inflight(VGG), 1);
    }
}

#[cfg(test)]
mod direction_tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        for direction in Direction::value_variants() {
            assert_eq!(Direction::from_str(direction.name(), false), Ok(*direction));
        }
    }

    #[test]
    fn only_modes_that_carry_tensors_lack_the_direction_down() {
        for mode in Mode::all() {
            assert_eq!(Direction::Down.is_for(*mode), !mode.carries_tensors(), "{mode}");
            assert!(Direction::Up.is_for(*mode));
        }
    }
}

#[cfg(test)]
mod connections_tests {
    use super::*;

    #[test]
    fn counts_double_and_end_with_the_largest() {
        assert_eq!(counts(1), [1]);
        assert_eq!(counts(8), [1, 2, 4, 8]);
        assert_eq!(counts(100), [1, 2, 4, 8, 16, 32, 64, 100]);
        assert_eq!(counts(MAX_CONNECTIONS as usize).len(), 15);
    }
}
