//! `diff`: two files that `--json` wrote, cell beside cell: which figures differ by more than their runs do.
//!
//! It compares stored results. `benches/against` builds and runs two revisions in turn, so that a drift of the
//! machine affects both alike.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use clap::Args;
use serde::ser::SerializeMap as _;
use serde::{Serialize, Serializer};
use serde_json::{Map, Value};
use tonic_rdma_commands::output::Outputs;
use tonic_rdma_commands::statistics::median_interval;
use tonic_rdma_commands::table::{dash, times};
use tonic_rdma_commands::{Failure, units};

use crate::compare::options::parse_ratio;
use crate::measure::report::{Column, Report, column};

pub(crate) const HELP: &str = "\
× says how many times better NEW is: below 1 it is worse. A difference is beyond the spread if the intervals of both medians \
have nothing in common; that needs --runs 4 or more in both files, better 5. Of equal programs, one figure in a hundred is \
beyond it by chance with 5 runs each. What the machine did between the two runs counts too.

Examples:
  tonic-rdma compare --runs 5 --json before.json
  tonic-rdma compare --runs 5 --json after.json
  tonic-rdma diff before.json after.json
  tonic-rdma diff before.json after.json --at-least 0.95     for CI: fails if a cell is slower";

/// The options of `diff`.
#[derive(Debug, Args)]
pub(crate) struct DiffOptions {
    /// The earlier results, as --json of compare wrote them
    ///
    /// Or of parameter-server, or of another command with rows.
    #[arg(value_name = "OLD.json")]
    old: PathBuf,
    /// The later results of the same command
    #[arg(value_name = "NEW.json")]
    new: PathBuf,
    /// Fail if a cell of NEW has less than RATIO times OLD's speed
    ///
    /// The exit status is 1 then. By its latency or its throughput, and if the difference is beyond the spread, or the spread is unknown. Also if
    /// a cell of OLD, or its latency or throughput, is not measured in NEW.
    #[arg(long, value_name = "RATIO", value_parser = parse_ratio)]
    at_least: Option<f64>,
    /// Compare even if the settings or the machines of both differ
    #[arg(long)]
    ignore_settings: bool,
    #[command(flatten)]
    outputs: Outputs,
}

/// The fields that name a cell.
const CELL: [&str; 22] = [
    "mode",
    "http2",
    "algorithm",
    "method",
    "workload",
    "model",
    "bytes",
    "inflight",
    "direction",
    "rate",
    "connections",
    "busy",
    "servers",
    "workers",
    "compute",
    "compute_scale",
    "batch",
    "ranks",
    "type",
    "operand",
    "reduction",
    "transport",
];
/// What most cells have, so that their names leave it out.
const USUAL: [&str; 5] = ["up", "none", "f32", "registered", "sum"];

/// The facts that are results, or choose cells. All others are settings.
const NO_SETTINGS: [&str; 19] = [
    "rows",
    "payloads",
    "rounds",
    "turns",
    "checks",
    "round_trips",
    "verdict",
    "version",
    "warnings",
    "seconds_per_cell_and_mode",
    "reducing_modes",
    "defaults",
    "clock",
    "text",
    "server_address",
    "plans",
    "counters",
    "tuner",
    "wrong",
];

/// A figure that is compared: its name in the results of this command, its names in a row, and whether more is
/// better.
#[derive(Debug)]
struct Figure {
    name: &'static str,
    fields: &'static [&'static str],
    more_is_better: bool,
}

static FIGURES: [Figure; 4] = [
    Figure { name: "latency", fields: &["p50_us", "p50_ms"], more_is_better: false },
    Figure { name: "p99", fields: &["p99_us"], more_is_better: false },
    Figure { name: "throughput", fields: &["ops_per_s", "minibatches_per_s"], more_is_better: true },
    Figure { name: "cpu", fields: &["cpu_us_per_op", "cpu_ms_per_minibatch"], more_is_better: false },
];

/// The figures that `--at-least` judges.
const JUDGED: [&str; 2] = ["latency", "throughput"];

