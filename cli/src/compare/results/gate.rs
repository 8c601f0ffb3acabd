//! `--at-least`: the ratio to grpc-tcp that modes over RDMA must reach for the command to succeed.

use tonic_rdma_commands::{Failure, units};

use super::row::{Ratio, Row};
use crate::compare::modes::mode::Mode;
use crate::compare::options::CompareOptions;
use crate::compare::plan::Plan;

/// Refuses a run that has nothing to compare, before the measuring.
pub(crate) fn check_plan(options: &CompareOptions, plan: &Plan) -> Result<(), Failure> {
    let Some(ratio) = options.at_least else { return Ok(()) };
    let refuse = |reason: &str| Err(Failure::usage(format!("--at-least {ratio}: {reason}")));
    if !plan.modes.contains(&Mode::GrpcTcp) {
        return refuse("--modes lacks grpc-tcp, which others are compared with");
    }
    if !plan.modes.iter().any(|mode| mode.uses_rdma()) {
        return refuse("--modes has no mode that uses RDMA");
    }
    if plan.is_open_loop() {
        return refuse("with --rate all modes have the throughput that is offered");
    }
    let comparable = |mode: Mode| plan.cells.iter().any(|cell| cell.beyond(mode).is_none());
    if !comparable(Mode::GrpcTcp) {
        return refuse("grpc-tcp can carry none of the payloads");
    }
    Ok(())
}

/// Fails if a mode that uses RDMA has less than `least` times the throughput of grpc-tcp in the same cell, and names
/// each such mode. Cells that one of the two modes can't carry are not compared.
pub(crate) fn check_rows(least: f64, rows: &[Row]) -> Result<(), Failure> {
    let uses_rdma = |row: &&Row| Mode::from_name(row.mode).is_some_and(Mode::uses_rdma);
    let short = |row: &Row| {
        let ratio = Ratio::of(row, rows).throughput.filter(|ratio| *ratio < least)?;
        Some(format!("{} at {}: {} times", row.mode, row.cell.label(), units::digits(ratio)))
    };
    let short: Vec<String> = rows.iter().filter(uses_rdma).filter_map(short).collect();
    if short.is_empty() {
        return Ok(());
    }
    let short = short.join("; ");
    Err(Failure::run(format!("less than {least} times the throughput of grpc-tcp: {short}")))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use super::super::row::sample_row;
    use super::*;
    use crate::compare::plan::cell::Cell;

    #[test]
    fn a_mode_below_the_ratio_is_named_with_cell_and_ratio() {
        let (small, large) = (Cell::closed(64, 1), Cell::closed(1 << 20, 8));
        let rows = [
            sample_row("grpc-tcp", small, 100.0),
            sample_row("grpc-uds", small, 1000.0),
            sample_row("grpc-rdma", small, 200.0),
            sample_row("rdma-zerocp", small, 1.0),
            sample_row("memcpy", small, 1000.0),
            sample_row("grpc-tcp", large, 100.0),
            sample_row("grpc-rdma", large, 50.0),
            sample_row("rdma-zerocp-await", large, 10_000.0),
        ];
        // A mode that is half as fast is not below one half.
        check_rows(0.5, &rows[..5]).unwrap();
        let failure = check_rows(0.5, &rows).unwrap_err().to_string();
        assert!(failure.ends_with("grpc-tcp: rdma-zerocp-await at 1 MiB × 8: 0.0100 times"), "{failure}");
        let failure = check_rows(2.5, &rows).unwrap_err().to_string();
        assert!(failure.contains("grpc-rdma at 64 B × 1: 0.50 times; grpc-rdma at 1 MiB × 8: 2.00 times"));
        assert!(!failure.contains("uds") && !failure.contains("memcpy"), "{failure}");
    }

    #[test]
    fn skipped_cells_are_not_compared() {
        let cell = Cell::closed(3 << 30, 1);
        let mut tcp = sample_row("grpc-tcp", cell, 100.0);
        (tcp.ops, tcp.ops_per_s, tcp.p50_us) = (0, 0.0, 0.0);
        check_rows(0.5, &[tcp, sample_row("rdma-zerocp", cell, 1e9)]).unwrap();
    }
}
