//! One combination of what is sent, how much of it at once, and when.

use crate::compare::modes::mode::Mode;
use crate::units;
use crate::workload::Workload;

/// Largest payload that is measured; the machine's memory ends sooner, and so may a mode's messages.
pub(crate) const MAX_BYTES: u64 = 1 << 40;

/// Most calls in flight at once.
pub(crate) const MAX_INFLIGHT: usize = 16_384;

/// Most calls in flight in an open loop for which nobody said how many there may be, and what they may hold. With some
/// thousands of small calls at once h2 takes a peer for hostile and ends the connection (`too_many_data_frames`).
const OPEN_LOOP_CALLS: usize = 1024;
const OPEN_LOOP_BYTES: u64 = 256 << 20;

/// What an operation sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Load {
    /// One payload of this many bytes.
    Size(u64),
    /// What the workload's table says.
    Workload(Workload),
}

/// One row of every mode.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Cell {
    pub(crate) load: Load,
    /// Calls in flight at once, on one connection: as many in a closed loop, no more in an open one.
    pub(crate) inflight: usize,
    /// Operations offered each second, whatever becomes of them (open loop); without it each begins when one has
    /// ended (closed loop).
    pub(crate) rate: Option<f64>,
}

impl Load {
    /// Bytes of an operation, on average.
    pub(crate) fn bytes(self) -> u64 {
        match self {
            Self::Size(bytes) => bytes,
            Self::Workload(workload) => workload.bytes(),
        }
    }

    /// The workload's name, if it is one.
    pub(crate) const fn workload(self) -> Option<&'static str> {
        match self {
            Self::Size(_) => None,
            Self::Workload(workload) => Some(workload.name()),
        }
    }

    /// The name in tables and messages: `64 B`, `skew`.
    pub(crate) fn label(self) -> String {
        match self {
            Self::Size(bytes) => units::size(bytes),
            Self::Workload(workload) => workload.name().to_owned(),
        }
    }

    /// Whether an operation is many calls.
    const fn is_set(self) -> bool {
        matches!(self, Self::Workload(workload) if workload.is_set())
    }

    /// Messages of an operation.
    pub(crate) fn messages(self) -> u64 {
        match self {
            Self::Size(_) => 1,
            Self::Workload(workload) => workload.most_messages(),
        }
    }

    /// Bytes of the largest call.
    pub(crate) fn largest_call(self) -> u64 {
        match self {
            Self::Size(bytes) => bytes,
            Self::Workload(workload) => workload.largest_message(),
        }
    }

    /// Most calls in flight in an open loop, unless the command line says otherwise. Sets are one call at a time, as in a
    /// closed loop.
    pub(crate) fn open_loop_inflight(self) -> usize {
        if self.is_set() {
            return 1;
        }
        let calls = OPEN_LOOP_BYTES / self.largest_call().max(1);
        usize::try_from(calls).unwrap_or(OPEN_LOOP_CALLS).clamp(1, OPEN_LOOP_CALLS)
    }
}

impl Cell {
    /// A closed loop of payloads of `bytes`.
    pub(crate) const fn closed(bytes: u64, inflight: usize) -> Self {
        Self { load: Load::Size(bytes), inflight, rate: None }
    }

    /// The cell's name in tables and messages: `64 B × 32`, `skew × 1 at 500/s`.
    pub(crate) fn label(self) -> String {
        let rate = self.rate.map(|rate| format!(" at {}/s", units::count(rate))).unwrap_or_default();
        format!("{} × {}{rate}", self.load.label(), self.inflight)
    }

    /// Operations under way at once, and calls that each of them makes at once. Sets go one after the other, as
    /// mini-batches do, and their calls side by side.
    pub(crate) const fn concurrency(self) -> (usize, usize) {
        if self.load.is_set() { (1, self.inflight) } else { (self.inflight, 1) }
    }

    /// Why `mode` can't carry the cell's messages, if it can't.
    pub(crate) fn beyond(self, mode: Mode) -> Option<String> {
        let (limit, reason) = mode.limit()?;
        (self.load.largest_call() > limit)
            .then(|| format!("it carries messages up to {} ({reason})", units::size(limit)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::{Mix, Model};

    const VGG: Load = Load::Workload(Workload::Model(Model::Vgg16));

    #[test]
    fn labels_say_what_when_and_how_many() {
        assert_eq!(Cell::closed(64, 32).label(), "64 B × 32");
        let skew = Load::Workload(Workload::Mix(Mix::Skew));
        assert_eq!(Cell { load: skew, inflight: 8, rate: Some(500.0) }.label(), "skew × 8 at 500/s");
    }

    #[test]
    fn a_set_s_calls_are_side_by_side() {
        let cell = |inflight| Cell { load: VGG, inflight, rate: None };
        assert_eq!(cell(8).concurrency(), (1, 8));
        assert_eq!(Cell::closed(64, 8).concurrency(), (8, 1));
        let blocks = Cell { load: Load::Workload(Workload::Blocks), inflight: 16, rate: None };
        assert_eq!((blocks.concurrency(), blocks.load.messages()), ((1, 16), 4096));
    }

    #[test]
    fn what_a_mode_can_t_carry_has_a_reason() {
        let limit = Cell::closed(2047 << 20, 1);
        assert!(Mode::ALL.into_iter().all(|mode| limit.beyond(mode).is_none()));
        let beyond = Cell::closed(3 << 30, 1);
        assert!(beyond.beyond(Mode::GrpcTcp).is_some_and(|reason| reason.contains("2047 MiB")));
        assert_eq!(beyond.beyond(Mode::Memcpy), None);
    }

    #[test]
    fn an_open_loop_holds_no_more_than_its_share() {
        let calls = |bytes| Load::Size(bytes).open_loop_inflight();
        assert_eq!([calls(1), calls(64 << 10), calls(1 << 20), calls(1 << 30)], [1024, 1024, 256, 1]);
        assert_eq!(VGG.open_loop_inflight(), 1);
    }
}
