//! The table of a run, as text for the terminal.

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{CellAlignment, Table};

/// Makes a table of `headings` and rows in groups, with an empty line between groups.
pub(crate) fn grid(headings: &[&str], groups: impl IntoIterator<Item = Vec<Vec<String>>>) -> Table {
    let mut table = Table::new();
    table.load_preset(UTF8_FULL_CONDENSED).set_header(headings);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    for (index, group) in groups.into_iter().enumerate() {
        if index > 0 {
            table.add_row(vec![""; headings.len()]);
        }
        table.add_rows(group);
    }
    table
}

pub(crate) fn times(value: Option<f64>) -> String {
    value.map_or_else(dash, |value| format!("{value:.2}"))
}

pub(crate) fn dash() -> String {
    "–".to_owned()
}
