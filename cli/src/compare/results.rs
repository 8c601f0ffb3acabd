//! The results of a run: rows with the figures of each mode in each cell, and the facts about the run,
//! without which its figures mean nothing. They are shown as a table, with an explanation of its columns, and
//! as JSON.

use serde::Serialize;
use tonic_rdma_commands::cores::Cores;
use tonic_rdma_commands::ends::Ends;
use tonic_rdma_commands::statistics::{median, range};
use tonic_rdma_commands::table::{dash, times};
use tonic_rdma_commands::{Failure, units};

use crate::compare::modes::mode::{Contender, Mode};
use crate::compare::options::{CompareOptions, Conditions};
use crate::compare::plan::{Cell, Direction, Plan};
use crate::compare::runs::{Figure, Runs, from_to, that_stand_out};
use crate::measure::machine::{Costs, Environment};
use crate::measure::report::{Column, Report, column};
use crate::measure::settings::{self, Consume, Http2, Http2Sizes};
use crate::measure::transport::{Encode, RdmaConnection};
use crate::workload::PayloadSizes;

/// The figures of one mode in one cell.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) mode: Mode,
    /// The setting of HTTP/2, if the run has several and the mode uses HTTP/2.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) http2: Option<Http2>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) workload: Option<&'static str>,
    /// Payload of an operation; the average of a workload's operations.
    pub(crate) bytes: u64,
    pub(crate) inflight: usize,
    /// The direction of the payload.
    pub(crate) direction: Direction,
    /// Operations offered each second in an open loop.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) rate: Option<f64>,
    pub(crate) ops: u64,
    pub(crate) errors: u64,
    /// Operations of an open loop that were given up before they were sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) unsent: Option<u64>,
    /// Whether the mode fell behind the rate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) saturated: Option<bool>,
    pub(crate) p50_us: f64,
    /// Absent if fewer than 100 operations were timed, because none of them is the slowest of a hundred.
    pub(crate) p99_us: Option<f64>,
    /// Absent if fewer than 1000 operations were timed.
    pub(crate) p999_us: Option<f64>,
    pub(crate) ops_per_s: f64,
    pub(crate) gbytes_per_s: f64,
    pub(crate) cpu_us_per_op: f64,
    /// Context switches of both processes, and those in which a thread went to sleep.
    pub(crate) switches_per_op: f64,
    pub(crate) sleeps_per_op: f64,
    #[serde(flatten)]
    pub(crate) runs: Runs,
    #[serde(flatten)]
    pub(crate) ratios: Ratios,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) first_error: Option<String>,
    /// The reason why the mode was not measured in this cell.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) skipped: Option<String>,
    /// With `--connections`: those that were open, and what they occupied.
    #[serde(flatten)]
    pub(crate) connections: Option<Connections>,
    #[serde(skip)]
    pub(crate) cell: Cell,
}

/// The connections of a mode.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Connections {
    /// Open connections, and how many of them make calls: `inflight` is the number of calls in flight on each
    /// of these. The others are idle.
    pub(crate) connections: usize,
    pub(crate) busy: usize,
    /// Memory and descriptors of both processes for each connection, beyond those of the first one. With one
    /// connection: everything that came with it. Absent if it could not be measured, because the connections
    /// failed.
    pub(crate) memory_bytes_each: Option<u64>,
    pub(crate) descriptors_each: Option<u64>,
    #[serde(flatten)]
    pub(crate) idle: Option<Idle>,
}

/// What both processes use while all connections of a mode are idle.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Idle {
    /// User and system time, as a share of one core.
    pub(crate) idle_cpu_percent: f64,
    /// How often a thread woke and slept again.
    pub(crate) idle_sleeps_per_s: f64,
}

impl Row {
    pub(crate) fn contender(&self) -> Contender {
        Contender { mode: self.mode, http2: self.http2 }
    }

    /// Returns whether both rows are compared with each other: modes in the same cell, with as many
    /// connections.
    pub(crate) fn is_beside(&self, other: &Self) -> bool {
        let numbers = |row: &Self| row.connections.map(|of| (of.connections, of.busy));
        self.cell == other.cell && numbers(self) == numbers(other)
    }

    /// Returns the median latency as a multiple of the mode's own with one connection.
    pub(crate) fn times_one(&self, rows: &[Self]) -> Option<f64> {
        let is_one = |row: &&Self| {
            (row.contender(), row.cell) == (self.contender(), self.cell)
                && row.connections.is_some_and(|of| of.connections == 1)
        };
        let one = rows.iter().find(is_one)?.p50_us;
        (one > 0.0 && self.p50_us > 0.0).then(|| self.p50_us / one)
    }

