//! The HTML report: one page that needs nothing else.

use std::path::Path;

use super::facts::Facts;
use super::plots::{self, FIGURES};
use super::results::{Ratio, Row};
use crate::failure::Failure;
use crate::units;

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
    for figure in &FIGURES {
        page.push_str(
            &plots::draw(figure, rows).map_err(|error| Failure::run(format!("can't plot: {error}")))?,
        );
        page.push('\n');
    }
    page.push_str(&table(rows));
    page.push_str(
        "<p>Ratios are against grpc-tcp in the same cell: p50 for latency, calls per second for throughput. CPU is user and \
         system time of both processes.</p></html>\n",
    );
    Ok(page)
}

fn table(rows: &[Row]) -> String {
    let mut table =
        "<table><tr><th>mode<th>size<th>in flight<th>p50<th>p99<th>calls/s<th>GB/s<th>CPU/call<th>errors\
                     <th>latency ×<th>throughput ×</tr>\n"
            .to_owned();
    let mut cell = None;
    for row in rows {
        let class = if cell.replace((row.bytes, row.inflight)) == cell { "" } else { " class=\"first\"" };
        let ratio = Ratio::of(row, rows);
        let times = |ratio: Option<f64>| ratio.map_or("–".to_owned(), |ratio| format!("{ratio:.2}"));
        let fields = [
            row.mode.to_owned(),
            units::size(row.bytes),
            row.inflight.to_string(),
            units::micros(row.p50_us),
            units::micros(row.p99_us),
            units::count(row.ops_per_s),
            units::digits(row.gbytes_per_s),
            units::micros(row.cpu_us_per_op),
            row.errors.to_string(),
            times(ratio.latency),
            times(ratio.throughput),
        ];
        let fields: String = fields.iter().map(|field| format!("<td>{}", escape(field))).collect();
        table.push_str(&format!("<tr{class}>{fields}</tr>\n"));
    }
    table.push_str("</table>\n");
    table
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::super::results::sample_row;
    use super::*;

    #[test]
    fn rows_and_ratios_are_in_the_table() {
        let table = table(&[sample_row("grpc-tcp", 64, 1, 80.0), sample_row("grpc-rdma", 64, 1, 10.0)]);
        assert!(table.contains("<td>grpc-rdma<td>64 B<td>1<td>10.0 µs"), "{table}");
        assert!(table.contains("<td>8.00<td>8.00</tr>"), "{table}");
    }

    #[test]
    fn text_is_escaped() {
        assert_eq!(escape("a<b>&c"), "a&lt;b&gt;&amp;c");
    }
}
