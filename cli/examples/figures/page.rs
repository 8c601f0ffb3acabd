//! A stored figure, and the page made from it. A column of its table shows a figure of one row, or of the
//! rows of one cell.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tonic_rdma_commands::statistics::{median, range};
use tonic_rdma_commands::table::dash;
use tonic_rdma_commands::{Failure, units};

/// Stored runs, and the selection that the page shows.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Figure {
    /// The columns, in the form that [`parse`] accepts.
    pub(crate) columns: String,
    /// The cells on the page, such as `64/1 64KiB/32` (payload and calls in flight), or the values that a
    /// field of theirs may have, such as `batch=1,32`. Empty means all.
    pub(crate) rows: String,
    pub(crate) date: String,
    pub(crate) runs: Vec<Run>,
}

/// A command, and the JSON that it wrote.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Run {
    pub(crate) label: String,
    pub(crate) command: String,
    pub(crate) result: Value,
}

impl Figure {
    /// Renders the page: the commands, the table, and the machine.
    pub(crate) fn markdown(&self) -> Result<String, Failure> {
        let columns = parse(&self.columns)?;
        let mut page = self.commands();
        let line = |fields: Vec<String>| format!("| {} |\n", fields.join(" | "));
        page.push_str(&line(columns.iter().map(|column| column.heading.to_owned()).collect()));
        page.push_str(&format!("|{}\n", "---|".repeat(columns.len())));
        let cells = self.chosen()?;
        // If the columns name modes, a line is a cell. Otherwise a line is a mode in a cell.
        let by_cell = columns.iter().any(Column::is_of_mode);
        for cell in &cells {
            for row in &cell[..if by_cell { 1 } else { cell.len() }] {
                let fields = columns.iter().map(|column| column.text(row, cell));
                page.push_str(&line(fields.collect::<Result<_, _>>()?));
            }
        }
        page.push_str(&format!("\n{}\n", self.conditions()));
        Ok(page)
    }

