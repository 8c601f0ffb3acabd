//! What is measured, for how long, and in which order.

use std::time::Duration;

use crate::args::{CompareOptions, List};
use crate::compare::mode::Mode;
use crate::failure::Failure;
use crate::units;

/// Largest payload: with it the message stays below the 2 GiB that protobuf implementations end at.
pub(crate) const MAX_BYTES: u64 = 2047 << 20;

/// Most calls in flight at once.
pub(crate) const MAX_INFLIGHT: usize = 16_384;

/// Calls that every mode makes in every cell at least, however long they take.
const MIN_ROUNDS: u32 = 3;

/// Cells of a run that nobody narrowed: small calls alone and many at once, then one large one at a time.
const DEFAULT_CELLS: [Cell; 9] = [
    Cell::new(64, 1),
    Cell::new(64, 32),
    Cell::new(8 << 10, 64),
    Cell::new(8 << 10, 512),
    Cell::new(64 << 10, 1),
    Cell::new(1 << 20, 1),
    Cell::new(4 << 20, 1),
    Cell::new(16 << 20, 1),
    Cell::new(64 << 20, 1),
];

const QUICK_CELLS: [Cell; 6] = [
    Cell::new(64, 1),
    Cell::new(64, 32),
    Cell::new(8 << 10, 64),
    Cell::new(64 << 10, 1),
    Cell::new(1 << 20, 1),
    Cell::new(16 << 20, 1),
];

/// Time for all timed slices together. Warm-up, full checks and overrunning slices come on top, so that a default
/// run ends well within 90 s and a quick one within 15 s.
const DEFAULT_BUDGET: Duration = Duration::from_secs(60);
const QUICK_BUDGET: Duration = Duration::from_secs(8);

/// One combination of payload size and calls in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cell {
    /// Payload of a call.
    pub(crate) bytes: u64,
    /// Calls in flight at once, on one connection.
    pub(crate) inflight: usize,
}

impl Cell {
    const fn new(bytes: u64, inflight: usize) -> Self {
        Self { bytes, inflight }
    }

    /// The cell's name in tables and messages: `64 B × 32`.
    pub(crate) fn label(self) -> String {
        format!("{} × {}", units::size(self.bytes), self.inflight)
    }

    /// Memory that both processes need for the cell at the worst: the payload, the encoded message, and the
    /// receiver's buffer, which grows by doubling.
    fn memory(self) -> u64 {
        self.bytes.saturating_mul(self.inflight as u64).saturating_mul(4)
    }
}

/// A whole run.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// Modes in the order of the table.
    pub(crate) modes: Vec<Mode>,
    /// Cells in the order of the table.
    pub(crate) cells: Vec<Cell>,
    /// Time for each mode in each cell.
    pub(crate) duration: Duration,
}

impl Plan {
    /// The run that `options` ask for, if the machine has the memory for it.
    pub(crate) fn new(options: &CompareOptions) -> Result<Self, Failure> {
        let modes = options.modes.clone().map_or_else(|| Mode::ALL.to_vec(), |list| list.0);
        let cells = cells(options.sizes.as_ref(), options.inflight.as_ref(), options.quick);
        let slots = u32::try_from(modes.len() * cells.len()).unwrap_or(u32::MAX).max(1);
        let duration = options.duration.unwrap_or_else(|| {
            let budget = if options.quick { QUICK_BUDGET } else { DEFAULT_BUDGET };
            (budget / slots).clamp(Duration::from_millis(100), Duration::from_secs(2))
        });
        let plan = Self { modes, cells, duration };
        plan.check_memory(available_memory())?;
        Ok(plan)
    }

    /// Length of one mode's turn: short against the drift of a machine, long against the hand-over.
    pub(crate) fn slice(&self) -> Duration {
        (self.duration / 8).clamp(Duration::from_millis(20), Duration::from_millis(200))
    }

    /// Turns of each mode in a cell.
    pub(crate) fn rounds(&self) -> u32 {
        let turns = self.duration.as_secs_f64() / self.slice().as_secs_f64();
        (turns.ceil() as u32).max(MIN_ROUNDS)
    }

    /// Rounds after which a cell may end once every mode has had its time.
    pub(crate) fn min_rounds(&self) -> u32 {
        MIN_ROUNDS
    }

    /// The modes in the order of round `round`: each leads in turn.
    pub(crate) fn order(&self, round: u32) -> impl Iterator<Item = usize> + use<> {
        let modes = self.modes.len();
        (0..modes).map(move |turn| (turn + round as usize) % modes)
    }

    fn check_memory(&self, available: Option<u64>) -> Result<(), Failure> {
        let largest = self.cells.iter().max_by_key(|cell| cell.memory());
        match (largest, available) {
            (Some(cell), Some(available)) if cell.memory() > available => Err(Failure::usage(format!(
                "{} in flight needs about {} of memory and {} are available: take a smaller size or fewer in flight",
                cell.label(),
                units::rough_size(cell.memory()),
                units::rough_size(available),
            ))),
            _ => Ok(()),
        }
    }
}

fn cells(sizes: Option<&List<u64>>, inflight: Option<&List<usize>>, quick: bool) -> Vec<Cell> {
    let preset: &[Cell] = if quick { &QUICK_CELLS } else { &DEFAULT_CELLS };
    if sizes.is_none() && inflight.is_none() {
        return preset.to_vec();
    }
    let sizes = sizes.map_or_else(
        || preset.iter().filter(|cell| cell.inflight == 1).map(|cell| cell.bytes).collect(),
        |list| list.0.clone(),
    );
    let inflight = inflight.map_or_else(|| vec![1], |list| list.0.clone());
    sizes.iter().flat_map(|bytes| inflight.iter().map(|calls| Cell::new(*bytes, *calls))).collect()
}

/// `MemAvailable` of /proc/meminfo, in bytes.
fn available_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use super::*;

    fn plan(duration: Duration) -> Plan {
        Plan { modes: Mode::ALL.to_vec(), cells: DEFAULT_CELLS.to_vec(), duration }
    }

    #[test]
    fn lists_give_the_cross_product() {
        let all = cells(Some(&List(vec![64, 4096])), Some(&List(vec![1, 8])), false);
        assert_eq!(all, [Cell::new(64, 1), Cell::new(64, 8), Cell::new(4096, 1), Cell::new(4096, 8)]);
        assert_eq!(cells(Some(&List(vec![7])), None, true), [Cell::new(7, 1)]);
        assert!(cells(None, Some(&List(vec![4])), true).iter().all(|cell| cell.inflight == 4));
    }

    #[test]
    fn every_mode_gets_its_time_and_leads_in_turn() {
        for millis in [1, 100, 200, 2000, 60_000] {
            let plan = plan(Duration::from_millis(millis));
            assert!(plan.rounds() >= MIN_ROUNDS);
            assert!(plan.slice() * plan.rounds() >= plan.duration);
        }
        let plan = plan(Duration::from_secs(1));
        assert_eq!(plan.order(0).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(plan.order(4).collect::<Vec<_>>(), [1, 2, 0]);
    }

    #[test]
    fn a_cell_that_does_not_fit_is_refused_by_name() {
        let plan = Plan { cells: vec![Cell::new(1 << 30, 512)], ..plan(Duration::from_secs(1)) };
        let refusal = plan.check_memory(Some(8 << 30)).unwrap_err().to_string();
        assert!(refusal.contains("1 GiB × 512"), "{refusal}");
        plan.check_memory(None).unwrap();
    }
}
