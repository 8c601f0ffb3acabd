//! The output: tables, JSON and plots.

use std::path::Path;

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{CellAlignment, Table};
use serde::Serialize;
use tonic_rdma_commands::output;

use crate::check::Check;
use crate::failure::Failure;
use crate::job::{Compute, Outcome, Overlap, Spread, Training};
use crate::plot::{FIRST, GREY, Line, Plot, SECOND, draw};
use crate::scaling::Scaling;

/// Writes a result as JSON.
pub(crate) fn write_json(path: &Path, result: &impl Serialize) -> Result<(), Failure> {
    unless_closed(output::write_json(path, result))
}

/// Prints text; to stderr if stdout has the JSON.
pub(crate) fn print(text: &str, json: Option<&Path>) -> Result<(), Failure> {
    unless_closed(output::print(text, json))
}

/// Ignores that stdout is closed: its reader has read enough.
fn unless_closed(written: Result<(), tonic_rdma_commands::Failure>) -> Result<(), Failure> {
    match written {
        Err(tonic_rdma_commands::Failure::OutputClosed) => Ok(()),
        other => Ok(other?),
    }
}

/// Writes a plot.
pub(crate) fn write_plot(path: &Path, plot: &Plot<'_>) -> Result<(), Failure> {
    let svg = draw(plot).map_err(|error| Failure::run("can't make the plot").because(error))?;
    Ok(output::write_file(path, &svg)?)
}

/// Returns the text of a job's result.
pub(crate) fn outcome(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Train(training) => self::training(training),
        Outcome::Overlap(overlap) => self::overlap(overlap),
    }
}

fn training(training: &Training) -> String {
    let mut table = table(&["epoch", "steps", "loss", "test accuracy", "samples/s"]);
    for (number, epoch) in training.epochs.iter().enumerate() {
        table.add_row([
            (number + 1).to_string(),
            epoch.steps.to_string(),
            format!("{:.4}", epoch.loss),
            epoch.accuracy.map_or_else(dash, percent),
            format!("{:.0}", epoch.samples_per_s),
        ]);
    }
    format!(
        "{:?} of {} parameters on Fashion-MNIST, {}, {} samples a step\n{table}\n\
         A step takes {:.2} ms; {:.2} ms of it rank 0 waits for gradients, after its own backward pass (medians).\n\
         The weights of all ranks are equal, bit by bit: {}.\n{}{}",
        training.model,
        training.parameters,
        machine(training.ranks, training.cores),
        training.batch,
        training.step_ms,
        training.wait_ms,
        training.weights,
        paragraph(&training.plans),
        paragraph(&training.fusion),
    )
}

/// Returns the text of a comparison of one rank and several.
pub(crate) fn check(check: &Check) -> String {
    format!(
        "{}\n{}\nThe losses of 1 rank and of {} differ by {:.1e} of the loss at most, in the first {} steps ({:.0e} is allowed).\n",
        training(&check.one),
        training(&check.several),
        check.several.ranks,
        check.difference,
        check.compared,
        check.tolerance
    )
}

