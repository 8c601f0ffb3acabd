//! Samples a second against the number of ranks: the figure of Baidu's article "Bringing HPC techniques to deep learning" (2017).
//!
//! Baidu ran 300 steps with 32 samples for each GPU, on 1 to 40 GPUs. Here a rank is a process that computes with one thread. Each
//! rank has its own samples, so more ranks compute more samples in one step, and with a free communication the samples a second
//! grow as the ranks do, up to the number of cores.

use std::io::Write;

use serde::Serialize;

use crate::failure::Failure;
use crate::job::{Job, Outcome, Spread, TrainJob, Training};
use crate::model::Architecture;
use crate::processes;

/// The result of all numbers of ranks.
#[derive(Debug, Serialize)]
pub(crate) struct Scaling {
    pub(crate) cores: usize,
    pub(crate) model: Architecture,
    pub(crate) parameters: usize,
    pub(crate) rank_batch: usize,
    pub(crate) steps: usize,
    pub(crate) turns: usize,
    pub(crate) rows: Vec<Row>,
}

/// The result of one number of ranks.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Row {
    pub(crate) ranks: usize,
    /// Samples a second of all ranks together, over the turns.
    pub(crate) samples_per_s: Spread,
    /// The medians of a step and of its wait for gradients, over the turns.
    pub(crate) step_ms: f64,
    pub(crate) wait_ms: f64,
}

impl Scaling {
    /// Returns the row of one rank, if it was measured.
    pub(crate) fn one(&self) -> Option<&Row> {
        self.rows.iter().find(|row| row.ranks == 1)
    }

    /// Returns the samples a second of a row as a multiple of those of one rank.
    pub(crate) fn ratio(&self, row: &Row) -> Option<f64> {
        Some(row.samples_per_s.median / self.one()?.samples_per_s.median)
    }
}

/// Trains with each number of ranks, in turns. The batch of `job` is that of one rank.
pub(crate) fn measure(ranks: &[usize], turns: usize, job: &TrainJob) -> Result<Scaling, Failure> {
    let mut trainings: Vec<(usize, Vec<Training>)> = ranks.iter().map(|ranks| (*ranks, Vec::new())).collect();
    for turn in 1..=turns {
        for (ranks, trainings) in &mut trainings {
            let training = train(*ranks, job)?;
            // stderr may be closed. The result has the same values.
            let _ = writeln!(
                std::io::stderr(),
                "turn {turn}: {ranks} ranks, {:.0} samples/s",
                training.samples_per_s
            );
            trainings.push(training);
        }
    }
    let parameters = trainings.iter().flat_map(|(_, all)| all).map(|training| training.parameters).next();
    Ok(Scaling {
        cores: processes::cores(),
        model: job.model,
        parameters: parameters.unwrap_or(0),
        rank_batch: job.batch,
        steps: job.steps.unwrap_or(0),
        turns,
        rows: trainings.into_iter().map(|(ranks, all)| row(ranks, &all)).collect(),
    })
}

/// Trains with this number of ranks, each with the batch of `job`.
fn train(ranks: usize, job: &TrainJob) -> Result<Training, Failure> {
    let job = TrainJob { batch: job.batch.saturating_mul(ranks), ..job.clone() };
    match processes::run(ranks, &Job::Train(job))? {
        Outcome::Train(training) => Ok(training),
        Outcome::Overlap(_) => Err(Failure::run("rank 0 reported the result of another job")),
    }
}

fn row(ranks: usize, trainings: &[Training]) -> Row {
    let spread = |value: fn(&Training) -> f64| Spread::of(trainings.iter().map(value).collect());
    Row {
        ranks,
        samples_per_s: spread(|training| training.samples_per_s),
        step_ms: spread(|training| training.step_ms).median,
        wait_ms: spread(|training| training.wait_ms).median,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn sample() -> Scaling {
        let row = |ranks, median| Row {
            ranks,
            samples_per_s: Spread { median, quartiles: [median - 10.0, median + 10.0] },
            step_ms: 30.0,
            wait_ms: 2.0,
        };
        Scaling {
            cores: 2,
            model: Architecture::Cnn,
            parameters: 147_146,
            rank_batch: 32,
            steps: 300,
            turns: 3,
            rows: vec![row(1, 1000.0), row(2, 1800.0), row(4, 1700.0)],
        }
    }

    #[test]
    fn a_row_is_compared_with_one_rank() {
        let mut scaling = sample();
        assert_eq!(scaling.ratio(&scaling.rows[1]), Some(1.8));
        scaling.rows.remove(0);
        assert_eq!(scaling.ratio(&scaling.rows[0]), None);
    }
}
