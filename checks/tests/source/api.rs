//! Compares the public API of the libraries with the files in `checks/api`: a list for each package, and in
//! `unstable/` the list of its module `unstable`, which is for the other packages.
//!
//! After an intended change: `UPDATE_API=1 cargo test -p tonic-rdma-checks --test source api`, and commit the
//! files.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;
use std::{env, fs};

use tonic_rdma_checks::{read, root};

use crate::model::{Package, PublicItem, public_items};

/// The published libraries: name, and folder of the sources.
pub(crate) const PUBLISHED: &[(&str, &str)] = &[
    ("tonic_rdma", "src"),
    ("tonic_rdma_collective", "collective/src"),
    ("tonic_rdma_flight", "flight/src"),
    ("tonic_rdma_graph", "graph/src"),
    ("tonic_rdma_opentelemetry", "opentelemetry/src"),
    ("tonic_rdma_tensor", "tensor/src"),
    ("tonic_rdma_verbs", "verbs/src"),
];

/// The module for the other packages.
const UNSTABLE: &str = "unstable";

/// The public items of each library.
pub(crate) static ITEMS: LazyLock<BTreeMap<&str, BTreeSet<PublicItem>>> = LazyLock::new(|| {
    let items = |&(name, folder): &(&'static str, &str)| (name, public_items(&Package::read(name, folder)));
    let items: BTreeMap<_, _> = PUBLISHED.iter().map(items).collect();
    assert!(items.values().all(|items| items.len() > 5), "the crates are read");
    items
});

#[test]
fn the_public_api_equals_the_files_of_checks_api() {
    let mut differences = Vec::new();
    for (name, items) in &*ITEMS {
        let file = format!("{}.txt", name.replace('_', "-"));
        let (unstable, stable): (Vec<_>, Vec<_>) = items.iter().partition(|item| is_unstable(item));
        for (file, items) in [(file.clone(), stable), (format!("{UNSTABLE}/{file}"), unstable)] {
            let current: BTreeSet<&str> = items.iter().map(|item| item.line.as_str()).collect();
            let file = root().join("checks/api").join(file);
            if env::var_os("UPDATE_API").is_some() && (file.exists() || !current.is_empty()) {
                fs::create_dir_all(file.parent().unwrap()).unwrap();
                fs::write(&file, current.iter().map(|line| format!("{line}\n")).collect::<String>()).unwrap();
            }
            let kept = if file.exists() { read(&file) } else { String::new() };
            differences.extend(difference(&kept.lines().collect(), &current));
        }
    }
    assert!(
        differences.is_empty(),
        "the public API has changed (-: gone, +: new):\n{}\n\
         if this is meant: UPDATE_API=1 cargo test -p tonic-rdma-checks --test source api",
        differences.join("\n")
    );
}

#[test]
fn public_items_are_listed_under_their_public_path() {
    let files = [
        (
            "lib",
            "mod a; pub mod b; #[doc(hidden)] pub mod c { pub struct Hidden; } pub mod unstable { pub use crate::a::f; }",
        ),
        ("lib", "pub use a::{A as Renamed}; pub use other::{Foreign as Own, *}; pub use a::Made;"),
        ("a", "pub struct A<T> { pub x: u8, y: T } impl<T> A<T> { pub fn new() -> Self { } fn g() {} }"),
        (
            "a",
            "impl<T> A<T> { #[doc(hidden)] pub fn h(&self) {} } pub fn f(a: &str) -> u8 { 0 } pub struct Unreachable;",
        ),
        ("a", "made! { Made }"),
        ("b", "pub enum E { V(u8), W, /** Doc. */ X { /** Doc. */ a: u8 } } pub(crate) struct C;"),
        ("b", "pub trait T: Send { type O; fn m(&self); } impl super::a::A<u8> { pub const N: usize = 1; }"),
    ];
    let mut texts: BTreeMap<String, String> = BTreeMap::new();
    for (file, text) in files {
        texts.entry(format!("src/{file}.rs")).or_default().push_str(text);
    }
    let found = public_items(&Package::from_files("p", "src", texts));
    let lines: BTreeSet<_> = found.iter().map(|item| item.line.as_str()).collect();
    let expected = [
        "struct p::Renamed<T>",
        "const p::Renamed::N: usize",
        "fn p::Renamed::new() -> Self",
        "field p::Renamed::x: u8",
        "use p::Own = other::Foreign",
        "use p::* = other",
        "use p::Made = a::Made",
        "mod p::b",
        "enum p::b::E",
        "variant p::b::E::V(u8)",
        "variant p::b::E::W",
        "variant p::b::E::X { a: u8 }",
        "trait p::b::T: Send",
        "type p::b::T::O",
        "fn p::b::T::m(&self)",
        "mod p::unstable",
        "fn p::unstable::f(a: &str) -> u8",
    ];
    assert_eq!(lines, expected.into());
    assert_eq!(found.iter().filter(|item| is_unstable(item)).count(), 2);
    let changed = difference(&["fn p::f(&self)"].into(), &["fn p::f(&mut self)"].into());
    assert_eq!(changed, ["- fn p::f(&self)", "+ fn p::f(&mut self)"]);
}

fn is_unstable(item: &PublicItem) -> bool {
    item.path.split("::").next() == Some(UNSTABLE)
}

/// Returns the lines that are only in the file (-), and the lines that are only in the current API (+).
fn difference(kept: &BTreeSet<&str>, current: &BTreeSet<&str>) -> Vec<String> {
    let gone = kept.difference(current).map(|line| format!("- {line}"));
    let new = current.difference(kept).map(|line| format!("+ {line}"));
    gone.chain(new).collect()
}
