//! What a run shows: the facts about it, the columns of its table, and their explanation.

use std::time::Duration;

use serde::Serialize;
use tonic_rdma_commands::ends::Ends;
use tonic_rdma_commands::statistics::median;
use tonic_rdma_commands::table::{dash, times};
use tonic_rdma_commands::{Failure, Named as _, units};

use crate::compare::modes::mode::{Contender, Mode};
use crate::compare::results::OF_HTTP2;
use crate::compare::runs::{Figure, Runs, from_to, that_stand_out};
use crate::measure::machine::{Costs, Environment};
use crate::measure::report::{Column, Report, column};
use crate::measure::settings::{self, Consume, Http2};
use crate::parameter_server::meter::{Outcome, TrainingMeter};
use crate::parameter_server::options::{
    Compute, Load, ParameterServerOptions, ScaledByWorkers, TrainingCell,
};
use crate::workload::{PayloadSizes, Workload};

/// Writes all outputs that `options` ask for.
pub(crate) fn show(
    options: &ParameterServerOptions,
    facts: &TrainingFacts,
    rows: &[TrainingRow],
) -> Result<(), Failure> {
    report(facts, facts.lines(), rows).show(&options.outputs)
}

fn report<'a, F>(
    facts: &'a F,
    lines: Vec<(&'static str, String)>,
    rows: &'a [TrainingRow],
) -> Report<'a, F, TrainingRow> {
    Report {
        facts,
        lines,
        columns: columns(rows),
        rows,
        beside: TrainingRow::is_beside,
        legend: legend(rows),
    }
}

/// The facts about a run.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct TrainingFacts {
    /// Both ends of a run between two hosts.
    #[serde(skip_serializing_if = "Option::is_none")]
    ends: Option<Ends>,
    #[serde(flatten)]
    environment: Environment,
    http2: String,
    /// Calls that a worker has in flight in gRPC modes.
    inflight: usize,
    consume: Consume,
    pinned: bool,
    /// Mini-batches of each worker in each trial, if the command line gives the number.
    #[serde(skip_serializing_if = "Option::is_none")]
    steps: Option<u32>,
    seconds_per_cell_and_mode: f64,
    /// The factor of the computing times, if workers compute.
    #[serde(skip_serializing_if = "Option::is_none")]
    compute_scale: Option<String>,
    /// Trials of each mode in a run. The JSON keeps the key that stored results have.
    #[serde(rename = "turns")]
    trials: u32,
    /// As in `compare`.
    #[serde(rename = "rounds")]
    runs: u32,
    checks: TensorChecks,
    payloads: Vec<PayloadSizes>,
    #[serde(skip)]
    several_servers: bool,
    #[serde(skip)]
    http2_description: String,
}

/// Number of tensors that were checked. A wrong tensor ends the run.
#[derive(Clone, Copy, Debug, Serialize)]
struct TensorChecks {
    every_byte: u64,
    stamps: u64,
}

impl TrainingFacts {
    /// Collects the facts once the run is over.
    pub(crate) fn new(
        options: &ParameterServerOptions,
        meter: &TrainingMeter<'_>,
        ends: Option<Ends>,
        (costs, warnings): (Costs, Vec<String>),
    ) -> Self {
        let (http2, http2_description) = settings::describe(&options.http2.0);
        let scales: Vec<String> = options.compute_scale.0.iter().map(ToString::to_string).collect();
        Self {
            ends,
            environment: Environment::new(meter.provider.clone(), costs, warnings),
            http2,
            inflight: options.inflight,
            consume: options.consume,
            pinned: meter.pinned,
            steps: options.steps,
            seconds_per_cell_and_mode: options.duration.as_secs_f64(),
            compute_scale: options.computes().then(|| scales.join(",")),
            several_servers: options.servers != ScaledByWorkers::ONE,
            trials: options.trials(),
            runs: options.runs,
            payloads: PayloadSizes::of_each(options.models().into_iter().map(Workload::Model)),
            checks: TensorChecks { every_byte: meter.every_byte, stamps: meter.stamps },
            http2_description,
        }
    }

