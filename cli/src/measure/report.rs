//! The outputs of a run: a table for people, JSON, and the progress bar.

use std::io::IsTerminal;
use std::path::Path;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use tonic_rdma_commands::table::grid;
use tonic_rdma_commands::{Failure, output};

/// A column of the table: the heading, and a function from a row and all rows to the text of the row.
pub(crate) struct Column<R> {
    pub(crate) heading: &'static str,
    pub(crate) text: fn(&R, &[R]) -> String,
}

/// Makes a column.
pub(crate) const fn column<R>(heading: &'static str, text: fn(&R, &[R]) -> String) -> Column<R> {
    Column { heading, text }
}

/// The results of a run, from top to bottom.
pub(crate) struct Report<'a, F, R> {
    pub(crate) facts: &'a F,
    /// The facts for people: names and values.
    pub(crate) lines: Vec<(&'static str, String)>,
    pub(crate) columns: Vec<Column<R>>,
    pub(crate) rows: &'a [R],
    /// Returns whether a row is compared with the one before it: these rows are a group of the table.
    pub(crate) beside: fn(&R, &R) -> bool,
    /// Paragraphs below the table, one a line.
    pub(crate) legend: String,
}

impl<F: Serialize, R: Serialize> Report<'_, F, R> {
    /// Prints the table, and writes the file that the command line asks for. Scripts rely on the JSON.
    pub(crate) fn show(&self, json: Option<&Path>) -> Result<(), Failure> {
        #[derive(Serialize)]
        struct Document<F, R> {
            #[serde(flatten)]
            facts: F,
            rows: R,
        }
        output::print(&self.text(), json)?;
        match json {
            Some(path) => output::write_json(path, &Document { facts: self.facts, rows: self.rows }),
            None => Ok(()),
        }
    }

    pub(crate) fn text(&self) -> String {
        let width = self.lines.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
        let lines = self.lines.iter().map(|(name, value)| format!("{name:>width$}: {value}\n"));
        let headings: Vec<&str> = self.columns.iter().map(|column| column.heading).collect();
        let fields = |row| self.columns.iter().map(|column| (column.text)(row, self.rows)).collect();
        let groups = self.rows.chunk_by(self.beside).map(|group| group.iter().map(fields).collect());
        let table = grid(&headings, groups);
        format!("{}\n{table}\n\n{}\n", lines.collect::<String>(), self.legend)
    }
}

/// Makes a progress bar of `trials` steps. The bar is hidden where stderr is not a terminal.
pub(crate) fn progress_bar(trials: u64) -> ProgressBar {
    let target = match std::io::stderr().is_terminal() {
        true => ProgressDrawTarget::stderr(),
        false => ProgressDrawTarget::hidden(),
    };
    let bar = ProgressBar::with_draw_target(Some(trials), target);
    match ProgressStyle::with_template("{bar:40} {percent:>3} %  {elapsed} of about {duration}  {msg}") {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[test]
    fn the_table_has_the_rows_in_groups() {
        let report = Report {
            facts: &(),
            lines: vec![("what", "<this>".to_owned())],
            columns: vec![
                column("row", |row: &u32, _| row.to_string()),
                column("of", |_, rows| rows.len().to_string()),
            ],
            rows: &[1, 2, 30],
            beside: |one, next| one + 1 == *next,
            legend: "what & why".to_owned(),
        };
        let text = report.text();
        assert!(text.starts_with("what: <this>\n") && text.ends_with("\nwhat & why\n"), "{text}");
        assert!(text.lines().any(|line| line.contains("30") && line.contains('3')), "{text}");
    }
}
