//! The outputs of a run: a table for people, the files of its results, and the progress bar.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use tonic_rdma_commands::Failure;
use tonic_rdma_commands::output::Outputs;
use tonic_rdma_commands::table::{grid, markdown};

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
    /// Prints the table, and writes the files that the command line asks for. Scripts rely on the JSON.
    pub(crate) fn show(&self, outputs: &Outputs) -> Result<(), Failure> {
        #[derive(Serialize)]
        struct Document<F, R> {
            #[serde(flatten)]
            facts: F,
            rows: R,
        }
        let document = Document { facts: self.facts, rows: self.rows };
        outputs.show(&self.text(), || self.markdown(), &document, self.rows)
    }

    pub(crate) fn text(&self) -> String {
        let width = self.lines.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
        let lines = self.lines.iter().map(|(name, value)| format!("{name:>width$}: {value}\n"));
        let groups = self.rows.chunk_by(self.beside).map(|group| group.iter().map(self.fields()).collect());
        let table = grid(&self.headings(), groups);
        format!("{}\n{table}\n\n{}\n", lines.collect::<String>(), self.legend)
    }

    fn markdown(&self) -> String {
        let table = markdown(&self.headings(), 1, self.rows.iter().map(self.fields()));
        let lines = self.lines.iter().map(|(name, value)| format!("- {name}: {value}\n"));
        let legend = self.legend.lines().map(|line| format!("- {line}\n"));
        format!("{table}\n\n{}", lines.chain(legend).collect::<String>())
    }

    fn headings(&self) -> Vec<&str> {
        self.columns.iter().map(|column| column.heading).collect()
    }

    /// Returns a function that makes the texts of a row.
    fn fields(&self) -> impl Fn(&R) -> Vec<String> {
        |row| self.columns.iter().map(|column| (column.text)(row, self.rows)).collect()
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
        let lines = ["| row | of |", "|-----|----|", "| 1   |  3 |", "| 2   |  3 |", "| 30  |  3 |"];
        let expected = format!("{}\n\n- what: <this>\n- what & why\n", lines.join("\n"));
        assert_eq!(report.markdown(), expected);
    }
}