    /// Returns the facts as pairs of name and value, for people.
    fn lines(&self) -> Vec<(&'static str, String)> {
        let time = match self.steps {
            Some(steps) => format!("{steps} mini-batches of each worker"),
            None => format!("{} s for each mode in all", units::digits(self.seconds_per_cell_and_mode)),
        };
        let TensorChecks { every_byte, stamps } = self.checks;
        let mut lines = vec![
            ("gRPC", format!("a call a variable, {} in flight for each worker", self.inflight)),
            ("HTTP/2", self.http2_description.clone()),
            (
                "receivers",
                match self.consume {
                    Consume::None => "leave tensors as they are after the check".to_owned(),
                    _ => "consume each tensor by reduce_max (f32), in all modes".to_owned(),
                },
            ),
            (
                "processes",
                match self.pinned {
                    true if self.several_servers => {
                        "servers share half of the cores, workers share the other half".to_owned()
                    }
                    true => "the server has a core to itself, workers share the others".to_owned(),
                    false => "not pinned (there are no two cores to pin to)".to_owned(),
                },
            ),
            (
                "time",
                match self.runs {
                    1 => format!("{} trials, {time}", self.trials),
                    runs => format!("{runs} runs of one trial, whose medians are below, {time} in each"),
                },
            ),
            (
                "content",
                format!("all as sent (every byte of {every_byte} tensors, sampled words of {stamps})"),
            ),
        ];
        if let Some(scale) = &self.compute_scale {
            let text =
                format!("the times of table 2 of the paper × {scale}; a worker does not transfer meanwhile");
            lines.push(("computing", text));
        }
        lines.extend(self.payloads.iter().map(|payloads| ("sizes", payloads.curve())));
        let first = self.ends.iter().flat_map(Ends::lines);
        first.chain(self.environment.with("all", lines)).collect()
    }
}

/// Returns the columns that `rows` need: those of servers and computing only if there is something to show.
fn columns(rows: &[TrainingRow]) -> Vec<Column<TrainingRow>> {
    let column = column::<TrainingRow>;
    let mut columns = vec![
        column("mode", |row, _| row.contender().to_string()),
        column("model", |row, _| row.model.to_owned()),
        column("workers", |row, _| row.workers.to_string()),
    ];
    if rows.iter().any(|row| row.servers != 1) {
        columns.push(column("servers", |row, _| row.servers.to_string()));
    }
    let computes = rows.iter().any(|row| row.compute_ms.is_some());
    if computes {
        columns.push(column("batch", |row, _| row.batch.map_or_else(dash, |batch| batch.to_string())));
        columns.push(column("computing", |row, _| {
            let scale = row.compute_scale.as_ref().map(|scale| format!(" × {scale}")).unwrap_or_default();
            let text = |millis: f64| format!("{} {}{scale}", row.compute.name(), units::micros(millis * 1e3));
            row.compute_ms.map_or_else(dash, text)
        }));
    }
    columns.extend([
        column("each way", |row, _| format!("{} in {}", units::rough_size(row.bytes), row.variables)),
        column("mini-batches/s", |row, _| measured(row, units::count(row.minibatches_per_s))),
    ]);
    if rows.iter().any(|row| !row.runs.is_empty()) {
        let in_runs = |row: &TrainingRow, _: &[TrainingRow]| {
            row.runs.range(RATE).map_or_else(dash, |range| from_to(range, units::count))
        };
        columns.push(column("in all runs", in_runs));
    }
    columns.extend([
        column("p50", |row, _| measured(row, units::micros(row.p50_ms * 1e3))),
        column("GB/s", |row, _| measured(row, units::digits(row.gbytes_per_s))),
        column("CPU/mini-batch", |row, _| measured(row, units::micros(row.cpu_ms_per_minibatch * 1e3))),
    ]);
    if computes {
        columns.push(column("× local", |row, _| times(row.times_local)));
    }
    columns.extend([
        column("× grpc-tcp", |row, rows| times(row.times(Mode::GrpcTcp, rows))),
        column("× grpc-rdma", |row, rows| times(row.times(Mode::GrpcRdma, rows))),
    ]);
    columns
}

fn measured(row: &TrainingRow, text: String) -> String {
    if row.skipped.is_none() { text } else { dash() }
}