    /// Renders another page of the same runs, with a row for each mode of [`MISSION`] and a column for each chosen
    /// payload from 64 KiB on, one at a time.
    pub(crate) fn mission(&self) -> Result<String, Failure> {
        let is_shown = |cell: &Vec<Row<'_>>| {
            cell[0].number("inflight") == Some(1.0) && cell[0].number("bytes") >= Some(65536.0)
        };
        let cells: Vec<_> = self.chosen()?.into_iter().filter(is_shown).collect();
        let sizes = cells.iter().map(|cell| units::size(cell[0].value["bytes"].as_u64().unwrap_or(0)));
        let mut page = self.commands();
        page.push_str(&format!("| p50, × grpc-tcp | {} |\n", sizes.collect::<Vec<_>>().join(" | ")));
        page.push_str(&format!("|---|{}\n", "---|".repeat(cells.len())));
        for (mode, about) in MISSION {
            page.push_str(&format!("| {about} (`{mode}`)"));
            for cell in &cells {
                let own = of_mode(cell, mode).and_then(|row| row.p50());
                let tcp = of_mode(cell, TCP).and_then(|row| row.p50());
                let text = match (own, tcp) {
                    (Some(own), Some(tcp)) if mode != TCP => {
                        format!("{}, {} ×", units::micros(own), ratio(tcp / own))
                    }
                    (Some(own), _) => units::micros(own),
                    _ => dash(),
                };
                page.push_str(&format!(" | {text}"));
            }
            page.push_str(" |\n");
        }
        page.push_str(&format!("\n{}\n", self.conditions()));
        Ok(page)
    }

    /// Returns the commands of the runs, as a block.
    fn commands(&self) -> String {
        let lines: String = self.runs.iter().map(|run| format!("{}\n", run.command)).collect();
        format!("```sh\n{lines}```\n\n")
    }

    /// Returns the rows of all runs, by cell.
    pub(crate) fn cells(&self) -> Result<Vec<Vec<Row<'_>>>, Failure> {
        let mut cells: Vec<Vec<Row<'_>>> = Vec::new();
        for run in &self.runs {
            let rows = run.result["rows"].as_array().ok_or_else(|| Failure::run("a run has no rows"))?;
            for value in rows {
                let row = Row { run: &run.label, value };
                match cells.iter_mut().find(|cell| cell[0].is_beside(&row)) {
                    Some(cell) => cell.push(row),
                    None => cells.push(vec![row]),
                }
            }
        }
        Ok(cells)
    }

    /// Returns the rows on the page, by cell.
    pub(crate) fn chosen(&self) -> Result<Vec<Vec<Row<'_>>>, Failure> {
        let mut cells = self.cells()?;
        let (fields, wanted): (Vec<&str>, Vec<&str>) =
            self.rows.split_whitespace().partition(|wanted| wanted.contains('='));
        for (name, values) in fields.iter().filter_map(|field| field.split_once('=')) {
            let values: Vec<&str> = values.split(',').collect();
            for value in &values {
                if !cells.iter().any(|cell| cell[0].has(name, &[value])) {
                    return Err(no_cell(&format!("{name}={value}")));
                }
            }
            cells.retain(|cell| cell[0].has(name, &values));
        }
        if wanted.is_empty() {
            return Ok(cells);
        }
        let mut shown = Vec::new();
        for wanted in wanted {
            let parsed = wanted
                .split_once('/')
                .and_then(|(bytes, inflight)| Some((units::parse_size(bytes).ok()?, inflight.parse().ok()?)));
            let (bytes, inflight) = parsed.ok_or_else(|| Failure::run(format!("no cell: {wanted:?}")))?;
            let found = cells.iter().filter(|cell| cell[0].is_of(bytes, inflight));
            let before = shown.len();
            shown.extend(found.cloned());
            if shown.len() == before {
                return Err(no_cell(wanted));
            }
        }
        Ok(shown)
    }

    /// Returns whether a run was made by a build without optimisation.
    pub(crate) fn is_unoptimised(&self) -> bool {
        self.runs.iter().any(|run| run.result["optimised"] == false)
    }

    /// Describes the machine and its costs, from the first run.
    fn conditions(&self) -> String {
        let Some(Run { result, .. }) = self.runs.first() else { return String::new() };
        let text = |value: &Value| value.as_str().unwrap_or("unknown").to_owned();
        let machine = &result["machine"];
        let mut parts = vec![match &machine["cpu"] {
            // A training does not describe the machine. The other figures of the same day do.
            Value::Null => format!("{}: {} cores", self.date, machine["cores"]),
            cpu => format!(
                "{}: {}, {} cores, Linux {}",
                self.date,
                text(cpu),
                machine["cores"],
                text(&machine["kernel"])
            ),
        }];
        // Before `parameter-server` had several runs, it measured the costs while its processes still gave back
        // their memory.
        let too_late = !result["turns"].is_null() && result["rounds"].is_null();
        let costs = if too_late { &Value::Null } else { &result["round_trips"] };
        let cost = |name: &str, what: &str| {
            costs[name].as_f64().map(|micros| format!("{what} {}", units::micros(micros)))
        };
        parts.extend(cost("spin_us", "round trip of two threads that spin"));
        parts.extend(cost("wake_us", "round trip of two threads that sleep"));
        parts.extend(cost("syscall_us", "system call"));
        parts.extend(
            costs["memcpy_gbytes_per_s"]
                .as_f64()
                .map(|speed| format!("memcpy {} GB/s", units::digits(speed))),
        );
        parts.extend(result["allocator"].as_str().map(|name| format!("allocator {name}")));
        if result["optimised"] == false {
            parts.push("UNOPTIMISED".to_owned());
        }
        let runs = match result["rounds"].as_u64() {
            Some(runs @ 2..) if self.columns.contains(SPREAD) => {
                format!("Medians of {runs} runs, with the least and the largest in brackets")
            }
            Some(runs @ 2..) => format!("Medians of {runs} runs"),
            _ => "One run".to_owned(),
        };
        format!("({}. {runs}; × says how many times better.)", parts.join("; "))
    }
}