/// Returns the text of a scaling.
pub(crate) fn scaling(scaling: &Scaling) -> String {
    let mut table =
        table(&["ranks", "samples/s", "quartiles", "× 1 rank", "of linear", "step", "waits for gradients"]);
    for row in &scaling.rows {
        let ratio = scaling.ratio(row);
        table.add_row([
            row.ranks.to_string(),
            format!("{:.0}", row.samples_per_s.median),
            format!("{:.0} – {:.0}", row.samples_per_s.quartiles[0], row.samples_per_s.quartiles[1]),
            ratio.map_or_else(dash, |ratio| format!("{ratio:.2}")),
            ratio.map_or_else(dash, |ratio| percent(ratio / row.ranks as f64)),
            format!("{:.2} ms", row.step_ms),
            format!("{:.2} ms", row.wait_ms),
        ]);
    }
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

fn overlap(overlap: &Overlap) -> String {
    let mut table = table(&["step", "median", "quartiles"]);
    for (name, spread) in [
        ("without communication", overlap.without_communication_ms),
        ("without overlap: all gradients given away after the computation", overlap.without_overlap_ms),
        ("with overlap: each gradient given away when it is computed", overlap.with_overlap_ms),
        ("communication alone", overlap.communication_ms),
    ] {
        let Spread { median, quartiles: [lower, upper] } = spread;
        table.add_row([name.to_owned(), format!("{median:.2} ms"), format!("{lower:.2} – {upper:.2} ms")]);
    }
    let hidden = overlap.hidden.map_or_else(
        || "The communication takes no measurable time, so there is nothing to hide.".to_owned(),
        |share| format!("The overlap hides {} of the communication.", percent(share)),
    );
    let place = match overlap.compute {
        Compute::Wait => {
            "on an accelerator (a wait that takes no core; the gradients lie in their places before the step)"
        }
        Compute::Copy => "on an accelerator (a wait), from which the core copies the gradients",
        Compute::Cores => "on the cores that communicate",
    };
    format!(
        "ResNet-50: {} gradients, {:.1} MB, {}; {:.2} ms of computation {place}, a third of it the forward pass\n\
         {table}\n{hidden}\n{}",
        overlap.tensors,
        overlap.bytes as f64 / 1e6,
        machine(overlap.ranks, overlap.cores),
        overlap.step_ms,
        paragraph(&overlap.fusion),
    )
}

/// Returns the plot of trainings: the loss by step.
pub(crate) fn losses<'a>(trainings: &[&Training]) -> Plot<'a> {
    let line = |(training, colour): (&&Training, _)| Line {
        name: ranks(training.ranks),
        colour,
        points: training.losses.iter().enumerate().map(|(step, loss)| (step as f64, *loss)).collect(),
    };
    Plot {
        title: "Loss of each step (lower is better)",
        x_axis: "step",
        y_axis: "cross entropy",
        lines: trainings.iter().zip([FIRST, SECOND]).map(line).collect(),
        marks: false,
    }
}

/// Returns the plot of a scaling, which is Baidu's figure: samples a second by ranks.
pub(crate) fn figure<'a>(scaling: &Scaling) -> Plot<'a> {
    let points = scaling.rows.iter().map(|row| (row.ranks as f64, row.samples_per_s.median));
    let mut lines = vec![Line { name: "measured".to_owned(), colour: FIRST, points: points.collect() }];
    if let Some(one) = scaling.one() {
        let line = |ranks: usize| (ranks as f64, ranks.min(scaling.cores) as f64 * one.samples_per_s.median);
        let mut points: Vec<_> =
            scaling.rows.iter().map(|row| row.ranks).chain([scaling.cores]).map(line).collect();
        let most = scaling.rows.iter().map(|row| row.ranks).max().unwrap_or(1);
        points.retain(|(ranks, _)| *ranks <= most as f64);
        points.sort_by(|one, other| one.0.total_cmp(&other.0));
        lines.insert(0, Line { name: format!("linear up to {} cores", scaling.cores), colour: GREY, points });
    }
    Plot {
        title: "Samples a second of all ranks together (higher is better)",
        x_axis: "ranks, each with one thread",
        y_axis: "samples/s",
        lines,
        marks: true,
    }
}

/// Makes a table whose first column is text.
pub(crate) fn table(headings: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(UTF8_FULL_CONDENSED).set_header(headings);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn machine(number: usize, cores: usize) -> String {
    // A launcher may keep each rank on one core. The process then sees this core alone.
    let plural = if cores == 1 { "" } else { "s" };
    format!("{}, rank 0 on {cores} core{plural}", ranks(number))
}

/// Returns the number of cores, for people to read.
pub(crate) fn machine_of(cores: usize) -> String {
    format!("{cores} core{}", if cores == 1 { "" } else { "s" })
}

fn ranks(number: usize) -> String {
    if number == 1 { "1 rank".to_owned() } else { format!("{number} ranks") }
}

/// Returns a share in percent.
pub(crate) fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

fn dash() -> String {
    "–".to_owned()
}

/// Returns text as lines of their own, or nothing.
fn paragraph(text: &str) -> String {
    if text.trim().is_empty() { String::new() } else { format!("\n{}\n", text.trim_end()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scaling::tests::sample;

    #[test]
    fn a_scaling_says_how_many_cores_there_are() {
        let text = scaling(&sample());
        for part in ["1800", "1.80", "90.0 %", "42.5 %", "has 2 cores", "With more ranks than cores"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let mut fewer = sample();
        fewer.rows.truncate(2);
        assert!(!scaling(&fewer).contains("more ranks than cores"));
        fewer.rows.remove(0);
        assert!(scaling(&fewer).contains('–'), "there is no row of 1 rank to compare with");
    }

    #[test]
    fn the_figure_has_a_line_that_ends_at_the_cores() {
        let plot = figure(&sample());
        assert_eq!(plot.lines[0].points, [(1.0, 1000.0), (2.0, 2000.0), (2.0, 2000.0), (4.0, 2000.0)]);
        assert_eq!(plot.lines[1].points, [(1.0, 1000.0), (2.0, 1800.0), (4.0, 1700.0)]);
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
        let text = overlap(&measured);
        for part in
            ["161 gradients, 102.2 MB", "2 ranks, rank 0 on 2 cores", "hides 75.0 %", "70.00 ms", "4 buckets"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
        measured.hidden = None;
        assert!(overlap(&measured).contains("nothing to hide"));
    }
}