impl Figure {
    /// Returns whether it can be compared. The latency of a mode that falls behind its rate can't: it grows with
    /// the length of the run.
    fn means_something(&self, old: &Map<String, Value>, new: &Map<String, Value>) -> bool {
        let is_saturated = [old, new].iter().any(|row| row.get("saturated") == Some(&Value::Bool(true)));
        !is_saturated || self.more_is_better || self.name == "cpu"
    }

    fn is_in(&self, row: &Map<String, Value>) -> bool {
        self.fields.iter().any(|field| number(row, field).is_some())
    }
}

fn number(row: &Map<String, Value>, field: &str) -> Option<f64> {
    row.get(field)?.as_f64().filter(|value| *value > 0.0)
}

/// The least number of runs of which the spread is known. The ranges of three runs each have nothing in common
/// once in ten times by chance.
const ENOUGH_RUNS: usize = 4;

/// Compares two files.
pub(crate) fn run(options: &DiffOptions) -> Result<(), Failure> {
    let [old, new] = [read(&options.old)?, read(&options.new)?];
    let differing = differing_settings(&old.facts, &new.facts);
    if !differing.is_empty() && !options.ignore_settings {
        return Err(Failure::usage(format!(
            "the settings of {} and {} differ: {}; --ignore-settings compares them nevertheless",
            options.old.display(),
            options.new.display(),
            differing.join(", ")
        )));
    }
    options.outputs.check()?;
    let Compared { rows, lost, added } = compare(&old, &new, options)?;
    let facts = Facts {
        old: describe(&options.old, &old),
        new: describe(&options.new, &new),
        differing_settings: differing,
        lost,
        added,
    };
    report(&facts, &rows).show(&options.outputs)?;
    options.at_least.map_or(Ok(()), |least| check(least, &rows, &facts.lost))
}

/// A file of results.
#[derive(Debug)]
struct Results {
    facts: Map<String, Value>,
    /// The rows by the names of their cells, in the order of the file.
    rows: Vec<(String, Map<String, Value>)>,
}

fn read(path: &Path) -> Result<Results, Failure> {
    let bad = |fault: &str| {
        let accepted = "accepted: a file that --json of compare, load, parameter-server or allreduce wrote";
        Failure::usage(format!("{}: {fault}; {accepted}", path.display()))
    };
    let text = fs::read(path)
        .map_err(|error| Failure::usage(format!("can't read {}", path.display())).because(error))?;
    let facts =
        serde_json::from_slice(&text).map_err(|error| bad(&format!("it is no JSON object: {error}")))?;
    let facts: Map<String, Value> = facts;
    let Some(of_file) = facts.get("rows").and_then(Value::as_array) else {
        return Err(bad("it has no rows"));
    };
    let mut rows: Vec<(String, Map<String, Value>)> = Vec::new();
    for (index, row) in of_file.iter().enumerate() {
        let has = |fields: &[&str]| fields.iter().any(|field| row.get(field).is_some());
        let Some(row) = row.as_object().filter(|_| has(&CELL) && has(FIGURES[0].fields)) else {
            return Err(bad(&format!("row {} has no {}", index + 1, FIGURES[0].fields.join(" or "))));
        };
        let name = name_of(row);
        if rows.iter().any(|(_, other)| is_same_cell(row, other)) {
            return Err(bad(&format!("the cell {name} is there twice")));
        }
        rows.push((name, row.clone()));
    }
    if rows.is_empty() {
        return Err(bad("it has no rows"));
    }
    Ok(Results { facts, rows })
}

/// Returns the fields that a row's cell has.
fn cell(row: &Map<String, Value>) -> impl Iterator<Item = (&'static str, &Value)> {
    // The name of a load says how large it is.
    let is_load = row.contains_key("workload") || row.contains_key("model");
    let fields = CELL.into_iter().filter(move |field| !(is_load && *field == "bytes"));
    fields.filter_map(|field| Some((field, row.get(field).filter(|value| !value.is_null())?)))
}

fn is_same_cell(one: &Map<String, Value>, other: &Map<String, Value>) -> bool {
    cell(one).eq(cell(other))
}

