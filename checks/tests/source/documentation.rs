//! Checks the documentation of the libraries: types at the roots have examples, doc tests compile every
//! example and every block of the pages, and tables name the packages, features and variables of the code.

use std::collections::BTreeSet;
use std::path::Path;

use tonic_rdma_checks::{files_of, pages, read, root};

use crate::api::{ITEMS, PUBLISHED};
use crate::model::{Package, docs};

/// The script that builds and runs the blocks that are whole files.
const PROGRAMS: &str = "examples/from-pages";

#[test]
fn every_type_at_the_root_has_an_example() {
    let (mut seen, mut missing) = (0, Vec::new());
    for item in &ITEMS["tonic_rdma"] {
        if ["struct ", "enum ", "trait ", "fn "].iter().any(|kind| item.line.starts_with(kind))
            && !item.path.contains("::")
        {
            seen += 1;
            if !item.docs.split("```").skip(1).step_by(2).any(|example| example.contains(&item.path)) {
                missing.push(&item.path);
            }
        }
    }
    assert!(seen > 15, "the root is read: {seen}");
    assert!(missing.is_empty(), "no example in the documentation of these uses them: {missing:?}");
}

#[test]
fn every_example_is_compiled() {
    let mut left_out = Vec::new();
    for file in PUBLISHED.iter().flat_map(|(_, folder)| files_of(&root().join(folder), "rs")) {
        let is_docs = |line: &&str| line.starts_with("///") || line.starts_with("//!");
        let docs = read(&file);
        let docs = docs.lines().map(str::trim_start).filter(is_docs).map(|line| line[3..].trim_start());
        left_out
            .extend(docs.filter(|line| is_left_out(line)).map(|line| format!("{}: {line}", file.display())));
    }
    assert!(left_out.is_empty(), "no doc test compiles these, or for any reason:\n{}", left_out.join("\n"));
}

#[test]
fn every_block_of_the_pages_is_compiled() {
    let (programs, mut missing, mut seen) = (read(&root().join(PROGRAMS)), Vec::new(), 0);
    for page in pages::all() {
        let path = page.path.display().to_string();
        // `checks/book/build.rs` makes doc tests of these pages.
        let is_tested = path == "README.md" || page.path.parent() == Some(Path::new(pages::BOOK));
        for block in page.text.split("```rust").skip(1) {
            seen += 1;
            let (attributes, block) = block.split_once('\n').unwrap();
            let mut lines = block.lines();
            let (first, second) = (lines.next().unwrap(), lines.next().unwrap());
            let is_file = first == "// build.rs" || first.starts_with("// src/");
            // A line of a build script alone is compared with our own below.
            let is_line = second.starts_with("tonic_prost_build::");
            let is_built = is_file && (is_line || programs.contains(&format!("\nfiles {path}\n")));
            if !is_built && (!is_tested || is_left_out(&format!("```{attributes}"))) {
                missing.push(format!("{path}: no doc test, and {PROGRAMS} does not build it: {first}"));
            }
        }
    }
    assert!(missing.is_empty(), "\n{}\n", missing.join("\n"));
    assert!(seen > 20, "only {seen} blocks were found: is this check broken?");
}

#[test]
fn a_block_that_is_left_out_is_found() {
    let left_out = ["```ignore", "```rust,ignore", "```should_panic", "``` compile_fail"];
    let compiled = ["```", "```rust,no_run", "```compile_fail,E0382", "```text", "let ignore"];
    assert!(left_out.into_iter().all(is_left_out) && !compiled.into_iter().any(is_left_out));
}

/// Returns whether a line begins an example that no doc test compiles, that is a program of its own (which
/// takes a second to compile), or that must not compile and does not name the compiler's error.
fn is_left_out(line: &str) -> bool {
    let Some(attributes) = line.strip_prefix("```") else { return false };
    let has = |of: &str| attributes.split([',', ' ']).any(|attribute| attribute.starts_with(of));
    has("ignore") || has("standalone_crate") || has("should_panic") || has("compile_fail") && !has("E0")
}

