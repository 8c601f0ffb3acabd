//! The rows of a run: figures of each mode with each model, number of workers and load.

use serde::Serialize;

use crate::parameter_server::cells::TrainingCell;
use crate::parameter_server::load::{Compute, Load};
use crate::parameter_server::mode::TransferMode;
use crate::parameter_server::processes::session::Outcome;

/// The figures of one mode with one model, one number of workers and one load.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct TrainingRow {
    pub(crate) mode: TransferMode,
    pub(crate) model: &'static str,
    pub(crate) servers: usize,
    pub(crate) workers: usize,
    /// What workers do between pull and push, with which batch, and for how long.
    pub(crate) compute: Compute,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) batch: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) compute_ms: Option<f64>,
    /// Mini-batches a second of all workers, divided by those of a single process that computes and transfers nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) times_local: Option<f64>,
    /// Number of the model's variables, and their bytes. A mini-batch moves these bytes in each direction.
    pub(crate) variables: usize,
    pub(crate) bytes: u64,
    /// Measured mini-batches of all workers.
    pub(crate) minibatches: u64,
    /// Mini-batches a second of all workers together: the median of the turns.
    pub(crate) minibatches_per_s: f64,
    /// Median time of a worker's mini-batch.
    pub(crate) p50_ms: f64,
    pub(crate) max_ms: f64,
    /// Variables and gradients, both directions together.
    pub(crate) gbytes_per_s: f64,
    /// CPU time of all processes.
    pub(crate) cpu_ms_per_minibatch: f64,
    /// The reason why the mode was not measured in this cell.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) skipped: Option<String>,
    #[serde(skip)]
    pub(crate) cell: TrainingCell,
    #[serde(skip)]
    pub(crate) load: Load,
}

impl TrainingRow {
    /// Makes a row that was not measured, with the reason.
    pub(crate) fn skipped(mode: TransferMode, cell: TrainingCell, load: Load, reason: &str) -> Self {
        let row = TrainingTally::new(mode, cell, load, 0).row();
        Self { skipped: Some(reason.to_owned()), ..row }
    }

    /// Returns whether both rows are modes in the same cell with the same load.
    pub(crate) fn is_beside(&self, other: &Self) -> bool {
        (self.cell, self.load) == (other.cell, other.load)
    }

    /// Returns the mini-batches a second of this row divided by those of `mode` beside it, or `None` without a
    /// row to compare with.
    pub(crate) fn times(&self, mode: TransferMode, rows: &[Self]) -> Option<f64> {
        let base = rows.iter().find(|row| row.mode == mode && row.is_beside(self))?.minibatches_per_s;
        (base > 0.0 && self.minibatches_per_s > 0.0).then(|| self.minibatches_per_s / base)
    }
}

/// The sum of one mode's turns in one cell.
#[derive(Debug)]
pub(crate) struct TrainingTally {
    mode: TransferMode,
    cell: TrainingCell,
    load: Load,
    steps: u32,
    nanos: Vec<u64>,
    /// Mini-batches a second of all workers, for each turn.
    rates: Vec<f64>,
    cpu_ms: f64,
}

impl TrainingTally {
    /// Makes a tally of turns of `steps` mini-batches.
    pub(crate) fn new(mode: TransferMode, cell: TrainingCell, load: Load, steps: u32) -> Self {
        Self { mode, cell, load, steps, nanos: Vec::new(), rates: Vec::new(), cpu_ms: 0.0 }
    }

    pub(crate) fn mode(&self) -> TransferMode {
        self.mode
    }

    pub(crate) fn steps(&self) -> u32 {
        self.steps
    }

    /// Adds a turn. The slowest worker determines the duration of the turn.
    pub(crate) fn add(&mut self, outcome: Outcome) {
        let longest = outcome.nanos.iter().map(|nanos| nanos.iter().sum::<u64>()).max().unwrap_or(0);
        let count: usize = outcome.nanos.iter().map(Vec::len).sum();
        if longest > 0 {
            self.rates.push(count as f64 * 1e9 / longest as f64);
        }
        self.cpu_ms += outcome.cpu.as_secs_f64() * 1e3;
        self.nanos.extend(outcome.nanos.into_iter().flatten());
    }

