//! What comes out of a job: JSON, a table, and a plot.

use serde::{Serialize, Serializer};
use serde_json::json;
use tonic_rdma_commands::plot::{Plot, Series};
use tonic_rdma_commands::statistics::median;
use tonic_rdma_commands::table::{dash, grid, times};

use super::parts::{Sent, SentTensor};
use crate::network::{EMBEDDING, HIDDEN, Model};
use crate::train::{percent, plot};

/// All modes side by side. All had the same losses and the same weights, bit by bit.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Comparison {
    #[serde(serialize_with = "model")]
    pub(crate) model: Model,
    pub(crate) workers: usize,
    pub(crate) servers: usize,
    pub(crate) batch: usize,
    pub(crate) parameters: usize,
    pub(crate) cores: usize,
    pub(crate) target: Option<f64>,
    pub(crate) deaths: Vec<Death>,
    pub(crate) modes: Vec<ModeResult>,
}

/// Processes that died, workers before servers, and the step from which the training went on.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Death {
    pub(crate) processes: Vec<usize>,
    pub(crate) step: u64,
    pub(crate) how: String,
}

/// The result of a mode.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct ModeResult {
    pub(crate) mode: String,
    /// The mean loss of the samples of each step. `null` if a worker died before it reported the step.
    pub(crate) losses: Vec<f64>,
    /// The duration of each step that this command ran in the first parameter server, in seconds.
    pub(crate) steps_s: Vec<f64>,
    /// The duration of all steps in the slowest part, without tests.
    pub(crate) seconds: f64,
    pub(crate) points: Vec<Point>,
    pub(crate) time_to_target_s: Option<f64>,
    /// A hash of all weights at the end.
    pub(crate) weights: String,
    pub(crate) sent_in_first_step: Sent,
    /// From the second step on.
    pub(crate) sent_later: Sent,
    pub(crate) tensors: Vec<SentTensor>,
}

/// A test.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Point {
    pub(crate) step: u64,
    /// The duration of the steps before.
    pub(crate) seconds: f64,
    pub(crate) loss: f64,
    pub(crate) accuracy: f64,
}

impl ModeResult {
    /// Returns the median duration of a step, in milliseconds, without the first step.
    fn step_ms(&self) -> f64 {
        median(self.steps_s.iter().skip(1).map(|seconds| seconds * 1e3))
    }
}

/// Writes a model with its kind, as scripts expect it.
fn model<S: Serializer>(model: &Model, to: S) -> Result<S::Ok, S::Error> {
    match model.reads_texts() {
        true => json!({ "recurrent": { "embedding": EMBEDDING, "hidden": HIDDEN } }).serialize(to),
        false => json!({ "pictures": model }).serialize(to),
    }
}

/// Returns the text of a comparison.
pub(crate) fn text(comparison: &Comparison) -> String {
    let headings = [
        "mode",
        "step",
        "steps/s × first mode",
        "all steps",
        "loss",
        "accuracy",
        "time to target",
        "tensors a step",
        "copied in step 1",
        "copied later",
    ];
    let first = comparison.modes.first().map_or(f64::NAN, ModeResult::step_ms);
    let row = |mode: &ModeResult| {
        let (last, later) = (mode.points.last(), mode.steps_s.len().saturating_sub(1).max(1) as f64);
        vec![
            mode.mode.clone(),
            format!("{:.2} ms", mode.step_ms()),
            times(Some(first / mode.step_ms())),
            format!("{:.2} s", mode.seconds),
            last.map_or_else(dash, |point| format!("{:.4}", point.loss)),
            last.map_or_else(dash, |point| percent(point.accuracy)),
            mode.time_to_target_s.map_or_else(dash, |seconds| format!("{seconds:.2} s")),
            format!("{:.0}", mode.sent_later.tensors as f64 / later),
            mode.sent_in_first_step.copied.to_string(),
            mode.sent_later.copied.to_string(),
        ]
    };
    let table = grid(&headings, [comparison.modes.iter().map(row).collect()]);
    let deaths = comparison.deaths.iter();
    let deaths: String = deaths
        .map(|death| format!("{}; the training went on from step {}.\n", death.how, death.step))
        .collect();
    let weights = comparison.modes.first().map_or("", |first| first.weights.as_str());
    let same = match comparison.modes.len() {
        1 => "The weights at the end:",
        _ => "All modes had the same losses in all steps and the same weights at the end, bit by bit:",
    };
    let (name, s) = (comparison.model.title(), |number: usize| if number == 1 { "" } else { "s" });
    let Comparison { parameters, workers, servers, batch, cores, .. } = comparison;
    format!(
        "{name} of {parameters} parameters, {servers} parameter server{}, {workers} worker{}, {batch} samples a step, {cores} core{}\n\
         {table}\n{same} {weights}.\n{deaths}",
        s(*servers),
        s(*workers),
        s(*cores),
    )
}

