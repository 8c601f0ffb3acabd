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
fn functions_and_lines_of_macros_that_make_functions_are_tests() {
    let text = "#[test]\n  fn one() {}\n#[tokio::test]\n#[ignore]\nasync fn two() {}\n#[doc(hidden)]\nfn no() {}\n\
        struct S {\n  count: usize,\n}\nstatic A: u8 = 1;\nlet x: u8 = 1;\n\
        macro_rules! made {\n  ($($name:ident: $of:literal;)*) => {\n    $(#[test] fn $name() {})*\n  };\n}\n\
        macro_rules! more {\n  ({ $($more:tt)* }) => {\n    made! { User: $($more)* }\n  };\n}\n\
        made! { User:\n  three: \"stop\";\n}\nmore! {\n  {\n    four: a::b;\n  }\n}\n\
        macro_rules! other {\n  ($($name:ident: $of:literal;)*) => {\n    $(fn $name() {})*\n  };\n}\n\
        other! {\n  five: \"stop\";\n}\n  six: a::b;\n";
    assert_eq!(tests(text), ["one", "two", "three", "four"]);
}

/// Returns the names of the tests in a file: functions with an attribute that ends in `test`, and the names in the lines `name: …` of the file's
/// macros that make such functions.
fn tests(text: &str) -> Vec<String> {
    let (mut names, mut makers) = (Vec::new(), BTreeSet::new());
    let (mut is_test, mut defined, mut is_making) = (false, None, false);
    for line in text.lines() {
        let outdented = line.starts_with('}');
        let line = line.trim().trim_start_matches("$(");
        if let Some(name) = line.strip_prefix("macro_rules! ") {
            defined = name.split_whitespace().next().map(str::to_owned);
        }
        let (attributes, rest) = attributes(line);
        is_test |= attributes.iter().any(|name| name.ends_with("test"));
        if rest.is_empty() {
            continue;
        }
        let function = rest.strip_prefix("async ").unwrap_or(rest).strip_prefix("fn ");
        match function.filter(|_| is_test).and_then(|rest| rest.split_once('(')) {
            Some((name, _)) if name.starts_with('$') => makers.extend(defined.clone()),
            Some((name, _)) => names.push(name.to_owned()),
            None => {}
        }
        is_test = false;
        let makes = line.split_once("! {").is_some_and(|(name, _)| makers.contains(name));
        if outdented {
            (defined, is_making) = (None, false);
        } else if makes && defined.is_some() {
            makers.extend(defined.clone());
        } else if makes {
            is_making = true;
        } else if let Some((name, _)) = line.split_once(':').filter(|_| is_making) {
            names.push(name.to_owned());
        }
    }
    names
}

/// Returns the paths of the attributes at the start of a line, and the rest of the line.
fn attributes(mut line: &str) -> (Vec<&str>, &str) {
    let mut paths = Vec::new();
    while let Some((attribute, rest)) = line.strip_prefix("#[").and_then(|rest| rest.split_once(']')) {
        paths.extend(attribute.split('(').next());
        line = rest.trim();
    }
    (paths, line)
}