fn no_cell(wanted: &str) -> Failure {
    Failure::run(format!("the runs have no cell {wanted}"))
}

/// The modes that [`Figure::mission`] compares, and what they are.
const MISSION: [(&str, &str); 3] =
    [(TCP, "gRPC over TCP"), ("grpc-rdma", "gRPC, drop-in"), ("rdma-zerocp", "tensors, no calls")];

/// The least number of operations for which a percentile is shown.
const ENOUGH_FOR_P99: u64 = 100;
const ENOUGH_FOR_P999: u64 = 1000;

/// The fields that rows of one cell have in common.
const CELL: [&str; 14] = [
    "compute_scale",
    "ranks",
    "workload",
    "bytes",
    "inflight",
    "direction",
    "rate",
    "model",
    "servers",
    "workers",
    "compute",
    "batch",
    "connections",
    "busy",
];

/// A figure of one row.
type Shown = fn(&Row<'_>) -> Option<String>;

/// The figures that a column can show, beside those of [`RATIOS`].
const FIGURES: [(&str, Shown); 35] = [
    ("run", |row| Some(row.run.to_owned())),
    ("setting", |row| Some(row.setting().to_owned())),
    ("mode", |row| Some(row.mode().to_owned())),
    ("payload", |row| {
        row.text("workload").or_else(|| Some(units::size(row.value["bytes"].as_u64().unwrap_or(0))))
    }),
    ("model", |row| row.text("model")),
    ("each way", |row| {
        let bytes = row.value["bytes"].as_u64()?;
        Some(format!("{} in {}", units::rough_size(bytes), row.value["variables"]))
    }),
    ("inflight", |row| row.count("inflight")),
    ("servers", |row| row.count("servers")),
    ("workers", |row| row.count("workers")),
    ("batch", |row| row.count("batch")),
    ("connections", |row| row.count("connections")),
    ("busy", |row| row.count("busy")),
    ("compute", |row| {
        let time = row.number("compute_ms").map(|millis| format!(" {}", units::micros(millis * 1e3)));
        Some(row.text("compute")? + &time.unwrap_or_default())
    }),
    ("local", |row| row.number("times_local").map(ratio)),
    ("images", |row| row.each_second().map(|each| units::digits(each * SAMPLES))),
    ("ranks", |row| row.count("ranks")),
    // What the rank received that received most.
    ("received", |row| {
        let bytes = row.value["received_bytes"].as_u64()?;
        let times = bytes as f64 / row.number("bytes")?;
        Some(format!("{} ({} ×)", units::rough_size(bytes), ratio(times)))
    }),
    ("steps", |row| row.count("steps")),
    ("target", |row| row.number("target_s").map(|seconds| units::micros(seconds * 1e6))),
    ("training", |row| row.number("seconds").map(|seconds| units::micros(seconds * 1e6))),
    ("accuracy", |row| row.number("accuracy").map(|share| format!("{:.2} %", share * 100.0))),
    ("loss", |row| row.number("loss").map(|loss| format!("{loss:.4}"))),
    ("copied", |row| row.count("copied_later")),
    ("memory", |row| row.value["memory_bytes_each"].as_u64().map(units::rough_size)),
    ("rate", |row| row.number("rate").map(units::count)),
    // The load of a row with a rate is the rate.
    ("load", |row| match row.number("rate") {
        Some(rate) => Some(format!("{}/s", units::count(rate))),
        None => Some(format!("× {}", row.count("inflight")?)),
    }),
    ("p50", |row| row.p50().map(units::micros)),
    ("p99", |row| row.p99().map(units::micros)),
    ("p999", |row| row.percentile("p999_us", ENOUGH_FOR_P999).map(units::micros)),
    ("each second", |row| {
        let note = if row.is_saturated() { ", saturated" } else { "" };
        row.each_second().map(|each| format!("{}{note}", units::count(each)))
    }),
    ("speed", |row| row.number("gbytes_per_s").map(units::digits)),
    ("CPU", |row| row.cpu().map(units::micros)),
    ("switches", |row| row.number("switches_per_op").map(units::digits)),
    // The least and the largest ratio of several runs.
    ("latency range", |row| {
        let range = row.value["latency_ratio_range"].as_array()?;
        Some(format!("{} to {}", ratio(range.first()?.as_f64()?), ratio(range.get(1)?.as_f64()?)))
    }),
    ("sleeps", |row| row.number("sleeps_per_op").map(units::digits)),
];

/// The figures that compare two rows of a cell, and the fields that `compare` has for them in a row, of this
/// row compared with grpc-tcp.
const RATIOS: [(&str, &str); 4] = [
    ("latency", "latency_ratio"),
    ("p99 ratio", "p99_ratio"),
    ("throughput", "throughput_ratio"),
    ("CPU ratio", "cpu_ratio"),
];
const TCP: &str = "grpc-tcp";

/// Factors of computing times, and what they stand for: a machine each for the workers, as in the paper, or this
/// machine as it is.
pub(crate) const SETTINGS: [(&str, &str); 2] = [("workers", "a network each"), ("1", "one machine for all")];

/// The samples of a mini-batch, which no row of AR-gRPC's figure has.
pub(crate) const SAMPLES: f64 = 32.0;

/// Ends the name of a figure that is shown with the least and the largest of its runs, as these can be.
const SPREAD: &str = " ±";
const OF_RUNS: [&str; 5] = ["p50", "each second", "local", "latency", "throughput"];

/// A column: `HEADING=FIGURE`, `HEADING=FIGURE:MODE` (of one mode in the cell), or `HEADING=FIGURE:MODE/BASE`
/// (of one mode compared with the mode BASE). The default of BASE is grpc-tcp. [`SPREAD`] may follow a FIGURE
/// of [`OF_RUNS`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Column<'a> {
    pub(crate) heading: &'a str,
    figure: &'a str,
    spread: bool,
    mode: Option<&'a str>,
    base: &'a str,
}

