//! The HTML report of a run.

use std::path::Path;

use tonic_rdma_commands::Failure;

use super::facts::Facts;
use super::plots;
use super::row::Row;
use super::table::{columns, legend};
use crate::measure::output::page::Page;

/// Writes `index.html` to `directory`.
pub(crate) fn write(directory: &Path, facts: &Facts, rows: &[Row]) -> Result<(), Failure> {
    page(facts, rows)?.write(directory)
}

fn page<'a>(facts: &Facts, rows: &[Row]) -> Result<Page<'a>, Failure> {
    let columns = columns(rows);
    let plots = plots::figures(rows).iter().map(|figure| plots::draw(figure, rows));
    let plots: Result<_, _> = plots.collect();
    let text = |row| columns.iter().map(|column| (column.text)(row, rows)).collect();
    let groups = rows.chunk_by(|one, next| one.cell == next.cell);
    Ok(Page {
        title: "tonic-rdma compare",
        facts: facts.lines(),
        plots: plots.map_err(|error| Failure::run("can't make the report").because(error))?,
        headings: columns.iter().map(|column| column.heading).collect(),
        groups: groups.map(|group| group.iter().map(text).collect()).collect(),
        legend: legend(rows),
    })
}

#[cfg(test)]
mod tests {
    use super::super::row::sample_row;
    use super::*;
    use crate::compare::plan::cell::Cell;

    #[test]
    fn rows_and_ratios_are_in_the_table() {
        let rows = [
            sample_row("grpc-tcp", Cell::closed(64, 1), 80.0),
            sample_row("grpc-rdma", Cell::closed(64, 1), 10.0),
        ];
        let columns = columns(&rows);
        let text = |row| columns.iter().map(|column| (column.text)(row, &rows)).collect();
        let page = Page {
            title: "<page>",
            facts: Vec::new(),
            plots: Vec::new(),
            headings: columns.iter().map(|column| column.heading).collect(),
            groups: vec![rows.iter().map(text).collect()],
            legend: "what & why".to_owned(),
        };
        let (table, html) = (page.table(), page.html());
        assert!(
            html.contains(&table) && html.contains("what &amp; why") && html.contains("<h1>&lt;page&gt;")
        );
        assert!(table.contains("<td>grpc-rdma<td>64 B<td>1<td>10.0 µs"), "{table}");
        assert!(table.contains("<td>8.00<td>8.00</tr>"), "{table}");
    }
}