/// Explains the columns that need an explanation.
fn legend(rows: &[TrainingRow]) -> String {
    let mut legend = "mini-batches/s: of all workers together, median of the trials. p50: median time of a worker's mini-batch: all \
                      variables pulled, then all gradients pushed and consumed. GB/s: both directions together. CPU: user + system \
                      time of all processes."
        .to_owned();
    if rows.iter().any(|row| row.compute_ms.is_some()) {
        legend.push_str(" computing: of a worker, between its pull and its push. × local: beside one process that only computes.");
    }
    if rows.iter().any(|row| !row.runs.is_empty()) {
        legend.push_str(
            "\nfigures are medians of the runs, and ratios are medians of the ratios within each run.",
        );
    }
    if rows.iter().any(|row| row.http2.is_some()) {
        legend.push_str(OF_HTTP2);
    }
    for cell in rows.chunk_by(|one, next| one.cell == next.cell) {
        if let Some((row, reason)) = cell.first().and_then(|row| Some((row, row.skipped.as_ref()?))) {
            legend.push_str(&format!("\n{} was not measured: {reason}.", row.cell.label()));
        }
    }
    legend
}

/// The figures of one mode with one model, one number of workers and one load.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct TrainingRow {
    pub(crate) mode: Mode,
    /// The setting of HTTP/2, if the run has several and the mode uses HTTP/2.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) http2: Option<Http2>,
    pub(crate) model: &'static str,
    pub(crate) servers: usize,
    pub(crate) workers: usize,
    /// What workers do between pull and push, with which batch, and for how long.
    pub(crate) compute: Compute,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) batch: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) compute_ms: Option<f64>,
    /// The factor in this time, if the run has several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) compute_scale: Option<String>,
    /// Mini-batches a second of all workers, divided by those of a single process that computes and transfers
    /// nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) times_local: Option<f64>,
    /// Number of the model's variables, and their bytes. A mini-batch moves these bytes in each direction.
    pub(crate) variables: usize,
    pub(crate) bytes: u64,
    /// Measured mini-batches of all workers.
    pub(crate) minibatches: u64,
    /// Mini-batches a second of all workers together: the median of the trials.
    pub(crate) minibatches_per_s: f64,
    /// Median time of a worker's mini-batch.
    pub(crate) p50_ms: f64,
    pub(crate) max_ms: f64,
    /// Variables and gradients, both directions together.
    pub(crate) gbytes_per_s: f64,
    /// CPU time of all processes.
    pub(crate) cpu_ms_per_minibatch: f64,
    #[serde(flatten)]
    pub(crate) runs: Runs,
    /// The reason why the mode was not measured in this cell.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) skipped: Option<String>,
    #[serde(skip)]
    pub(crate) cell: TrainingCell,
    #[serde(skip)]
    pub(crate) load: Load,
}

/// The name of the rate in the JSON.
const RATE: &str = "minibatches_per_s";

/// The figures of which a row of several runs has those of each run.
const FIGURES: [Figure<TrainingRow>; 3] = [
    (RATE, |row| (row.minibatches > 0).then_some(row.minibatches_per_s)),
    ("p50_ms", |row| (row.minibatches > 0).then_some(row.p50_ms)),
    ("cpu_ms_per_minibatch", |row| (row.minibatches > 0).then_some(row.cpu_ms_per_minibatch)),
];

impl TrainingRow {
    /// Makes a row that was not measured, with the reason.
    pub(crate) fn skipped(
        contender: impl Into<Contender>,
        cell: TrainingCell,
        load: Load,
        reason: &str,
    ) -> Self {
        let row = TrainingTally::new(contender, cell, load, 0).row();
        Self { skipped: Some(reason.to_owned()), ..row }
    }

    fn contender(&self) -> Contender {
        Contender { mode: self.mode, http2: self.http2 }
    }

    /// Returns whether both rows are modes in the same cell with the same load.
    pub(crate) fn is_beside(&self, other: &Self) -> bool {
        (self.cell, self.load) == (other.cell, other.load)
    }