/// Parses the columns of a table, separated by `|`.
pub(crate) fn parse(text: &str) -> Result<Vec<Column<'_>>, Failure> {
    text.split('|').map(column).collect()
}

fn column(text: &str) -> Result<Column<'_>, Failure> {
    let no_column = || Failure::run(format!("no column: {text:?}"));
    let (heading, rest) = text.split_once('=').ok_or_else(no_column)?;
    let (rest, base) = rest.split_once('/').unwrap_or((rest, TCP));
    let (figure, mode) = rest.split_once(':').map_or((rest, None), |(figure, mode)| (figure, Some(mode)));
    let (figure, spread) = figure.strip_suffix(SPREAD).map_or((figure, false), |figure| (figure, true));
    let names: Vec<&str> =
        FIGURES.iter().map(|(name, _)| *name).chain(RATIOS.map(|(name, _)| name)).collect();
    if spread && !OF_RUNS.contains(&figure) {
        let figures = OF_RUNS.join(", ");
        return Err(Failure::run(format!(
            "{heading}: {figure:?} has no spread; those that have one: {figures}"
        )));
    }
    if !names.contains(&figure) {
        let names = names.join(", ");
        return Err(Failure::run(format!("{heading}: no figure {figure:?}; there are: {names}")));
    }
    Ok(Column { heading, figure, spread, mode, base })
}

/// Formats a ratio.
pub(crate) fn ratio(value: f64) -> String {
    if value >= 9.995 { units::digits(value) } else { format!("{value:.2}") }
}

/// Divides run by run.
pub(crate) fn divided(over: &[f64], under: &[f64]) -> Vec<f64> {
    let both = over.iter().zip(under).filter(|_| over.len() == under.len());
    both.map(|(over, under)| over / under).collect()
}

