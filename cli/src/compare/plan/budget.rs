//! The time of each mode in each cell, such that a run without `--duration` ends in time.

use std::time::Duration;

use tonic_rdma_commands::Failure;
use tonic_rdma_payload::content::VARIANTS;

use crate::compare::modes::mode::Mode;
use crate::compare::operations::room;
use crate::compare::plan::cell::{Cell, Direction};
use crate::measure::machine::{available, lacking};
use crate::workload::Workload;

/// The least number of turns of every mode in every cell, even if the turns take long.
pub(crate) const MIN_ROUNDS: u32 = 3;

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
    let operation = cell.load.most_messages() as f64 * MESSAGE + cell.load.bytes() as f64 * BYTE;
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

/// Refuses cells that need more memory than is available now. This precedes the measuring.
pub(crate) fn check(cells: &[Cell], modes: &[Mode], direction: Direction) -> Result<(), Failure> {
    fits(cells, modes, direction, available())
}

fn fits(cells: &[Cell], modes: &[Mode], direction: Direction, available: Option<u64>) -> Result<(), Failure> {
    let need = |cell: &Cell| match direction {
        Direction::Up => needed(*cell, modes),
        // The server also has the content, to send it from there.
        Direction::Down => needed(*cell, modes).saturating_add(room(cell.load)),
    };
    match (cells.iter().max_by_key(|cell| need(cell)), available) {
        (Some(cell), Some(available)) if need(cell) > available => {
            let lacking = lacking(need(cell), available);
            let text = format!("{} {lacking}: take a smaller size or fewer in flight", cell.label());
            Err(Failure::usage(text))
        }
        _ => Ok(()),
    }
}

/// Returns the memory that both processes need for `cell` at most. The modes share the content, and only one mode at a
/// time has messages in flight.
fn needed(cell: Cell, modes: &[Mode]) -> u64 {
    let taking_part = || modes.iter().filter(|mode| cell.beyond(**mode).is_none());
    let kept = taking_part().map(|mode| kept(cell, *mode)).fold(0, u64::saturating_add);
    let in_flight = taking_part().map(|mode| in_flight(cell, *mode)).max().unwrap_or(0);
    room(cell.load).saturating_add(kept).saturating_add(in_flight)
}

/// Returns the memory that `mode` keeps during the whole cell, including the turns of other modes.
fn kept(cell: Cell, mode: Mode) -> u64 {
    match mode {
        // Registered memory to send from, a copy of the content; and the copy of memcpy.
        Mode::GrpcNativeGather | Mode::Memcpy => room(cell.load),
        // The places at the receiver, and registered memory to send from: the content, or copies of it.
        Mode::RdmaCp | Mode::RdmaZerocp | Mode::RdmaZerocpAwait => {
            let places = room(cell.load).saturating_mul(cell.inflight as u64);
            let sources = match cell.load {
                // Payloads that are moved into an operation have memory of their own.
                Workload::Size(_) if mode.awaits() => room(cell.load).saturating_mul(VARIANTS as u64),
                _ => room(cell.load),
            };
            places.saturating_add(sources)
        }
        _ => 0,
    }
}

/// Returns the memory of `mode`'s messages in flight.
fn in_flight(cell: Cell, mode: Mode) -> u64 {
    let calls = cell.load.largest_message().saturating_mul(cell.inflight as u64);
    let calls = if cell.load.is_set() { calls.min(cell.load.largest_operation()) } else { calls };
    match mode {
        // Messages are sent from where they lie. They land in blocks, which may be larger than the messages.
        Mode::GrpcNativeGather => calls.saturating_mul(2).saturating_add(cell.load.largest_message()),
        // The encoded message, and the receiver's buffer, which may have to grow; and one message that is kept for a
        // check of every byte.
        mode if mode.is_grpc() => calls.saturating_mul(3).saturating_add(cell.load.largest_message()),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::modes::mode::Mode;
    use crate::compare::plan::preset;
    use tonic_rdma_commands::Flavour;

    #[test]
    fn a_default_run_fits_with_any_number_of_modes() {
        let (default_cells, quick_cells) = (preset(false, false), preset(false, true));
        for modes in 1..=Mode::default_list(false, Flavour::IdlePolling).len() {
            let (default, quick) =
                (duration(&default_cells, modes, false), duration(&quick_cells, modes, true));
            assert!(total(&default_cells, modes, default) <= DEFAULT, "{modes}: {default:?}");
            assert!(total(&quick_cells, modes, quick) <= QUICK, "{modes}: {quick:?}");
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
        assert!(long(Workload::Size(1 << 30)) < long(Workload::Size(1 << 20)));
        assert!(long(Workload::Blocks) < long(Workload::Size(1 << 20)));
        let open = Cell { rate: Some(10.0), ..Cell::closed(64, 1) };
        assert!(duration(&[open; 20], 4, false) < duration(&[Cell::closed(64, 1); 20], 4, false));
    }
}

#[cfg(test)]
mod memory_tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use super::*;
    use crate::workload::Model;

    const GIB: u64 = 1 << 30;

    #[test]
    fn cells_beyond_the_memory_are_refused_with_both_figures() {
        let cells = [Cell::closed(64, 1), Cell::closed(GIB, 512)];
        let refusal = fits(&cells, Mode::all(), Direction::Up, Some(8 * GIB)).unwrap_err().to_string();
        assert!(refusal.contains("1 GiB × 512 needs about 3082 GiB"), "{refusal}");
        assert!(refusal.contains("8.00 GiB are available"), "{refusal}");
        fits(&cells, Mode::all(), Direction::Up, None).unwrap();
        fits(&cells[..1], Mode::all(), Direction::Up, Some(8 * GIB)).unwrap();
        let (one, tcp) = ([Cell::closed(GIB, 1)], [Mode::GrpcTcp]);
        fits(&one, &tcp, Direction::Up, Some(5 * GIB)).unwrap();
        fits(&one, &tcp, Direction::Down, Some(6 * GIB)).unwrap();
        assert!(
            fits(&one, &tcp, Direction::Down, Some(5 * GIB)).unwrap_err().to_string().contains("6.00 GiB")
        );
    }

    #[test]
    fn no_payload_needs_more_than_a_few_times_its_size_in_any_one_mode() {
        for mode in Mode::all() {
            for bytes in [256 << 20, GIB] {
                let times = if mode.awaits() { 6 } else { 5 };
                assert!(needed(Cell::closed(bytes, 1), &[*mode]) <= times * bytes, "{mode}");
            }
        }
        assert_eq!(needed(Cell::closed(3 * GIB, 1), &[Mode::Memcpy]), 6 * GIB);
        assert_eq!(needed(Cell::closed(3 * GIB, 1), &[Mode::RdmaZerocp]), 9 * GIB);
    }

    #[test]
    fn modes_that_skip_a_cell_need_no_memory_for_it() {
        assert_eq!(needed(Cell::closed(3 * GIB, 1), &[Mode::GrpcTcp, Mode::Memcpy]), 6 * GIB);
    }

    #[test]
    fn the_memory_of_a_set_is_bounded_by_the_set() {
        let load = Workload::Model(Model::Vgg16);
        let need = |inflight| needed(Cell { load, inflight, rate: None }, &[Mode::GrpcTcp]);
        let set = room(load);
        assert_eq!(need(1), set + (3 + 1) * (392 << 20));
        assert_eq!(need(1000), set + 3 * load.bytes() + (392 << 20));
    }
}
