//! Checks the documentation of the libraries: entry points have examples, doc tests compile every example, tables name the
//! features and variables of the code, and the documentation of functions begins with a verb.

mod examples;

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::LazyLock;

use tonic_rdma_checks::{files_of, read, root};

use crate::api::PUBLISHED;
use crate::model::{Kind, Package, PublicItem, docs, public_items};
use examples::{examples, first_word};

/// Methods that a program calls first, besides constructors.
const FIRST_CALLS: &[(&str, &[&str])] = &[
    ("RdmaConnector", &["last_connection"]),
    ("BalancedChannel", &["endpoints"]),
    ("RdmaConnectInfo", &["counters", "why"]),
    ("Pool", &["allocate", "lease"]),
    ("SiteAllocator", &["allocate", "allocate_named", "next_iteration"]),
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
    ("Channel", &["write", "read", "region", "static_sender", "dynamic_sender", "request"]),
    ("DeviceBuilder", &["bind", "build", "client_tls", "server_tls", "plaintext_tensors"]),
    (
        "Communicator",
        &["allocate", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "send", "shrink"],
    ),
    ("Operation", &["start", "wait"]),
    ("RegionWrite", &["at", "from", "notify", "blocks_from"]),
    ("RegionRead", &["at", "into"]),
    ("Memcpy", &["on_completion"]),
    ("StaticSender", &["send", "send_region", "try_send_region"]),
    ("StaticReceiver", &["recv", "try_recv"]),
    ("DynamicSender", &["send"]),
    ("DynamicReceiver", &["recv", "try_recv"]),
    ("Tensor", &["as_array", "to_dlpack"]),
];

/// The items and documentation that the tests check, read once for all tests.
struct PublicDocs {
    /// Public items of all libraries.
    items: Vec<PublicItem>,
    /// Documentation of the library's first page.
    first_page: String,
    /// Documentation of the module `gather`.
    gather: String,
}

static LIBRARY: LazyLock<PublicDocs> = LazyLock::new(|| {
    let read = |&(name, folder, of_macros): &(&str, &str, &[&str])| {
        public_items(&Package::read(name, folder), of_macros)
    };
    let items: Vec<PublicItem> = PUBLISHED.iter().flat_map(read).collect();
    assert!(items.len() > 500, "the crates are read: {}", items.len());
    let (name, folder, _) = PUBLISHED[0];
    let library = Package::read(name, folder);
    let docs_of = |module: &str| docs(&library.modules[module].attributes);
    PublicDocs { items, first_page: docs_of(""), gather: docs_of("transport::gather") }
});

#[test]
fn every_entry_point_has_an_example() {
    let mut missing = Vec::new();
    for item in &LIBRARY.items {
        let path = match item.kind {
            Kind::Function => item.name().to_owned(),
            Kind::Method if item.constructs => last_two(item),
            _ => continue,
        };
        if !calls(item, &path) {
            missing.push(format!("{}: no example calls it", item.path));
        }
    }
    for (name, methods) in FIRST_CALLS {
        let types: Vec<_> =
            LIBRARY.items.iter().filter(|item| item.kind == Kind::Named && item.name() == *name).collect();
        assert!(!types.is_empty(), "{name} is not public any more");
        for method in *methods {
            let path = format!("{name}::{method}");
            let found = LIBRARY.items.iter().find(|item| item.kind == Kind::Method && last_two(item) == path);
            let found = found.unwrap_or_else(|| panic!("{path} is gone"));
            let calls = [format!(".{method}("), format!(".{method}::<")];
            // The example may be in the documentation of the method or of its type, because some methods share an example.
            let places = types.iter().map(|named| &named.docs).chain([&found.docs]);
            if !places.into_iter().any(|docs| calls.iter().any(|call| shows(docs, call))) {
                missing.push(format!("{path}: no example calls it"));
            }
        }
    }
    assert_none(missing);
}

#[test]
fn every_name_at_the_root_has_an_example() {
    let root: Vec<_> = LIBRARY
        .items
        .iter()
        .filter(|item| {
            item.kind == Kind::Named && item.parent().is_empty() && item.line.contains(" tonic_rdma::")
        })
        .filter(|item| !item.docs.is_empty())
        .collect();
    assert!(root.len() > 15, "the root is read: {}", root.len());
    let missing = root.iter().filter(|named| !shows(&named.docs, named.name()));
    assert_none(missing.map(|named| format!("{}: no example in its documentation uses it", named.path)));
}

#[test]
fn every_example_is_compiled() {
    let mut left_out = Vec::new();
    for (_, folder, _) in PUBLISHED {
        for file in files_of(&root().join(folder), "rs") {
            let text = read(&file);
            let docs: String = text.lines().filter_map(doc_line).map(|line| format!("{line}\n")).collect();
            for example in examples(&docs) {
                if let Some(why) = example.left_out() {
                    left_out.push(format!("{}: an example is `{why}`:\n{}", file.display(), example.code));
                }
            }
        }
    }
    assert_none(left_out);
}

#[test]
fn documentation_of_functions_begins_with_a_verb() {
    let functions = LIBRARY.items.iter().filter(|item| matches!(item.kind, Kind::Function | Kind::Method));
    let wrong: BTreeSet<String> = functions
        .map(|function| (&function.path, first_word(&function.docs)))
        .filter(|(_, word)| !is_verb(word))
        .map(|(path, word)| format!("{path}: begins with `{word}`"))
        .collect();
    assert_none(wrong);
}

