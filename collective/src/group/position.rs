//! Where a rank is in its operations.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::error::Place;

/// The operation and the step of this rank, and the rank that it waits for. The engine writes them, and calls of other ranks
/// read them. The numbers are for error messages, so that a reader may see those of two neighbouring steps.
#[derive(Debug, Default)]
pub(crate) struct Position {
    operation: AtomicU64,
    step: AtomicU32,
    steps: AtomicU32,
    /// The rank that this one waits for, and one more; 0 if it waits for none.
    waits_for: AtomicU32,
}

impl Position {
    /// Says where this rank is, and which rank of its group it waits for.
    pub(crate) fn set(&self, place: Place, waits_for: Option<usize>) {
        self.operation.store(place.operation, Ordering::Relaxed);
        self.step.store(place.step, Ordering::Relaxed);
        self.steps.store(place.steps, Ordering::Relaxed);
        self.waits_for.store(waits_for.map_or(0, |rank| rank as u32 + 1), Ordering::Relaxed);
    }

    /// Returns the operation and step.
    pub(crate) fn place(&self) -> Place {
        Place {
            operation: self.operation.load(Ordering::Relaxed),
            step: self.step.load(Ordering::Relaxed),
            steps: self.steps.load(Ordering::Relaxed),
        }
    }

    /// Returns the rank of the group that this rank waits for.
    pub(crate) fn waits_for(&self) -> Option<usize> {
        self.waits_for.load(Ordering::Relaxed).checked_sub(1).map(|rank| rank as usize)
    }
}
