//! Checks that several ranks train as one does: the losses of both, step by step.
//!
//! Both trainings have the same samples in each step. They are not equal bit by bit, because the sums of the gradients have another
//! order, and the difference grows with the steps. So the losses of the first steps are compared.

use serde::Serialize;

use crate::failure::Error;
use crate::options::Options;
use crate::processes::run_ranks;
use crate::results::Training;

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
pub(crate) fn check(ranks: usize, job: &Options) -> Result<Check, Error> {
    let (one, several) = (run_ranks(1, job)?.into_training()?, run_ranks(ranks, job)?.into_training()?);
    if one.losses.is_empty() || one.losses.len() != several.losses.len() {
        let (one, several) = (one.losses.len(), several.losses.len());
        return Err(format!("1 rank made {one} steps and {ranks} ranks made {several}").into());
    }
    let compared = one.losses.len().min(STEPS);
    let mut difference = 0.0_f64;
    for (step, (first, second)) in one.losses.iter().zip(&several.losses).take(compared).enumerate() {
        let share = (first - second).abs() / first.abs();
        // A loss that is not a number fails too.
        if share.is_nan() || share > TOLERANCE {
            return Err(format!(
                "in step {step} the loss of 1 rank is {first} and that of {ranks} ranks {second}; rounding explains a \
                 difference of {TOLERANCE} of it"
            )
            .into());
        }
        difference = difference.max(share);
    }
    Ok(Check { one, several, compared, difference, tolerance: TOLERANCE })
}

impl Check {
    /// Returns the text of a comparison of one rank and several.
    pub(crate) fn text(&self) -> String {
        format!(
            "{}\n{}\nThe losses of 1 rank and of {} differ by {:.1e} of the loss at most, in the first {} steps ({:.0e} is allowed).\n",
            self.one.text(),
            self.several.text(),
            self.several.ranks,
            self.difference,
            self.compared,
            self.tolerance
        )
    }
}
