//! A stored figure, and the page made from it.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tonic_rdma_commands::{Failure, units};

use crate::columns::{self, Row};

/// Stored runs, and the selection that the page shows.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Figure {
    /// The columns, in the form that [`columns::parse`] accepts.
    pub(crate) columns: String,
    /// The cells on the page, such as `64/1 64KiB/32` (payload and calls in flight), or the values that a field of theirs
    /// may have, such as `batch=1,32`. Empty means all.
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
        let columns = columns::parse(&self.columns)?;
        let mut page = "```sh\n".to_owned();
        for run in &self.runs {
            page.push_str(&run.command);
            page.push('\n');
        }
        page.push_str("```\n\n");
        let line = |fields: Vec<String>| format!("| {} |\n", fields.join(" | "));
        page.push_str(&line(columns.iter().map(|column| column.heading.to_owned()).collect()));
        page.push_str(&format!("|{}\n", "---|".repeat(columns.len())));
        let cells = self.chosen()?;
        // If the columns name modes, a line is a cell. Otherwise a line is a mode in a cell.
        let by_cell = columns.iter().any(columns::Column::is_of_mode);
        for cell in &cells {
            for row in &cell[..if by_cell { 1 } else { cell.len() }] {
                let fields = columns.iter().map(|column| column.text(row, cell));
                page.push_str(&line(fields.collect::<Result<_, _>>()?));
            }
        }
        page.push_str(&format!("\n{}\n", self.conditions()));
        Ok(page)
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
        let costs = &result["round_trips"];
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
        format!("({}. One run; × says how many times better.)", parts.join("; "))
    }
}

fn no_cell(wanted: &str) -> Failure {
    Failure::run(format!("the runs have no cell {wanted}"))
}
