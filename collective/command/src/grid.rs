//! A table with groups of rows.

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{CellAlignment, Table};

/// Makes a table of groups of rows, with an empty row between groups.
pub(crate) fn grid(headings: &[&str], groups: impl IntoIterator<Item = Vec<Vec<String>>>) -> Table {
    let mut table = Table::new();
    table.load_preset(UTF8_FULL_CONDENSED).set_header(headings);
    for column in table.column_iter_mut() {
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
