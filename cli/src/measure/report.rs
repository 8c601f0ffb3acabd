//! The outputs of a run: a table for people, JSON, and an HTML page with plots: one file that needs nothing else. And the progress bar.

use std::io::IsTerminal;
use std::path::Path;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use tonic_rdma_commands::plot::{Axis, Content, Plot, PlotError, Scale, Series, draw};
use tonic_rdma_commands::table::grid;
use tonic_rdma_commands::{Failure, output};

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:900px;margin:2em auto;padding:0 1em;color:#222}\
h1{font-size:1.5em}table{border-collapse:collapse;margin:1em 0;font-variant-numeric:tabular-nums}\
td,th{padding:.25em .7em;white-space:nowrap;text-align:right;border-bottom:1px solid #ddd}td:first-child,th:first-child{text-align:left}\
tr.first td{border-top:2px solid #999}dt{float:left;width:8em;color:#666}dd{margin-left:8em}svg{max-width:100%;height:auto}";

/// Checks that the output files can be written. This precedes the measuring, so that no run is lost.
pub(crate) fn check_outputs(json: Option<&Path>, report: Option<&Path>) -> Result<(), Failure> {
    output::check_files(&[("--json", json)])?;
    let Some(directory) = report else { return Ok(()) };
    if directory.as_os_str() == "-" {
        return output::check_files(&[("--report", report)]);
    }
    std::fs::create_dir_all(directory).map_err(|error| {
        Failure::usage(format!("--report: can't write {}", directory.display())).because(error)
    })?;
    output::check_files(&[("--report", Some(&directory.join("index.html")))])
}

/// A column of the table: the heading, and a function from a row and all rows to the text of the row.
pub(crate) struct Column<R> {
    pub(crate) heading: &'static str,
    pub(crate) text: fn(&R, &[R]) -> String,
}

/// Makes a column.
pub(crate) const fn column<R>(heading: &'static str, text: fn(&R, &[R]) -> String) -> Column<R> {
    Column { heading, text }
}

/// A bar plot: groups side by side, with a bar of each series in a group.
#[derive(Debug)]
pub(crate) struct Bars {
    pub(crate) title: String,
    pub(crate) x_axis: &'static str,
    pub(crate) y_axis: &'static str,
    /// Whether the axis is logarithmic. Otherwise it begins at zero.
    pub(crate) logarithmic: bool,
    /// Names below the groups.
    pub(crate) groups: Vec<String>,
    /// A value for each group, in which 0 is no bar.
    pub(crate) series: Vec<Series<f64>>,
}

impl Bars {
    /// Draws the plot as SVG. Without a value the result is empty.
    pub(crate) fn draw(&self) -> Result<String, PlotError> {
        let Self { title, x_axis, y_axis, logarithmic, groups, series } = self;
        let scale = if *logarithmic { Scale::Log } else { Scale::Linear };
        let content = Content::Bars { x: x_axis, groups: groups.clone(), bars: series.clone() };
        draw(&[Plot { title, y: Axis { name: y_axis, scale }, content }])
    }
}

/// The results of a run, from top to bottom.
pub(crate) struct Report<'a, F, R> {
    pub(crate) title: &'static str,
    pub(crate) facts: &'a F,
    /// The facts for people: names and values.
    pub(crate) lines: Vec<(&'static str, String)>,
    pub(crate) plots: Vec<Bars>,
    pub(crate) columns: Vec<Column<R>>,
    pub(crate) rows: &'a [R],
    /// Returns whether a row is compared with the one before it: these rows are a group of the table.
    pub(crate) beside: fn(&R, &R) -> bool,
    /// Paragraphs below the table, one a line.
    pub(crate) legend: String,
}

impl<F: Serialize, R: Serialize> Report<'_, F, R> {
    /// Prints the table, and writes the files that the command line asks for. Scripts rely on the JSON.
    pub(crate) fn show(&self, json: Option<&Path>, directory: Option<&Path>) -> Result<(), Failure> {
        #[derive(Serialize)]
        struct Document<F, R> {
            #[serde(flatten)]
            facts: F,
            rows: R,
        }
        output::print(&self.text(), json)?;
        if let Some(path) = json {
            output::write_json(path, &Document { facts: self.facts, rows: self.rows })?;
        }
        let Some(directory) = directory else { return Ok(()) };
        output::write_file(&directory.join("index.html"), &self.html()?)
    }

    fn headings(&self) -> Vec<&'static str> {
        self.columns.iter().map(|column| column.heading).collect()
    }

    fn groups(&self) -> Vec<Vec<Vec<String>>> {
        let fields = |row| self.columns.iter().map(|column| (column.text)(row, self.rows)).collect();
        let groups = self.rows.chunk_by(self.beside);
        groups.map(|group| group.iter().map(fields).collect()).collect()
    }

    pub(crate) fn text(&self) -> String {
        let width = self.lines.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
        let lines = self.lines.iter().map(|(name, value)| format!("{name:>width$}: {value}\n"));
        let table = grid(&self.headings(), self.groups());
        format!("{}\n{table}\n\n{}\n", lines.collect::<String>(), self.legend)
    }

    pub(crate) fn html(&self) -> Result<String, Failure> {
        let title = escape(self.title);
        let mut page = format!(
            "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\"><title>{title}</title>\
             <style>{STYLE}</style>\n<h1>{title}</h1>\n<dl>"
        );
        for (name, value) in &self.lines {
            page.push_str(&format!("<dt>{}</dt><dd>{}</dd>\n", escape(name), escape(value)));
        }
        page.push_str("</dl>\n");
        for plot in &self.plots {
            page += &plot.draw().map_err(|error| Failure::run("can't make the report").because(error))?;
            page.push('\n');
        }
        let cells = |tag: &str, texts: &[String]| -> String {
            texts.iter().map(|text| format!("<{tag}>{}", escape(text))).collect()
        };
        let headings: Vec<String> = self.headings().into_iter().map(str::to_owned).collect();
        page.push_str(&format!("<table><tr>{}</tr>\n", cells("th", &headings)));
        for group in self.groups() {
            for (index, row) in group.iter().enumerate() {
                let class = if index == 0 { " class=\"first\"" } else { "" };
                page.push_str(&format!("<tr{class}>{}</tr>\n", cells("td", row)));
            }
        }
        page.push_str("</table>\n");
        for line in self.legend.lines() {
            page.push_str(&format!("<p>{}</p>\n", escape(line)));
        }
        page.push_str("</html>\n");
        Ok(page)
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// Makes a progress bar of `turns` steps. The bar is hidden where stderr is not a terminal.
pub(crate) fn progress_bar(turns: u64) -> ProgressBar {
    let target = match std::io::stderr().is_terminal() {
        true => ProgressDrawTarget::stderr(),
        false => ProgressDrawTarget::hidden(),
    };
    let bar = ProgressBar::with_draw_target(Some(turns), target);
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
    fn the_table_and_the_page_have_the_rows_in_groups() {
        let report = Report {
            title: "<page>",
            facts: &(),
            lines: vec![("what", "<this>".to_owned())],
            plots: Vec::new(),
            columns: vec![
                column("row", |row: &u32, _| row.to_string()),
                column("of", |_, rows| rows.len().to_string()),
            ],
            rows: &[1, 2, 30],
            beside: |one, next| one + 1 == *next,
            legend: "what & why".to_owned(),
        };
        let (text, html) = (report.text(), report.html().unwrap());
        assert!(text.starts_with("what: <this>\n") && text.ends_with("\nwhat & why\n"), "{text}");
        assert!(text.lines().any(|line| line.contains("30") && line.contains('3')), "{text}");
        assert!(html.contains("<h1>&lt;page&gt;") && html.contains("<p>what &amp; why</p>"), "{html}");
        let table = "<th>row<th>of</tr>\n<tr class=\"first\"><td>1<td>3</tr>\n<tr><td>2<td>3</tr>\n<tr class=\"first\"><td>30<td>3</tr>";
        assert!(html.contains(table), "{html}");
    }
}
