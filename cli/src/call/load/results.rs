//! The results of a load: rows with the figures of each transport in each cell, the transport that its
//! connections really had, and warnings.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::Serialize;
use tonic_rdma_commands::statistics::median;
use tonic_rdma_commands::table::{dash, times};
use tonic_rdma_commands::{Failure, Flavour, units};

use crate::call::channel::{Path, Transport};
use crate::call::load::trial::{Load, Participant, Tally};
use crate::call::load::{Cell, LoadOptions};
use crate::compare::runs::Runs;
use crate::measure::machine::{Costs, Environment};
use crate::measure::report::{Report, column};

/// The figures of a transport in a cell. The names of figures are those of `compare`.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    /// The transport that was asked for.
    mode: Transport,
    /// Bytes that a call sends, on average.
    bytes: u64,
    inflight: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    rate: Option<f64>,
    /// Calls that ended with OK and the expected answer.
    ops: u64,
    errors: u64,
    /// The errors by their gRPC status, or `WRONG_ANSWER`.
    statuses: BTreeMap<String, u64>,
    /// Calls of an open loop that were given up before they were sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    unsent: Option<u64>,
    p50_us: Option<f64>,
    /// Absent if fewer than 100 calls ended well, because none of them is the slowest of a hundred.
    p99_us: Option<f64>,
    /// Absent if fewer than 1000 calls ended well.
    p999_us: Option<f64>,
    ops_per_s: f64,
    /// CPU time of this process for each call that ended well.
    cpu_us_per_op: Option<f64>,
    #[serde(flatten)]
    runs: Runs,
    latency_ratio: Option<f64>,
    p99_ratio: Option<f64>,
    throughput_ratio: Option<f64>,
    cpu_ratio: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    first_error: Option<String>,
    /// The transports that connections really had, the device in use, and the reasons.
    went: BTreeSet<Transport>,
    device: Option<String>,
    reasons: BTreeSet<String>,
    #[serde(skip)]
    paths: BTreeSet<Path>,
}

type Figure = fn(&Row) -> Option<f64>;

impl Row {
    pub(super) fn new(participant: &Participant, cell: Cell, tally: Tally, load: &Load) -> Self {
        let latencies = &tally.latencies;
        let at_least = |least, share| {
            (latencies.len() >= least).then(|| latencies.value_at_quantile(share) as f64 / 1e3)
        };
        let micros = |time: Duration| time.as_secs_f64() * 1e6;
        let ops = latencies.len();
        Self {
            mode: participant.transport,
            bytes: load.bytes(),
            inflight: cell.inflight,
            rate: cell.rate,
            ops,
            errors: tally.errors.values().sum(),
            unsent: cell.rate.map(|_| tally.unsent),
            p50_us: at_least(1, 0.5),
            p99_us: at_least(100, 0.99),
            p999_us: at_least(1000, 0.999),
            ops_per_s: ops as f64 / tally.wall.as_secs_f64().max(1e-9),
            cpu_us_per_op: (ops > 0).then(|| micros(tally.cpu) / ops as f64),
            statuses: tally.errors,
            runs: Runs::default(),
            latency_ratio: None,
            p99_ratio: None,
            throughput_ratio: None,
            cpu_ratio: None,
            first_error: tally.first_error,
            went: BTreeSet::new(),
            device: None,
            reasons: BTreeSet::new(),
            paths: tally.paths,
        }
    }

    fn is_beside(&self, other: &Self) -> bool {
        (self.inflight, self.rate) == (other.inflight, other.rate)
    }

    /// Compares with the row of tcp in the same cell of the same run: how many times better.
    fn compare(&mut self, tcp: &Self) {
        let ratio = |over: Option<f64>, under: Option<f64>| {
            over.zip(under).and_then(|(over, under)| (over > 0.0 && under > 0.0).then(|| over / under))
        };
        self.latency_ratio = ratio(tcp.p50_us, self.p50_us);
        self.p99_ratio = ratio(tcp.p99_us, self.p99_us);
        self.throughput_ratio = ratio(Some(self.ops_per_s), Some(tcp.ops_per_s));
        self.cpu_ratio = ratio(tcp.cpu_us_per_op, self.cpu_us_per_op);
    }

