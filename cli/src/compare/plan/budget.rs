//! How long each mode has in each cell, so that a run for which nobody said so ends in time.

use std::time::Duration;

use super::cell::Cell;

/// Calls that every mode makes in every cell at least, however long they take.
pub(super) const MIN_ROUNDS: u32 = 3;

/// What a run is made to take, with what can be estimated of it: a default run then ends within 90 s and a quick one
/// within 15 s, start and hiccups included.
const DEFAULT: f64 = 66.0;
const QUICK: f64 = 10.5;

/// Bounds of the time for a mode in a cell: below, it would be noise, and above, nothing more comes of it.
const LEAST: Duration = Duration::from_millis(20);
const MOST: Duration = Duration::from_secs(2);

/// Warm-up, as a share of the time that counts.
const WARM_UP: f64 = 0.1;

/// What an operation costs in the slowest mode, roughly: seconds for a message, and for each of its bytes.
const MESSAGE: f64 = 100e-6;
const BYTE: f64 = 1e-9;

/// Operations outside the time that counts: two of which every byte is checked, each as good as two, and the first.
const OUTSIDE: f64 = 5.0;

/// The time for each of `modes` modes in each of `cells`, so that a run ends within 90 s, a `quick` one within 15 s. Where
/// that can't be, as with very large payloads or very many cells, it is as short as makes sense.
pub(crate) fn duration(cells: &[Cell], modes: usize, quick: bool) -> Duration {
    let budget = if quick { QUICK } else { DEFAULT };
    let fits = |duration: Duration| total(cells, modes, duration) <= budget;
    let (mut least, mut most) = (LEAST, MOST);
    if fits(most) {
        return most;
    }
    // The estimate only grows with the duration, so halving the range finds where it meets the budget.
    while most - least > Duration::from_millis(1) {
        let middle = (least + most) / 2;
        if fits(middle) { least = middle } else { most = middle }
    }
    least
}

/// Seconds that a run takes if each mode has `duration` in each cell.
fn total(cells: &[Cell], modes: usize, duration: Duration) -> f64 {
    cells.iter().map(|cell| modes as f64 * slot(*cell, duration.as_secs_f64())).sum()
}

/// Seconds of one mode in one cell.
fn slot(cell: Cell, duration: f64) -> f64 {
    let operation = cell.load.messages() as f64 * MESSAGE + cell.load.bytes() as f64 * BYTE;
    let (callers, _) = cell.concurrency();
    // Each caller makes one operation in each round at least.
    let shortest = f64::from(MIN_ROUNDS) * operation * callers as f64;
    let timed = match cell.rate {
        None => duration.max(shortest),
        // A mode that falls behind is waited for, once more as long.
        Some(_) => 2.0 * duration,
    };
    timed + (WARM_UP * duration).max(operation) + OUTSIDE * operation
}

#[cfg(test)]
mod tests {
    use super::super::cell::Load;
    use super::*;
    use crate::compare::plan::{DEFAULT_CELLS, QUICK_CELLS};
    use crate::workload::Workload;

    #[test]
    fn a_run_that_nobody_narrowed_fits_however_many_modes_there_are() {
        for modes in 1..=9 {
            let (default, quick) =
                (duration(&DEFAULT_CELLS, modes, false), duration(&QUICK_CELLS, modes, true));
            assert!(total(&DEFAULT_CELLS, modes, default) <= DEFAULT, "{modes}: {default:?}");
            assert!(total(&QUICK_CELLS, modes, quick) <= QUICK, "{modes}: {quick:?}");
            // Long enough for some hundred operations of the slowest mode, but for the largest payloads.
            assert!(default > Duration::from_millis(600) && quick > Duration::from_millis(150), "{modes}");
        }
    }

    #[test]
    fn more_cells_have_less_time_each_within_bounds() {
        let cells = |count| vec![Cell::closed(64, 1); count];
        assert_eq!(duration(&cells(1), 1, true), MOST);
        assert!(duration(&cells(20), 4, true) > duration(&cells(60), 4, true));
        assert_eq!(duration(&cells(10_000), 4, false), LEAST);
    }

    #[test]
    fn what_takes_long_by_itself_leaves_less_for_others() {
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
