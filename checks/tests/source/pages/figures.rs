//! Compares the tables of figures in README with the files that they are copied from.

use tonic_rdma_checks::{read, root};

#[test]
fn readme_has_the_tables_of_the_files() {
    let readme = read(&root().join("README.md"));
    let rows = |text: &str| -> Vec<String> {
        text.lines().filter(|line| line.starts_with('|')).map(str::to_owned).collect()
    };
    let mut seen = Vec::new();
    for marked in readme.split("<!-- figures: ").skip(1) {
        let (name, rest) = marked.split_once(" -->").expect("a mark that does not end");
        let (table, _) =
            rest.split_once("<!-- end -->").unwrap_or_else(|| panic!("the table {name} has no end"));
        let file = format!("docs/book/figures/{name}.md");
        let of_file = rows(&read(&root().join(&file)));
        assert!(
            !of_file.is_empty() && rows(table) == of_file,
            "README's table is not the one of {file}: copy it"
        );
        seen.push(name);
    }
    assert!(seen.contains(&"headline"), "README has these tables: {seen:?}");
}