    /// Returns the row of several `runs` of one mode in one cell: medians, and counts of all runs. A figure
    /// that most runs lack has no median.
    fn of_runs(runs: &[&Self]) -> Option<Self> {
        let first = *runs.first()?;
        let has_calls = runs.iter().any(|row| row.ops > 0);
        let measured = || runs.iter().filter(move |row| row.ops > 0 || !has_calls);
        let each = |figure: fn(&Self) -> f64| median(measured().map(|row| figure(row)));
        let there = |figure: fn(&Self) -> Option<f64>| runs.iter().filter_map(move |row| figure(row));
        let most = |count: usize| 2 * count > runs.len();
        let in_most =
            |figure: fn(&Self) -> Option<f64>| most(there(figure).count()).then(|| median(there(figure)));
        let all = |count: fn(&Self) -> u64| runs.iter().map(|row| count(row)).sum();
        let saturated = runs.iter().filter(|row| row.saturated == Some(true)).count();
        let latency = |row: &Self| row.ratios.latency;
        let own = each(|row| row.p50_us);
        let in_run = |row: &&Self| match row.mode {
            Mode::GrpcTcp => latency(row).map(|_| own / row.p50_us),
            _ => latency(row),
        };
        let in_runs = || range(&runs.iter().filter_map(in_run).collect::<Vec<_>>());
        let ratios = Ratios {
            latency: in_most(latency),
            latency_range: in_most(latency).filter(|_| runs.len() > 1).and_then(|_| in_runs()),
            p99: in_most(|row| row.ratios.p99),
            throughput: in_most(|row| row.ratios.throughput),
            cpu: in_most(|row| row.ratios.cpu),
        };
        Some(Self {
            ops: all(|row| row.ops),
            errors: all(|row| row.errors),
            unsent: first.unsent.map(|_| all(|row| row.unsent.unwrap_or(0))),
            saturated: first.saturated.map(|_| most(saturated)),
            p50_us: own,
            p99_us: in_most(|row| row.p99_us),
            p999_us: in_most(|row| row.p999_us),
            ops_per_s: each(|row| row.ops_per_s),
            gbytes_per_s: each(|row| row.gbytes_per_s),
            cpu_us_per_op: each(|row| row.cpu_us_per_op),
            switches_per_op: each(|row| row.switches_per_op),
            sleeps_per_op: each(|row| row.sleeps_per_op),
            first_error: runs.iter().find_map(|row| row.first_error.clone()),
            ratios,
            runs: Runs::of(runs, &FIGURES),
            ..first.clone()
        })
    }

    /// Describes the errors in one line.
    pub(crate) fn describe_errors(&self) -> String {
        let first = self.first_error.as_deref().unwrap_or("unknown");
        let plural = if self.errors == 1 { "error" } else { "errors" };
        let on = self.connections.map(|of| format!(" on {} of {} connections", of.busy, of.connections));
        let (on, cell) = (on.unwrap_or_default(), self.cell.label());
        format!("{} at {cell}{on}: {} {plural}, the first: {first}", self.contender(), self.errors)
    }
}

/// The number of checks of content, and of wrong contents.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Checks {
    /// Messages whose every byte was checked.
    pub(crate) every_byte: u64,
    /// Messages whose stamps at sampled offsets were checked.
    pub(crate) stamps: u64,
    /// Messages with wrong content.
    pub(crate) mismatches: u64,
}

impl Checks {
    pub(crate) fn add(&mut self, other: Self) {
        self.every_byte += other.every_byte;
        self.stamps += other.stamps;
        self.mismatches += other.mismatches;
    }

    /// Describes the result.
    pub(crate) fn summary(&self) -> String {
        let Self { every_byte, stamps, mismatches } = self;
        let verdict = match mismatches {
            0 => "all as sent".to_owned(),
            wrong => format!("{wrong} WRONG"),
        };
        format!("{verdict} (every byte of {every_byte} messages, sampled words of {stamps})")
    }
}

/// A row compared with `grpc-tcp` in the same cell of the same run: how many times better. `None` if there
/// is nothing to compare with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Ratios {
    /// p50 of grpc-tcp divided by p50 of this row.
    #[serde(rename = "latency_ratio")]
    pub(crate) latency: Option<f64>,
    /// The least and the largest of several runs. For grpc-tcp, which is compared with its own median: how
    /// far one run is from another without any change.
    #[serde(rename = "latency_ratio_range", skip_serializing_if = "Option::is_none")]
    pub(crate) latency_range: Option<[f64; 2]>,
    /// p99 of grpc-tcp divided by p99 of this row.
    #[serde(rename = "p99_ratio")]
    pub(crate) p99: Option<f64>,
    /// Operations per second of this row divided by those of grpc-tcp.
    #[serde(rename = "throughput_ratio")]
    pub(crate) throughput: Option<f64>,
    /// CPU time of an operation of grpc-tcp divided by that of this row.
    #[serde(rename = "cpu_ratio")]
    pub(crate) cpu: Option<f64>,
}

impl Ratios {
    /// Compares `row` with the `grpc-tcp` row of its cell among `rows`.
    pub(crate) fn of(row: &Row, rows: &[Row]) -> Self {
        let is_base = |other: &&Row| {
            let is_against = row.contender().is_against(other.contender());
            other.mode == Mode::GrpcTcp && other.is_beside(row) && is_against
        };
        let Some(base) = rows.iter().find(is_base) else {
            return Self::default();
        };
        let ratio = |over: f64, under: f64| (over > 0.0 && under > 0.0).then(|| over / under);
        // The latency of a saturated mode grows with the length of the run.
        let settled = [base, row].iter().all(|row| row.saturated != Some(true));
        let p99 = base.p99_us.zip(row.p99_us).and_then(|(base, row)| ratio(base, row));
        Self {
            latency: ratio(base.p50_us, row.p50_us).filter(|_| settled),
            latency_range: None,
            p99: p99.filter(|_| settled),
            throughput: ratio(row.ops_per_s, base.ops_per_s),
            cpu: ratio(base.cpu_us_per_op, row.cpu_us_per_op),
        }
    }
}

/// The figures of which a row of several runs has those of each run.
const FIGURES: [Figure<Row>; 4] = [
    ("p50_us", |row| (row.ops > 0).then_some(row.p50_us)),
    ("p99_us", |row| row.p99_us.filter(|_| row.ops > 0)),
    ("ops_per_s", |row| (row.ops > 0).then_some(row.ops_per_s)),
    ("cpu_us_per_op", |row| (row.ops > 0).then_some(row.cpu_us_per_op)),
];

