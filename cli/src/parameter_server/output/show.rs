//! The output of a run: a table, JSON, and a page with plots.

use plotters::style::RGBColor;
use tonic_rdma_commands::table::grid;
use tonic_rdma_commands::{Failure, output};

use super::columns::{groups, headings};
use super::facts::TrainingFacts;
use super::row::TrainingRow;
use crate::measure::output::bars::{self, Bars, PlotError, Series};
use crate::measure::output::files::{check_outputs, write_json};
use crate::measure::output::page::Page;
use crate::parameter_server::load::Load;
use crate::parameter_server::mode::TransferMode;
use crate::parameter_server::options::ParameterServerOptions;

/// A colour for each mode, in the order of [`TransferMode::ALL`]. The colours stay distinct for readers with red-green
/// colour blindness.
const COLOURS: [RGBColor; TransferMode::ALL.len()] = [
    RGBColor(0x88, 0x88, 0x88),
    RGBColor(0xdd, 0x66, 0x22),
    RGBColor(0xee, 0xaa, 0x44),
    RGBColor(0xbb, 0x22, 0x33),
    RGBColor(0xee, 0x77, 0x99),
    RGBColor(0x33, 0x77, 0xbb),
    RGBColor(0x22, 0x22, 0x22),
];

/// Checks that the output files can be written, before the measuring.
pub(crate) fn check(options: &ParameterServerOptions) -> Result<(), Failure> {
    check_outputs(options.json.as_deref(), options.report.as_deref())
}

/// Writes all outputs that `options` ask for.
pub(crate) fn show(
    options: &ParameterServerOptions,
    facts: &TrainingFacts,
    rows: &[TrainingRow],
) -> Result<(), Failure> {
    output::print(&text(facts, rows), options.json.as_deref())?;
    if let Some(path) = &options.json {
        write_json(path, facts, rows)?;
    }
    if let Some(directory) = &options.report {
        page(facts, rows)?.write(directory)?;
    }
    Ok(())
}

fn text(facts: &TrainingFacts, rows: &[TrainingRow]) -> String {
    let mut text = String::new();
    for (name, value) in facts.lines() {
        text.push_str(&format!("{name:>12}: {value}\n"));
    }
    text.push_str(&format!("\n{}\n\n{}\n", grid(&headings(rows), groups(rows)), legend(rows)));
    text
}

/// Explains the columns that need an explanation.
fn legend(rows: &[TrainingRow]) -> String {
    let mut legend = "mini-batches/s: of all workers together, median of the turns. p50: median time of a worker's mini-batch: all \
                      variables pulled, then all gradients pushed and consumed. GB/s: both directions together. CPU: user + system \
                      time of all processes."
        .to_owned();
    if rows.iter().any(|row| row.compute_ms.is_some()) {
        legend.push_str(" computing: of a worker, between its pull and its push. × local: beside one process that only computes.");
    }
    for cell in rows.chunk_by(|one, next| one.cell == next.cell) {
        if let Some((row, reason)) = cell.first().and_then(|row| Some((row, row.skipped.as_ref()?))) {
            legend.push_str(&format!("\n{} was not measured: {reason}.", row.cell.label()));
        }
    }
    legend
}

fn page<'a>(facts: &TrainingFacts, rows: &[TrainingRow]) -> Result<Page<'a>, Failure> {
    Ok(Page {
        title: "tonic-rdma parameter-server",
        facts: facts.lines(),
        plots: plots(rows).map_err(|error| Failure::run("can't make the report").because(error))?,
        headings: headings(rows),
        groups: groups(rows),
        legend: legend(rows),
    })
}

/// Draws all models side by side for each number of workers and load. If there are several numbers of workers, it also
/// draws how each model scales over them, as in the paper's figure 11. If there are several batches, it draws each model
/// over them, as in figure 9.
fn plots(rows: &[TrainingRow]) -> Result<Vec<String>, PlotError> {
    let measured: Vec<&TrainingRow> = rows.iter().filter(|row| row.skipped.is_none()).collect();
    let select = |chosen: &dyn Fn(&TrainingRow) -> bool| {
        measured.iter().copied().filter(|row| chosen(row)).collect::<Vec<_>>()
    };
    let with = |load: &Load| load.label().map(|load| format!(", {load}")).unwrap_or_default();
    let (workers, loads, models) = (
        distinct(measured.iter().map(|row| row.workers)),
        distinct(measured.iter().map(|row| (row.load.compute, row.load.batch))),
        distinct(measured.iter().map(|row| row.model)),
    );
    let mut plots = Vec::new();
    for workers in &workers {
        let plural = if *workers == 1 { "" } else { "s" };
        for (compute, batch) in &loads {
            let of = select(&|row| {
                row.workers == *workers && (row.load.compute, row.load.batch) == (*compute, *batch)
            });
            let Some(row) = of.first() else { continue };
            let title = format!(
                "Mini-batches a second, {workers} worker{plural}{} (higher is better)",
                with(&row.load)
            );
            plots.push(draw(&title, "model", true, &of, |row| row.model.to_owned())?);
        }
    }
    for model in &models {
        for (compute, batch) in loads.iter().filter(|_| workers.len() > 1) {
            let of = select(&|row| {
                row.model == *model && (row.load.compute, row.load.batch) == (*compute, *batch)
            });
            let Some(row) = of.first() else { continue };
            let title = format!(
                "{model}{}: mini-batches a second of all workers (higher is better)",
                with(&row.load)
            );
            plots.push(draw(&title, "workers", false, &of, |row| row.workers.to_string())?);
        }
        for (workers, compute) in distinct(measured.iter().map(|row| (row.workers, row.load.compute))) {
            let of =
                select(&|row| row.model == *model && row.workers == workers && row.load.compute == compute);
            let batches = distinct(of.iter().filter_map(|row| row.load.batch));
            if batches.len() > 1 {
                let plural = if workers == 1 { "" } else { "s" };
                let title = format!(
                    "{model}, {workers} worker{plural}, {}: mini-batches a second (higher is better)",
                    compute.name()
                );
                plots.push(draw(&title, "batch", false, &of, |row| row.load.batch.unwrap_or(0).to_string())?);
            }
        }
    }
    Ok(plots)
}

