//! Finds rings: groups of files in which every file reaches all others by imports.

use std::collections::{BTreeMap, BTreeSet};

use super::imports::imports;
use super::package::Package;

/// Maximum number of files in a ring.
const SIZE: usize = 3;

/// For each file, the files that it imports from.
type Graph = BTreeMap<String, BTreeSet<String>>;

/// Returns the rings of `package` that have too many files, each with the imports that close it: for each
/// pair of files a line with one of the imported paths.
pub(crate) fn rings(package: &Package) -> Vec<String> {
    let edges = edges(package);
    let mut graph = Graph::new();
    for (from, to, _) in &edges {
        graph.entry(from.clone()).or_default().insert(to.clone());
    }
    let reached: BTreeMap<&str, BTreeSet<&str>> =
        graph.keys().map(|file| (file.as_str(), reach(&graph, file))).collect();
    let ring_of = |file: &str| -> BTreeSet<&str> {
        let reaches_back = |other: &&str| reached.get(other).is_some_and(|back| back.contains(file));
        reached[file].iter().copied().filter(reaches_back).collect()
    };
    let rings: BTreeSet<BTreeSet<&str>> = reached.keys().map(|file| ring_of(file)).collect();
    let text = |ring: BTreeSet<&str>| {
        let is_tie = |(from, to, _): &&(String, String, String)| {
            from != to && ring.contains(from.as_str()) && ring.contains(to.as_str())
        };
        let ties: BTreeMap<_, _> =
            edges.iter().filter(is_tie).map(|(from, to, by)| ((from, to), by)).collect();
        let ties: String =
            ties.iter().map(|((from, to), by)| format!("\n    {from} -> {to} by {by}")).collect();
        format!("{} files of {} import one another in a ring:{ties}", ring.len(), package.name)
    };
    rings.into_iter().filter(|ring| ring.len() > SIZE).map(text).collect()
}

fn edges(package: &Package) -> Vec<(String, String, String)> {
    let mut edges = Vec::new();
    for (module, content) in &package.modules {
        for import in imports(package, module) {
            if let Some(target) = &import.target {
                let to = package.file(target).to_owned();
                edges.push((content.file.clone(), to, import.path.join("::")));
            }
        }
    }
    edges
}

/// Returns the files that `file` reaches over any number of imports.
fn reach<'a>(graph: &'a Graph, file: &str) -> BTreeSet<&'a str> {
    let mut found = BTreeSet::new();
    let mut next: Vec<&str> = vec![file];
    while let Some(file) = next.pop() {
        for other in graph.get(file).into_iter().flatten() {
            if found.insert(other.as_str()) {
                next.push(other);
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(texts: &[&str; 5]) -> Vec<String> {
        let names = ["lib", "a", "b", "c", "d"].map(|name| format!("src/{name}.rs"));
        rings(&Package::from_files("p", "src", names.into_iter().zip(texts.map(str::to_owned))))
    }

    #[test]
    fn a_ring_of_four_is_named_with_its_imports_and_one_of_three_is_fine() {
        let root = "mod a; mod b; mod c; mod d; pub use a::A; pub use b::B; pub use c::C;";
        let [a, b] = ["use crate::b::B; pub struct A;", "use crate::c::C; pub struct B;"];
        let d = "use crate::a::A; pub struct D;";
        assert_eq!(found(&[root, a, b, "pub struct C; fn f() { super::a::g() }", d]), [""; 0]);
        let ring = found(&[root, a, b, "use crate::d; pub struct C;", d]);
        assert!(ring.len() == 1 && ring[0].contains("src/d.rs -> src/a.rs by crate::a::A"), "{ring:?}");
        // These take names from the root, which defines none: no ring through the root.
        let through = [root, "use crate::B; pub struct A;", "use crate::C; pub struct B;", "pub struct C;"];
        assert_eq!(found(&[through[0], through[1], through[2], through[3], "use crate::{A, B};"]), [""; 0]);
    }
}
