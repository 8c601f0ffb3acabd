//! Where a rank is in its operations.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::error::Place;

/// The operation and the step of this rank, and the rank that it waits for. The engine writes them, and calls of other ranks
/// read them. The numbers are for error messages, so that a reader may see those of two neighbouring steps.
#[derive(Debug)]
pub(crate) struct Position {
    operation: AtomicU64,
    step: AtomicU32,
    steps: AtomicU32,
    waits_for: AtomicU32,
}

impl Position {
    const NONE: u32 = u32::MAX;

    /// Says where this rank is, and which rank of its group it waits for.
    pub(crate) fn set(&self, place: Place, waits_for: Option<usize>) {
        self.operation.store(place.operation, Ordering::Relaxed);
        self.step.store(place.step, Ordering::Relaxed);
        self.steps.store(place.steps, Ordering::Relaxed);
        let waits_for = waits_for.and_then(|rank| u32::try_from(rank).ok()).unwrap_or(Self::NONE);
        self.waits_for.store(waits_for, Ordering::Relaxed);
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
        match self.waits_for.load(Ordering::Relaxed) {
            Self::NONE => None,
            rank => Some(rank as usize),
        }
    }
}

impl Default for Position {
    fn default() -> Self {
        Self {
            operation: AtomicU64::new(0),
            step: AtomicU32::new(0),
            steps: AtomicU32::new(0),
            waits_for: AtomicU32::new(Self::NONE),
        }
    }
}
