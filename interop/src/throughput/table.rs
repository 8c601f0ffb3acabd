//! Results of a measurement.

use std::path::Path;

use serde::Serialize;
use tonic_rdma_commands::cores::Cores;
use tonic_rdma_commands::output;
use tonic_rdma_commands::statistics::median;
use tonic_rdma_commands::table::columns;

use super::options::ThroughputOptions;
use tonic_rdma_commands::Failure;

/// Results for one payload size and one number of calls in flight.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    bytes: u32,
    inflight: u32,
    /// Calls per second of each run.
    ours_calls_per_s: Vec<f64>,
    plain_calls_per_s: Vec<f64>,
    /// Ratio of ours to plain, of each group of four runs.
    ratios: Vec<f64>,
}

/// Printed values of a row.
#[derive(Debug, Serialize)]
struct Summary {
    ours_median: f64,
    plain_median: f64,
    ratio_median: f64,
}

impl Row {
    pub(super) fn new(bytes: u32, inflight: u32) -> Self {
        Self { bytes, inflight, ours_calls_per_s: vec![], plain_calls_per_s: vec![], ratios: vec![] }
    }

    /// Adds a group of four runs.
    pub(super) fn add(&mut self, ours: [f64; 2], plain: [f64; 2]) {
        self.ours_calls_per_s.extend(ours);
        self.plain_calls_per_s.extend(plain);
        self.ratios.push(ours.iter().sum::<f64>() / plain.iter().sum::<f64>());
    }

    fn summary(&self) -> Summary {
        Summary {
            ours_median: median(self.ours_calls_per_s.iter().copied()),
            plain_median: median(self.plain_calls_per_s.iter().copied()),
            ratio_median: median(self.ratios.iter().copied()),
        }
    }
}

/// Prints the conditions of the measurement.
pub(super) fn announce(cores: Option<Cores>, options: &ThroughputOptions) -> Result<(), Failure> {
    let on = match cores {
        Some(Cores { client, server }) => format!("servers on core {server}, client on core {client}"),
        None => "client and servers share one core: this is no measurement".to_owned(),
    };
    let runs = options.rounds * 4 * (options.sizes.len() * options.inflight.len()) as u32;
    let seconds = options.duration.as_secs_f64();
    let text = format!("{on}\n{runs} runs of {seconds} s, after a warm-up of a fifth of that\n");
    output::print(&text, options.json.as_deref())
}

/// Prints a table. `json`: the file of `--json`.
pub(super) fn print(rows: &[Row], json: Option<&Path>) -> Result<(), Failure> {
    let row = |row: &Row| {
        let Summary { ours_median, plain_median, ratio_median } = row.summary();
        let least = row.ratios.iter().copied().fold(f64::INFINITY, f64::min);
        let most = row.ratios.iter().copied().fold(0.0, f64::max);
        vec![
            row.bytes.to_string(),
            row.inflight.to_string(),
            format!("{ours_median:.0}"),
            format!("{plain_median:.0}"),
            format!("{ratio_median:.3}"),
            format!("{least:.3} to {most:.3}"),
        ]
    };
    let headings = ["bytes", "inflight", "ours/s", "plain/s", "ratio", "ratios of groups"];
    output::print(&format!("{}\n", columns(&headings, 0, rows.iter().map(row))), json)
}

/// Writes the results as JSON.
pub(super) fn write_json(path: &Path, rows: &[Row]) -> Result<(), Failure> {
    #[derive(Serialize)]
    struct RowWithSummary<'a> {
        #[serde(flatten)]
        row: &'a Row,
        #[serde(flatten)]
        summary: Summary,
    }
    let rows: Vec<_> = rows.iter().map(|row| RowWithSummary { row, summary: row.summary() }).collect();
    output::write_json(path, &serde_json::json!({ "rows": rows }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_of_four_runs_gives_one_ratio() {
        let mut row = Row::new(64, 1);
        row.add([90.0, 100.0], [100.0, 100.0]);
        assert_eq!(row.summary().ratio_median, 0.95);
        assert_eq!(row.ours_calls_per_s, [90.0, 100.0]);
    }
}
