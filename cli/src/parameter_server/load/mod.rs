//! The computing of a worker between its pull and its push, and the settings for it.

mod compute;
mod scale;

use std::time::Duration;

use serde::Serialize;

pub(crate) use self::compute::{Compute, Computing};
pub(crate) use self::scale::ComputeScale;

/// The computing of each mini-batch: its kind, batch and time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Load {
    pub(crate) compute: Compute,
    /// Samples of a worker's mini-batch. Nothing depends on them if workers do not compute.
    pub(crate) batch: Option<u32>,
    /// Computing time of a worker's mini-batch.
    pub(crate) time: Duration,
}

impl Load {
    /// The load of workers that only pull and push.
    pub(crate) const NONE: Self = Self { compute: Compute::None, batch: None, time: Duration::ZERO };

    /// Returns what a worker does between its pull and its push.
    pub(crate) fn computing(&self) -> Computing {
        Computing { compute: self.compute, nanos: self.time.as_nanos() as u64 }
    }

    /// Returns the load for people, such as `batch 32, wait`, or `None` without computing.
    pub(crate) fn label(&self) -> Option<String> {
        self.batch.map(|batch| format!("batch {batch}, {}", self.compute.name()))
    }
}
