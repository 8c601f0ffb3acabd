//! Checks that several ranks train as one does: the losses of both, step by step.
//!
//! Both trainings have the same samples in each step. They are not equal bit by bit, because the sums of the gradients have another
//! order, and the difference grows with the steps. So the losses of the first steps are compared.

use serde::Serialize;

use crate::failure::Failure;
use crate::job::{Job, Outcome, TrainJob, Training};
use crate::processes;

/// The number of steps that are compared.
const STEPS: usize = 100;

/// The largest difference of two losses that is due to rounding, as a share of the loss.
const TOLERANCE: f64 = 1e-3;

/// Two trainings and their difference.
#[derive(Debug, Serialize)]
pub(crate) struct Check {
    pub(crate) one: Training,
    pub(crate) several: Training,
    /// The number of steps that were compared.
    pub(crate) compared: usize,
    /// The largest difference of the losses of one step, as a share of the loss.
    pub(crate) difference: f64,
    pub(crate) tolerance: f64,
}

/// Trains with one rank and with `ranks`, and compares the losses.
pub(crate) fn check(ranks: usize, job: &TrainJob) -> Result<Check, Failure> {
    let train = |ranks| match processes::run(ranks, &Job::Train(job.clone()))? {
        Outcome::Train(training) => Ok(training),
        Outcome::Overlap(_) => Err(Failure::run("rank 0 reported the result of another job")),
    };
    let (one, several) = (train(1)?, train(ranks)?);
    if one.losses.is_empty() || one.losses.len() != several.losses.len() {
        let (one, several) = (one.losses.len(), several.losses.len());
        return Err(Failure::run(format!("1 rank made {one} steps and {ranks} ranks made {several}")));
    }
    let compared = one.losses.len().min(STEPS);
    let mut difference = 0.0_f64;
    for (step, (first, second)) in one.losses.iter().zip(&several.losses).take(compared).enumerate() {
        let share = (first - second).abs() / first.abs();
        // A loss that is not a number fails too.
        if share.is_nan() || share > TOLERANCE {
            return Err(Failure::run(format!(
                "in step {step} the loss of 1 rank is {first} and that of {ranks} ranks {second}; rounding explains a \
                 difference of {TOLERANCE} of it"
            )));
        }
        difference = difference.max(share);
    }
    Ok(Check { one, several, compared, difference, tolerance: TOLERANCE })
}