/// Returns the name of a row's cell: `grpc-tcp, 64 B × 32`. Other cells may have it too, because it is rounded.
fn name_of(row: &Map<String, Value>) -> String {
    let mut name = String::new();
    for (field, value) in cell(row) {
        let text = match (field, value) {
            (_, Value::String(text)) if USUAL.contains(&text.as_str()) => continue,
            ("bytes", bytes) => units::size(bytes.as_u64().unwrap_or(0)),
            ("inflight", calls) => {
                name.push_str(&format!(" × {calls}"));
                continue;
            }
            ("rate", rate) => format!("{}/s", units::count(rate.as_f64().unwrap_or(0.0))),
            (_, Value::String(text)) => text.clone(),
            (field, number) if number == 1 => format!("1 {}", field.trim_end_matches('s')),
            (field, number) => format!("{number} {field}"),
        };
        let comma = if name.is_empty() { "" } else { ", " };
        name.push_str(&format!("{comma}{text}"));
    }
    name
}

/// Returns the settings that differ, each with both values.
fn differing_settings(old: &Map<String, Value>, new: &Map<String, Value>) -> Vec<String> {
    let [old, new] = [old, new].map(|facts| {
        let mut settings = BTreeMap::new();
        collect_settings("", facts, &mut settings);
        settings
    });
    let text = |value: Option<&Value>| match value {
        None => "none".to_owned(),
        Some(Value::String(text)) => text.clone(),
        Some(value) => value.to_string(),
    };
    let mut names: Vec<&String> = old.keys().chain(new.keys()).collect();
    names.sort();
    names.dedup();
    let differing = names.into_iter().map(|name| (name, old.get(name), new.get(name)));
    let differing = differing.filter(|(_, old, new)| old != new);
    differing.map(|(name, old, new)| format!("{name} ({}, {})", text(old), text(new))).collect()
}

fn collect_settings(above: &str, facts: &Map<String, Value>, settings: &mut BTreeMap<String, Value>) {
    for (name, value) in facts.iter().filter(|(name, _)| !NO_SETTINGS.contains(&name.as_str())) {
        let path = if above.is_empty() { name.clone() } else { format!("{above}.{name}") };
        match value {
            Value::Null => {}
            Value::Object(inner) => collect_settings(&path, inner, settings),
            value => drop(settings.insert(path, value.clone())),
        }
    }
}

/// What both files have in common.
#[derive(Debug)]
struct Compared {
    rows: Vec<DiffRow>,
    /// Cells of the old file that can't be compared, or not by all figures that `--at-least` judges, each with
    /// the reason.
    lost: Vec<String>,
    /// Cells that only the new file has.
    added: Vec<String>,
}

fn compare(old: &Results, new: &Results, options: &DiffOptions) -> Result<Compared, Failure> {
    let [of_old, of_new] = [&options.old, &options.new].map(|path| path.display());
    let (mut rows, mut lost) = (Vec::new(), Vec::new());
    for (cell, before) in &old.rows {
        let Some((_, after)) = new.rows.iter().find(|(_, other)| is_same_cell(before, other)) else {
            lost.push(format!("{cell}: not in {of_new}"));
            continue;
        };
        match [(before, &of_old), (after, &of_new)]
            .into_iter()
            .find_map(|(row, file)| Some((fault(row)?, file)))
        {
            Some((fault, file)) => lost.push(format!("{cell}: {fault} in {file}")),
            None => {
                let gone = FIGURES.iter().filter(|figure| {
                    let is_judged = JUDGED.contains(&figure.name) && figure.means_something(before, after);
                    is_judged && figure.is_in(before) && !figure.is_in(after)
                });
                lost.extend(gone.map(|figure| format!("{cell}: no {} in {of_new}", figure.name)));
                rows.push(DiffRow::new(cell, before, after));
            }
        }
    }
    if let (true, Some(first)) = (rows.is_empty(), lost.first()) {
        let text = format!("{of_old} and {of_new} have no cell to compare; the first: {first}");
        // A check of a cell that is lost has failed.
        return Err(if options.at_least.is_some() { Failure::run(text) } else { Failure::usage(text) });
    }
    let added =
        new.rows.iter().filter(|(_, row)| !old.rows.iter().any(|(_, other)| is_same_cell(row, other)));
    let added = added.map(|(cell, _)| format!("{cell}: not in {of_old}")).collect();
    Ok(Compared { rows, lost, added })
}

