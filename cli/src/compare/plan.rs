//! What is measured, for how long, and in which order.

use std::time::Duration;

use crate::args::{CompareOptions, List};
use crate::compare::cell::{Cell, Load};
use crate::compare::mode::Mode;
use crate::compare::open_loop::MAX_ARRIVALS;
use crate::failure::Failure;
use crate::units;

/// Largest payload: with it the message stays below the 2 GiB that protobuf implementations end at.
pub(crate) const MAX_BYTES: u64 = 2047 << 20;

/// Calls that every mode makes in every cell at least, however long they take.
const MIN_ROUNDS: u32 = 3;

/// Cells of a run that nobody narrowed: small calls alone and many at once, then one large one at a time.
const DEFAULT_CELLS: [Cell; 9] = [
    Cell::closed(64, 1),
    Cell::closed(64, 32),
    Cell::closed(8 << 10, 64),
    Cell::closed(8 << 10, 512),
    Cell::closed(64 << 10, 1),
    Cell::closed(1 << 20, 1),
    Cell::closed(4 << 20, 1),
    Cell::closed(16 << 20, 1),
    Cell::closed(64 << 20, 1),
];

const QUICK_CELLS: [Cell; 6] = [
    Cell::closed(64, 1),
    Cell::closed(64, 32),
    Cell::closed(8 << 10, 64),
    Cell::closed(64 << 10, 1),
    Cell::closed(1 << 20, 1),
    Cell::closed(16 << 20, 1),
];

/// Payload of an open loop that nobody narrowed: any other would be too much for one rate or too little for another.
const OPEN_LOOP_LOAD: Load = Load::Size(64);

/// Time for all timed slices together. Warm-up, full checks and overrunning slices come on top, so that a default
/// run ends well within 90 s and a quick one within 15 s.
const DEFAULT_BUDGET: Duration = Duration::from_secs(60);
const QUICK_BUDGET: Duration = Duration::from_secs(8);

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
        let cells = cells(options);
        let slots = u32::try_from(modes.len() * cells.len()).unwrap_or(u32::MAX).max(1);
        let duration = options.duration.unwrap_or_else(|| {
            let budget = if options.quick { QUICK_BUDGET } else { DEFAULT_BUDGET };
            (budget / slots).clamp(Duration::from_millis(100), Duration::from_secs(2))
        });
        let plan = Self { modes, cells, duration };
        plan.check_memory(available_memory())?;
        Ok(plan)
    }

    /// Whether operations begin when they are due, in all cells.
    pub(crate) fn is_open_loop(&self) -> bool {
        self.cells.iter().any(|cell| cell.rate.is_some())
    }

    /// Length of one mode's turn: short against the drift of a machine, long against the hand-over. Turns of an open loop are
    /// long, so that queues can build up, but no longer than their schedule has room for.
    pub(crate) fn slice(&self, cell: Cell) -> Duration {
        match cell.rate {
            None => (self.duration / 8).clamp(Duration::from_millis(20), Duration::from_millis(200)),
            Some(rate) => {
                // A whole number of operations, so that what is offered is the rate, however low.
                let third = self.duration.as_secs_f64() / f64::from(MIN_ROUNDS);
                Duration::from_secs_f64((rate * third).ceil().clamp(1.0, MAX_ARRIVALS) / rate)
            }
        }
    }

    /// Turns of each mode in a cell.
    pub(crate) fn rounds(&self, cell: Cell) -> u32 {
        let turns = self.duration.as_secs_f64() / self.slice(cell).as_secs_f64();
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
                "{} needs about {} of memory and {} are available: take a smaller size or fewer in flight",
                cell.label(),
                units::rough_size(cell.memory()),
                units::rough_size(available),
            ))),
            _ => Ok(()),
        }
    }
}