/// Returns the median of several runs with the least and the largest of them, or the only value.
pub(crate) fn with_spread(runs: &[f64], text: fn(f64) -> String) -> String {
    let Some([least, most]) = range(runs) else { return dash() };
    let middle = text(median(runs.iter().copied()));
    if runs.len() == 1 { middle } else { format!("{middle} ({} to {})", text(least), text(most)) }
}

/// A row of a run, with the label of the run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row<'a> {
    pub(crate) run: &'a str,
    pub(crate) value: &'a Value,
}

impl Row<'_> {
    pub(crate) fn mode(&self) -> &str {
        self.value["mode"].as_str().unwrap_or_default()
    }

    /// Returns the setting of [`SETTINGS`], or the label of the run.
    pub(crate) fn setting(&self) -> &str {
        let of = |scale: &str| SETTINGS.iter().find(|(name, _)| *name == scale).map(|(_, setting)| *setting);
        self.value["compute_scale"].as_str().and_then(of).unwrap_or(self.run)
    }

    pub(crate) fn number(&self, name: &str) -> Option<f64> {
        self.value[name].as_f64()
    }

    /// Returns a field of text.
    fn text(&self, name: &str) -> Option<String> {
        self.value[name].as_str().map(str::to_owned)
    }

    fn count(&self, name: &str) -> Option<String> {
        self.value[name].as_u64().map(|count| count.to_string())
    }

    /// Returns a field as it is on the page.
    pub(crate) fn field(&self, name: &str) -> String {
        self.text(name).unwrap_or_else(|| self.value[name].to_string())
    }

    /// Returns whether this row and `other` belong to one cell.
    pub(crate) fn is_beside(&self, other: &Self) -> bool {
        self.run == other.run && CELL.iter().all(|name| self.value[name] == other.value[name])
    }

    /// Returns whether this row belongs to a cell such as `64/32`: bytes and calls in flight.
    pub(crate) fn is_of(&self, bytes: u64, inflight: u64) -> bool {
        self.value["bytes"] == bytes && self.value["inflight"] == inflight
    }

    /// Returns whether the field `name` has one of `values`.
    pub(crate) fn has(&self, name: &str, values: &[&str]) -> bool {
        values.contains(&self.field(name).as_str())
    }

    /// Returns a time in microseconds, stored in microseconds or milliseconds.
    fn micros(&self, micros: &str, millis: &str) -> Option<f64> {
        self.number(micros).or_else(|| Some(self.number(millis)? * 1e3))
    }

    /// Returns the median time of an operation or mini-batch in microseconds.
    pub(crate) fn p50(&self) -> Option<f64> {
        self.micros("p50_us", "p50_ms").filter(|p50| *p50 > 0.0)
    }

    fn p99(&self) -> Option<f64> {
        self.percentile("p99_us", ENOUGH_FOR_P99)
    }

    /// Returns the CPU time of both processes for an operation or mini-batch in microseconds.
    pub(crate) fn cpu(&self) -> Option<f64> {
        self.micros("cpu_us_per_op", "cpu_ms_per_minibatch").filter(|cpu| *cpu > 0.0)
    }

    /// Returns operations or mini-batches a second.
    pub(crate) fn each_second(&self) -> Option<f64> {
        self.number("ops_per_s").or_else(|| self.number("minibatches_per_s")).filter(|each| *each > 0.0)
    }

    /// Returns the median time of each run in microseconds: of the only run, if the row has no others.
    pub(crate) fn p50s(&self) -> Vec<f64> {
        let micros = || self.runs("p50_us", 1.0).or_else(|| self.runs("p50_ms", 1e3));
        micros().unwrap_or_else(|| self.p50().into_iter().collect())
    }

    /// Returns the operations or mini-batches a second of each run.
    pub(crate) fn rates(&self) -> Vec<f64> {
        let rates = || self.runs("ops_per_s", 1.0).or_else(|| self.runs("minibatches_per_s", 1.0));
        rates().unwrap_or_else(|| self.each_second().into_iter().collect())
    }

    /// Returns the mini-batches a second of each run, compared with those of a process that only computes.
    pub(crate) fn locals(&self) -> Vec<f64> {
        // The rate and its ratio to local are proportional.
        let factor = || Some(self.number("times_local")? / self.each_second()?);
        factor().map_or_else(Vec::new, |factor| self.rates().iter().map(|rate| rate * factor).collect())
    }

    fn runs(&self, name: &str, factor: f64) -> Option<Vec<f64>> {
        let runs = self.value[format!("{name}_runs")].as_array()?.iter();
        runs.map(|value| Some(value.as_f64()? * factor)).collect()
    }

    /// Returns a percentile, if there were enough operations.
    fn percentile(&self, name: &str, enough: u64) -> Option<f64> {
        let unsent = self.value["unsent"].as_u64().unwrap_or(0);
        (self.value["ops"].as_u64()? + unsent >= enough).then(|| self.number(name)).flatten()
    }

    fn is_saturated(&self) -> bool {
        self.value["saturated"] == true
    }
}

