//! The table for the terminal.

use std::fmt::Display;

use tonic_rdma_commands::table::{grid, times};
use tonic_rdma_commands::units::{micros, rough_size};
use tonic_rdma_graph::transfer::Mode;

use super::{ModeRow, Results};

const LEGEND: &str = "step: all micro-batches of a step, with the making of inputs and without the check, median. transfer: the same \
                      with kernels that do not run, so that only tensors cross. In brackets: the least and the largest of the \
                      rounds. × : grpc-tcp over this mode. copies: tensors that \
                      the sender copied / tensors sent, after the first micro-batch and without the transfer turns. errors: \
                      tensors that differ from the unsplit model.";

/// Renders everything that the terminal shows.
pub(super) fn render(results: &Results) -> String {
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
    text.push_str(&format!("{}\n{LEGEND}\n", modes(results)));
    text
}

fn modes(results: &Results) -> impl Display {
    let base = results.modes.iter().find(|row| row.mode == Mode::GrpcTcp);
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
            row.checked.to_string(),
            row.errors.to_string(),
        ]
    };
    let headings = ["mode", "step", "×", "transfer", "×", "copies", "checked", "errors"];
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
    use super::*;

    #[test]
    fn the_table_has_ratios_to_grpc_tcp() {
        let text = render(&super::super::sample());
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
        let mut alone = super::super::sample();
        alone.modes.remove(0);
        assert!(render(&alone).contains('–'));
    }
}