/// Returns why the figures of a row mean nothing.
fn fault(row: &Map<String, Value>) -> Option<String> {
    let text = |field: &str| row.get(field).and_then(Value::as_str);
    let errors = row.get("errors").and_then(Value::as_u64).filter(|errors| *errors > 0);
    let errors = errors.map(|count| format!("{count} errors ({})", text("first_error").unwrap_or("unknown")));
    // `compare` says with `saturated` what they mean.
    let unsent = row.get("unsent").and_then(Value::as_u64);
    let unsent = unsent.filter(|unsent| *unsent > 0 && !row.contains_key("saturated"));
    let unsent = unsent.map(|count| format!("{count} calls were given up"));
    errors.or(unsent).or_else(|| Some(format!("not measured ({})", text("skipped")?)))
}

/// One cell of both files.
#[derive(Clone, Debug)]
struct DiffRow {
    name: String,
    /// The fields that name the cell.
    cell: Vec<(&'static str, Value)>,
    figures: Vec<(&'static Figure, Pair)>,
}

/// A figure in both files.
#[derive(Clone, Debug)]
struct Pair {
    field: &'static str,
    old: f64,
    new: f64,
    /// How many times better the new one is.
    ratio: f64,
    /// Whether the difference is beyond the spread; `None` if there are too few runs.
    beyond_spread: Option<bool>,
}

impl DiffRow {
    fn new(name: &str, old: &Map<String, Value>, new: &Map<String, Value>) -> Self {
        let cell = CELL.iter().filter_map(|field| Some((*field, new.get(*field)?.clone()))).collect();
        let figures = FIGURES.iter().filter(|figure| figure.means_something(old, new));
        let figures = figures.filter_map(|figure| Some((figure, Pair::of(figure, old, new)?))).collect();
        Self { name: name.to_owned(), cell, figures }
    }

    fn pair(&self, name: &str) -> Option<&Pair> {
        self.figures.iter().find(|(figure, _)| figure.name == name).map(|(_, pair)| pair)
    }
}

impl Pair {
    fn of(figure: &Figure, old: &Map<String, Value>, new: &Map<String, Value>) -> Option<Self> {
        figure.fields.iter().find_map(|field| {
            let (before, after) = (number(old, field)?, number(new, field)?);
            let ratio = if figure.more_is_better { after / before } else { before / after };
            let runs = |row: &Map<String, Value>| {
                let runs = row.get(&format!("{field}_runs"))?.as_array()?;
                let runs: Vec<f64> = runs.iter().filter_map(Value::as_f64).collect();
                median_interval(&runs).filter(|_| runs.len() >= ENOUGH_RUNS)
            };
            let beyond_spread = runs(old).zip(runs(new)).map(|(old, new)| old[1] < new[0] || new[1] < old[0]);
            Some(Self { field, old: before, new: after, ratio, beyond_spread })
        })
    }

    /// Returns the ratio with a mark if it is beyond the spread.
    fn text(&self) -> String {
        let mark = if self.beyond_spread == Some(true) { " *" } else { "" };
        format!("{}{mark}", times(Some(self.ratio)))
    }
}

impl Serialize for DiffRow {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        for (field, value) in &self.cell {
            map.serialize_entry(field, value)?;
        }
        for (figure, pair) in &self.figures {
            map.serialize_entry(&format!("{}_old", pair.field), &pair.old)?;
            map.serialize_entry(&format!("{}_new", pair.field), &pair.new)?;
            map.serialize_entry(&format!("{}_ratio", figure.name), &pair.ratio)?;
            map.serialize_entry(&format!("{}_beyond_spread", figure.name), &pair.beyond_spread)?;
        }
        map.end()
    }
}

/// The settings and the result of the comparison.
#[derive(Clone, Debug, Serialize)]
struct Facts {
    old: String,
    new: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    differing_settings: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    lost: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    added: Vec<String>,
}

/// Describes a file by its path, version and number of runs.
fn describe(path: &Path, results: &Results) -> String {
    let version = results.facts.get("version").and_then(Value::as_str);
    let version = version.map(|version| format!(", version {version}")).unwrap_or_default();
    let runs = results.facts.get("rounds").and_then(Value::as_u64).unwrap_or(1);
    format!("{}{version}, {runs} {}", path.display(), if runs == 1 { "run" } else { "runs" })
}

fn report<'a>(facts: &'a Facts, rows: &'a [DiffRow]) -> Report<'a, Facts, DiffRow> {
    let pairs = || rows.iter().flat_map(|row| row.figures.iter().map(|(_, pair)| pair));
    let beyond: Vec<f64> =
        pairs().filter(|pair| pair.beyond_spread == Some(true)).map(|pair| pair.ratio).collect();
    let worse = beyond.iter().filter(|ratio| **ratio < 1.0).count();
    let known = pairs().filter(|pair| pair.beyond_spread.is_some()).count();
    let spread = match known {
        0 => "unknown, because both files need --runs 4 or more".to_owned(),
        _ => format!(
            "of {known} figures {worse} are worse beyond it, {} are better beyond it",
            beyond.len() - worse
        ),
    };
    let mut lines = vec![("old", facts.old.clone()), ("new", facts.new.clone()), ("spread", spread)];
    lines.extend(facts.differing_settings.iter().map(|setting| ("differs", setting.clone())));
    lines.extend(facts.lost.iter().chain(&facts.added).map(|cell| ("left out", cell.clone())));
    let legend = "×: how many times better the new figure is than the old one (p50, p99, operations a second, CPU time of an \
                  operation). *: beyond the spread: the intervals that hold each median in nine of ten cases have nothing in \
                  common.";
    Report { facts, lines, columns: columns(), rows, beside: |_, _| true, legend: legend.to_owned() }
}

fn columns() -> Vec<Column<DiffRow>> {
    fn micros(row: &DiffRow, value: fn(&Pair) -> f64) -> String {
        row.pair("latency").map_or_else(dash, |pair| {
            units::micros(value(pair) * if pair.field.ends_with("_ms") { 1e3 } else { 1.0 })
        })
    }
    fn ratio(row: &DiffRow, name: &str) -> String {
        row.pair(name).map_or_else(dash, Pair::text)
    }
    vec![
        column("cell", |row: &DiffRow, _| row.name.clone()),
        column("old p50", |row, _| micros(row, |pair| pair.old)),
        column("new p50", |row, _| micros(row, |pair| pair.new)),
        column("latency ×", |row, _| ratio(row, "latency")),
        column("p99 ×", |row, _| ratio(row, "p99")),
        column("throughput ×", |row, _| ratio(row, "throughput")),
        column("CPU ×", |row, _| ratio(row, "cpu")),
    ]
}

/// Fails if a cell has less than `least` times the speed of before, or is among the `lost`.
fn check(least: f64, rows: &[DiffRow], lost: &[String]) -> Result<(), Failure> {
    let mut slower = Vec::new();
    for row in rows {
        for name in JUDGED {
            let pair = row.pair(name).filter(|pair| pair.ratio < least && pair.beyond_spread != Some(false));
            slower.extend(pair.map(|pair| format!("{}: {name} {}", row.name, units::digits(pair.ratio))));
        }
    }
    let mut faults = Vec::new();
    if !slower.is_empty() {
        faults.push(format!("less than {least} times the speed of before: {}", slower.join("; ")));
    }
    if !lost.is_empty() {
        faults.push(format!("not compared: {}", lost.join("; ")));
    }
    if faults.is_empty() { Ok(()) } else { Err(Failure::run(faults.join("; "))) }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn row(value: Value) -> Map<String, Value> {
        value.as_object().cloned().unwrap_or_default()
    }

    #[test]
    fn cells_are_named_by_their_fields() {
        for (fields, name) in [
            (
                json!({ "mode": "grpc-tcp", "bytes": 64, "inflight": 32, "direction": "up", "ops": 5, "p50_us": 3.0 }),
                "grpc-tcp, 64 B × 32",
            ),
            (
                json!({ "mode": "grpc-tcp", "workload": "skew", "bytes": 999, "inflight": 1, "direction": "down", "rate": 2e4 }),
                "grpc-tcp, skew × 1, down, 20.0 k/s",
            ),
            (
                json!({ "mode": "grpc-tcp", "bytes": 64, "inflight": 1, "rate": null, "connections": 8, "busy": 1 }),
                "grpc-tcp, 64 B × 1, 8 connections, 1 busy",
            ),
            (
                json!({ "mode": "rdma-cp", "model": "gru", "bytes": 9, "servers": 1, "workers": 2, "compute": "none" }),
                "rdma-cp, gru, 1 server, 2 workers",
            ),
            (
                json!({ "algorithm": "ring", "bytes": 1024, "ranks": 2, "type": "f32", "operand": "slice" }),
                "ring, 1 KiB, 2 ranks, slice",
            ),
        ] {
            assert_eq!(name_of(&row(fields)), name);
        }
    }

    #[test]
    fn settings_are_all_facts_but_results() {
        let facts = |kernel: &str, allocator: &str| {
            row(
                json!({ "version": kernel, "rounds": kernel, "machine": { "kernel": kernel, "cores": 2 }, "checks": kernel,
                        "allocator": allocator, "cores": null, "ends": { "clock": kernel, "client": { "devices": [kernel] } } }),
            )
        };
        assert_eq!(differing_settings(&facts("a", "b"), &facts("a", "b")), [""; 0]);
        let mut new = facts("2", "system");
        new.insert("pin".to_owned(), json!(true));
        assert_eq!(
            differing_settings(&facts("1", "mimalloc"), &new),
            [
                "allocator (mimalloc, system)",
                "ends.client.devices ([\"1\"], [\"2\"])",
                "machine.kernel (1, 2)",
                "pin (none, true)"
            ]
        );
    }

    fn pair(old: &[f64], new: &[f64]) -> Option<Pair> {
        let row = |runs: &[f64]| {
            row(
                json!({ "p50_us": tonic_rdma_commands::statistics::median(runs.iter().copied()), "p50_us_runs": runs }),
            )
        };
        Pair::of(&FIGURES[0], &row(old), &row(new))
    }

    #[test]
    fn a_difference_is_beyond_the_spread_if_the_intervals_have_nothing_in_common() {
        let judged = |old: &[f64], new: &[f64]| pair(old, new).map(|pair| (pair.ratio, pair.beyond_spread));
        assert_eq!(judged(&[4.0; 4], &[2.0, 3.9, 2.0, 2.0]), Some((2.0, Some(true))));
        assert_eq!(judged(&[4.0; 4], &[2.0, 4.0, 2.0, 2.0]), Some((2.0, Some(false))));
        // Three runs are too few.
        assert_eq!(judged(&[4.0; 3], &[2.0; 4]), Some((2.0, None)));
        // One of eight runs does not count.
        assert_eq!(judged(&[4.0; 4], &[8.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0, 1.0]), Some((0.5, Some(true))));
        assert_eq!(judged(&[0.0], &[1.0]), None);
    }

    #[test]
    fn the_latency_of_a_saturated_mode_is_not_compared() {
        let of = |saturated| {
            row(json!({ "mode": "grpc-tcp", "p50_us": 1.0, "ops_per_s": 5.0, "saturated": saturated }))
        };
        let names = |old, new| {
            DiffRow::new("", &of(old), &of(new))
                .figures
                .iter()
                .map(|(figure, _)| figure.name)
                .collect::<Vec<_>>()
        };
        assert_eq!(names(false, false), ["latency", "throughput"]);
        assert_eq!(names(false, true), ["throughput"]);
    }
}
