//! The HTML report: one page that needs nothing else.

use std::path::Path;

use super::facts::Facts;
use super::plots;
use super::results::Row;
use super::table::{columns, legend};
use crate::failure::Failure;

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:900px;margin:2em auto;padding:0 1em;color:#222}\
h1{font-size:1.5em}table{border-collapse:collapse;margin:1em 0;font-variant-numeric:tabular-nums}\
td,th{padding:.25em .7em;white-space:nowrap;text-align:right;border-bottom:1px solid #ddd}td:first-child,th:first-child{text-align:left}\
tr.first td{border-top:2px solid #999}dt{float:left;width:8em;color:#666}dd{margin-left:8em}svg{max-width:100%;height:auto}";

/// Writes `index.html` to `directory`.
pub(crate) fn write(directory: &Path, facts: &Facts, rows: &[Row]) -> Result<(), Failure> {
    let path = directory.join("index.html");
    let page = page(facts, rows)?;
    std::fs::write(&path, page)
        .map_err(|error| Failure::run(format!("can't write {}: {error}", path.display())))
}

fn page(facts: &Facts, rows: &[Row]) -> Result<String, Failure> {
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\"><title>tonic-rdma compare</title>\
         <style>{STYLE}</style>\n<h1>tonic-rdma compare</h1>\n<dl>"
    );
    for (name, value) in facts.lines() {
        page.push_str(&format!("<dt>{}</dt><dd>{}</dd>\n", escape(name), escape(&value)));
    }
    page.push_str("</dl>\n");
    for figure in plots::figures(rows) {
        page.push_str(
            &plots::draw(figure, rows).map_err(|error| Failure::run(format!("can't plot: {error}")))?,
        );
        page.push('\n');
    }
    page.push_str(&table(rows));
    for line in legend(rows).lines() {
        page.push_str(&format!("<p>{}</p>\n", escape(line)));
    }
    page.push_str("</html>\n");
    Ok(page)
}

fn table(rows: &[Row]) -> String {
    let columns = columns(rows);
    let headings: String = columns.iter().map(|column| format!("<th>{}", escape(column.heading))).collect();
    let mut table = format!("<table><tr>{headings}</tr>\n");
    let mut cell = None;
    for row in rows {
        let class = if cell.replace(row.cell) == Some(row.cell) { "" } else { " class=\"first\"" };
        let fields = columns.iter().map(|column| format!("<td>{}", escape(&(column.text)(row, rows))));
        table.push_str(&format!("<tr{class}>{}</tr>\n", fields.collect::<String>()));
    }
    table.push_str("</table>\n");
    table
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::super::cell::Cell;
    use super::super::results::sample_row;
    use super::*;

    #[test]
    fn rows_and_ratios_are_in_the_table() {
        let table = table(&[
            sample_row("grpc-tcp", Cell::closed(64, 1), 80.0),
            sample_row("grpc-rdma", Cell::closed(64, 1), 10.0),
        ]);
        assert!(table.contains("<td>grpc-rdma<td>64 B<td>1<td>10.0 µs"), "{table}");
        assert!(table.contains("<td>8.00<td>8.00</tr>"), "{table}");
    }

    #[test]
    fn text_is_escaped() {
        assert_eq!(escape("a<b>&c"), "a&lt;b&gt;&amp;c");
    }
}
