//! Tables for the terminal.

use comfy_table::presets::{ASCII_MARKDOWN, NOTHING, UTF8_FULL_CONDENSED};
use comfy_table::{CellAlignment, Table};

/// Makes a table of `headings` and rows in groups, with an empty line between groups. The first column is
/// aligned to the left, and all others to the right.
pub fn grid(headings: &[&str], groups: impl IntoIterator<Item = Vec<Vec<String>>>) -> Table {
    let mut table = with_headings(headings, UTF8_FULL_CONDENSED, 1);
    for (index, group) in groups.into_iter().enumerate() {
        if index > 0 {
            table.add_row(vec![""; headings.len()]);
        }
        table.add_rows(group);
    }
    table
}

/// Makes a table without lines, for logs: columns with blanks between. The first `texts` columns are aligned
/// to the left.
pub fn columns(headings: &[&str], texts: usize, rows: impl IntoIterator<Item = Vec<String>>) -> Table {
    let mut table = with_headings(headings, NOTHING, texts);
    table.add_rows(rows);
    table
}

/// Makes a table in Markdown, for documents. The first `texts` columns are aligned to the left. A bar in a cell
/// ends no column.
pub fn markdown(headings: &[&str], texts: usize, rows: impl IntoIterator<Item = Vec<String>>) -> Table {
    let mut table = with_headings(headings, ASCII_MARKDOWN, texts);
    let escaped = |row: Vec<String>| row.into_iter().map(|cell| cell.replace('|', r"\|")).collect::<Vec<_>>();
    table.add_rows(rows.into_iter().map(escaped));
    table
}

fn with_headings(headings: &[&str], preset: &str, texts: usize) -> Table {
    let mut table = Table::new();
    table.load_preset(preset).set_header(headings);
    for column in table.column_iter_mut().skip(texts) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// Formats a ratio, or a [`dash`] if there is none: `4.76`.
pub fn times(value: Option<f64>) -> String {
    value.map_or_else(dash, |value| format!("{value:.2}"))
}

/// Returns the text of a cell without a value.
pub fn dash() -> String {
    "–".to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_stand_apart_and_numbers_to_the_right() {
        let row = |name: &str, number: &str| vec![name.to_owned(), number.to_owned()];
        let table = grid(&["name", "number"], [vec![row("a", "1"), row("b", "20")], vec![row("c", "3")]]);
        let text = table.to_string();
        let lines: Vec<Vec<&str>> = text.lines().filter(|line| line.starts_with('│')).map(cells).collect();
        assert_eq!(
            lines,
            [
                [" name ", " number "],
                [" a    ", "      1 "],
                [" b    ", "     20 "],
                ["      ", "        "],
                [" c    ", "      3 "]
            ]
        );
    }

    #[test]
    fn columns_are_as_wide_as_their_texts() {
        let rows = || [vec!["a".to_owned(), "1".to_owned()], vec!["bcd".to_owned(), "234".to_owned()]];
        let lines = |table: Table| table.lines().map(|line| line.trim_end().to_owned()).collect::<Vec<_>>();
        assert_eq!(lines(columns(&["x", "y"], 1, rows())), [" x      y", " a      1", " bcd  234"]);
        let expected = ["| x   |   y |", "|-----|-----|", "| a   |   1 |", "| bcd | 234 |"];
        assert_eq!(lines(markdown(&["x", "y"], 1, rows())), expected);
        let bar = [vec!["a|b".to_owned(), "1".to_owned()]];
        assert_eq!(lines(markdown(&["x", "y"], 1, bar))[2], r"| a\|b | 1 |");
    }

    fn cells(line: &str) -> Vec<&str> {
        line.trim_matches('│').split('┆').collect()
    }

    #[test]
    fn a_ratio_has_two_digits_and_may_be_missing() {
        assert_eq!([times(Some(4.756)), times(None)], ["4.76", "–"]);
    }
}