    pub(crate) fn row(mut self) -> TrainingRow {
        self.nanos.sort_unstable();
        self.rates.sort_unstable_by(f64::total_cmp);
        let bytes = self.cell.bytes();
        let minibatches = self.nanos.len() as u64;
        let minibatches_per_s = self.rates.get(self.rates.len() / 2).copied().unwrap_or(0.0);
        let computing = Some(self.load.time).filter(|_| self.load.compute != Compute::None);
        let times_local = computing.map(|time| minibatches_per_s * time.as_secs_f64());
        let millis = |nanos: Option<&u64>| nanos.map_or(0.0, |nanos| *nanos as f64 / 1e6);
        TrainingRow {
            mode: self.mode,
            model: self.cell.model.name(),
            servers: self.cell.servers,
            workers: self.cell.workers,
            compute: self.load.compute,
            batch: self.load.batch,
            compute_ms: computing.map(|time| time.as_nanos() as f64 / 1e6),
            times_local: times_local.filter(|times| *times > 0.0),
            variables: self.cell.model.variables().len(),
            bytes,
            minibatches,
            minibatches_per_s,
            p50_ms: millis(self.nanos.get(self.nanos.len() / 2)),
            max_ms: millis(self.nanos.last()),
            gbytes_per_s: minibatches_per_s * 2.0 * bytes as f64 / 1e9,
            cpu_ms_per_minibatch: if minibatches == 0 { 0.0 } else { self.cpu_ms / minibatches as f64 },
            skipped: None,
            cell: self.cell,
            load: self.load,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use std::time::Duration;

    use super::*;
    use crate::workload::Model;

    const CELL: TrainingCell = TrainingCell { model: Model::Gru, servers: 1, workers: 2 };
    const LOAD: Load = Load { compute: Compute::Wait, batch: Some(8), time: Duration::from_millis(10) };

    fn row(mode: TransferMode, load: Load, milliseconds: u64) -> TrainingRow {
        let mut tally = TrainingTally::new(mode, CELL, load, 2);
        // The median turn counts, and in it the slower worker.
        for factor in [1, 2, 9] {
            let nanos = |slower| vec![milliseconds * 1_000_000 * factor * slower; 2];
            let cpu = Duration::from_millis(8);
            tally.add(Outcome { nanos: vec![nanos(1), nanos(2)], cpu, checked: 0 });
        }
        tally.row()
    }

    #[test]
    fn a_row_is_the_median_of_its_turns() {
        let row = row(TransferMode::GrpcTcp, Load::NONE, 10);
        assert_eq!((row.minibatches, row.variables, row.bytes), (12, 11, 29_278_112));
        // Four mini-batches in 2 × 40 ms.
        assert!((row.minibatches_per_s - 50.0).abs() < 1e-9, "{row:?}");
        assert_eq!((row.p50_ms, row.max_ms, row.cpu_ms_per_minibatch), (40.0, 180.0, 2.0));
        assert!((row.gbytes_per_s - 50.0 * 2.0 * 29_278_112.0 / 1e9).abs() < 1e-9);
    }

    #[test]
    fn ratios_compare_measured_rows_of_the_same_cell() {
        let rows = [
            row(TransferMode::GrpcTcp, Load::NONE, 40),
            row(TransferMode::RdmaZerocp, Load::NONE, 10),
            row(TransferMode::RdmaZerocp, LOAD, 20),
        ];
        assert_eq!(rows[1].times(TransferMode::GrpcTcp, &rows), Some(4.0));
        assert_eq!(rows[1].times(TransferMode::GrpcRdma, &rows), None);
        assert_eq!(rows[2].times(TransferMode::GrpcTcp, &rows), None, "the loads differ");
        let other = TrainingCell { workers: 3, ..CELL };
        let skipped = TrainingRow::skipped(TransferMode::GrpcTcp, other, LOAD, "no memory");
        assert_eq!((skipped.times(TransferMode::GrpcTcp, &rows), skipped.minibatches), (None, 0));
        assert_eq!(serde_json::to_value(&skipped).unwrap()["skipped"], "no memory");
        assert_eq!(skipped.times_local, None);
        assert!(serde_json::to_value(&rows[0]).unwrap().get("skipped").is_none());
    }

    #[test]
    fn a_row_with_a_load_is_compared_with_computing_alone() {
        let row = row(TransferMode::GrpcTcp, LOAD, 20);
        // Four mini-batches in 2 × 80 ms, and one in 10 ms alone.
        assert_eq!((row.batch, row.compute_ms, row.times_local), (Some(8), Some(10.0), Some(0.25)));
        let json = serde_json::to_value(&row).unwrap();
        assert_eq!((&json["compute"], &json["batch"]), (&"wait".into(), &8.into()));
        let json = serde_json::to_value(super::tests::row(TransferMode::GrpcTcp, Load::NONE, 20)).unwrap();
        assert!(
            json["compute"] == "none" && json.get("batch").is_none() && json.get("times_local").is_none()
        );
    }
}
