//! Compares the tables of figures in README with the files that they are copied from, and the text of its picture with the picture.

use tonic_rdma_checks::{read, root};

/// The marks before a table (with the name of its file) and after it.
const MARK: &str = "<!-- figures: ";
const END: &str = "<!-- end -->";

#[test]
fn readme_has_the_tables_of_the_files() {
    let readme = read(&root().join("README.md"));
    let tables = tables(&readme);
    assert!(tables.iter().any(|(name, _)| *name == "headline"), "README does not have the headline's table");
    for (name, table) in tables {
        let file = format!("docs/book/figures/{name}.md");
        let text = read(&root().join(&file));
        let of_file = rows(&text);
        assert!(!of_file.is_empty(), "{file} has no table");
        assert_eq!(table, of_file, "README's table is not the one of {file}: copy it");
    }
}

#[test]
fn the_text_of_the_picture_names_its_modes() {
    let readme = read(&root().join("README.md"));
    let (before, _) =
        readme.split_once("](docs/book/figures/latency.svg)").expect("README shows latency.svg");
    let modes = before.rsplit_once("![Latency of ").expect("a text of the picture").1;
    // The legend has the modes one by one, in the order of the bars.
    let svg = read(&root().join("docs/book/figures/latency.svg"));
    let is_mode = |line: &&str| ["grpc-", "rdma-"].iter().any(|begin| line.starts_with(begin));
    let legend: Vec<&str> = svg.lines().filter(is_mode).collect();
    assert_eq!(modes.split(", ").collect::<Vec<_>>(), legend);
}

#[test]
fn a_table_lies_between_its_marks() {
    let page = "| x |\n<!-- figures: one -->\na\n| 1 |\n| 2 |\n<!-- end -->\n| 3 |\n";
    assert_eq!(tables(page), [("one", vec!["| 1 |", "| 2 |"])]);
}

/// Returns the names and the rows of a page's marked tables.
fn tables(page: &str) -> Vec<(&str, Vec<&str>)> {
    let marked = page.split(MARK).skip(1);
    let table = |rest| {
        let (name, rest) = str::split_once(rest, " -->").expect("a mark that does not end");
        let (table, _) = rest.split_once(END).unwrap_or_else(|| panic!("the table {name} has no end"));
        (name, rows(table))
    };
    marked.map(table).collect()
}

fn rows(text: &str) -> Vec<&str> {
    text.lines().filter(|line| line.starts_with('|')).collect()
}