#[test]
fn the_tables_of_features_and_packages_are_those_of_the_manifests() {
    let first_page = first_page();
    let manifest = |folder: &str| read(&root().join(folder).join("Cargo.toml"));
    let own = manifest("");
    let features = own.split("\n[features]\n").nth(1).unwrap().split("\n[").next().unwrap();
    // Names that begin with an underscore are not for users.
    let names = features.lines().filter(|line| !line.starts_with(['#', '_']));
    let features = names.filter_map(|line| line.split_once(" = ")).map(|(name, _)| name.to_owned()).collect();
    assert_eq!(first_column(&first_page, "\n# Cargo features\n"), features);
    let folders = PUBLISHED.iter().map(|(_, sources)| sources.trim_end_matches("src"));
    let name = |text: String| text.split("\nname = \"").nth(1).unwrap().split('"').next().unwrap().to_owned();
    let packages: BTreeSet<String> = folders.map(manifest).map(name).collect();
    assert_eq!(first_column(&first_page, "\n# Packages\n"), packages);
    let start = read(&root().join("docs/book/src/start.md"));
    assert_eq!(first_column(&start, "\n## Packages and features\n"), packages);
    for name in ["tonic", "tokio"] {
        let line = own.lines().find(|line| line.starts_with(&format!("{name} = "))).expect("a dependency");
        let stated = format!("{name} {}", line.split('"').nth(1).expect("a version"));
        assert!(first_page.contains(&stated), "the first page does not say `{stated}`");
    }
}

#[test]
fn the_table_of_variables_has_those_that_are_read() {
    let mut asked = tonic_rdma::unstable::known_variables();
    asked.retain(|name| !name.starts_with("RDMA_COLLECTIVE_"));
    let from_env = ITEMS["tonic_rdma"].iter().find(|item| item.path == "Config::from_env").unwrap();
    assert_eq!(first_column(&from_env.docs, ""), asked);
}

#[test]
fn what_several_pages_say_is_the_same() {
    // What the feature `ibverbs` needs, because readers begin with different packages.
    let devices = read(&root().join("docs/book/src/devices.md"));
    let list = devices.lines().find_map(|line| line.strip_prefix("apt install ")?.strip_suffix("# to build"));
    for file in ["src/lib.rs", "verbs/src/lib.rs", "verbs/README.md", "verbs/Cargo.toml"] {
        assert!(read(&root().join(file)).contains(list.unwrap().trim()), "{file} does not say: {list:?}");
    }
    // The line for a build script. Ours has a folder, because Cargo names none, and stubs.
    let script = read(&root().join("proto/generate/src/main.rs"));
    let script = script.replace(".out_dir(folder).generate_default_stubs(true)", "");
    for file in ["src/transport/gather/mod.rs", "docs/book/src/large-messages.md"] {
        let text = read(&root().join(file));
        let mut lines = text.lines().map(|line| line.trim_start_matches("//!").trim());
        let line =
            lines.find(|line| line.starts_with("tonic_prost_build::")).expect("the build script's line");
        assert!(script.contains(line), "proto/generate/src/main.rs has another line than {file}: {line}");
    }
}

/// Returns the documentation of the library's first page.
fn first_page() -> String {
    docs(&Package::read("tonic_rdma", "src").modules[""].attributes)
}

/// Returns the texts in backquotes in the first column of the first table after `heading`.
fn first_column(docs: &str, heading: &str) -> BTreeSet<String> {
    let section = if heading.is_empty() { docs } else { docs.split(heading).nth(1).expect(heading) };
    let rows =
        section.lines().skip_while(|line| !line.starts_with('|')).take_while(|line| line.starts_with('|'));
    rows.filter_map(|row| row.strip_prefix("| `")?.split('`').next()).map(str::to_owned).collect()
}