    /// Returns the mini-batches a second of this row divided by those of `mode` beside it, or `None` without
    /// a row to compare with. Of several runs it is the median of the ratios.
    pub(crate) fn times(&self, mode: Mode, rows: &[Self]) -> Option<f64> {
        let is_base = |row: &&Self| {
            row.mode == mode && row.is_beside(self) && self.contender().is_against(row.contender())
        };
        let base = rows.iter().find(is_base)?;
        if let Some((own, other)) = self.runs.of_figure(RATE).zip(base.runs.of_figure(RATE)) {
            return Some(median(own.iter().zip(other).map(|(own, other)| own / other)));
        }
        let (own, other) = (self.minibatches_per_s, base.minibatches_per_s);
        (other > 0.0 && own > 0.0).then(|| own / other)
    }

    /// Returns the row of several `runs`: medians, and the mini-batches of all runs.
    fn of_runs(runs: &[&Self]) -> Option<Self> {
        let first = *runs.first()?;
        let each = |figure: fn(&Self) -> f64| median(runs.iter().map(|row| figure(row)));
        Some(Self {
            times_local: first.times_local.map(|_| each(|row| row.times_local.unwrap_or(0.0))),
            minibatches: runs.iter().map(|row| row.minibatches).sum(),
            minibatches_per_s: each(|row| row.minibatches_per_s),
            p50_ms: each(|row| row.p50_ms),
            max_ms: runs.iter().map(|row| row.max_ms).fold(0.0, f64::max),
            gbytes_per_s: each(|row| row.gbytes_per_s),
            cpu_ms_per_minibatch: each(|row| row.cpu_ms_per_minibatch),
            runs: Runs::of(runs, &FIGURES),
            ..first.clone()
        })
    }
}

/// Returns the medians of runs, which have the same rows in the same order.
pub(crate) fn medians(runs: &[Vec<TrainingRow>]) -> Vec<TrainingRow> {
    let rows = runs.first().map_or(0, Vec::len);
    let of_all =
        |index| TrainingRow::of_runs(&runs.iter().filter_map(|rows| rows.get(index)).collect::<Vec<_>>());
    (0..rows).filter_map(of_all).collect()
}

/// Describes runs that stand out from the others.
pub(crate) fn disturbed_runs(rows: &[TrainingRow]) -> Vec<String> {
    let name = |row: &TrainingRow| {
        let load = row.load.label().map(|load| format!(", {load}")).unwrap_or_default();
        format!("{} with {}{load}", row.contender(), row.cell.label())
    };
    that_stand_out(rows.iter().map(|row| (name(row), &row.runs)), "p50_ms", |millis| {
        units::micros(millis * 1e3)
    })
}

/// The sum of one mode's trials in one cell.
#[derive(Debug)]
pub(crate) struct TrainingTally {
    pub(crate) contender: Contender,
    cell: TrainingCell,
    load: Load,
    /// Mini-batches of a trial.
    pub(crate) steps: u32,
    times: Vec<Duration>,
    /// Mini-batches a second of all workers, for each trial.
    rates: Vec<f64>,
    cpu_ms: f64,
}

impl TrainingTally {
    /// Makes a tally of trials of `steps` mini-batches.
    pub(crate) fn new(contender: impl Into<Contender>, cell: TrainingCell, load: Load, steps: u32) -> Self {
        let (contender, times, rates) = (contender.into(), Vec::new(), Vec::new());
        Self { contender, cell, load, steps, times, rates, cpu_ms: 0.0 }
    }

    /// Adds a trial. The slowest worker determines the duration of the trial.
    pub(crate) fn add(&mut self, outcome: Outcome) {
        let longest: Duration =
            outcome.times.iter().map(|times| times.iter().sum()).max().unwrap_or_default();
        let count: usize = outcome.times.iter().map(Vec::len).sum();
        if !longest.is_zero() {
            self.rates.push(count as f64 / longest.as_secs_f64());
        }
        self.cpu_ms += outcome.cpu.as_secs_f64() * 1e3;
        self.times.extend(outcome.times.into_iter().flatten());
    }