    /// Returns the row of all runs: the medians of the figures that most runs have, and the counts of all.
    fn of_runs(runs: &[&Self]) -> Option<Self> {
        let in_most = |figure: Figure| {
            let there: Vec<f64> = runs.iter().filter_map(|row| figure(row)).collect();
            (2 * there.len() > runs.len()).then(|| median(there))
        };
        let mut all = (*runs.first()?).clone();
        for row in &runs[1..] {
            (all.ops, all.errors) = (all.ops + row.ops, all.errors + row.errors);
            all.unsent = all.unsent.zip(row.unsent).map(|(one, other)| one + other);
            row.statuses
                .iter()
                .for_each(|(name, count)| *all.statuses.entry(name.clone()).or_default() += count);
            all.first_error = all.first_error.or_else(|| row.first_error.clone());
            all.paths.extend(row.paths.iter().cloned());
        }
        all.went = all.paths.iter().map(|path| path.transport).collect();
        all.device = all.paths.iter().find_map(|path| path.device.clone());
        all.reasons = all.paths.iter().map(|path| path.reason.clone()).collect();
        let figures: [(_, Figure); 4] = [
            ("p50_us", |row| row.p50_us),
            ("p99_us", |row| row.p99_us),
            ("ops_per_s", |row| Some(row.ops_per_s)),
            ("cpu_us_per_op", |row| row.cpu_us_per_op),
        ];
        all.runs = Runs::of(runs, &figures);
        Some(Self {
            p50_us: in_most(|row| row.p50_us),
            p99_us: in_most(|row| row.p99_us),
            p999_us: in_most(|row| row.p999_us),
            ops_per_s: in_most(|row| Some(row.ops_per_s))?,
            cpu_us_per_op: in_most(|row| row.cpu_us_per_op),
            latency_ratio: in_most(|row| row.latency_ratio),
            p99_ratio: in_most(|row| row.p99_ratio),
            throughput_ratio: in_most(|row| row.throughput_ratio),
            cpu_ratio: in_most(|row| row.cpu_ratio),
            ..all
        })
    }

    /// Returns where the calls went, for people.
    fn where_it_went(&self) -> String {
        let name = |path: &Path| match &path.device {
            Some(device) => format!("{} ({device})", path.transport),
            None => path.transport.to_string(),
        };
        let names: BTreeSet<String> = self.paths.iter().map(name).collect();
        names.into_iter().collect::<Vec<_>>().join(", ")
    }

    fn cell(&self) -> String {
        match self.rate {
            Some(rate) => format!("{} calls/s", units::digits(rate)),
            None => format!("{} in flight", self.inflight),
        }
    }

    /// Returns a warning for calls that went by another transport than the one that was asked for.
    fn warning(&self) -> Option<String> {
        let other = |path: &&Path| path.transport != self.mode;
        let path = self.paths.iter().find(other)?;
        let part = if self.paths.iter().all(|path| other(&path)) { "its" } else { "some of its" };
        Some(format!("{}: {part} calls went by {}, because {}", self.mode, path.transport, path.reason))
    }
}

/// Compares the rows of each run with tcp, and returns the medians of the runs.
pub(super) fn medians(mut runs: Vec<Vec<Row>>) -> Vec<Row> {
    for rows in &mut runs {
        let tcp: Vec<Row> = rows.iter().filter(|row| row.mode == Transport::Tcp).cloned().collect();
        for row in rows {
            if let Some(tcp) = tcp.iter().find(|tcp| tcp.is_beside(row)) {
                row.compare(tcp);
            }
        }
    }
    let count = runs.first().map_or(0, Vec::len);
    let of_runs = |index| Row::of_runs(&runs.iter().filter_map(|rows| rows.get(index)).collect::<Vec<_>>());
    (0..count).filter_map(of_runs).collect()
}

/// The facts about a load.
#[derive(Debug, Serialize)]
pub(super) struct Facts {
    #[serde(flatten)]
    environment: Environment,
    server: String,
    method: String,
    connections: usize,
    deadline_s: f64,
    runtime: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    total: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    seconds_per_cell_and_mode: Option<f64>,
    /// The name that `compare` has.
    #[serde(rename = "rounds")]
    runs: u32,
    checked: bool,
    /// They are in `environment`, too.
    #[serde(skip)]
    warnings: Vec<String>,
}

impl Facts {
    pub(super) fn new(
        options: &LoadOptions,
        load: &Load,
        runtime: Flavour,
        costs: Costs,
        rows: &[Row],
    ) -> Self {
        let provider = rows.iter().flat_map(|row| &row.paths).find_map(|path| path.provider);
        let warnings: BTreeSet<String> = rows.iter().filter_map(Row::warning).collect();
        let warnings = Vec::from_iter(warnings);
        Self {
            environment: Environment::new(provider.map(str::to_owned), costs, warnings.clone()),
            server: options.server.url.clone(),
            method: load.path.path().trim_start_matches('/').to_owned(),
            connections: options.connections,
            deadline_s: load.deadline.as_secs_f64(),
            runtime: runtime.to_string(),
            total: options.total,
            seconds_per_cell_and_mode: options.total.is_none().then_some(options.duration.as_secs_f64()),
            runs: options.runs,
            checked: !load.expected.is_empty(),
            warnings,
        }
    }