/// Describes runs that stand out from the others.
pub(crate) fn disturbed_runs(rows: &[Row]) -> Vec<String> {
    let named = rows.iter().map(|row| (format!("{} at {}", row.contender(), row.cell.label()), &row.runs));
    that_stand_out(named, "p50_us", units::micros)
}

/// Compares the rows of each run with `grpc-tcp`, and returns the medians of the runs.
pub(crate) fn medians(mut runs: Vec<Vec<Row>>) -> Vec<Row> {
    for rows in &mut runs {
        let ratios: Vec<Ratios> = rows.iter().map(|row| Ratios::of(row, rows)).collect();
        rows.iter_mut().zip(ratios).for_each(|(row, ratios)| row.ratios = ratios);
    }
    let of_all = |row: &Row| {
        let is_same = |other: &&Row| other.contender() == row.contender() && other.is_beside(row);
        Row::of_runs(&runs.iter().flatten().filter(is_same).collect::<Vec<_>>())
    };
    runs.first().into_iter().flatten().filter_map(of_all).collect()
}

/// Fails if a mode that uses RDMA, or `grpc-tcp-shared`, has less than `least` times the throughput of
/// grpc-tcp in the same cell, and names each such mode. Cells that one of the two modes can't carry are not
/// compared.
pub(crate) fn check_ratios(least: f64, rows: &[Row]) -> Result<(), Failure> {
    let short = |row: &Row| {
        let ratio = row.ratios.throughput.filter(|ratio| *ratio < least)?;
        Some(format!("{} at {}: {} times", row.contender(), row.cell.label(), units::digits(ratio)))
    };
    // At a rate all modes have the throughput that is offered.
    let compared = rows.iter().filter(|row| row.mode.uses_rdma() && row.rate.is_none());
    let short: Vec<String> = compared.filter_map(short).collect();
    if short.is_empty() {
        return Ok(());
    }
    let short = short.join("; ");
    Err(Failure::run(format!("less than {least} times the throughput of grpc-tcp: {short}")))
}

/// The facts about a run.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Facts {
    /// Both ends of a run between two hosts.
    #[serde(skip_serializing_if = "Option::is_none")]
    ends: Option<Ends>,
    #[serde(flatten)]
    environment: Environment,
    /// Device and reason of the RDMA connection.
    #[serde(skip_serializing_if = "Option::is_none")]
    verdict: Option<String>,
    http2: Http2Facts,
    direction: Direction,
    encode: Encode,
    /// Use of payloads by receivers, and the modes in which receivers find the largest element.
    consume: Consume,
    reducing_modes: Vec<&'static str>,
    #[serde(flatten)]
    conditions: Conditions,
    /// Whether the server ran in a container of its own.
    container: bool,
    /// Cores that the processes were kept on; absent if they were not pinned.
    cores: Option<Cores>,
    /// How long each mode was measured in each cell, in each run.
    seconds_per_cell_and_mode: f64,
    /// The JSON keeps the key that stored results have.
    #[serde(rename = "rounds")]
    runs: u32,
    checks: Checks,
    /// Descriptions of the workloads' operations.
    #[serde(skip)]
    workloads: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    payloads: Vec<PayloadSizes>,
    #[serde(skip)]
    open_loop: bool,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Http2Facts {
    setting: String,
    #[serde(skip)]
    description: String,
    sizes: Option<Http2Sizes>,
}

impl Facts {
    /// Describes the use of payloads by receivers.
    fn receiver(&self) -> String {
        match self.reducing_modes.as_slice() {
            [] => "leaves payloads as they are after the check, in all modes".to_owned(),
            modes => {
                let when = match self.direction {
                    Direction::Up => "before it answers",
                    Direction::Down => "before the call counts as done",
                };
                format!("consumes payloads by reduce_max (f32) {when}: {}", modes.join(", "))
            }
        }
    }

    /// Collects the facts once the run is over.
    pub(crate) fn new(
        plan: &Plan,
        options: &CompareOptions,
        (cores, costs, warnings): (Option<Cores>, Costs, Vec<String>),
        (verdict, ends): (Option<RdmaConnection>, Option<Ends>),
        checks: Checks,
    ) -> Self {
        let (provider, verdict) = verdict.map(|verdict| (verdict.provider, verdict.reason)).unzip();
        let (setting, description) = settings::describe(&options.http2.0);
        // Of one setting.
        let sizes = if let [one] = options.http2.0[..] { one.0 } else { None };
        Self {
            ends,
            environment: Environment::new(provider, costs, warnings),
            verdict,
            http2: Http2Facts { setting, description, sizes },
            direction: plan.direction,
            encode: options.encode,
            consume: options.consume,
            reducing_modes: reducing(&plan.modes, options.consume),
            conditions: Conditions::of(options),
            container: options.container,
            cores,
            seconds_per_cell_and_mode: plan.duration.as_secs_f64(),
            runs: options.runs,
            checks,
            workloads: workloads(&plan.cells),
            payloads: PayloadSizes::of_each(plan.cells.iter().map(|cell| cell.load)),
            open_loop: plan.is_open_loop() || plan.rates.is_some(),
        }
    }