/// Returns the plot of a comparison, the paper's figure 10: how good the model is, by the time of the
/// training.
pub(crate) fn figure(comparison: &Comparison) -> Plot<'static> {
    let (title, y) = match comparison.model.reads_texts() {
        true => ("Cross entropy of the tested texts (lower is better)", "cross entropy"),
        false => ("Accuracy on the tested pictures (higher is better)", "% right"),
    };
    plot(title, "seconds of training, without tests", y, lines(comparison), true)
}

fn lines(comparison: &Comparison) -> Vec<Series<(f64, f64)>> {
    let texts = comparison.model.reads_texts();
    let value = |point: &Point| if texts { point.loss } else { point.accuracy * 100.0 };
    let line = |(number, mode): (usize, &ModeResult)| {
        let points = mode.points.iter().map(|point| (point.seconds, value(point)));
        Series::new(mode.mode.clone(), number, points.collect())
    };
    comparison.modes.iter().enumerate().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn comparison(model: Model) -> Comparison {
        let mode = |mode: &str, milliseconds: f64| ModeResult {
            mode: mode.to_owned(),
            losses: vec![2.0, 1.0, 0.5],
            steps_s: [9.0, 1.0, 1.0].map(|step| step * milliseconds / 1e3).to_vec(),
            seconds: 11.0 * milliseconds / 1e3,
            points: vec![Point { step: 3, seconds: milliseconds, loss: 0.4, accuracy: 0.86 }],
            time_to_target_s: Some(11.0 * milliseconds / 1e3),
            weights: "abc".to_owned(),
            sent_in_first_step: Sent { tensors: 24, bytes: 240, copied: 24, inline: 0 },
            sent_later: Sent { tensors: 48, bytes: 480, copied: 0, inline: 0 },
            tensors: Vec::new(),
        };
        Comparison {
            model,
            workers: 2,
            servers: 1,
            batch: 128,
            parameters: 1000,
            cores: 2,
            target: Some(0.85),
            deaths: vec![Death {
                processes: vec![1],
                step: 2,
                how: "worker 1 (process 7) has ended".to_owned(),
            }],
            modes: vec![mode("grpc-tcp", 500.0), mode("rdma-zerocp", 200.0)],
        }
    }

    #[test]
    fn a_comparison_has_a_row_for_each_mode_and_names_what_died() {
        let text = text(&comparison(Model::Lstm));
        // The first step is left out of the median.
        for part in [
            "500.00 ms",
            "200.00 ms",
            "2.50",
            "86.0 %",
            "2.20 s",
            "bit by bit: abc",
            "2 cores",
            "LSTM with 6 states",
            "1 parameter server, 2 workers",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(text.contains("worker 1 (process 7) has ended; the training went on from step 2."), "{text}");
    }

    #[test]
    fn the_figure_is_of_accuracy_or_of_the_loss_of_texts() {
        let pictures = lines(&comparison(Model::Cnn));
        assert_eq!(pictures[1].values, [(200.0, 86.0)]);
        let texts = lines(&comparison(Model::Lstm));
        assert_eq!(texts[0].values, [(500.0, 0.4)]);
    }

    #[test]
    fn the_json_names_the_kind_of_the_model() {
        let kind = |model| serde_json::to_value(comparison(model)).unwrap()["model"].clone();
        assert_eq!(kind(Model::Cnn), json!({ "pictures": "cnn" }));
        assert_eq!(kind(Model::Lstm), json!({ "recurrent": { "embedding": EMBEDDING, "hidden": HIDDEN } }));
    }
}
