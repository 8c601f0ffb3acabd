//! The cells of a run, with the loads to measure in each, and the check that the machine has the memory for them.

use tonic_rdma_commands::{Failure, units};

use super::load::Load;
use super::mode::TransferMode;
use super::options::ParameterServerOptions;
use crate::measure::machine::memory::available;
use crate::workload::{Model, Variable};

/// A model, and the numbers of servers that hold it and of workers that train it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TrainingCell {
    pub(crate) model: Model,
    pub(crate) servers: usize,
    pub(crate) workers: usize,
}

impl TrainingCell {
    /// Returns the bytes of all variables.
    pub(crate) fn bytes(&self) -> u64 {
        self.model.variables().iter().map(Variable::bytes).sum()
    }

    /// Returns the cell's name for people.
    pub(crate) fn label(&self) -> String {
        let plural = if self.workers == 1 { "" } else { "s" };
        let servers = if self.servers == 1 { String::new() } else { format!(", {} servers", self.servers) };
        format!("{}, {} worker{plural}{servers}", self.model.name(), self.workers)
    }
}

/// A cell of the plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Planned {
    pub(crate) cell: TrainingCell,
    /// The loads to measure, in the same processes.
    pub(crate) loads: Vec<Load>,
    /// The reason why the cell can't be measured.
    pub(crate) skipped: Option<String>,
}

/// Returns the cells that `options` ask for. Cells beyond the memory are skipped. It is an error if all cells are.
pub(crate) fn cells(options: &ParameterServerOptions) -> Result<Vec<Planned>, Failure> {
    let mut wanted = Vec::new();
    for model in options.models() {
        for workers in &options.workers.0 {
            let servers = options.servers.beside(*workers);
            let cell = TrainingCell { model, servers, workers: *workers };
            wanted.push((cell, options.loads(model, *workers)?));
        }
    }
    plan(wanted, &options.modes(), available())
}

fn plan(
    wanted: Vec<(TrainingCell, Vec<Load>)>,
    modes: &[TransferMode],
    available: Option<u64>,
) -> Result<Vec<Planned>, Failure> {
    let planned: Vec<Planned> = wanted
        .into_iter()
        .map(|(cell, loads)| {
            let lacking = available.filter(|available| needed(cell, modes) > *available);
            let skipped = lacking.map(|available| {
                format!(
                    "it needs about {} of memory and {} are available",
                    units::rough_size(needed(cell, modes)),
                    units::rough_size(available)
                )
            });
            Planned { cell, loads, skipped }
        })
        .collect();
    let fits = planned.iter().any(|it| it.skipped.is_none());
    match planned.first().filter(|_| !fits) {
        Some(Planned { cell, skipped: Some(reason), .. }) => {
            Err(Failure::usage(format!("{}: {reason}: take fewer workers or a smaller model", cell.label())))
        }
        _ => Ok(planned),
    }
}

/// Returns the memory that all processes of a cell need together at most. Workers hold their own tensors, and servers
/// hold the variables once. Slots
/// exist twice, one set for each direction. The mode that needs most memory for messages in flight adds to this, in one
/// direction at a time.
fn needed(cell: TrainingCell, modes: &[TransferMode]) -> u64 {
    let (bytes, workers) = (cell.bytes(), cell.workers as u64);
    let held = bytes * (1 + workers);
    let slots = if modes.iter().any(|mode| mode.uses_slots()) { 2 * bytes * workers } else { 0 };
    let in_flight = |mode: &TransferMode| match mode {
        // The encoded message, and the receiver's buffer, which may have to grow.
        TransferMode::GrpcTcp
        | TransferMode::GrpcRdma
        | TransferMode::GrpcRdmaGather
        | TransferMode::GrpcNative
        | TransferMode::GrpcNativeGather => 3 * bytes * workers,
        // Copies at the server and at the worker, which are kept for the next mini-batch.
        TransferMode::RdmaCp => 2 * bytes * workers,
        TransferMode::RdmaZerocp => 0,
    };
    held + slots + modes.iter().map(in_flight).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn cells_beyond_the_memory_are_skipped_with_both_figures() {
        let plan = |workers: &[usize], modes: &[TransferMode], available| {
            let cell = |workers: &usize| TrainingCell { model: Model::Vgg16, servers: 1, workers: *workers };
            plan(workers.iter().map(|workers| (cell(workers), vec![Load::NONE])).collect(), modes, available)
        };
        let planned = plan(&[1, 8], &TransferMode::ALL, Some(8 * GIB)).unwrap();
        assert_eq!((planned.len(), &planned[0].skipped), (2, &None));
        let reason = planned[1].skipped.as_deref().unwrap();
        assert!(reason.contains("24.5 GiB") && reason.contains("8.00 GiB are available"), "{reason}");
        let refusal = plan(&[8], &TransferMode::ALL, Some(8 * GIB)).unwrap_err().to_string();
        assert!(refusal.contains("vgg16, 8 workers: it needs") && refusal.contains("fewer"), "{refusal}");
        plan(&[8], &TransferMode::ALL, None).unwrap();
        let lean = plan(&[8], &[TransferMode::RdmaZerocp], Some(13 * GIB)).unwrap();
        assert_eq!(lean[0].skipped, None);
    }
}