    /// Returns the facts as pairs of name and value, for people.
    pub(crate) fn lines(&self) -> Vec<(&'static str, String)> {
        let cores = match self.cores {
            Some(cores) => format!("client on core {}, server on core {}", cores.client, cores.server),
            None => format!("not pinned ({})", self.conditions.why_not_pinned()),
        };
        let seconds = units::digits(self.seconds_per_cell_and_mode);
        let runs = match self.runs {
            1 => String::new(),
            runs => format!(", in each of {runs} runs, whose medians are below"),
        };
        let apart = if self.container { "; the server is in a container of its own" } else { "" };
        let mut lines = Vec::new();
        if self.ends.is_some() {
            lines.push(("not measured", "grpc-uds: a Unix socket is of one host".to_owned()));
        }
        if self.conditions.defaults {
            lines.push(("defaults", "yes: the allocator, runtime and processes below".to_owned()));
        }
        lines.extend(self.verdict.clone().map(|verdict| ("connection", verdict)));
        lines.extend([
            ("HTTP/2", self.http2.description.clone()),
            ("direction", self.direction.describe().to_owned()),
            ("encoding", self.encode.to_string()),
            ("receiver", self.receiver()),
            ("runtime", format!("tokio, {}, in both processes", self.conditions.runtime)),
            ("processes", cores + apart),
            ("time", format!("{seconds} s for each mode in each cell{runs}")),
            ("content", self.checks.summary()),
        ]);
        lines.extend(self.workloads.iter().map(|workload| ("workload", workload.clone())));
        lines.extend(self.payloads.iter().map(|payloads| ("sizes", payloads.curve())));
        if self.open_loop {
            let what = "Poisson arrivals, the same for all modes; latency counts from the time when a call was due; a client \
                        with a core of its own and no CPU limit polls in gaps of up to 3 ms, which is not in CPU/op; any other \
                        client sleeps";
            lines.push(("open loop", what.to_owned()));
        }
        let first = self.ends.iter().flat_map(Ends::lines);
        first.chain(self.environment.with("both", lines)).collect()
    }
}

/// Returns the names of the modes whose receivers find the largest element.
fn reducing(modes: &[Mode], consume: Consume) -> Vec<&'static str> {
    modes.iter().filter(|mode| mode.reduces(consume)).map(|mode| mode.name()).collect()
}

/// Returns a line for each workload among `cells`.
fn workloads(cells: &[Cell]) -> Vec<String> {
    let mut lines = Vec::new();
    for cell in cells {
        let line = format!("{} ({} each)", cell.load.describe(), units::rough_size(cell.load.bytes()));
        if cell.load.name().is_some() && !lines.contains(&line) {
            lines.push(line);
        }
    }
    lines
}

/// Explains the columns of `--connections`.
const OF_CONNECTIONS: &str = "
busy: connections that make calls; the others are open and idle. in flight: calls at once on each busy connection.
p50 of one ×: the median as a multiple of the mode's own with one connection.
memory each: resident memory of both processes for each connection beyond the first, shared pages counted once; before the \
calls where one connection is busy, after them where all are. With one connection: everything that came with it.
idle CPU: user + system time of both processes while all connections are idle, as a share of one core.";

/// Explains the figures of several runs.
const OF_RUNS: &str = "
figures are medians of the runs, and ratios are medians of the ratios within each run. p50 in all runs: the least and the largest \
of a run; in all runs: likewise of latency × (for grpc-tcp its median p50 over that of a run). The next run is outside in two of \
N + 1 cases, if nothing changes. No σ, because runs that are disturbed lie far away on one side. errors: of all runs.";

/// Explains the modes that carry tensors.
const OF_TENSORS: &str = "
rdma-cp, rdma-zerocp: no RPC. A tensor is written to the memory where the receiver expects it, from a registered copy \
(cp) or from registered memory (zerocp); an operation ends when the receiver has checked, consumed and released it. \
Both ends poll; in rdma-zerocp-await both wait by futures. A set is sent as a whole. rdma-dynamic, rdma-named: the receiver has \
no memory for a tensor beforehand; it reads the tensor from the place that it is told, or asks for it by name. It then \
acknowledges the operation by a tensor of eight bytes.";

/// Explains several settings of HTTP/2.
pub(crate) const OF_HTTP2: &str = "
(default), (tuned): the setting of HTTP/2. Such a row is compared with grpc-tcp of the same setting, all others with grpc-tcp of \
the first.";

const OF_SATURATION: &str = "
saturated: the mode fell behind the offered rate, so its latencies grow with the length of the run; \
calls that were never sent count with the time that they had waited.";

/// The modes that need an explanation below the table.
const EXPLAINED: [Mode; 7] = [
    Mode::GrpcTcpBusy,
    Mode::GrpcTcpTuned,
    Mode::GrpcTcpShared,
    Mode::GrpcNative,
    Mode::GrpcNativeGather,
    Mode::GrpcReference,
    Mode::GrpcReferenceTcp,
];

/// Writes all outputs that `options` ask for. Errors in rows, and a ratio below that of `--at-least`, are
/// failures.
pub(crate) fn show(options: &CompareOptions, facts: &Facts, rows: &[Row]) -> Result<(), Failure> {
    report(facts, facts.lines(), rows).show(&options.outputs)?;
    let errors: Vec<String> = rows.iter().filter(|row| row.errors > 0).map(Row::describe_errors).collect();
    match (errors.as_slice(), options.at_least) {
        ([], None) => Ok(()),
        ([], Some(least)) => check_ratios(least, rows),
        (errors, _) => Err(Failure::run(errors.join("; "))),
    }
}

fn report<'a, F>(facts: &'a F, lines: Vec<(&'static str, String)>, rows: &'a [Row]) -> Report<'a, F, Row> {
    Report { facts, lines, columns: columns(rows), rows, beside: Row::is_beside, legend: legend(rows) }
}

