//! The memory that a run needs, compared with the memory that the machine has.

use super::cell::{Cell, Load};
use super::direction::Direction;
use crate::compare::modes::mode::Mode;
use crate::compare::operations::layout::room;
use crate::measure::machine::memory::available;
use tonic_rdma_commands::{Failure, units};
use tonic_rdma_payload::content::VARIANTS;

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
        (Some(cell), Some(available)) if need(cell) > available => Err(Failure::usage(format!(
            "{} needs about {} of memory and {} are available: take a smaller size or fewer in flight",
            cell.label(),
            units::rough_size(need(cell)),
            units::rough_size(available),
        ))),
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
        Mode::GrpcTcp
        | Mode::GrpcTcpBusy
        | Mode::GrpcTcpTuned
        | Mode::GrpcUds
        | Mode::GrpcRdma
        | Mode::GrpcRdmaGather
        | Mode::GrpcNative => 0,
        // Registered memory to send from: a copy of the content.
        Mode::GrpcNativeGather => room(cell.load),
        // The places at the receiver, and registered memory to send from: the content, or copies of it.
        Mode::RdmaCp | Mode::RdmaZerocp | Mode::RdmaZerocpAwait => {
            let places = room(cell.load).saturating_mul(cell.inflight as u64);
            let sources = match cell.load {
                // Payloads that are moved into an operation have memory of their own.
                Load::Size(_) if mode.awaits() => room(cell.load).saturating_mul(VARIANTS as u64),
                Load::Size(_) | Load::Workload(_) => room(cell.load),
            };
            places.saturating_add(sources)
        }
        Mode::Memcpy => room(cell.load),
    }
}

/// Returns the memory of `mode`'s messages in flight.
fn in_flight(cell: Cell, mode: Mode) -> u64 {
    let calls = cell.load.largest_call().saturating_mul(cell.inflight as u64);
    let calls = match cell.load {
        Load::Workload(workload) if workload.is_set() => calls.min(workload.largest_operation()),
        _ => calls,
    };
    match mode {
        // The encoded message, and the receiver's buffer, which may have to grow; and one message that is kept for a
        // check of every byte.
        Mode::GrpcTcp
        | Mode::GrpcTcpBusy
        | Mode::GrpcTcpTuned
        | Mode::GrpcUds
        | Mode::GrpcRdma
        | Mode::GrpcRdmaGather
        | Mode::GrpcNative => calls.saturating_mul(3).saturating_add(cell.load.largest_call()),
        // Messages are sent from where they lie. They land in blocks, which may be larger than the messages.
        Mode::GrpcNativeGather => calls.saturating_mul(2).saturating_add(cell.load.largest_call()),
        Mode::RdmaCp | Mode::RdmaZerocp | Mode::RdmaZerocpAwait | Mode::Memcpy => 0,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use super::*;
    use crate::workload::{Model, Workload};

    const GIB: u64 = 1 << 30;

    #[test]
    fn cells_beyond_the_memory_are_refused_with_both_figures() {
        let cells = [Cell::closed(64, 1), Cell::closed(GIB, 512)];
        let refusal = fits(&cells, &Mode::ALL, Direction::Up, Some(8 * GIB)).unwrap_err().to_string();
        assert!(refusal.contains("1 GiB × 512 needs about 3082 GiB"), "{refusal}");
        assert!(refusal.contains("8.00 GiB are available"), "{refusal}");
        fits(&cells, &Mode::ALL, Direction::Up, None).unwrap();
        fits(&cells[..1], &Mode::ALL, Direction::Up, Some(8 * GIB)).unwrap();
        let (one, tcp) = ([Cell::closed(GIB, 1)], [Mode::GrpcTcp]);
        fits(&one, &tcp, Direction::Up, Some(5 * GIB)).unwrap();
        fits(&one, &tcp, Direction::Down, Some(6 * GIB)).unwrap();
        assert!(
            fits(&one, &tcp, Direction::Down, Some(5 * GIB)).unwrap_err().to_string().contains("6.00 GiB")
        );
    }

    #[test]
    fn no_payload_needs_more_than_a_few_times_its_size_in_any_one_mode() {
        for mode in Mode::ALL {
            for bytes in [256 << 20, GIB] {
                let times = if mode.awaits() { 6 } else { 5 };
                assert!(needed(Cell::closed(bytes, 1), &[mode]) <= times * bytes, "{mode}");
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
        let load = Load::Workload(Workload::Model(Model::Vgg16));
        let need = |inflight| needed(Cell { load, inflight, rate: None }, &[Mode::GrpcTcp]);
        let set = room(load);
        assert_eq!(need(1), set + (3 + 1) * (392 << 20));
        assert_eq!(need(1000), set + 3 * load.bytes() + (392 << 20));
    }
}
