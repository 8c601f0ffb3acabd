//! Compares the public API of the libraries with the files in `checks/api`, and limits the number of public items.
//!
//! After an intended change: `UPDATE_API=1 cargo test -p tonic-rdma-checks --test source api`, and commit the files.

use std::collections::{BTreeMap, BTreeSet};
use std::{env, fs};

use tonic_rdma_checks::{read, root};

use crate::model::{Kind, Package, PublicItem, Target, public_items};

/// The libraries: name, folder of the sources, and the types that macros define.
pub(crate) const PUBLISHED: &[(&str, &str, &[&str])] = &[
    ("tonic_rdma", "src", &["CounterSnapshot"]),
    ("tonic_rdma_collective", "collective/src", &[]),
    ("tonic_rdma_graph", "graph/src", &[]),
    ("tonic_rdma_tensor", "tensor/src", &[]),
    ("tonic_rdma_verbs", "verbs/src", &[]),
];

/// Maximum number of public items of the crate `tonic-rdma`.
const MOST: usize = 200;

/// The variable with which the test writes the files instead of comparing them.
const UPDATE: &str = "UPDATE_API";

#[test]
fn the_public_api_equals_the_files_of_checks_api() {
    let mut differences = Vec::new();
    for (name, folder, of_macros) in PUBLISHED {
        let items = public_items(&Package::read(name, folder), of_macros);
        let current: BTreeSet<&str> = items.iter().map(|item| item.line.as_str()).collect();
        let file = root().join(format!("checks/api/{}.txt", name.replace('_', "-")));
        if env::var_os(UPDATE).is_some() {
            let text: String = current.iter().map(|line| format!("{line}\n")).collect();
            fs::write(&file, text).unwrap();
        }
        let kept = if file.exists() { read(&file) } else { String::new() };
        differences.extend(difference(&kept.lines().collect(), &current));
    }
    assert!(
        differences.is_empty(),
        "the public API has changed (-: gone, +: new):\n{}\n\
         if this is meant: {UPDATE}=1 cargo test -p tonic-rdma-checks --test source api",
        differences.join("\n")
    );
}

#[test]
#[allow(clippy::print_stdout, reason = "the counts are for readers of the test's output")]
fn the_public_api_is_small() {
    for (name, folder, of_macros) in PUBLISHED {
        let items = public_items(&Package::read(name, folder), of_macros);
        let count = count(&items);
        println!("{name}: {count} public items");
        assert!(count > 50, "{name} is read");
        assert!(*name != "tonic_rdma" || count <= MOST, "{name} has {count} public items, {MOST} at most");
    }
}

#[test]
fn one_thing_has_one_name() {
    for (name, folder, of_macros) in PUBLISHED {
        let mut places: BTreeMap<(String, String), BTreeSet<&str>> = BTreeMap::new();
        let items = public_items(&Package::read(name, folder), of_macros);
        for item in items.iter().filter(|item| matches!(item.kind, Kind::Named | Kind::Function)) {
            places.entry((item.defined.clone(), item.docs.clone())).or_default().insert(&item.path);
        }
        let twice: Vec<_> = places
            .into_iter()
            .filter(|((_, docs), paths)| !docs.is_empty() && paths.len() > 1)
            .map(|(_, paths)| format!("{paths:?}"))
            .collect();
        assert!(twice.is_empty(), "{name} has these under several names:\n{}", twice.join("\n"));
    }
}

#[test]
fn types_in_public_declarations_can_be_named() {
    for (name, folder, of_macros) in PUBLISHED {
        let items = public_items(&Package::read(name, folder), of_macros);
        assert_eq!(unreachable_types(&items), [""; 0], "{name}: users can't name these types");
    }
}

#[test]
fn a_type_that_users_cannot_name_is_found() {
    let unreachable = |text: &str| {
        let files = [("src/lib.rs".to_owned(), text.to_owned())];
        unreachable_types(&public_items(&Package::from_files("p", "src", files), &[])).len()
    };
    let hidden = "mod a { pub struct Hidden; pub struct Shown; } pub use a::Shown;";
    assert_eq!(unreachable(&format!("{hidden} pub fn f() -> a::Shown {{}}")), 0);
    assert_eq!(unreachable(&format!("{hidden} pub fn f() -> Vec<a::Hidden> {{}}")), 1);
    assert_eq!(unreachable(&format!("{hidden} pub enum E {{ V(a::Hidden) }}")), 1);
    assert_eq!(unreachable(&format!("{hidden} pub struct S {{ pub x: a::Hidden, y: a::Hidden }}")), 1);
    assert_eq!(unreachable(&format!("{hidden} impl Shown {{ pub fn f(_: &a::Hidden) {{}} }}")), 1);
}

#[test]
fn a_changed_item_is_found() {
    let api = |text: &str| {
        let files = [("src/lib.rs".to_owned(), text.to_owned())];
        public_items(&Package::from_files("p", "src", files), &[])
    };
    let lines = |items: &BTreeSet<PublicItem>| items.iter().map(|item| item.line.clone()).collect::<Vec<_>>();
    let kept = lines(&api("pub struct A; impl A { pub fn f(&self) {} }"));
    let compare = |text: &str| {
        let current = lines(&api(text));
        difference(&kept.iter().map(String::as_str).collect(), &current.iter().map(String::as_str).collect())
    };
    assert_eq!(compare("pub struct A; impl A { pub fn f(&self) {} fn g() {} } struct B;"), [""; 0]);
    assert_eq!(compare("pub struct A; impl A { pub fn f(&self) {} pub fn g() {} }"), ["+ fn p::A::g()"]);
    assert_eq!(compare("pub struct A;"), ["- fn p::A::f(&self)"]);
    assert_eq!(
        compare("pub struct A; impl A { pub fn f(&mut self) {} }"),
        ["- fn p::A::f(&self)", "+ fn p::A::f(&mut self)"]
    );
    assert_eq!(compare("pub struct A; impl A { pub fn f(&self) {} } pub fn g() {}").len(), 1);
}

/// Returns the number of public items: modules, types, traits, functions, methods, constants and aliases.
fn count(items: &BTreeSet<PublicItem>) -> usize {
    items
        .iter()
        .filter(|item| item.counts())
        .map(|item| (&item.path, item.kind))
        .collect::<BTreeSet<_>>()
        .len()
}

/// Returns the public declarations that have a type of the crate without a public path.
fn unreachable_types(items: &BTreeSet<PublicItem>) -> Vec<String> {
    let reached: BTreeSet<&Target> = items.iter().filter_map(|item| item.target.as_ref()).collect();
    let hidden = |item: &PublicItem| item.types.iter().any(|target| !reached.contains(target));
    items.iter().filter(|item| hidden(item)).map(|item| item.line.clone()).collect()
}

/// Returns the lines that are only in the file (-), and the lines that are only in the current API (+).
fn difference(kept: &BTreeSet<&str>, current: &BTreeSet<&str>) -> Vec<String> {
    let gone = kept.difference(current).map(|line| format!("- {line}"));
    let new = current.difference(kept).map(|line| format!("+ {line}"));
    gone.chain(new).collect()
}
