//! Compares the tables of figures on the pages with the files that they are copied from.

use std::process::Command;

use tonic_rdma_checks::root;

#[test]
fn pages_have_the_tables_of_the_files() {
    let checked = Command::new(root().join("docs/book/copy-tables")).arg("--check").output().unwrap();
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
}
