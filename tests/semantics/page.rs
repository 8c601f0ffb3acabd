//! The pages of the book that have the tables. `UPDATE_TABLE=1 cargo test --test semantics page` writes them
//! anew.

use std::fmt::Write as _;
use std::path::Path;

use crate::column::Column;
use crate::core_tests::{Counterpart, TESTS};
use crate::differences::{self, Declared};
use crate::run::{Behaviour, Group};
use crate::table::{self, GROUPS};

const INTRODUCTION: &str = "\
# What gRPC promises, in four columns

A call behaves alike over four transports:

| column | client and server |
|---|---|
| stock TCP | tonic's channel and server |
| drop-in | the same over `RdmaConnector` and `RdmaIncoming`: HTTP/2 over RDMA |
| native | `RdmaChannel` and `RdmaServer`: RDMA without HTTP/2 |
| in process | the same two in one process, where [calls stay](native-calls.md#same-process-same-host-other-host) |

`tests/semantics` has a function for each behaviour, runs it over each column, and checks every message byte for byte on both sides. One list has all
differences with their reasons. The tests fail if a difference is missing from the list, or if the list has one that no longer exists. They also write
this page (`UPDATE_TABLE=1 cargo test --test semantics page`).
";

const BEHAVIOURS: &str = "\
# Behaviours, one by one

The outcome of each behaviour over each column; differences are bold. [What gRPC promises](semantics.md) explains the columns and has the reasons.
";

#[test]
fn the_pages_are_up_to_date() {
    is_up_to_date("semantics.md", &page());
    is_up_to_date("semantics-behaviours.md", &behaviours());
}

fn is_up_to_date(name: &str, page: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/book/src").join(name);
    if std::env::var_os("UPDATE_TABLE").is_some() {
        std::fs::write(&path, page).unwrap();
        return;
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        found == page,
        "{} is not what the tables say: run `UPDATE_TABLE=1 cargo test --test semantics page`",
        path.display()
    );
}

#[test]
fn all_names_are_of_behaviours() {
    for difference in differences::ALL {
        let behaviour = table::find(difference.behaviour);
        let behaviour = behaviour.unwrap_or_else(|| panic!("no behaviour: {difference:?}"));
        assert_ne!(difference.outcome, Declared::Outcome(behaviour.outcome), "no difference: {difference:?}");
        assert!(difference.because.ends_with('.'), "no sentence: {difference:?}");
        let same = |other: &&differences::Difference| {
            other.behaviour == difference.behaviour && other.column == difference.column
        };
        assert_eq!(differences::ALL.iter().filter(same).count(), 1, "declared twice: {difference:?}");
    }
    for (test, counterpart) in TESTS {
        match counterpart {
            Counterpart::In(names) => {
                for name in *names {
                    assert!(table::find(name).is_some(), "{test}: no behaviour {name}");
                }
            }
            Counterpart::Absent(why) => assert!(why.ends_with('.'), "{test}: no sentence: {why}"),
        }
    }
}

fn page() -> String {
    let mut page = INTRODUCTION.to_owned();
    let count: usize = GROUPS.iter().map(|group| group.behaviours.len()).sum();
    let differing =
        GROUPS.iter().flat_map(|group| group.behaviours).filter(|behaviour| differs(behaviour)).count();
    let _ = write!(
        page,
        "\nOf {count} behaviours, {} are the same in all columns, and {differing} differ.\n",
        count - differing
    );
    page.push_str("\n## Differences\n\n| behaviours | column | why |\n|---|---|---|\n");
    let rows = differences::ALL.iter().map(|difference| {
        let same = |column: &Column| {
            differences::find(difference.behaviour, *column).is_some_and(|it| std::ptr::eq(it, difference))
        };
        let columns: Vec<_> = Column::ALL.into_iter().filter(same).map(Column::heading).collect();
        (difference.behaviour, format!("{} | {}", columns.join(", "), difference.because))
    });
    for (rest, names) in by_value(rows) {
        let _ = writeln!(page, "| {} | {rest} |", titles_of(&names));
    }
    page.push_str(
        "\n## gRPC's own end-to-end tests\n\nThe tests of gRPC core (`test/core/end2end/tests` of \
         [grpc/grpc](https://github.com/grpc/grpc)), and the behaviours that answer their questions here.\n\n| test | here |\n|---|---|\n",
    );
    for (test, counterpart) in TESTS {
        if let Counterpart::In(names) = counterpart {
            let _ = writeln!(page, "| `{test}` | {} |", titles_of(names));
        }
    }
    page.push_str("\nThese have no counterpart:\n\n| tests | why |\n|---|---|\n");
    let absent = TESTS.iter().filter_map(|(test, counterpart)| match counterpart {
        Counterpart::Absent(why) => Some((*test, *why)),
        Counterpart::In(_) => None,
    });
    for (why, tests) in by_value(absent) {
        let _ = writeln!(page, "| `{}` | {why} |", tests.join("`, `"));
    }
    page
}

fn behaviours() -> String {
    let mut page = BEHAVIOURS.to_owned();
    GROUPS.iter().for_each(|group| write_group(&mut page, group));
    page
}

fn differs(behaviour: &Behaviour) -> bool {
    differences::ALL.iter().any(|difference| difference.behaviour == behaviour.name)
}

fn write_group(page: &mut String, group: &Group) {
    let headings = Column::ALL.map(Column::heading).join(" | ");
    let _ =
        write!(page, "\n## {}\n\n| | {headings} |\n|{}\n", group.title, "---|".repeat(1 + Column::ALL.len()));
    for behaviour in group.behaviours {
        let cells = Column::ALL.map(|column| cell(behaviour, column)).join(" | ");
        let _ = writeln!(page, "| {} | {cells} |", words(behaviour.name));
    }
}

/// Returns what a column's cell says: the outcome, or that it is the first column's.
fn cell(behaviour: &Behaviour, column: Column) -> String {
    match differences::find(behaviour.name, column).map(|difference| difference.outcome) {
        Some(Declared::NotRun) => "–".to_owned(),
        Some(Declared::Outcome(outcome)) => format!("**{}**", escaped(outcome)),
        None if column != Column::Tcp && differences::find(behaviour.name, Column::Tcp).is_none() => {
            "same".to_owned()
        }
        None => escaped(behaviour.outcome),
    }
}

/// Returns the values in their order, each with all names that have it.
fn by_value<'a, V: PartialEq>(rows: impl Iterator<Item = (&'a str, V)>) -> Vec<(V, Vec<&'a str>)> {
    let mut found: Vec<(V, Vec<&str>)> = Vec::new();
    for (name, value) in rows {
        match found.iter_mut().find(|(of, _)| *of == value) {
            Some((_, names)) => names.push(name),
            None => found.push((value, vec![name])),
        }
    }
    found
}

/// Returns the behaviours in words, with the title of each group before its own.
fn titles_of(names: &[&str]) -> String {
    let group_of = |name: &str| {
        let mut groups = GROUPS.iter();
        let group = groups.find(|group| group.behaviours.iter().any(|behaviour| behaviour.name == name));
        group.map_or("", |group| group.title)
    };
    let groups = by_value(names.iter().map(|name| (*name, group_of(name))));
    let title = |(group, names): (&str, Vec<&str>)| {
        format!("{group}: {}", names.into_iter().map(words).collect::<Vec<_>>().join(", "))
    };
    groups.into_iter().map(title).collect::<Vec<_>>().join("; ")
}

fn words(name: &str) -> String {
    name.rsplit("::").next().unwrap_or_default().replace('_', " ")
}

fn escaped(text: &str) -> String {
    text.replace('|', "\\|").replace('_', "\\_").replace('<', "&lt;")
}