    pub(crate) fn row(mut self) -> TrainingRow {
        self.times.sort_unstable();
        self.rates.sort_unstable_by(f64::total_cmp);
        let bytes = self.cell.bytes();
        let minibatches = self.times.len() as u64;
        let minibatches_per_s = self.rates.get(self.rates.len() / 2).copied().unwrap_or(0.0);
        let computing = Some(self.load.time).filter(|_| self.load.compute != Compute::None);
        let times_local = computing.map(|time| minibatches_per_s * time.as_secs_f64());
        let millis = |time: Option<&Duration>| time.map_or(0.0, |time| time.as_nanos() as f64 / 1e6);
        TrainingRow {
            mode: self.contender.mode,
            http2: self.contender.http2,
            model: self.cell.model.name(),
            servers: self.cell.servers,
            workers: self.cell.workers,
            compute: self.load.compute,
            batch: self.load.batch,
            compute_ms: computing.map(|time| time.as_nanos() as f64 / 1e6),
            compute_scale: self.load.scale.map(|scale| scale.to_string()),
            times_local: times_local.filter(|times| *times > 0.0),
            variables: self.cell.model.variables().len(),
            bytes,
            minibatches,
            minibatches_per_s,
            p50_ms: millis(self.times.get(self.times.len() / 2)),
            max_ms: millis(self.times.last()),
            gbytes_per_s: minibatches_per_s * 2.0 * bytes as f64 / 1e9,
            cpu_ms_per_minibatch: if minibatches == 0 { 0.0 } else { self.cpu_ms / minibatches as f64 },
            runs: Runs::default(),
            skipped: None,
            cell: self.cell,
            load: self.load,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use std::time::Duration;

    use super::*;
    use crate::workload::Model;

    fn row(mode: Mode, model: Model, workers: usize) -> TrainingRow {
        loaded(mode, model, workers, Load::NONE)
    }

    fn loaded(mode: Mode, model: Model, workers: usize, load: Load) -> TrainingRow {
        let mut tally = TrainingTally::new(mode, TrainingCell { model, servers: 1, workers }, load, 1);
        tally.add(Outcome { times: vec![vec![Duration::from_millis(50)]; workers], ..Outcome::default() });
        tally.row()
    }

    fn table(rows: &[TrainingRow]) -> String {
        report(&(), Vec::new(), rows).text()
    }

    #[test]
    fn rows_with_a_load_show_it() {
        let time = Duration::from_millis(5);
        let load = |batch| Load { compute: Compute::Wait, batch: Some(batch), time, scale: None };
        let of = |batch| loaded(Mode::GrpcTcp, Model::Gru, 1, load(batch));
        let text = table(&[of(8)]);
        assert!(text.contains("× local") && text.contains("5.00 ms") && !text.contains("servers"), "{text}");
    }

    #[test]
    fn a_skipped_row_has_dashes_and_a_reason() {
        let cell = TrainingCell { model: Model::Vgg16, servers: 1, workers: 8 };
        let rows = [
            row(Mode::GrpcTcp, Model::Gru, 1),
            TrainingRow::skipped(Mode::GrpcTcp, cell, Load::NONE, "no memory"),
        ];
        assert!(legend(&rows).ends_with("vgg16, 8 workers was not measured: no memory."));
        let text = table(&rows);
        let line = text.lines().find(|line| line.contains("vgg16")).unwrap();
        assert!(line.contains('–') && line.contains("512 MiB in 32"), "{text}");
    }
}

#[cfg(test)]
mod row_tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;
    use crate::workload::Model;

    const CELL: TrainingCell = TrainingCell { model: Model::Gru, servers: 1, workers: 2 };
    const LOAD: Load =
        Load { compute: Compute::Wait, batch: Some(8), time: Duration::from_millis(10), scale: None };

    fn row(mode: Mode, load: Load, milliseconds: u64) -> TrainingRow {
        let mut tally = TrainingTally::new(mode, CELL, load, 2);
        // The median trial counts, and in it the slower worker.
        for factor in [1, 2, 9] {
            let times = |slower| vec![Duration::from_millis(milliseconds * factor * slower); 2];
            let cpu = Duration::from_millis(8);
            tally.add(Outcome { times: vec![times(1), times(2)], cpu, checked: 0 });
        }
        tally.row()
    }

    #[test]
    fn a_row_is_the_median_of_its_trials() {
        let row = row(Mode::GrpcTcp, Load::NONE, 10);
        assert_eq!((row.minibatches, row.variables, row.bytes), (12, 11, 29_278_112));
        // Four mini-batches in 2 × 40 ms.
        assert!((row.minibatches_per_s - 50.0).abs() < 1e-9, "{row:?}");
        assert_eq!((row.p50_ms, row.max_ms, row.cpu_ms_per_minibatch), (40.0, 180.0, 2.0));
        assert!((row.gbytes_per_s - 50.0 * 2.0 * 29_278_112.0 / 1e9).abs() < 1e-9);
    }

    #[test]
    fn ratios_compare_measured_rows_of_the_same_cell() {
        let rows = [
            row(Mode::GrpcTcp, Load::NONE, 40),
            row(Mode::RdmaZerocp, Load::NONE, 10),
            row(Mode::RdmaZerocp, LOAD, 20),
        ];
        assert_eq!(rows[1].times(Mode::GrpcTcp, &rows), Some(4.0));
        assert_eq!(rows[1].times(Mode::GrpcRdma, &rows), None);
        assert_eq!(rows[2].times(Mode::GrpcTcp, &rows), None, "the loads differ");
        let other = TrainingCell { workers: 3, ..CELL };
        let skipped = TrainingRow::skipped(Mode::GrpcTcp, other, LOAD, "no memory");
        assert_eq!((skipped.times(Mode::GrpcTcp, &rows), skipped.minibatches), (None, 0));
        assert_eq!(serde_json::to_value(&skipped).unwrap()["skipped"], "no memory");
        assert_eq!(skipped.times_local, None);
        assert!(serde_json::to_value(&rows[0]).unwrap().get("skipped").is_none());
    }

    #[test]
    fn rows_of_runs_are_medians_and_ratios_are_of_the_same_run() {
        let run = |tcp, tuned, zerocp| {
            let with = |http2, milliseconds| TrainingRow { http2, ..row(Mode::GrpcTcp, LOAD, milliseconds) };
            let (usual, better) = (Some(Http2::DEFAULT), Some(Http2::TUNED));
            vec![with(usual, tcp), with(better, tuned), row(Mode::RdmaZerocp, LOAD, zerocp)]
        };
        let rows = medians(&[run(40, 20, 20), run(20, 20, 4), run(60, 30, 10)]);
        assert_eq!((rows.len(), rows[0].minibatches, rows[0].max_ms), (3, 36, 60.0 * 18.0));
        assert!((rows[0].minibatches_per_s - 12.5).abs() < 1e-9 && rows[0].p50_ms == 160.0, "{rows:?}");
        // Those of the runs are 2, 5 and 6, and the ratio of the medians is 4.
        let ratios = rows.iter().map(|row| row.times(Mode::GrpcTcp, &rows)).collect::<Vec<_>>();
        assert_eq!(ratios, [Some(1.0), Some(1.0), Some(5.0)]);
        let json = serde_json::to_value(&rows[1]).unwrap();
        assert_eq!(
            (&json["http2"], json["minibatches_per_s_runs"].as_array().unwrap().len()),
            (&"tuned".into(), 3)
        );
        assert_eq!((&json["p50_ms_min"], &json["p50_ms_max"]), (&80.0.into(), &120.0.into()));
        let once = medians(&[run(40, 20, 10)]);
        assert!(once[0].runs.is_empty() && once[2].times(Mode::GrpcTcp, &once) == Some(4.0), "{once:?}");
        let skipped = |_| vec![TrainingRow::skipped(Mode::GrpcTcp, CELL, LOAD, "no memory")];
        let skipped = medians(&[0, 1].map(skipped));
        assert!(skipped[0].runs.is_empty() && skipped[0].skipped.is_some(), "{skipped:?}");
    }

    #[test]
    fn a_row_with_a_load_is_compared_with_computing_alone() {
        let row = row(Mode::GrpcTcp, LOAD, 20);
        // Four mini-batches in 2 × 80 ms, and one in 10 ms alone.
        assert_eq!((row.batch, row.compute_ms, row.times_local), (Some(8), Some(10.0), Some(0.25)));
        let json = serde_json::to_value(&row).unwrap();
        assert_eq!((&json["compute"], &json["batch"]), (&"wait".into(), &8.into()));
        let json = serde_json::to_value(super::row_tests::row(Mode::GrpcTcp, Load::NONE, 20)).unwrap();
        assert!(
            json["compute"] == "none" && json.get("batch").is_none() && json.get("times_local").is_none()
        );
    }
}
