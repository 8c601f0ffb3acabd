//! What a run shows and writes.

use std::fmt::Display;
use std::path::Path;

use serde::Serialize;

use crate::control::PartMemory;
use tonic_rdma_commands::plot::{self, Axis, Content, Plot, PlotError, Scale, Series};
use tonic_rdma_commands::table::{grid, times};
use tonic_rdma_commands::units::{digits, micros, rough_size};
use tonic_rdma_commands::{Context as _, Failure, output};
use tonic_rdma_graph::explain::Explanation;
use tonic_rdma_graph::schedule::ReceiveMode;
use tonic_rdma_graph::transfer::TransferMode;

/// The results of a run. Scripts rely on the names of the fields.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Results {
    pub(crate) model: String,
    pub(crate) parts: usize,
    /// The number of parts that was asked for. A graph of one node, or of none, is one part.
    pub(crate) parts_asked: usize,
    pub(crate) micro_batches: u64,
    pub(crate) receive: ReceiveMode,
    /// The number of nodes of each part.
    pub(crate) nodes: Vec<usize>,
    /// The bytes that cross for a micro-batch; of the largest one if the shapes differ.
    pub(crate) bytes: u64,
    /// The number of addresses of static slots that were distributed before the first step.
    pub(crate) static_addresses: usize,
    /// The registered memory of each part.
    pub(crate) memory: Vec<PartMemory>,
    /// The crossing tensors.
    #[serde(flatten)]
    pub(crate) explanation: Explanation,
    pub(crate) modes: Vec<ModeRow>,
}

/// A mode.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct ModeRow {
    pub(crate) mode: TransferMode,
    /// The time of a step in which nothing is compared, median.
    pub(crate) step_us: f64,
    /// The time for the tensors of a step to cross, median.
    pub(crate) transfer_us: f64,
    /// The time of a step in each round that had steps.
    pub(crate) step_us_of_rounds: Vec<f64>,
    /// The transfer time in each round. All modes take turns in a round, so values of one round belong
    /// together.
    pub(crate) transfer_us_of_rounds: Vec<f64>,
    /// Tensors that were sent after the first micro-batch. Replays do not count.
    pub(crate) sent: u64,
    /// How many of them their senders copied.
    pub(crate) sender_copies: u64,
    /// `sender_copies` over `sent`.
    pub(crate) sender_copies_per_tensor: f64,
    /// Tensors that were received after the first micro-batch. Replays do not count.
    pub(crate) received: u64,
    /// How many of them their receivers copied, after they had arrived.
    pub(crate) receiver_copies: u64,
    /// The number of tensors that were compared.
    pub(crate) checked: u64,
    /// The number of tensors that differ.
    pub(crate) errors: u64,
}

impl Results {
    /// Shows the results, and writes the files that were asked for.
    pub(crate) fn show(
        &self,
        explain: bool,
        json: Option<&Path>,
        plot: Option<&Path>,
    ) -> Result<(), Failure> {
        let mut text = String::new();
        if explain {
            text.push_str(&format!("{}\n", self.explanation));
        }
        text.push_str(&render(self));
        output::print(&text, json)?;
        if let Some(path) = json {
            output::write_json(path, self)?;
        }
        if let Some(path) = plot {
            let svg = self.plot().context(format!("can't draw {}", path.display()))?;
            output::write_file(path, &svg)?;
        }
        Ok(())
    }

    /// Draws the step and the transfer time of all modes.
    fn plot(&self) -> Result<String, PlotError> {
        let title = format!("{}, {} parts (lower is better)", self.model, self.parts);
        let chart = |name: &str, number, value: fn(&ModeRow) -> f64| {
            let millis: Vec<f64> = self.modes.iter().map(|row| value(row) / 1000.0).collect();
            let named = self.modes.iter().zip(&millis);
            let groups = named.map(|(row, value)| format!("{} {}", row.mode, digits(*value))).collect();
            let content = Content::Bars { x: "", groups, bars: vec![Series::new(name, number, millis)] };
            Plot { title: &title, y: Axis { name: "ms", scale: Scale::Linear }, content }
        };
        plot::draw(&[
            chart("time of a step", 0, |row| row.step_us),
            chart("transfer time of a step", 1, |row| row.transfer_us),
        ])
    }
}

const LEGEND: &str = "step: all micro-batches of a step, with the making of inputs and without the check, median. transfer: the same \
                      with kernels that do not run, so that only tensors cross. In brackets: the least and the largest of the \
                      rounds. × : grpc-tcp over this mode. copied before: tensors that \
                      the sender copied / tensors sent, after the first micro-batch and without the transfer trials. after: the same of \
                      the receiver. errors: \
                      tensors that differ from the unsplit model.";