/// Returns the columns that `rows` need.
fn columns(rows: &[Row]) -> Vec<Column<Row>> {
    let column = column::<Row>;
    let (open_loop, of_connections) = (is_open_loop(rows), is_of_connections(rows));
    let mut columns = vec![
        column("mode", |row, _| row.contender().to_string()),
        column("size", |row, _| row.cell.load.to_string()),
        column("in flight", |row, _| match row.rate {
            Some(_) => format!("up to {}", row.inflight),
            None => row.inflight.to_string(),
        }),
    ];
    if open_loop {
        columns.push(column("offered/s", |row, _| row.rate.map_or_else(dash, units::count)));
    }
    if of_connections {
        columns.extend([
            column("connections", |row, _| {
                row.connections.map_or_else(dash, |of| of.connections.to_string())
            }),
            column("busy", |row, _| row.connections.map_or_else(dash, |of| of.busy.to_string())),
        ]);
    }
    columns.extend([
        column("p50", |row, _| measured(row, units::micros(row.p50_us))),
        column("p99", |row, _| row.p99_us.map_or_else(dash, units::micros)),
    ]);
    if is_of_runs(rows) {
        columns.insert(
            columns.len() - 1,
            column("p50 in all runs", |row, _| {
                row.runs.range("p50_us").map_or_else(dash, |range| from_to(range, units::micros))
            }),
        );
    }
    if open_loop {
        columns.push(column("p99.9", |row, _| row.p999_us.map_or_else(dash, units::micros)));
    }
    columns.extend([
        column("ops/s", |row, _| measured(row, achieved(row))),
        column("GB/s", |row, _| measured(row, units::digits(row.gbytes_per_s))),
        column("CPU/op", |row, _| measured(row, units::micros(row.cpu_us_per_op))),
        column("switches/op", |row, _| measured(row, units::digits(row.switches_per_op))),
        column("errors", |row, _| row.errors.to_string()),
        column("latency ×", |row, _| times(row.ratios.latency)),
    ]);
    if rows.iter().any(|row| row.ratios.latency_range.is_some()) {
        columns.push(column("in all runs", |row, _| {
            row.ratios.latency_range.map_or_else(dash, |range| from_to(range, |ratio| times(Some(ratio))))
        }));
    }
    columns.push(column("throughput ×", |row, _| times(row.ratios.throughput)));
    if of_connections {
        columns.extend([
            column("p50 of one ×", |row, rows| times(row.times_one(rows))),
            column("memory each", |row, _| {
                row.connections.and_then(|of| of.memory_bytes_each).map_or_else(dash, units::rough_size)
            }),
            column("idle CPU", |row, _| {
                let idle = row.connections.and_then(|of| of.idle);
                idle.map_or_else(dash, |idle| format!("{:.2} %", idle.idle_cpu_percent))
            }),
        ]);
    }
    columns
}

fn is_open_loop(rows: &[Row]) -> bool {
    rows.iter().any(|row| row.rate.is_some())
}

fn is_of_runs(rows: &[Row]) -> bool {
    rows.iter().any(|row| !row.runs.is_empty())
}

fn is_of_connections(rows: &[Row]) -> bool {
    rows.iter().any(|row| row.connections.is_some())
}

/// Explains the columns and modes that need an explanation.
fn legend(rows: &[Row]) -> String {
    let mut legend = "latency ×, throughput ×: how many times better than grpc-tcp in the same cell \
                      (p50, ops/s). CPU/op: user + system time of both processes. switches/op: how often one of their threads \
                      slept, or gave its core up to another thread."
        .to_owned();
    for mode in EXPLAINED.iter().filter(|mode| rows.iter().any(|row| row.mode == **mode)) {
        legend.push_str(&format!("\n{mode}: {}.", mode.meaning()));
    }
    let any = |applies: fn(&Row) -> bool| rows.iter().any(applies);
    let notes = [
        (is_of_runs(rows), OF_RUNS),
        (any(|row| row.mode.carries_tensors()), OF_TENSORS),
        (any(|row| row.http2.is_some()), OF_HTTP2),
        (any(|row| row.ops > 0 && row.p99_us.is_none()), "\np99: only of 100 operations or more."),
        (any(|row| row.saturated == Some(true)), OF_SATURATION),
        (is_of_connections(rows), OF_CONNECTIONS),
    ];
    for (_, text) in notes.iter().filter(|(applies, _)| *applies) {
        legend.push_str(text);
    }
    for row in rows {
        if let Some(reason) = &row.skipped {
            let (what, cell) = (row.contender(), row.cell.label());
            legend.push_str(&format!("\n{what} was not measured at {cell}: {reason}."));
        }
    }
    legend
}

fn achieved(row: &Row) -> String {
    let note = if row.saturated == Some(true) { " saturated" } else { "" };
    format!("{}{note}", units::count(row.ops_per_s))
}

fn measured(row: &Row, text: String) -> String {
    if row.ops == 0 { dash() } else { text }
}