    fn lines(&self) -> Vec<(&'static str, String)> {
        let each = match (self.total, self.seconds_per_cell_and_mode) {
            (Some(total), _) => format!("{total} calls"),
            (None, seconds) => format!("{} s", units::digits(seconds.unwrap_or_default())),
        };
        let runs = match self.runs {
            1 => String::new(),
            runs => format!(", in each of {runs} runs, whose medians are below"),
        };
        let answers =
            if self.checked { "compared with --check" } else { "not checked, but for their status" };
        let lines = vec![
            ("server", self.server.clone()),
            ("method", self.method.clone()),
            ("answers", answers.to_owned()),
            ("runtime", format!("tokio, {}, in this process", self.runtime)),
            (
                "connections",
                format!("{} of each transport, deadline {} s", self.connections, self.deadline_s),
            ),
            ("amount", format!("{each} for each transport in each cell{runs}")),
        ];
        self.environment.with("client", lines)
    }
}

/// Shows table and files. Errors in rows are a failure, and so are calls that were given up.
pub(super) fn show(options: &LoadOptions, facts: &Facts, rows: &[Row]) -> Result<(), Failure> {
    let (open_loop, runs) = (options.rate.is_some(), options.runs > 1);
    let column = column::<Row>;
    let mut columns = vec![
        column("transport", |row, _| row.mode.to_string()),
        column("went by", |row, _| row.where_it_went()),
        column("in flight", |row, _| match row.rate {
            Some(_) => format!("up to {}", row.inflight),
            None => row.inflight.to_string(),
        }),
    ];
    if open_loop {
        columns.push(column("offered/s", |row, _| row.rate.map_or_else(dash, units::count)));
    }
    columns.extend([
        column("calls", |row, _| row.ops.to_string()),
        column("errors", |row, _| row.errors.to_string()),
        column("p50", |row, _| row.p50_us.map_or_else(dash, units::micros)),
    ]);
    if runs {
        columns.push(column("p50 in all runs", |row, _| {
            let range = row.runs.range("p50_us");
            range.map_or_else(dash, |range| range.map(units::micros).join(" to "))
        }));
    }
    columns.extend([
        column("p99", |row, _| row.p99_us.map_or_else(dash, units::micros)),
        column("calls/s", |row, _| units::count(row.ops_per_s)),
        column("CPU/call", |row, _| row.cpu_us_per_op.map_or_else(dash, units::micros)),
        column("latency ×", |row, _| times(row.latency_ratio)),
        column("throughput ×", |row, _| times(row.throughput_ratio)),
    ]);
    if open_loop {
        columns.push(column("unsent", |row, _| row.unsent.map_or_else(dash, |unsent| unsent.to_string())));
    }
    let legend = legend(facts, rows);
    let report = Report { facts, lines: facts.lines(), columns, rows, beside: Row::is_beside, legend };
    report.show(&options.outputs)?;
    let errors: Vec<String> = rows.iter().filter_map(describe_errors).collect();
    match errors.is_empty() {
        true => Ok(()),
        false => Err(Failure::run(errors.join("; "))),
    }
}

fn describe_errors(row: &Row) -> Option<String> {
    let unsent = row.unsent.filter(|unsent| *unsent > 0);
    let unsent = unsent.map(|count| {
        let inflight = row.inflight;
        format!("{count} calls were given up, because {inflight} were in flight until the deadline")
    });
    let counts = row.statuses.iter().map(|(name, count)| format!("{count} {name}"));
    let counts = counts.collect::<Vec<_>>().join(", ");
    let first = row.first_error.as_ref().map(|first| format!("{counts}, the first: {first}"));
    let faults: Vec<String> = unsent.into_iter().chain(first).collect();
    (!faults.is_empty()).then(|| format!("{} with {}: {}", row.mode, row.cell(), faults.join("; ")))
}

/// Explains the columns, and what to look at.
fn legend(facts: &Facts, rows: &[Row]) -> String {
    let mut legend = "latency ×, throughput ×: how many times better than tcp in the same cell (p50, calls/s). CPU/call: user + \
                      system time of this process, the client; that of the server is not in it."
        .to_owned();
    if rows.iter().any(|row| row.rate.is_some()) {
        legend += "\nopen loop: Poisson arrivals, the same for all transports; latency counts from the time when a call was due.";
    }
    if rows.iter().any(|row| row.ops > 0 && row.p99_us.is_none()) {
        legend += "\np99: only of 100 calls or more.";
    }
    for warning in &facts.warnings {
        legend += &format!("\nWARNING: {warning}");
    }
    legend
}
