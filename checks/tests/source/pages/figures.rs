//! Compares the tables of figures in README with the files that they are copied from.

use tonic_rdma_checks::{read, root};

#[test]
fn readme_has_the_tables_of_the_files() {
    let readme = read(&root().join("README.md"));
    let rows = |text: &str| text.lines().filter(|line| line.starts_with('|')).collect::<Vec<_>>().join("\n");
    let mut seen = Vec::new();
    for marked in readme.split("<!-- figures: ").skip(1) {
        let (name, rest) = marked.split_once(" -->").expect("a mark that does not end");
        let (table, _) = rest.split_once("<!-- end -->").expect("a table that has no end");
        let file = read(&root().join(format!("docs/book/figures/{name}.md")));
        assert!(table.contains('|'), "the table {name} is empty");
        assert_eq!(rows(table), rows(&file), "README's table {name} is not that of the file: copy it");
        seen.push(name);
    }
    assert!(seen.contains(&"headline"), "README has these tables: {seen:?}");
}
