//! Samples a second against the number of ranks: the figure of Baidu's article "Bringing HPC techniques to deep learning" (2017).
//!
//! Baidu ran 300 steps with 32 samples for each GPU, on 1 to 40 GPUs. Here a rank is a process that computes with one thread. Each
//! rank has its own samples, so more ranks compute more samples in one step, and with a free communication the samples a second
//! grow as the ranks do, up to the number of cores.

use std::io::Write;

use serde::Serialize;
use tonic_rdma_commands::plot::{Plot, Series};
use tonic_rdma_commands::table::{dash, grid, times};

use crate::failure::Error;
use crate::network::Model;
use crate::options::Options;
use crate::processes;
use crate::results::{Spread, Training, percent, plot};

/// The result of all numbers of ranks.
#[derive(Debug, Serialize)]
pub(crate) struct Scaling {
    pub(crate) cores: usize,
    pub(crate) model: Model,
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

/// Trains with each number of ranks that the options name, in turns.
pub(crate) fn measure(options: &Options) -> Result<Scaling, Error> {
    let mut trainings: Vec<Vec<Training>> = options.scaling.iter().map(|_| Vec::new()).collect();
    for turn in 1..=options.turns {
        for (ranks, trainings) in options.scaling.iter().zip(&mut trainings) {
            let training = processes::run_ranks(*ranks, &options.of_scaling(*ranks))?.into_training()?;
            // stderr may be closed. The result has the same values.
            let _ = writeln!(
                std::io::stderr(),
                "turn {turn}: {ranks} ranks, {:.0} samples/s",
                training.samples_per_s
            );
            trainings.push(training);
        }
    }
    let of_one = options.of_scaling(1);
    let row = |(ranks, trainings): (&usize, &Vec<Training>)| {
        let spread = |value: fn(&Training) -> f64| Spread::of(trainings.iter().map(value).collect());
        Row {
            ranks: *ranks,
            samples_per_s: spread(|training| training.samples_per_s),
            step_ms: spread(|training| training.step_ms).median,
            wait_ms: spread(|training| training.wait_ms).median,
        }
    };
    Ok(Scaling {
        cores: processes::cores(),
        model: options.model,
        parameters: options.model.parameters(),
        rank_batch: of_one.batch,
        steps: of_one.steps.unwrap_or(0) - of_one.warm_up(),
        turns: options.turns,
        rows: options.scaling.iter().zip(&trainings).map(row).collect(),
    })
}

/// Returns the text of a scaling.
pub(crate) fn text(scaling: &Scaling) -> String {
    let row = |row: &Row| {
        let (ratio, [lower, upper]) = (scaling.ratio(row), row.samples_per_s.quartiles);
        vec![
            row.ranks.to_string(),
            format!("{:.0}", row.samples_per_s.median),
            format!("{lower:.0} – {upper:.0}"),
            times(ratio),
            ratio.map_or_else(dash, |ratio| percent(ratio / row.ranks as f64)),
            format!("{:.2} ms", row.step_ms),
            format!("{:.2} ms", row.wait_ms),
        ]
    };
    let headings =
        ["ranks", "samples/s", "quartiles", "× 1 rank", "of linear", "step", "waits for gradients"];
    let table = grid(&headings, [scaling.rows.iter().map(row).collect()]);
    let beyond = scaling.rows.iter().any(|row| row.ranks > scaling.cores);
    format!(
        "{:?} of {} parameters, {} samples a step for each rank, {} steps, medians of {} turns\n{table}\n\
         This machine has {} cores, and each rank computes with one thread.{}\n",
        scaling.model,
        scaling.parameters,
        scaling.rank_batch,
        scaling.steps,
        scaling.turns,
        scaling.cores,
        if beyond { " With more ranks than cores the samples a second can't grow further." } else { "" },
    )
}

/// Returns the plot of a scaling, which is Baidu's figure: samples a second by ranks.
pub(crate) fn figure(scaling: &Scaling) -> Plot<'static> {
    plot(
        "Samples a second of all ranks together (higher is better)",
        "ranks, each with one thread",
        "samples/s",
        lines(scaling),
        true,
    )
}

fn lines(scaling: &Scaling) -> Vec<Series<(f64, f64)>> {
    let points = scaling.rows.iter().map(|row| (row.ranks as f64, row.samples_per_s.median));
    let mut lines = vec![Series::new("measured", 0, points.collect())];
    if let Some(one) = scaling.one() {
        let point = |ranks: usize| (ranks as f64, ranks.min(scaling.cores) as f64 * one.samples_per_s.median);
        let measured = || scaling.rows.iter().map(|row| row.ranks);
        let most = measured().max().unwrap_or(1);
        let mut ranks: Vec<usize> =
            measured().chain([scaling.cores]).filter(|ranks| *ranks <= most).collect();
        ranks.sort_unstable();
        let points = ranks.into_iter().map(point).collect();
        lines.push(Series::new(format!("linear up to {} cores", scaling.cores), 5, points));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Scaling {
        let row = |ranks, median| Row {
            ranks,
            samples_per_s: Spread { median, quartiles: [median - 10.0, median + 10.0] },
            step_ms: 30.0,
            wait_ms: 2.0,
        };
        Scaling {
            cores: 2,
            model: Model::Cnn,
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

    #[test]
    fn a_scaling_says_how_many_cores_there_are() {
        let shown = text(&sample());
        for part in ["1800", "1.80", "90.0 %", "42.5 %", "has 2 cores", "With more ranks than cores"] {
            assert!(shown.contains(part), "{part}: {shown}");
        }
        let mut fewer = sample();
        fewer.rows.truncate(2);
        assert!(!text(&fewer).contains("more ranks than cores"));
        fewer.rows.remove(0);
        assert!(text(&fewer).contains('–'), "there is no row of 1 rank to compare with");
    }

    #[test]
    fn the_figure_has_a_line_that_ends_at_the_cores() {
        let lines = lines(&sample());
        assert_eq!(lines[0].values, [(1.0, 1000.0), (2.0, 1800.0), (4.0, 1700.0)]);
        assert_eq!(lines[1].values, [(1.0, 1000.0), (2.0, 2000.0), (2.0, 2000.0), (4.0, 2000.0)]);
    }
}
