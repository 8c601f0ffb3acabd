//! The results of ranks, which travel between processes as JSON.

use serde::{Deserialize, Serialize};
use tonic_rdma_commands::plot::{Axis, Content, Plot, Scale, Series};
use tonic_rdma_commands::table::grid;

use crate::network::Model;

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
    /// Samples a second of all ranks together, over all steps.
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
    pub(crate) accuracy: f64,
    pub(crate) samples_per_s: f64,
}

impl Training {
    pub(crate) fn text(&self) -> String {
        let row = |(number, epoch): (usize, &Epoch)| {
            vec![
                (number + 1).to_string(),
                epoch.steps.to_string(),
                format!("{:.4}", epoch.loss),
                percent(epoch.accuracy),
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

/// Returns the plot of a training: the loss by step.
pub(crate) fn losses(training: &Training) -> Plot<'static> {
    let points = training.losses.iter().enumerate().map(|(step, loss)| (step as f64, *loss));
    let lines = vec![Series::new(ranks(training.ranks), 0, points.collect())];
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
