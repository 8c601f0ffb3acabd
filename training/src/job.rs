//! Jobs: what all ranks of one group do, and the results. A job and its result travel between processes as JSON.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::model::Architecture;

/// The work of all ranks of one group.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Job {
    Train(TrainJob),
    Overlap(OverlapJob),
}

/// A training.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct TrainJob {
    pub(crate) model: Architecture,
    /// The folder of the samples.
    pub(crate) data: PathBuf,
    pub(crate) epochs: usize,
    /// The largest number of steps, over all epochs.
    pub(crate) steps: Option<usize>,
    /// Samples of one step, of all ranks together.
    pub(crate) batch: usize,
    pub(crate) rate: f32,
    pub(crate) momentum: f32,
    pub(crate) seed: u64,
    /// Whether each epoch ends with a test.
    pub(crate) test: bool,
    /// The number of steps before the measured ones. They come in addition to `steps`.
    pub(crate) warm_up: usize,
}

/// A measurement of the overlap.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct OverlapJob {
    pub(crate) compute: Compute,
    pub(crate) step_ms: Option<f64>,
    /// Measured steps of each kind.
    pub(crate) steps: usize,
}

/// Where an imitated step computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Compute {
    /// On an accelerator, which writes the gradients to their places itself: the core waits and is free
    Wait,
    /// On an accelerator: the core copies each gradient to its place, and else waits and is free
    Copy,
    /// On the cores that communicate: products of matrices
    Cores,
}

/// The result of a job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Outcome {
    Train(Training),
    Overlap(Overlap),
}

/// The result of a training.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Training {
    pub(crate) ranks: usize,
    pub(crate) cores: usize,
    pub(crate) model: Architecture,
    pub(crate) parameters: usize,
    /// Samples of one step, of all ranks together.
    pub(crate) batch: usize,
    /// The mean loss of the samples of each step, over all ranks.
    pub(crate) losses: Vec<f64>,
    pub(crate) epochs: Vec<Epoch>,
    /// Samples a second of all ranks together, over all measured steps.
    pub(crate) samples_per_s: f64,
    /// The median duration of a step at rank 0, and of its wait for gradients after its own computation.
    pub(crate) step_ms: f64,
    pub(crate) wait_ms: f64,
    /// A hash of all weights at the end, equal on all ranks.
    pub(crate) weights: String,
    /// The plans and the buckets that the communicator chose.
    pub(crate) plans: String,
    pub(crate) fusion: String,
}

/// The result of one epoch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Epoch {
    pub(crate) steps: usize,
    /// The mean loss of the steps.
    pub(crate) loss: f64,
    /// The share of the test samples that the network puts into their class.
    pub(crate) accuracy: Option<f64>,
    pub(crate) samples_per_s: f64,
}

/// The result of a measurement of the overlap. Durations are those of the slowest rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Overlap {
    pub(crate) ranks: usize,
    pub(crate) cores: usize,
    pub(crate) compute: Compute,
    pub(crate) tensors: usize,
    pub(crate) bytes: usize,
    /// The intended duration of the computation, forward and backward.
    pub(crate) step_ms: f64,
    /// The communication alone, before the steps.
    pub(crate) communication_ms: Spread,
    pub(crate) without_communication_ms: Spread,
    pub(crate) without_overlap_ms: Spread,
    pub(crate) with_overlap_ms: Spread,
    /// The share of the communication that was hidden: (without overlap − with overlap) / (without overlap − without
    /// communication), of the medians. `None` if communication takes no measurable time.
    pub(crate) hidden: Option<f64>,
    /// The report of the communicator itself.
    pub(crate) fusion: String,
}

/// The median and the quartiles of several values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) quartiles: [f64; 2],
}

impl Spread {
    /// Returns the spread of `values`, by linear interpolation between neighbours. All are 0 if there is no value.
    pub(crate) fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let quantile = |share: f64| {
            let place = share * values.len().saturating_sub(1) as f64;
            let at = |index: f64| values.get(index as usize).copied().unwrap_or(0.0);
            at(place.floor()) + (at(place.ceil()) - at(place.floor())) * place.fract()
        };
        Self { median: quantile(0.5), quartiles: [quantile(0.25), quantile(0.75)] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_is_of_sorted_values() {
        let spread = Spread::of(vec![4.0, 1.0, 3.0, 2.0, 5.0]);
        assert_eq!(spread, Spread { median: 3.0, quartiles: [2.0, 4.0] });
        assert_eq!(Spread::of(vec![1.0, 2.0]).median, 1.5);
        assert_eq!(Spread::of(vec![7.0]).quartiles, [7.0, 7.0]);
        assert_eq!(Spread::of(Vec::new()), Spread::default());
    }

    #[test]
    fn a_job_keeps_its_values_in_json() {
        let job = Job::Overlap(OverlapJob { compute: Compute::Cores, step_ms: Some(0.1), steps: 3 });
        assert_eq!(serde_json::from_str::<Job>(&serde_json::to_string(&job).unwrap()).unwrap(), job);
    }
}