/// Draws bars for each mode. `name` gives the group of a row.
fn draw(
    title: &str,
    x_axis: &str,
    logarithmic: bool,
    rows: &[&TrainingRow],
    name: impl Fn(&TrainingRow) -> String,
) -> Result<String, PlotError> {
    let groups = distinct(rows.iter().map(|row| name(row)));
    let series = |(mode, colour): (TransferMode, RGBColor)| {
        let find = |group: &String| rows.iter().find(|row| row.mode == mode && name(row) == *group);
        let values: Vec<_> = groups.iter().map(|group| Some(find(group)?.minibatches_per_s)).collect();
        values.iter().any(Option::is_some).then(|| Series { name: mode.name(), colour, values })
    };
    let series = TransferMode::ALL.into_iter().zip(COLOURS).filter_map(series).collect();
    bars::draw(&Bars { title, x_axis, y_axis: "mini-batches/s", logarithmic, groups, series })
}

/// Returns each value once, in their order.
fn distinct<T: PartialEq>(values: impl Iterator<Item = T>) -> Vec<T> {
    let mut distinct = Vec::new();
    for value in values {
        if !distinct.contains(&value) {
            distinct.push(value);
        }
    }
    distinct
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use std::time::Duration;

    use super::super::row::TrainingTally;
    use super::*;
    use crate::parameter_server::cells::TrainingCell;
    use crate::parameter_server::load::Compute;
    use crate::parameter_server::processes::session::Outcome;
    use crate::workload::Model;

    fn row(mode: TransferMode, model: Model, workers: usize) -> TrainingRow {
        loaded(mode, model, workers, Load::NONE)
    }

    fn loaded(mode: TransferMode, model: Model, workers: usize, load: Load) -> TrainingRow {
        let mut tally = TrainingTally::new(mode, TrainingCell { model, servers: 1, workers }, load, 1);
        tally.add(Outcome { nanos: vec![vec![50_000_000]; workers], ..Outcome::default() });
        tally.row()
    }

    #[test]
    fn plots_are_by_model_and_by_number_of_workers() {
        let one = [row(TransferMode::GrpcTcp, Model::Gru, 1), row(TransferMode::RdmaCp, Model::Vgg16, 1)];
        let drawn = plots(&one).unwrap();
        assert_eq!(drawn.len(), 1);
        for text in ["gru", "vgg16", "grpc-tcp", "rdma-cp", "mini-batches/s", "1 worker ("] {
            assert!(drawn[0].contains(text), "{text}");
        }
        assert!(!drawn[0].contains("rdma-zerocp"));
        let several = [&one[..], &[row(TransferMode::GrpcTcp, Model::Gru, 4)]].concat();
        assert_eq!(plots(&several).unwrap().len(), 2 + 2);
        assert_eq!(plots(&[]).unwrap().len(), 0);
    }

    #[test]
    fn plots_with_loads_are_by_batch_too() {
        let load =
            |batch| Load { compute: Compute::Wait, batch: Some(batch), time: Duration::from_millis(5) };
        let of = |batch| loaded(TransferMode::GrpcTcp, Model::Gru, 1, load(batch));
        let drawn = plots(&[of(1), of(64)]).unwrap();
        // One for each batch, and one over both.
        assert_eq!(drawn.len(), 3);
        assert!(drawn[1].contains("1 worker, batch 64, wait"), "{}", drawn[1]);
        assert!(drawn[2].contains("gru, 1 worker, wait"), "{}", drawn[2]);
        let text = grid(&headings(&[of(8)]), groups(&[of(8)])).to_string();
        assert!(text.contains("× local") && text.contains("5.00 ms") && !text.contains("servers"), "{text}");
    }

    #[test]
    fn a_skipped_row_has_dashes_and_a_reason() {
        let cell = TrainingCell { model: Model::Vgg16, servers: 1, workers: 8 };
        let rows = [
            row(TransferMode::GrpcTcp, Model::Gru, 1),
            TrainingRow::skipped(TransferMode::GrpcTcp, cell, Load::NONE, "no memory"),
        ];
        assert!(legend(&rows).ends_with("vgg16, 8 workers was not measured: no memory."));
        let text = grid(&headings(&rows), groups(&rows)).to_string();
        let line = text.lines().find(|line| line.contains("vgg16")).unwrap();
        assert!(line.contains('–') && line.contains("512 MiB in 32"), "{text}");
        assert_eq!(plots(&rows).unwrap().len(), 1);
    }
}
