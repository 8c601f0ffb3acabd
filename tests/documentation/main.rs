//! Keeps the library's documentation true and whole: entry points have examples, no example is left out of the doc tests,
//! tables name what the code has, and functions say what they do. Works on the text of `src/`, with all cargo features; the
//! doc tests compile the examples themselves.
#![allow(clippy::expect_used, clippy::panic, reason = "tests")]

mod api;
mod examples;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::sync::LazyLock;

use api::{Function, Library, Named};
use examples::{Example, examples, first_word};

/// Modules whose public names are the front of the library.
const FRONT: &[&str] = &[
    "",
    "runtime",
    "endpoint",
    "transport",
    "transport::balance",
    "transport::gather",
    "tensor",
    "tensor::convert",
    "tensor::types",
    "memory",
    "memory::sites",
    "memory::dlpack",
    "endpoint::tuner",
    "verbs",
];

/// Methods that a program calls first, besides constructors.
const FIRST_CALLS: &[(&str, &[&str])] = &[
    ("RdmaConnector", &["last_connection"]),
    ("BalancedChannel", &["endpoints"]),
    ("RdmaConnectInfo", &["counters", "why"]),
    ("Pool", &["allocate", "lease"]),
    (
        "SiteAllocator",
        &["allocate", "with_capacity", "allocate_named", "with_capacity_named", "next_iteration"],
    ),
    (
        "RdmaDevice",
        &[
            "allocate",
            "channel",
            "service",
            "export",
            "export_shared",
            "static_receiver",
            "dynamic_receiver",
            "put",
        ],
    ),
    (
        "Channel",
        &["memcpy", "memcpy_then", "memcpy_batch", "region", "static_sender", "dynamic_sender", "request"],
    ),
    ("Settings", &["client_tls", "server_tls", "plaintext_tensors"]),
    ("StaticSender", &["send", "send_region", "start"]),
    ("StaticReceiver", &["recv", "try_recv"]),
    ("DynamicSender", &["send"]),
    ("DynamicReceiver", &["recv", "try_recv"]),
    ("Tensor", &["as_array", "to_dlpack"]),
];

/// Names that a macro defines, so that they are not found in the source.
const OF_MACROS: &[&str] = &["CounterSnapshot"];

/// What the tests look at, read once for all of them.
struct Front {
    /// Public names of each module in front.
    modules: BTreeMap<&'static str, Vec<Named>>,
    /// Documentation of the library's first page, and of the guide of `gather`.
    tour: String,
    gather: String,
}

static LIBRARY: LazyLock<Front> = LazyLock::new(|| {
    let library = Library::read();
    let modules = FRONT.iter().map(|module| (*module, library.public(module, OF_MACROS))).collect();
    let (tour, gather) = (library.docs_of_module(""), library.docs_of_module("transport::gather"));
    Front { modules, tour, gather }
});

#[test]
fn every_entry_point_has_an_example() {
    let front = front();
    let mut missing = Vec::new();
    for named in &front {
        missing.extend(without_example(named));
    }
    for (name, methods) in FIRST_CALLS {
        let named = front.iter().filter(|named| named.name == *name).collect::<Vec<_>>();
        assert!(!named.is_empty(), "{name} is not in front any more");
        for method in *methods {
            let found = named.iter().flat_map(|named| &named.functions).find(|it| it.name == *method);
            let found = found.unwrap_or_else(|| panic!("{name}::{method} is gone"));
            let calls = [format!(".{method}("), format!(".{method}::<")];
            // Its own documentation, or that of the type: some belong together.
            let places = named.iter().map(|named| &named.docs).chain([&found.docs]);
            if !places.into_iter().any(|docs| calls.iter().any(|call| shows(docs, call))) {
                missing.push(format!("{name}::{method}: no example calls it"));
            }
        }
    }
    assert_none(missing);
}

#[test]
fn every_name_at_the_root_has_an_example() {
    let root = &LIBRARY.modules[""];
    assert!(root.len() > 15, "the root is read: {}", root.len());
    let missing = root.iter().filter(|named| !shows(&named.docs, &named.name));
    assert_none(missing.map(|named| format!("{}: no example in its documentation uses it", named.name)));
}

#[test]
fn every_example_is_compiled() {
    let mut left_out = Vec::new();
    for (path, text) in sources() {
        let docs: String =
            text.lines().filter_map(|line| doc_line(line)).map(|line| format!("{line}\n")).collect();
        for example in examples(&docs) {
            if let Some(why) = example.not_compiled() {
                left_out.push(format!("{path}: an example is `{why}`:\n{}", example.code));
            }
        }
    }
    assert_none(left_out);
}

#[test]
fn documentation_of_functions_begins_with_a_verb() {
    let mut wrong = BTreeSet::new();
    for named in front() {
        let of_type =
            named.functions.iter().map(|function| (format!("{}::{}", named.name, function.name), function));
        let free = named.free.iter().map(|function| (function.name.clone(), function));
        for (path, function) in of_type.chain(free) {
            let word = first_word(&function.docs);
            if !is_verb(word) {
                wrong.insert(format!("{path}: begins with `{word}`"));
            }
        }
    }
    assert_none(wrong);
}