/// Renders everything that the terminal shows.
fn render(results: &Results) -> String {
    let count =
        |placement| results.explanation.tensors.iter().filter(|tensor| tensor.placement == placement).count();
    let mut text = format!(
        "{}: {} parts of {} nodes; {} crossing tensors ({} static, {} dynamic), {} in a micro-batch; {} addresses of static slots \
         distributed before step 1; {} micro-batches in a step; {}\n",
        results.model,
        results.parts,
        results.nodes.iter().map(usize::to_string).collect::<Vec<_>>().join(" + "),
        results.explanation.tensors.len(),
        count("static"),
        count("dynamic"),
        rough_size(results.bytes),
        results.static_addresses,
        results.micro_batches,
        results.receive,
    );
    if results.parts < results.parts_asked {
        let asked = results.parts_asked;
        text.push_str(&format!(
            "It runs in one part instead of {asked}, because no tensor of its graph can cross.\n"
        ));
    }
    text.push_str(&format!("{}{}\n{LEGEND}\n", memory(results), modes(results)));
    text
}

/// Returns a line on the registered memory of each part: what was reserved before the first step, what was
/// used of it, and what came on top.
fn memory(results: &Results) -> String {
    let line = |(part, memory): (usize, &PartMemory)| {
        let PartMemory { slots, sends } = memory;
        let beyond = match (sends.beyond, sends.refused) {
            (0, 0) => String::new(),
            (bytes, 0) => format!(", {} later", rough_size(bytes)),
            (bytes, refused) => {
                format!(", {} later, and {refused} allocations found none", rough_size(bytes))
            }
        };
        format!(
            "registered memory of part {part}: {} used of {} for slots, {} of {} to send from{beyond}\n",
            rough_size(slots.used),
            rough_size(slots.preallocated),
            rough_size(sends.used),
            rough_size(sends.preallocated)
        )
    };
    results.memory.iter().enumerate().map(line).collect()
}

fn modes(results: &Results) -> impl Display {
    let base = results.modes.iter().find(|row| row.mode == TransferMode::GrpcTcp);
    let over = |row: &ModeRow, time: fn(&ModeRow) -> f64| {
        times(base.filter(|_| time(row) > 0.0).map(|base| time(base) / time(row)))
    };
    let cells = |row: &ModeRow| {
        vec![
            row.mode.to_string(),
            spread(row.step_us, &row.step_us_of_rounds),
            over(row, |row| row.step_us),
            spread(row.transfer_us, &row.transfer_us_of_rounds),
            over(row, |row| row.transfer_us),
            format!("{} / {}", row.sender_copies, row.sent),
            format!("{} / {}", row.receiver_copies, row.received),
            row.checked.to_string(),
            row.errors.to_string(),
        ]
    };
    let headings = ["mode", "step", "×", "transfer", "×", "copied before", "after", "checked", "errors"];
    grid(&headings, [results.modes.iter().map(cells).collect()])
}

/// Formats a median, and the least and the largest of the values that it is of.
fn spread(median: f64, values: &[f64]) -> String {
    let least = values.iter().copied().reduce(f64::min);
    match least.zip(values.iter().copied().reduce(f64::max)) {
        Some((least, most)) if values.len() > 1 => {
            format!("{} [{} – {}]", micros(median), micros(least), micros(most))
        }
        _ => micros(median),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    fn sample() -> Results {
        let mode = |mode, step_us, transfer_us| ModeRow {
            mode,
            step_us,
            transfer_us,
            step_us_of_rounds: vec![step_us],
            transfer_us_of_rounds: vec![transfer_us, 0.9 * transfer_us, 1.25 * transfer_us],
            sent: 40_000,
            sender_copies: 1,
            sender_copies_per_tensor: 1.0 / 40_000.0,
            received: 40_000,
            receiver_copies: 2,
            checked: 12,
            errors: 0,
        };
        Results {
            model: "light_example.onnx".to_owned(),
            parts: 2,
            parts_asked: 2,
            micro_batches: 2,
            receive: ReceiveMode::PollingAsync,
            nodes: vec![3, 4],
            bytes: 1 << 20,
            static_addresses: 1,
            memory: Vec::new(),
            explanation: Explanation { tensors: Vec::new() },
            modes: vec![
                mode(TransferMode::GrpcTcp, 4000.0, 800.0),
                mode(TransferMode::RdmaZerocp, 3400.0, 100.0),
            ],
        }
    }

    #[test]
    fn bars_have_names_and_values() {
        let svg = sample().plot().unwrap();
        for text in ["<svg", "grpc-tcp", "rdma-zerocp", "transfer time", "3.40", "0.10"] {
            assert!(svg.contains(text), "{text}");
        }
    }

    #[test]
    fn the_table_has_ratios_to_grpc_tcp() {
        let text = render(&sample());
        for part in [
            "light_example.onnx",
            "3 + 4 nodes",
            "1.00 MiB",
            "rdma-zerocp",
            "8.00",
            "3.40 ms",
            "100 µs [90.0 µs – 125 µs]",
            "1 / 40000",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let mut alone = sample();
        alone.modes.remove(0);
        assert!(render(&alone).contains('–'));
    }
}