/// Every load with every number in flight at every rate.
fn cells(options: &CompareOptions) -> Vec<Cell> {
    let CompareOptions { sizes, workload, inflight, rate, .. } = options;
    let preset: &[Cell] = if options.quick { &QUICK_CELLS } else { &DEFAULT_CELLS };
    if sizes.is_none() && workload.is_none() && inflight.is_none() && rate.is_none() {
        return preset.to_vec();
    }
    let mut loads: Vec<Load> =
        items(sizes).map(Load::Size).chain(items(workload).map(Load::Workload)).collect();
    if loads.is_empty() {
        loads = match rate {
            Some(_) => vec![OPEN_LOOP_LOAD],
            None => preset.iter().filter(|cell| cell.inflight == 1).map(|cell| cell.load).collect(),
        };
    }
    let rates: Vec<Option<f64>> = if rate.is_some() { items(rate).map(Some).collect() } else { vec![None] };
    let mut cells = Vec::new();
    for load in loads {
        let inflights = match (inflight, rate) {
            (Some(_), _) => items(inflight).collect(),
            (None, Some(_)) => vec![load.open_loop_inflight()],
            (None, None) => vec![1],
        };
        let each = inflights.iter().flat_map(|inflight| rates.iter().map(move |rate| (*inflight, *rate)));
        cells.extend(each.map(|(inflight, rate)| Cell { load, inflight, rate }));
    }
    cells
}

fn items<T: Copy>(list: &Option<List<T>>) -> impl Iterator<Item = T> {
    list.iter().flat_map(|list| list.0.iter().copied())
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
    use crate::workload::Workload;

    fn plan(duration: Duration) -> Plan {
        Plan { modes: Mode::ALL.to_vec(), cells: DEFAULT_CELLS.to_vec(), duration }
    }

    fn asked(arguments: &[&str]) -> Vec<Cell> {
        cells(&CompareOptions::of(arguments))
    }

    #[test]
    fn lists_give_the_cross_product() {
        let cell = Cell::closed;
        assert_eq!(asked(&[]), DEFAULT_CELLS);
        assert_eq!(asked(&["--quick"]), QUICK_CELLS);
        let all = asked(&["--sizes", "64,4096", "--inflight", "1,8"]);
        assert_eq!(all, [cell(64, 1), cell(64, 8), cell(4096, 1), cell(4096, 8)]);
        assert_eq!(asked(&["--quick", "--sizes", "7"]), [cell(7, 1)]);
        assert!(asked(&["--quick", "--inflight", "4"]).iter().all(|cell| cell.inflight == 4));
    }

    #[test]
    fn workloads_stand_beside_sizes_and_rates_apply_to_all() {
        let skew = Load::Workload(Workload::from_name("skew").unwrap());
        let gru = Load::Workload(Workload::from_name("gru").unwrap());
        let cell = |load, inflight, rate| Cell { load, inflight, rate };
        assert_eq!(asked(&["--workload", "skew"]), [cell(skew, 1, None)]);
        assert_eq!(asked(&["--workload", "gru", "--sizes", "64"]), [Cell::closed(64, 1), cell(gru, 1, None)]);
        let rates = asked(&["--rate", "100,2000"]);
        let small = |rate| cell(Load::Size(64), 1024, Some(rate));
        assert_eq!(rates, [small(100.0), small(2000.0)]);
        let bounded = asked(&["--rate", "5", "--workload", "skew,gru", "--inflight", "3"]);
        assert_eq!(bounded, [cell(skew, 3, Some(5.0)), cell(gru, 3, Some(5.0))]);
    }

    #[test]
    fn every_mode_gets_its_time_and_leads_in_turn() {
        for millis in [1, 100, 200, 2000, 60_000] {
            let plan = plan(Duration::from_millis(millis));
            for rate in [None, Some(0.1), Some(1000.0), Some(1e6)] {
                let cell = Cell { rate, ..Cell::closed(64, 1) };
                assert!(plan.rounds(cell) >= MIN_ROUNDS);
                assert!(plan.slice(cell) * plan.rounds(cell) >= plan.duration);
                let arrivals = rate.unwrap_or(1.0) * plan.slice(cell).as_secs_f64();
                assert!(rate.is_none() || (0.99..=MAX_ARRIVALS).contains(&arrivals), "{arrivals}");
            }
        }
        let plan = plan(Duration::from_secs(1));
        assert_eq!(plan.order(0).collect::<Vec<_>>(), [0, 1, 2, 3]);
        assert_eq!(plan.order(5).collect::<Vec<_>>(), [1, 2, 3, 0]);
    }

    #[test]
    fn a_cell_that_does_not_fit_is_refused_by_name() {
        let plan = Plan { cells: vec![Cell::closed(1 << 30, 512)], ..plan(Duration::from_secs(1)) };
        let refusal = plan.check_memory(Some(8 << 30)).unwrap_err().to_string();
        assert!(refusal.contains("1 GiB × 512"), "{refusal}");
        plan.check_memory(None).unwrap();
    }
}
