//! The cells of a run, and the check that the machine has the memory for them.

use super::mode::TransferMode;
use super::options::ParameterServerOptions;
use crate::failure::Failure;
use crate::measure::machine::memory::available;
use crate::units;
use crate::workload::{Model, Variable};

/// A model, and the number of workers that train it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TrainingCell {
    pub(crate) model: Model,
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
        format!("{}, {} worker{plural}", self.model.name(), self.workers)
    }
}

/// A cell of the plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Planned {
    pub(crate) cell: TrainingCell,
    /// The reason why the cell can't be measured.
    pub(crate) skipped: Option<String>,
}

/// Returns the cells that `options` ask for. Cells beyond the memory are skipped. It is an error if all cells are.
pub(crate) fn cells(options: &ParameterServerOptions) -> Result<Vec<Planned>, Failure> {
    plan(&options.models(), &options.workers.0, &options.modes(), available())
}

fn plan(
    models: &[Model],
    workers: &[usize],
    modes: &[TransferMode],
    available: Option<u64>,
) -> Result<Vec<Planned>, Failure> {
    let cells = models.iter().flat_map(|model| workers.iter().map(|workers| (*model, *workers)));
    let planned: Vec<Planned> = cells
        .map(|(model, workers)| {
            let cell = TrainingCell { model, workers };
            let lacking = available.filter(|available| needed(cell, modes) > *available);
            let skipped = lacking.map(|available| {
                format!(
                    "it needs about {} of memory and {} are available",
                    units::rough_size(needed(cell, modes)),
                    units::rough_size(available)
                )
            });
            Planned { cell, skipped }
        })
        .collect();
    let fits = planned.iter().any(|it| it.skipped.is_none());
    match planned.first().filter(|_| !fits) {
        Some(Planned { cell, skipped: Some(reason) }) => {
            Err(Failure::usage(format!("{}: {reason}: take fewer workers or a smaller model", cell.label())))
        }
        _ => Ok(planned),
    }
}

/// Returns the memory that all processes of a cell need together at most. Every process holds its own tensors. Slots
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
        let plan = |workers: &[usize], modes, available| plan(&[Model::Vgg16], workers, modes, available);
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
