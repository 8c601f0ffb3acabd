//! Looks up the tests that the page about the software device names, so that each sentence of its promise has a test.

use std::collections::BTreeSet;

use tonic_rdma_checks::{files_of, pages, read, root};

/// The head of the table whose last column names tests.
const HEAD: &str = "promise";

#[test]
fn every_promise_has_tests_that_exist() {
    let names: BTreeSet<String> = files_of(root(), "rs").iter().flat_map(|file| tests(&read(file))).collect();
    let rows = pages::of_book("software-device.md").into_iter().flat_map(|page| page.rows());
    let (mut seen, mut missing) = (0, Vec::new());
    for (_, cells) in rows.filter(|(head, _)| head == HEAD) {
        seen += 1;
        let named: Vec<_> = cells.last().unwrap().split('`').skip(1).step_by(2).collect();
        if named.is_empty() {
            missing.push(format!("{}: no test", cells[0]));
        }
        let absent = named.into_iter().filter(|name| !names.contains(*name));
        missing.extend(absent.map(|name| format!("{}: {name}", cells[0])));
    }
    assert!(missing.is_empty(), "promises without a test:\n{}", missing.join("\n"));
    assert!(seen > 15, "only {seen} promises were found: is this check broken?");
}

#[test]
fn functions_and_lines_of_macros_are_tests() {
    let text = "#[test]\n  fn one() {}\n#[tokio::test]\nasync fn two() {}\n    three: \"stop\";\n  four: a::b;\nlet x: u8 = 1;\nfn five() {}";
    assert_eq!(tests(text), ["one", "two", "three", "four"]);
}

/// Returns the names of the tests in a file: functions with an attribute that ends in `test`, and lines `name: what it runs;` of
/// macros that make tests.
fn tests(text: &str) -> Vec<String> {
    let mut names = Vec::new();
    let mut is_test = false;
    for line in text.lines().map(str::trim) {
        if line.starts_with("#[") {
            is_test |=
                line.trim_end_matches(']').split('(').next().is_some_and(|name| name.ends_with("test"));
            continue;
        }
        let function = line.strip_prefix("async ").unwrap_or(line).strip_prefix("fn ");
        if let Some((name, _)) = function.filter(|_| is_test).and_then(|rest| rest.split_once('(')) {
            names.push(name.to_owned());
        } else if let Some((name, _)) = line.split_once(": ")
            && line.ends_with(';')
            && name.chars().all(|letter| letter.is_alphanumeric() || letter == '_')
        {
            names.push(name.to_owned());
        }
        is_test = false;
    }
    names
}
