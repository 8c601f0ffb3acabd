//! The time of each mode in each cell, such that a run without `--duration` ends in time.

use std::time::Duration;

use super::cell::Cell;

/// The least number of turns of every mode in every cell, even if the turns take long.
pub(super) const MIN_ROUNDS: u32 = 3;

/// Estimated seconds of a run: a default run then ends within 90 s and a quick one within 15 s, including start and
/// delays.
const DEFAULT: f64 = 66.0;
const QUICK: f64 = 10.5;

/// Bounds of the time for a mode in a cell: less would be noise, and more gives no better figures.
const LEAST: Duration = Duration::from_millis(20);
const MOST: Duration = Duration::from_secs(2);

/// Warm-up, as a share of the measured time.
const WARM_UP: f64 = 0.1;

/// Rough cost of an operation in the slowest mode: seconds for a message, and for each byte.
const MESSAGE: f64 = 100e-6;
const BYTE: f64 = 1e-9;

/// Operations outside the measured time: the first one, and two with a check of every byte, which take twice as long.
const OUTSIDE: f64 = 5.0;

/// Returns the time for each of `modes` modes in each of `cells`, such that a run ends within 90 s, or within 15 s if
/// `quick`. With very large payloads or very many cells a run takes longer; the time is then the shortest that makes
/// sense.
pub(crate) fn duration(cells: &[Cell], modes: usize, quick: bool) -> Duration {
    let budget = if quick { QUICK } else { DEFAULT };
    let fits = |duration: Duration| total(cells, modes, duration) <= budget;
    let (mut least, mut most) = (LEAST, MOST);
    if fits(most) {
        return most;
    }
    // The estimate only grows with the duration, so bisection finds where it meets the budget.
    while most - least > Duration::from_millis(1) {
        let middle = (least + most) / 2;
        if fits(middle) { least = middle } else { most = middle }
    }
    least
}

/// Returns the time of each of `turns` turns of `--connections`, such that a run ends within 90 s, or within 15 s if
/// `quick`, unless it makes thousands of connections.
pub(crate) fn turn(turns: usize, quick: bool) -> Duration {
    let budget = if quick { QUICK } else { DEFAULT };
    let each = budget / (1.0 + WARM_UP) / turns.max(1) as f64;
    Duration::from_secs_f64(each).clamp(LEAST, MOST)
}

/// Returns the seconds that a run takes if each mode has `duration` in each cell.
fn total(cells: &[Cell], modes: usize, duration: Duration) -> f64 {
    cells.iter().map(|cell| modes as f64 * slot(*cell, duration.as_secs_f64())).sum()
}

/// Returns the seconds of one mode in one cell.
fn slot(cell: Cell, duration: f64) -> f64 {
    let operation = cell.load.messages() as f64 * MESSAGE + cell.load.bytes() as f64 * BYTE;
    let (callers, _) = cell.concurrency();
    // Each caller makes at least one operation in each round.
    let shortest = f64::from(MIN_ROUNDS) * operation * callers as f64;
    let timed = match cell.rate {
        None => duration.max(shortest),
        // The run waits for a mode that falls behind, at most for another `duration`.
        Some(_) => 2.0 * duration,
    };
    timed + (WARM_UP * duration).max(operation) + OUTSIDE * operation
}

#[cfg(test)]
mod tests {
    use super::super::cell::Load;
    use super::*;
    use crate::compare::modes::mode::Mode;
    use crate::compare::plan::{DEFAULT_CELLS, QUICK_CELLS};
    use crate::measure::process::runtime::Flavour;
    use crate::workload::Workload;

    #[test]
    fn a_default_run_fits_with_any_number_of_modes() {
        for modes in 1..=Mode::default_list(false, Flavour::IdlePolling).len() {
            let (default, quick) =
                (duration(&DEFAULT_CELLS, modes, false), duration(&QUICK_CELLS, modes, true));
            assert!(total(&DEFAULT_CELLS, modes, default) <= DEFAULT, "{modes}: {default:?}");
            assert!(total(&QUICK_CELLS, modes, quick) <= QUICK, "{modes}: {quick:?}");
            // The time is enough for some hundred operations of the slowest mode, except with the largest payloads.
            assert!(default > Duration::from_millis(450) && quick > Duration::from_millis(100), "{modes}");
        }
    }

    #[test]
    fn more_cells_mean_less_time_for_each_within_bounds() {
        let cells = |count| vec![Cell::closed(64, 1); count];
        assert_eq!(duration(&cells(1), 1, true), MOST);
        assert!(duration(&cells(20), 4, true) > duration(&cells(60), 4, true));
        assert_eq!(duration(&cells(10_000), 4, false), LEAST);
    }

    #[test]
    fn slow_cells_leave_less_time_for_others() {
        let long = |load| {
            let mut cells = vec![Cell::closed(64, 1); 20];
            cells.push(Cell { load, inflight: 1, rate: None });
            duration(&cells, 4, false)
        };
        assert!(long(Load::Size(1 << 30)) < long(Load::Size(1 << 20)));
        assert!(long(Load::Workload(Workload::Blocks)) < long(Load::Size(1 << 20)));
        let open = Cell { rate: Some(10.0), ..Cell::closed(64, 1) };
        assert!(duration(&[open; 20], 4, false) < duration(&[Cell::closed(64, 1); 20], 4, false));
    }
}