#[test]
fn the_table_of_features_is_that_of_the_manifest() {
    let manifest = read(&root().join("Cargo.toml"));
    let features = manifest.split("\n[features]\n").nth(1).expect("a table of features");
    let features = features.split("\n[").next().unwrap_or_default();
    // Names that begin with an underscore are not for users.
    let names = features.lines().filter(|line| !line.starts_with(['#', '_']));
    let expected: BTreeSet<&str> =
        names.filter_map(|line| line.split_once(" = ").map(|(name, _)| name)).collect();
    let section = LIBRARY.first_page.split("\n# Cargo features\n").nth(1).expect("a section on features");
    assert_eq!(first_column(section), expected);
}

#[test]
fn the_tables_of_packages_have_every_library() {
    let manifest = |folder: &str| read(&root().join(folder).join("Cargo.toml"));
    let folders: Vec<&str> =
        PUBLISHED.iter().map(|(_, sources, _)| sources.trim_end_matches("src")).collect();
    // Not in the list of public APIs, because it mostly shows types of other packages.
    let manifests = folders.into_iter().chain(["flight"]).map(manifest);
    let name = |text: String| Some(text.split_once("\nname = \"")?.1.split('"').next()?.to_owned());
    let libraries: BTreeSet<String> = manifests.filter_map(name).collect();
    let start = read(&root().join("docs/book/src/start.md"));
    for (page, text, heading) in [
        ("the first page", &LIBRARY.first_page, "\n# Packages\n"),
        ("start.md", &start, "\n## Packages and features\n"),
    ] {
        let section =
            text.split(heading).nth(1).unwrap_or_else(|| panic!("{page} has no section on packages"));
        let table: BTreeSet<String> = first_column(section).into_iter().map(str::to_owned).collect();
        assert_eq!(table, libraries, "{page}");
    }
}

/// What the feature `ibverbs` needs is on several pages, because readers begin with different packages.
#[test]
fn all_pages_name_the_same_packages_for_ibverbs() {
    let list = read(&root().join("docs/book/src/devices.md"))
        .lines()
        .find_map(|line| {
            Some(line.strip_prefix("apt install ")?.strip_suffix("# to build")?.trim().to_owned())
        })
        .expect("a line of packages to build with");
    for file in ["src/lib.rs", "verbs/src/lib.rs", "verbs/README.md", "verbs/Cargo.toml"] {
        assert!(read(&root().join(file)).contains(&list), "{file} does not say: {list}");
    }
}

#[test]
fn the_versions_are_those_of_the_manifest() {
    let manifest = read(&root().join("Cargo.toml"));
    for name in ["tonic", "tokio"] {
        let line =
            manifest.lines().find(|line| line.starts_with(&format!("{name} = "))).expect("a dependency");
        let version = line.split('"').nth(1).expect("a version");
        let stated = format!("{name} {version}");
        assert!(LIBRARY.first_page.contains(&stated), "the first page does not say `{stated}`");
    }
}

#[test]
fn the_table_of_variables_has_those_that_are_read() {
    let asked = RefCell::new(BTreeSet::new());
    let _ = tonic_rdma::Config::from_variables(|name| {
        asked.borrow_mut().insert(name.to_owned());
        None
    });
    let expected = asked.into_inner();
    assert!(expected.len() > 20, "the variables are found: {expected:?}");
    let from_env =
        LIBRARY.items.iter().find(|item| item.path == "Config::from_env").expect("Config::from_env");
    let table: BTreeSet<String> = first_column(&from_env.docs).into_iter().map(str::to_owned).collect();
    assert_eq!(table, expected);
}

#[test]
fn the_build_script_of_the_guide_is_in_use() {
    let line = LIBRARY
        .gather
        .lines()
        .find(|line| line.starts_with("tonic_prost_build::"))
        .expect("the build script's line");
    let script = read(&root().join("proto/generate/src/main.rs")).replace(".out_dir(folder)", "");
    assert!(script.contains(line), "proto/generate/src/main.rs has another: {line}");
}

/// Returns whether an example in the function's documentation calls it.
fn calls(function: &PublicItem, path: &str) -> bool {
    [format!("{path}("), format!("{path}::<")].iter().any(|call| shows(&function.docs, call))
}

/// Returns the names of the type and of the method, such as `Pool::lease`.
fn last_two(method: &PublicItem) -> String {
    let of = method.parent().rsplit("::").next().unwrap_or_default();
    format!("{of}::{}", method.name())
}

/// Returns whether an example in `docs` has `text` in a line that readers see.
fn shows(docs: &str, text: &str) -> bool {
    examples(docs)
        .iter()
        .any(|example| example.is_compiled() && example.visible().any(|line| line.contains(text)))
}

fn is_verb(word: &str) -> bool {
    /// Words that end like these verbs, but are no verbs.
    const OTHERS: &[&str] = &["As", "Bytes", "Elements", "Lengths", "Rows", "Steps", "This", "Tensors"];
    word.ends_with('s') && word.starts_with(char::is_uppercase) && !OTHERS.contains(&word)
}

/// Returns the texts in backquotes in the first column of the first table of `docs`.
fn first_column(docs: &str) -> BTreeSet<&str> {
    let rows =
        docs.lines().skip_while(|line| !line.starts_with('|')).take_while(|line| line.starts_with('|'));
    rows.filter_map(|row| row.strip_prefix("| `")?.split('`').next()).collect()
}

/// Returns the text of a line of documentation.
fn doc_line(line: &str) -> Option<&str> {
    let line = line.trim_start();
    let text = line.strip_prefix("///").or_else(|| line.strip_prefix("//!"))?;
    Some(text.strip_prefix(' ').unwrap_or(text))
}

fn assert_none(violations: impl IntoIterator<Item = String>) {
    let violations: Vec<_> = violations.into_iter().collect();
    assert!(violations.is_empty(), "\n{}\n", violations.join("\n"));
}
