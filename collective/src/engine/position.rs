//! Where a rank is: for other ranks that look for the cause of a deadline.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::Place;

/// The operation, the step and the rank that an engine waits for. Other threads read it at any time. The values are for messages,
/// and need not belong together.
#[derive(Debug)]
pub(crate) struct Position {
    operation: AtomicU64,
    /// The step, and the number of steps.
    step: AtomicU64,
    /// The rank plus one; 0 for none.
    waits_for: AtomicU64,
}

impl Position {
    pub(super) fn new() -> Self {
        Self { operation: AtomicU64::new(0), step: AtomicU64::new(0), waits_for: AtomicU64::new(0) }
    }

    pub(super) fn set(&self, place: Place, waits_for: Option<usize>) {
        self.operation.store(place.operation, Ordering::Relaxed);
        self.step.store(u64::from(place.step) << 32 | u64::from(place.steps), Ordering::Relaxed);
        self.waits_for.store(waits_for.map_or(0, |rank| rank as u64 + 1), Ordering::Relaxed);
    }

    /// Returns the place, and the rank that the engine waits for.
    pub(crate) fn read(&self) -> (Place, Option<usize>) {
        let step = self.step.load(Ordering::Relaxed);
        let place = Place {
            operation: self.operation.load(Ordering::Relaxed),
            step: (step >> 32) as u32,
            steps: step as u32,
        };
        let waits_for = self.waits_for.load(Ordering::Relaxed).checked_sub(1);
        (place, waits_for.map(|rank| rank as usize))
    }
}
