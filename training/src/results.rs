//! The results of ranks, which travel between processes as JSON.

use serde::{Deserialize, Serialize};
use tonic_rdma_commands::plot::{Axis, Content, Plot, Scale, Series};
use tonic_rdma_commands::table::{dash, grid};

use crate::network::Model;
use crate::options::Compute;

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
    pub(crate) model: Model,
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

impl Outcome {
    /// Returns the training.
    pub(crate) fn into_training(self) -> Result<Training, &'static str> {
        match self {
            Self::Train(training) => Ok(training),
            Self::Overlap(_) => Err("rank 0 reported the result of another job"),
        }
    }

    /// Returns the text of a job's result.
    pub(crate) fn text(&self) -> String {
        match self {
            Self::Train(training) => training.text(),
            Self::Overlap(overlap) => overlap.text(),
        }
    }
}

impl Training {
    pub(crate) fn text(&self) -> String {
        let row = |(number, epoch): (usize, &Epoch)| {
            vec![
                (number + 1).to_string(),
                epoch.steps.to_string(),
                format!("{:.4}", epoch.loss),
                epoch.accuracy.map_or_else(dash, percent),
                format!("{:.0}", epoch.samples_per_s),
            ]
        };
        let rows = self.epochs.iter().enumerate().map(row).collect();
        let table = grid(&["epoch", "steps", "loss", "test accuracy", "samples/s"], [rows]);
        format!(
            "{:?} of {} parameters on Fashion-MNIST, {}, {} samples a step\n{table}\n\
             A step takes {:.2} ms; {:.2} ms of it rank 0 waits for gradients, after its own backward pass (medians).\n\
             The weights of all ranks are equal, bit by bit: {}.\n{}{}",
            self.model,
            self.parameters,
            machine(self.ranks, self.cores),
            self.batch,
            self.step_ms,
            self.wait_ms,
            self.weights,
            paragraph(&self.plans),
            paragraph(&self.fusion),
        )
    }
}

impl Overlap {
    fn text(&self) -> String {
        let row = |(name, spread): (&str, Spread)| {
            let Spread { median, quartiles: [lower, upper] } = spread;
            vec![name.to_owned(), format!("{median:.2} ms"), format!("{lower:.2} – {upper:.2} ms")]
        };
        let rows = [
            ("without communication", self.without_communication_ms),
            ("without overlap: all gradients given away after the computation", self.without_overlap_ms),
            ("with overlap: each gradient given away when it is computed", self.with_overlap_ms),
            ("communication alone", self.communication_ms),
        ];
        let table = grid(&["step", "median", "quartiles"], [rows.map(row).to_vec()]);
        let hidden = self.hidden.map_or_else(
            || "The communication takes no measurable time, so there is nothing to hide.".to_owned(),
            |share| format!("The overlap hides {} of the communication.", percent(share)),
        );
        let place = match self.compute {
            Compute::Wait => {
                "on an accelerator (a wait that takes no core; the gradients lie in their places before the step)"
            }
            Compute::Copy => "on an accelerator (a wait), from which the core copies the gradients",
            Compute::Cores => "on the cores that communicate",
        };
        format!(
            "ResNet-50: {} gradients, {:.1} MB, {}; {:.2} ms of computation {place}, a third of it the forward pass\n\
             {table}\n{hidden}\n{}",
            self.tensors,
            self.bytes as f64 / 1e6,
            machine(self.ranks, self.cores),
            self.step_ms,
            paragraph(&self.fusion),
        )
    }
}

/// Returns the plot of trainings: the loss by step.
pub(crate) fn losses(trainings: &[&Training]) -> Plot<'static> {
    let line = |(number, training): (usize, &&Training)| {
        let points = training.losses.iter().enumerate().map(|(step, loss)| (step as f64, *loss));
        Series::new(ranks(training.ranks), number, points.collect())
    };
    let lines = trainings.iter().enumerate().map(line).collect();
    plot("Loss of each step (lower is better)", "step", "cross entropy", lines, false)
}

/// Makes a plot of lines over axes that begin at zero.
pub(crate) fn plot(
    title: &'static str,
    x: &'static str,
    y: &'static str,
    lines: Vec<Series<(f64, f64)>>,
    marks: bool,
) -> Plot<'static> {
    let [x, y] = [x, y].map(|name| Axis { name, scale: Scale::Linear });
    Plot { title, y, content: Content::Lines { x, lines, marks } }
}

fn machine(number: usize, cores: usize) -> String {
    // A launcher may keep each rank on one core. The process then sees this core alone.
    let plural = if cores == 1 { "" } else { "s" };
    format!("{}, rank 0 on {cores} core{plural}", ranks(number))
}

fn ranks(number: usize) -> String {
    if number == 1 { "1 rank".to_owned() } else { format!("{number} ranks") }
}

/// Returns a share in percent.
pub(crate) fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// Returns text as lines of their own, or nothing.
fn paragraph(text: &str) -> String {
    if text.trim().is_empty() { String::new() } else { format!("\n{}\n", text.trim_end()) }
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
    fn an_overlap_names_what_it_hides() {
        let spread = |median| Spread { median, quartiles: [median; 2] };
        let mut measured = Overlap {
            ranks: 2,
            cores: 2,
            compute: Compute::Wait,
            tensors: 161,
            bytes: 102_228_128,
            step_ms: 60.0,
            communication_ms: spread(40.0),
            without_communication_ms: spread(60.0),
            without_overlap_ms: spread(100.0),
            with_overlap_ms: spread(70.0),
            hidden: Some(0.75),
            fusion: "4 buckets".to_owned(),
        };
        let text = measured.text();
        for part in
            ["161 gradients, 102.2 MB", "2 ranks, rank 0 on 2 cores", "hides 75.0 %", "70.00 ms", "4 buckets"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
        measured.hidden = None;
        assert!(measured.text().contains("nothing to hide"));
    }
}