#[cfg(test)]
pub(crate) mod row_tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use super::*;

    pub(crate) fn sample_row(mode: &'static str, cell: Cell, p50_us: f64) -> Row {
        let ops_per_s = 1e6 / p50_us * cell.inflight as f64;
        Row {
            mode: clap::ValueEnum::from_str(mode, false).unwrap(),
            http2: None,
            workload: cell.load.name(),
            bytes: cell.load.bytes(),
            inflight: cell.inflight,
            direction: Direction::Up,
            rate: cell.rate,
            ops: 1000,
            errors: 0,
            unsent: cell.rate.map(|_| 0),
            saturated: cell.rate.map(|rate| ops_per_s < rate),
            p50_us,
            p99_us: Some(p50_us * 2.0),
            p999_us: Some(p50_us * 3.0),
            ops_per_s,
            gbytes_per_s: ops_per_s * cell.load.bytes() as f64 / 1e9,
            cpu_us_per_op: p50_us,
            switches_per_op: 4.0,
            sleeps_per_op: 2.0,
            runs: Runs::default(),
            ratios: Ratios::default(),
            first_error: None,
            skipped: None,
            connections: None,
            cell,
        }
    }

    /// Returns the rows of a single run.
    pub(super) fn compared(rows: &[Row]) -> Vec<Row> {
        medians(vec![rows.to_vec()])
    }

    fn of_connections(mode: &'static str, connections: usize, busy: usize, p50_us: f64) -> Row {
        let each = Some(4096);
        let of =
            Connections { connections, busy, memory_bytes_each: each, descriptors_each: Some(2), idle: None };
        Row { connections: Some(of), ..sample_row(mode, Cell::closed(64, 1), p50_us) }
    }

    #[test]
    fn rows_are_compared_with_one_connection_and_with_tcp() {
        let rows = [
            of_connections("grpc-tcp", 1, 1, 80.0),
            of_connections("grpc-native", 1, 1, 4.0),
            of_connections("grpc-tcp", 8, 8, 400.0),
            of_connections("grpc-native", 8, 8, 20.0),
            of_connections("grpc-native", 8, 1, 5.0),
        ];
        let rows = compared(&rows);
        let times = |row: &Row| (row.times_one(&rows), row.ratios.latency);
        assert_eq!(times(&rows[3]), (Some(5.0), Some(20.0)));
        assert_eq!(times(&rows[4]), (Some(1.25), None));
    }

    #[test]
    fn connections_are_flat_in_the_json() {
        let json = serde_json::to_value(of_connections("grpc-native", 8, 1, 5.0)).unwrap();
        assert_eq!(
            (&json["mode"], &json["connections"], &json["busy"]),
            (&"grpc-native".into(), &8.into(), &1.into())
        );
        assert_eq!((&json["memory_bytes_each"], &json["bytes"]), (&4096.into(), &64.into()));
        let json = serde_json::to_value(sample_row("grpc-tcp", Cell::closed(64, 1), 5.0)).unwrap();
        assert!(json.get("connections").is_none() && json.get("busy").is_none(), "{json}");
    }

    #[test]
    fn a_mode_below_the_ratio_is_named_with_cell_and_ratio() {
        let (small, large) = (Cell::closed(64, 1), Cell::closed(1 << 20, 8));
        let rows = [
            sample_row("grpc-tcp", small, 100.0),
            sample_row("grpc-uds", small, 1000.0),
            sample_row("grpc-rdma", small, 200.0),
            sample_row("rdma-zerocp", small, 1.0),
            sample_row("memcpy", small, 1000.0),
            sample_row("grpc-tcp", large, 100.0),
            sample_row("grpc-rdma", large, 50.0),
            sample_row("rdma-zerocp-await", large, 10_000.0),
        ];
        // A mode that is half as fast is not below one half.
        check_ratios(0.5, &compared(&rows[..5])).unwrap();
        let rows = compared(&rows);
        let failure = check_ratios(0.5, &rows).unwrap_err().to_string();
        assert!(failure.ends_with("grpc-tcp: rdma-zerocp-await at 1 MiB × 8: 0.0100 times"), "{failure}");
        let at_rate = Cell { rate: Some(1e9), ..small };
        let at_rate = [sample_row("grpc-tcp", at_rate, 1.0), sample_row("grpc-rdma", at_rate, 9.0)];
        check_ratios(0.5, &compared(&at_rate)).unwrap();
        let failure = check_ratios(2.5, &rows).unwrap_err().to_string();
        assert!(failure.contains("grpc-rdma at 64 B × 1: 0.50 times; grpc-rdma at 1 MiB × 8: 2.00 times"));
        assert!(!failure.contains("uds") && !failure.contains("memcpy"), "{failure}");
    }

    #[test]
    fn skipped_cells_are_not_compared() {
        let cell = Cell::closed(3 << 30, 1);
        let mut tcp = sample_row("grpc-tcp", cell, 100.0);
        (tcp.ops, tcp.ops_per_s, tcp.p50_us) = (0, 0.0, 0.0);
        check_ratios(0.5, &compared(&[tcp, sample_row("rdma-zerocp", cell, 1e9)])).unwrap();
    }

    #[test]
    fn ratios_compare_rows_of_the_same_cell() {
        let rows = compared(&[
            sample_row("grpc-tcp", Cell::closed(64, 1), 80.0),
            sample_row("grpc-uds", Cell::closed(64, 1), 40.0),
            sample_row("grpc-uds", Cell::closed(64, 2), 1.0),
        ]);
        let all = |ratio| {
            let ratio = Some(ratio);
            Ratios { latency: ratio, latency_range: None, p99: ratio, throughput: ratio, cpu: ratio }
        };
        assert_eq!([rows[0].ratios, rows[1].ratios], [all(1.0), all(2.0)]);
        assert_eq!(rows[2].ratios, Ratios::default());
    }

    #[test]
    fn rows_with_settings_of_http2_are_compared_with_tcp_of_the_same_setting() {
        let row = |mode, http2, p50| Row { http2, ..sample_row(mode, Cell::closed(64, 1), p50) };
        let [usual, tuned] = [Some(Http2::DEFAULT), Some(Http2::TUNED)];
        let run = vec![
            row("grpc-tcp", usual, 80.0),
            row("grpc-tcp", tuned, 40.0),
            row("grpc-rdma", usual, 20.0),
            row("grpc-rdma", tuned, 20.0),
            row("rdma-zerocp", None, 2.0),
        ];
        let rows = medians(vec![run.clone(), run]);
        let ratios: Vec<_> = rows.iter().map(|row| row.ratios.latency).collect();
        assert_eq!(ratios, [1.0, 1.0, 4.0, 2.0, 40.0].map(Some));
        assert_eq!(serde_json::to_value(&rows[3]).unwrap()["http2"], "tuned");
        assert!(serde_json::to_value(&rows[4]).unwrap().get("http2").is_none());
        let text = report(&(), Vec::new(), &rows).text();
        assert!(
            text.contains("grpc-rdma (tuned)") && text.contains("grpc-tcp of the same setting"),
            "{text}"
        );
        let failure = check_ratios(3.0, &rows).unwrap_err().to_string();
        assert!(failure.ends_with("grpc-tcp: grpc-rdma (tuned) at 64 B × 1: 2.00 times"), "{failure}");
    }

    #[test]
    fn rows_of_runs_are_medians_and_ratios_are_of_the_same_run() {
        let cell = Cell::closed(64, 1);
        let run = |tcp, rdma| vec![sample_row("grpc-tcp", cell, tcp), sample_row("grpc-rdma", cell, rdma)];
        let mut runs = vec![run(100.0, 50.0), run(30.0, 60.0), run(90.0, 10.0)];
        (runs[0][1].p99_us, runs[2][1].p999_us) = (None, None);
        (runs[1][1].p999_us, runs[1][1].errors) = (None, 2);
        runs[1][1].first_error = Some("it broke".to_owned());
        let rows = medians(runs);
        let rdma = &rows[1];
        assert_eq!(rows[0].ratios.latency_range, Some([0.9, 3.0]), "its own spread");
        assert_eq!((rows.len(), rows[0].p50_us, rdma.p50_us, rdma.cpu_us_per_op), (2, 90.0, 50.0, 50.0));
        // The ratio of the medians would be 1.8.
        let Ratios { latency, latency_range, p99, throughput, cpu } = rdma.ratios;
        assert_eq!((latency, latency_range, throughput), (Some(2.0), Some([0.5, 9.0]), Some(2.0)));
        // Two runs have a p99, and one has a p999.
        assert_eq!((cpu, p99, rdma.p99_us, rdma.p999_us), (Some(2.0), Some(4.75), Some(70.0), None));
        assert_eq!((rdma.ops, rdma.errors, rdma.first_error.as_deref()), (3000, 2, Some("it broke")));
        check_ratios(2.0, &rows).unwrap();
        let failure = check_ratios(2.5, &rows).unwrap_err().to_string();
        assert!(failure.ends_with("grpc-rdma at 64 B × 1: 2.00 times"), "{failure}");
        let json = serde_json::to_value(rdma).unwrap();
        assert_eq!((&json["p50_us_min"], &json["p50_us_max"]), (&10.0.into(), &60.0.into()));
        assert_eq!(json["p50_us_runs"], serde_json::json!([50.0, 60.0, 10.0]));
        // One run has no p99.
        assert!(json["ops_per_s_runs"].is_array() && json.get("p99_us_runs").is_none(), "{json}");
    }

    #[test]
    fn a_mode_that_fell_behind_in_most_runs_is_saturated() {
        let cell = Cell { rate: Some(20_000.0), ..Cell::closed(64, 1) };
        let run = |tcp| vec![sample_row("grpc-tcp", cell, tcp), sample_row("grpc-rdma", cell, 10.0)];
        let once = medians(vec![run(40.0), run(80.0), run(20.0)]);
        let twice = medians(vec![run(40.0), run(80.0), run(80.0)]);
        let told = |rows: &[Row]| (rows[0].saturated, rows[1].saturated, rows[1].ratios.latency);
        assert_eq!(told(&once), (Some(false), Some(false), Some(3.0)));
        assert_eq!(told(&twice), (Some(true), Some(false), None));
        assert_eq!((once[1].ratios.latency_range, twice[1].ratios.latency_range), (Some([2.0, 4.0]), None));
        assert_eq!(twice[0].unsent, Some(0));
    }

    #[test]
    fn latencies_of_a_saturated_mode_are_not_compared() {
        let cell = Cell { rate: Some(20_000.0), ..Cell::closed(64, 1) };
        let rows = compared(&[sample_row("grpc-tcp", cell, 80.0), sample_row("grpc-rdma", cell, 10.0)]);
        let Ratios { latency, p99, throughput, .. } = rows[1].ratios;
        assert_eq!((latency, p99, throughput), (None, None, Some(8.0)));
    }

    #[test]
    fn wrong_content_is_in_capital_letters() {
        let checks = Checks { every_byte: 1, stamps: 2, mismatches: 2 };
        assert!(checks.summary().contains("2 WRONG"));
    }

    #[test]
    fn rows_without_a_rate_have_no_fields_of_open_loops() {
        let json = serde_json::to_value(sample_row("grpc-tcp", Cell::closed(64, 1), 80.0)).unwrap();
        let mut names: Vec<_> = json.as_object().unwrap().keys().cloned().collect();
        names.sort();
        let expected = "bytes cpu_ratio cpu_us_per_op direction errors gbytes_per_s inflight latency_ratio mode ops ops_per_s \
                        p50_us p999_us p99_ratio p99_us sleeps_per_op switches_per_op throughput_ratio";
        assert_eq!(names.join(" "), expected);
    }
}

