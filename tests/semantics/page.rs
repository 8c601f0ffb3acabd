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

A call behaves alike over stock TCP (tonic's channel and server), over the drop-in (the same over `RdmaConnector` and `RdmaIncoming`: HTTP/2 over
RDMA), over native calls (`RdmaChannel` and `RdmaServer`: no HTTP/2), and in process (the same pair in one process, where calls
[stay in it](native-calls.md#same-process-same-host-other-host)). `tests/semantics` has one function for each line below. It runs over each column, and its outcome must be the one that stands here. The tests know all differences from one list, with the reason for each. A difference that is
not in the list fails a test, and so does an entry of the list that is no difference any more. A test also compares this page with the lists;
`UPDATE_TABLE=1 cargo test --test semantics page` writes it anew.

Each message's content is checked, byte for byte, at both ends.
";

const BEHAVIOURS: &str = "\
# Behaviours, one by one

The outcome of each behaviour over each column. [What gRPC promises](semantics.md) explains the columns, and lists the differences with their reasons.
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
    page.push_str("\n## Differences\n\n| behaviour | column | why |\n|---|---|---|\n");
    for difference in differences::ALL {
        let title = title_of(difference.behaviour);
        let same = |column: &Column| {
            differences::find(difference.behaviour, *column).is_some_and(|it| std::ptr::eq(it, difference))
        };
        let columns: Vec<_> = Column::ALL.into_iter().filter(same).map(Column::heading).collect();
        let _ = writeln!(page, "| {title} | {} | {} |", columns.join(", "), difference.because);
    }
    page.push_str(
        "\n## gRPC's own end-to-end tests\n\nThe tests of gRPC core (`test/core/end2end/tests` of \
         [grpc/grpc](https://github.com/grpc/grpc)), and where their questions are asked here.\n\n| test | here |\n|---|---|\n",
    );
    for (test, counterpart) in TESTS {
        let here = match counterpart {
            Counterpart::In(names) => names.iter().map(|name| title_of(name)).collect::<Vec<_>>().join("; "),
            Counterpart::Absent(why) => format!("*absent.* {why}"),
        };
        let _ = writeln!(page, "| `{test}` | {here} |");
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

/// Returns a behaviour's group and name in words.
fn title_of(name: &str) -> String {
    let group = GROUPS.iter().find(|group| group.behaviours.iter().any(|behaviour| behaviour.name == name));
    format!("{}: {}", group.map_or("", |group| group.title), words(name))
}

fn words(name: &str) -> String {
    name.rsplit("::").next().unwrap_or_default().replace('_', " ")
}

fn escaped(text: &str) -> String {
    text.replace('|', "\\|").replace('_', "\\_").replace('<', "&lt;")
}
