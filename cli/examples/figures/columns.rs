//! Columns of a table. A column shows a figure of one row, or of the rows of one cell.

use serde_json::Value;
use tonic_rdma_commands::units;

use crate::error::FigureError;

/// The least number of operations for which a percentile is shown.
const ENOUGH_FOR_P99: u64 = 100;
const ENOUGH_FOR_P999: u64 = 1000;

/// A figure that a column can show.
pub(crate) const FIGURES: [&str; 29] = [
    "run",
    "mode",
    "payload",
    "model",
    "each way",
    "inflight",
    "servers",
    "workers",
    "batch",
    "compute",
    "local",
    "steps",
    "target",
    "training",
    "accuracy",
    "loss",
    "copied",
    "connections",
    "busy",
    "memory",
    "rate",
    "p50",
    "p99",
    "p999",
    "each second",
    "speed",
    "CPU",
    "latency",
    "throughput",
];

/// A column: `HEADING=FIGURE`, `HEADING=FIGURE:MODE` (of one mode in the cell), or `HEADING=FIGURE:MODE/BASE` (of one
/// mode compared with the mode BASE). The default of BASE is grpc-tcp.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Column<'a> {
    pub(crate) heading: &'a str,
    figure: &'a str,
    mode: Option<&'a str>,
    base: &'a str,
}

/// Parses the columns of a table, separated by `|`.
pub(crate) fn parse(text: &str) -> Result<Vec<Column<'_>>, FigureError> {
    text.split('|').map(column).collect()
}

fn column(text: &str) -> Result<Column<'_>, FigureError> {
    let (heading, rest) = text.split_once('=').ok_or_else(|| FigureError::BadColumn(text.to_owned()))?;
    let (rest, base) = rest.split_once('/').unwrap_or((rest, "grpc-tcp"));
    let (figure, mode) = rest.split_once(':').map_or((rest, None), |(figure, mode)| (figure, Some(mode)));
    if !FIGURES.contains(&figure) {
        return Err(FigureError::NoFigure { heading: heading.to_owned(), figure: figure.to_owned() });
    }
    Ok(Column { heading, figure, mode, base })
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

    pub(crate) fn number(&self, name: &str) -> Option<f64> {
        self.value[name].as_f64()
    }

    /// Returns whether this row and `other` belong to one cell.
    pub(crate) fn is_beside(&self, other: &Self) -> bool {
        let same = |name: &str| self.value[name] == other.value[name];
        self.run == other.run
            && [
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
            ]
            .iter()
            .all(|name| same(name))
    }

    /// Returns whether this row belongs to a cell such as `64/32`: bytes and calls in flight.
    pub(crate) fn is_of(&self, bytes: u64, inflight: u64) -> bool {
        self.value["bytes"] == bytes && self.value["inflight"] == inflight
    }

    /// Returns whether the field `name` has one of `values`.
    pub(crate) fn has(&self, name: &str, values: &[&str]) -> bool {
        let text = match &self.value[name] {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        values.contains(&text.as_str())
    }

    /// Returns a time in microseconds, stored in microseconds or milliseconds.
    fn micros(&self, micros: &str, millis: &str) -> Option<f64> {
        self.number(micros).or_else(|| Some(self.number(millis)? * 1e3))
    }

    /// Returns the median time of an operation or mini-batch in microseconds.
    pub(crate) fn p50(&self) -> Option<f64> {
        self.micros("p50_us", "p50_ms").filter(|p50| *p50 > 0.0)
    }

    /// Returns operations or mini-batches a second.
    pub(crate) fn each_second(&self) -> Option<f64> {
        self.number("ops_per_s").or_else(|| self.number("minibatches_per_s")).filter(|each| *each > 0.0)
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

impl<'a> Column<'a> {
    /// Returns whether the column names a mode.
    pub(crate) const fn is_of_mode(&self) -> bool {
        self.mode.is_some()
    }

    /// Returns the text for `row`, whose cell has the rows `cell`.
    pub(crate) fn text(&self, row: &Row<'a>, cell: &[Row<'a>]) -> Result<String, FigureError> {
        let find = |mode: &str| {
            let found = cell.iter().find(|row| row.mode() == mode);
            found
                .copied()
                .ok_or_else(|| FigureError::NoRow { heading: self.heading.to_owned(), mode: mode.to_owned() })
        };
        let row = match self.mode {
            Some(mode) => find(mode)?,
            None => *row,
        };
        let ratio = |over: Option<f64>, under: Option<f64>| {
            let ratio = over.zip(under).map(|(over, under)| over / under);
            ratio.map(|ratio| if ratio >= 9.995 { units::digits(ratio) } else { format!("{ratio:.2}") })
        };
        let text = match self.figure {
            "run" => Some(row.run.to_owned()),
            "mode" => Some(row.mode().to_owned()),
            "payload" => Some(match row.value["workload"].as_str() {
                Some(workload) => workload.to_owned(),
                None => units::size(row.value["bytes"].as_u64().unwrap_or(0)),
            }),
            "model" => row.value["model"].as_str().map(str::to_owned),
            "each way" => row.value["bytes"]
                .as_u64()
                .map(|bytes| format!("{} in {}", units::rough_size(bytes), row.value["variables"])),
            count @ ("inflight" | "servers" | "workers" | "batch" | "connections" | "busy") => {
                row.value[count].as_u64().map(|count| count.to_string())
            }
            "compute" => row.value["compute"].as_str().map(|name| match row.number("compute_ms") {
                Some(millis) => format!("{name} {}", units::micros(millis * 1e3)),
                None => name.to_owned(),
            }),
            "local" => ratio(row.number("times_local"), Some(1.0)),
            "steps" => row.value["steps"].as_u64().map(|steps| steps.to_string()),
            "target" => row.number("target_s").map(|seconds| units::micros(seconds * 1e6)),
            "training" => row.number("seconds").map(|seconds| units::micros(seconds * 1e6)),
            "accuracy" => row.number("accuracy").map(|share| format!("{:.2} %", share * 100.0)),
            "loss" => row.number("loss").map(|loss| format!("{loss:.4}")),
            "copied" => row.value["copied_later"].as_u64().map(|tensors| tensors.to_string()),
            "memory" => row.value["memory_bytes_each"].as_u64().map(units::rough_size),
            "rate" => row.number("rate").map(units::count),
            "p50" => row.p50().map(units::micros),
            "p99" => row.percentile("p99_us", ENOUGH_FOR_P99).map(units::micros),
            "p999" => row.percentile("p999_us", ENOUGH_FOR_P999).map(units::micros),
            "each second" => row.each_second().map(|each| {
                format!("{}{}", units::count(each), if row.is_saturated() { ", saturated" } else { "" })
            }),
            "speed" => row.number("gbytes_per_s").map(units::digits),
            "CPU" => row.micros("cpu_us_per_op", "cpu_ms_per_minibatch").map(units::micros),
            "latency" => {
                let base = find(self.base)?;
                // The latency of a saturated row only depends on the length of the run.
                let settled = !row.is_saturated() && !base.is_saturated();
                ratio(base.p50().filter(|_| settled), row.p50())
            }
            "throughput" => ratio(row.each_second(), find(self.base)?.each_second()),
            other => {
                let (heading, figure) = (self.heading.to_owned(), other.to_owned());
                return Err(FigureError::NoFigure { heading, figure });
            }
        };
        Ok(text.unwrap_or_else(|| "–".to_owned()))
    }
}