#[cfg(test)]
mod show_tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;
    use crate::compare::plan::Cell;
    use crate::compare::results::Connections;
    use crate::compare::results::row_tests::{compared, sample_row};
    use crate::workload::{Mix, Workload};

    fn table(rows: &[Row]) -> String {
        let rows = compared(rows);
        let report = report(&(), Vec::new(), &rows);
        // The explanation below the table names modes, too.
        Report { legend: String::new(), ..report }.text()
    }

    #[test]
    fn a_table_shows_ratios_and_dashes_for_missing_values() {
        let cell = Cell::closed(64, 1);
        let rows = [sample_row("grpc-tcp", cell, 80.0), sample_row("grpc-uds", cell, 32.0)];
        let text = table(&rows);
        let uds = text.lines().find(|line| line.contains("grpc-uds")).unwrap_or_default();
        assert!(uds.contains("32.0 µs") && uds.contains("2.50"), "{text}");
        assert!(!text.contains("offered") && !text.contains("p99.9"), "{text}");
        let alone = table(&rows[1..]);
        assert!(alone.contains('–'), "{alone}");
    }

    #[test]
    fn a_p99_of_few_operations_is_a_dash() {
        let mut row = sample_row("grpc-tcp", Cell::closed(64, 1), 80.0);
        (row.ops, row.p99_us) = (99, None);
        let text = table(&[row.clone()]);
        assert!(text.contains("80.0 µs") && text.contains('–') && !text.contains("160"), "{text}");
        assert!(legend(&[row]).contains("only of 100"));
    }

    #[test]
    fn a_skipped_row_has_dashes_and_a_reason() {
        let mut row = sample_row("grpc-tcp", Cell::closed(3 << 30, 1), 80.0);
        (row.ops, row.skipped) = (0, Some("it is too much".to_owned()));
        let rows = [row, sample_row("memcpy", Cell::closed(3 << 30, 1), 32.0)];
        assert!(legend(&rows).ends_with("grpc-tcp was not measured at 3 GiB × 1: it is too much."));
        assert!(table(&rows).contains('–') && !legend(&rows[1..]).contains("not measured"));
    }

    #[test]
    fn an_open_loop_shows_the_offered_rate_and_saturated_modes() {
        let cell = Cell { load: Workload::Mix(Mix::Skew), inflight: 1, rate: Some(20_000.0) };
        let rows = [sample_row("grpc-tcp", cell, 80.0), sample_row("grpc-rdma", cell, 10.0)];
        let text = table(&rows);
        let tcp = text.lines().find(|line| line.contains("grpc-tcp")).unwrap_or_default();
        assert!(tcp.contains("skew") && tcp.contains("20.0 k") && tcp.contains("12.5 k saturated"), "{text}");
        let rdma = text.lines().find(|line| line.contains("grpc-rdma")).unwrap_or_default();
        assert!(rdma.contains("100 k") && !rdma.contains("saturated") && rdma.contains("30.0 µs"), "{text}");
        assert!(legend(&rows).contains("fell behind") && !legend(&rows[1..]).contains("fell behind"));
    }

    #[test]
    fn rows_of_runs_have_the_least_and_the_largest_ratio() {
        let cell = Cell::closed(64, 1);
        let run = |rdma| vec![sample_row("grpc-tcp", cell, 80.0), sample_row("grpc-rdma", cell, rdma)];
        let rows = medians(vec![run(40.0), run(160.0)]);
        let text = report(&(), Vec::new(), &rows).text();
        assert!(text.contains("0.50 to 2.00") && text.contains("40.0 µs to 160 µs"), "{text}");
        assert!(text.contains("medians of the runs") && !legend(&rows[..0]).contains("runs"), "{text}");
    }

    fn of_connections() -> Vec<Row> {
        let row = |mode, connections, busy, p50_us| {
            let memory_bytes_each = Some(40 << 10);
            let of =
                Connections { connections, busy, memory_bytes_each, descriptors_each: Some(2), idle: None };
            Row { connections: Some(of), ..sample_row(mode, Cell::closed(64, 1), p50_us) }
        };
        vec![
            row("grpc-tcp", 1, 1, 80.0),
            row("grpc-native", 1, 1, 4.0),
            row("grpc-tcp", 8, 1, 88.0),
            row("grpc-native", 8, 1, 5.0),
            row("grpc-tcp", 8, 8, 640.0),
            row("grpc-native", 8, 8, 20.0),
        ]
    }

    #[test]
    fn the_table_has_ratios_and_the_memory_of_each_connection() {
        let text = table(&of_connections());
        let busy = text.lines().rfind(|line| line.contains("grpc-native")).unwrap();
        for shown in ["20.0 µs", "5.00", "32.0", "40.0 KiB"] {
            assert!(busy.contains(shown), "{shown} in {text}");
        }
        assert!(legend(&of_connections()).contains("everything that came with it"));
    }

    #[test]
    fn a_mode_that_failed_has_dashes() {
        let mut row = sample_row("grpc-native", Cell::closed(64, 1), 4.0);
        (row.ops, row.errors, row.p99_us) = (0, 1, None);
        row.connections = Some(Connections {
            connections: 8,
            busy: 8,
            memory_bytes_each: None,
            descriptors_each: None,
            idle: None,
        });
        let text = table(&[row]);
        assert!(text.lines().any(|line| line.contains("grpc-native") && line.contains('–')), "{text}");
    }
}