/// Returns the row of a mode in a cell.
pub(crate) fn of_mode<'a>(cell: &[Row<'a>], mode: &str) -> Option<Row<'a>> {
    cell.iter().find(|row| row.mode() == mode).copied()
}

impl<'a> Column<'a> {
    /// Returns whether the column names a mode.
    pub(crate) const fn is_of_mode(&self) -> bool {
        self.mode.is_some()
    }

    /// Returns the text for `row`, compared with `base`, from all of its runs.
    fn runs(&self, row: &Row<'_>, base: &Row<'_>) -> String {
        match self.figure {
            "p50" => with_spread(&row.p50s(), units::micros),
            "each second" => with_spread(&row.rates(), units::count),
            "local" => with_spread(&row.locals(), ratio),
            "latency" => with_spread(&divided(&base.p50s(), &row.p50s()), ratio),
            _ => with_spread(&divided(&row.rates(), &base.rates()), ratio),
        }
    }

    /// Returns the text for `row`, whose cell has the rows `cell`.
    pub(crate) fn text(&self, row: &Row<'a>, cell: &[Row<'a>]) -> Result<String, Failure> {
        let find = |mode: &str| {
            of_mode(cell, mode).ok_or_else(|| Failure::run(format!("{}: no row of {mode}", self.heading)))
        };
        let row = match self.mode {
            Some(mode) => find(mode)?,
            None => *row,
        };
        if self.spread {
            let base =
                if RATIOS.iter().any(|(name, _)| *name == self.figure) { find(self.base)? } else { row };
            return Ok(self.runs(&row, &base));
        }
        // The ratio to grpc-tcp of several runs is the median of their ratios, and not the ratio of medians.
        let stored = RATIOS.iter().find(|(figure, _)| *figure == self.figure && self.base == TCP);
        if let Some(stored) = stored.and_then(|(_, name)| row.value.get(name)) {
            return Ok(stored.as_f64().map_or_else(dash, ratio));
        }
        let compared = |over: Option<f64>, under: Option<f64>| Some(ratio(over? / under?));
        // Of several runs, the median of their ratios here, too.
        let by_run = |over: Vec<f64>, under: Vec<f64>| {
            let ratios = divided(&over, &under);
            (!ratios.is_empty()).then(|| ratio(median(ratios)))
        };
        let text = match self.figure {
            // The latency of a saturated row only depends on the length of the run.
            "latency" | "p99 ratio" if row.is_saturated() || find(self.base)?.is_saturated() => None,
            "latency" => by_run(find(self.base)?.p50s(), row.p50s()),
            "p99 ratio" => compared(find(self.base)?.p99(), row.p99()),
            "throughput" => by_run(row.rates(), find(self.base)?.rates()),
            "CPU ratio" => compared(find(self.base)?.cpu(), row.cpu()),
            "p50" | "p99" if self.is_of_mode() && row.is_saturated() => Some("saturated".to_owned()),
            figure => FIGURES.iter().find(|(name, _)| *name == figure).and_then(|(_, shown)| shown(&row)),
        };
        Ok(text.unwrap_or_else(dash))
    }
}