#[test]
fn the_table_of_features_is_that_of_the_manifest() {
    let manifest = read("Cargo.toml");
    let features = manifest.split("\n[features]\n").nth(1).expect("a table of features");
    let features = features.split("\n[").next().unwrap_or_default();
    // Names that begin with an underscore are not for users.
    let names = features.lines().filter(|line| !line.starts_with(['#', '_']));
    let expected: BTreeSet<&str> =
        names.filter_map(|line| line.split_once(" = ").map(|(name, _)| name)).collect();
    let section = LIBRARY.tour.split("\n# Cargo features\n").nth(1).expect("a section on features");
    assert_eq!(first_column(section), expected);
}

#[test]
fn the_versions_are_those_of_the_manifest() {
    let manifest = read("Cargo.toml");
    for name in ["tonic", "tokio"] {
        let line =
            manifest.lines().find(|line| line.starts_with(&format!("{name} = "))).expect("a dependency");
        let version = line.split('"').nth(1).expect("a version");
        let stated = format!("{name} {version}");
        assert!(LIBRARY.tour.contains(&stated), "the first page does not say `{stated}`");
    }
}

#[test]
fn the_table_of_variables_is_what_is_read() {
    let source = read("src/endpoint/config/rules.rs");
    let code = source.split("#[cfg(test)]").next().unwrap_or_default();
    let code = code.lines().filter(|line| doc_line(line).is_none());
    let literals = code.flat_map(|line| line.split('"')).filter(|text| text.starts_with("RDMA_"));
    let expected: BTreeSet<&str> = literals.collect();
    assert!(expected.len() > 20, "the variables are found: {expected:?}");
    let config = LIBRARY.modules[""].iter().find(|named| named.name == "Config").expect("Config");
    let from_env = config.functions.iter().find(|function| function.name == "from_env").expect("from_env");
    assert_eq!(first_column(&from_env.docs), expected);
}

#[test]
fn the_build_script_in_the_guide_is_one_that_runs() {
    let line = LIBRARY
        .gather
        .lines()
        .find(|line| line.starts_with("tonic_prost_build::"))
        .expect("the build script's line");
    assert!(read("proto/generated/build.rs").contains(line), "proto/generated/build.rs has another: {line}");
}

/// All names of the modules in front, each once.
fn front() -> Vec<&'static Named> {
    let mut all: Vec<&Named> = Vec::new();
    for named in LIBRARY.modules.values().flatten() {
        if !all.iter().any(|known| known.name == named.name && known.defined == named.defined) {
            all.push(named);
        }
    }
    let found: BTreeSet<&str> = all.iter().map(|named| named.name.as_str()).collect();
    assert!(all.len() > 70, "the front is read: {found:?}");
    all
}

/// Constructors and free functions whose documentation has no example that calls them.
fn without_example(named: &Named) -> Vec<String> {
    let constructors = named.functions.iter().filter(|function| function.constructs);
    let constructors = constructors.map(|function| (function, format!("{}::{}", named.name, function.name)));
    let free = named.free.iter().map(|function| (function, function.name.clone()));
    let all = constructors.chain(free);
    all.filter(|(function, path)| !calls(function, path))
        .map(|(_, path)| format!("{path}: no example calls it"))
        .collect()
}

/// Whether an example in the function's documentation calls it.
fn calls(function: &Function, path: &str) -> bool {
    [format!("{path}("), format!("{path}::<")].iter().any(|call| shows(&function.docs, call))
}

/// Whether an example in `docs` has `text` in it, in a line that readers see.
fn shows(docs: &str, text: &str) -> bool {
    examples(docs)
        .iter()
        .any(|example| example.is_compiled() && example.visible().any(|line| line.contains(text)))
}

fn is_verb(word: &str) -> bool {
    /// Words that end as verbs do here, and are none.
    const OTHERS: &[&str] = &["As", "Bytes", "Elements", "Lengths", "Rows", "Steps", "This", "Tensors"];
    word.ends_with('s') && word.starts_with(char::is_uppercase) && !OTHERS.contains(&word)
}

/// What stands in backquotes in the first column of the first table of `docs`.
fn first_column(docs: &str) -> BTreeSet<&str> {
    let rows =
        docs.lines().skip_while(|line| !line.starts_with('|')).take_while(|line| line.starts_with('|'));
    rows.filter_map(|row| row.strip_prefix("| `")?.split('`').next()).collect()
}

/// The text of a line of documentation.
fn doc_line(line: &str) -> Option<&str> {
    let line = line.trim_start();
    let text = line.strip_prefix("///").or_else(|| line.strip_prefix("//!"))?;
    Some(text.strip_prefix(' ').unwrap_or(text))
}

fn sources() -> Vec<(String, String)> {
    let mut found = Vec::new();
    api::list(&root().join("src"), &mut found);
    let read = |path: std::path::PathBuf| {
        let name = path.strip_prefix(root()).expect("below the root").to_string_lossy().into_owned();
        (name, fs::read_to_string(&path).expect("a readable file"))
    };
    found.into_iter().map(read).collect()
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn assert_none(violations: impl IntoIterator<Item = String>) {
    let violations: Vec<_> = violations.into_iter().collect();
    assert!(violations.is_empty(), "\n{}\n", violations.join("\n"));
}

impl Example {
    fn is_compiled(&self) -> bool {
        self.is_rust() && self.not_compiled().is_none()
    }
}
