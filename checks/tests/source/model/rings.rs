//! Finds rings: groups of files in which every file reaches all others by imports.

use std::collections::{BTreeMap, BTreeSet};

use super::imports::imports;
use super::package::Package;

/// For each file, the files that it imports from.
type Graph = BTreeMap<String, BTreeSet<String>>;

/// Returns the groups of more than `size` files of `package` that import one another in a ring. Each group is sorted.
pub(crate) fn rings(package: &Package, size: usize) -> Vec<Vec<String>> {
    let graph = graph(package);
    let reached: BTreeMap<&str, BTreeSet<&str>> =
        graph.keys().map(|file| (file.as_str(), reach(&graph, file))).collect();
    let mut rings = BTreeSet::new();
    for (file, others) in &reached {
        let ring: Vec<String> = others
            .iter()
            .filter(|other| reached.get(*other).is_some_and(|back| back.contains(file)))
            .map(|other| (*other).to_owned())
            .collect();
        if ring.len() > size {
            rings.insert(ring);
        }
    }
    rings.into_iter().collect()
}

/// Returns the imports between the files of a ring: for each pair of files a line with one of the imported paths.
pub(crate) fn ties(package: &Package, ring: &[String]) -> Vec<String> {
    let mut lines = BTreeMap::new();
    for (from, to, path) in edges(package) {
        if from != to && ring.contains(&from) && ring.contains(&to) {
            lines.insert((from, to), path);
        }
    }
    lines.into_iter().map(|((from, to), path)| format!("    {from} -> {to} by {path}")).collect()
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

fn graph(package: &Package) -> Graph {
    let mut graph = Graph::new();
    for (from, to, _) in edges(package) {
        graph.entry(from).or_default().insert(to);
    }
    graph
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

    fn package(files: &[(&str, &str)]) -> Package {
        let files = files.iter().map(|(path, text)| (format!("src/{path}.rs"), (*text).to_owned()));
        Package::from_files("p", "src", files)
    }

    const ROOT: (&str, &str) = ("lib", "mod a; mod b; mod c; mod d;");

    #[test]
    fn a_ring_of_four_is_found_and_one_of_three_is_not() {
        let mut files = vec![
            ROOT,
            ("a", "use crate::b::B; pub struct A;"),
            ("b", "use crate::c::C; pub struct B;"),
            ("c", "pub struct C; fn f() { super::a::g() }"),
            ("d", "use crate::a::A; pub struct D;"),
        ];
        assert_eq!(rings(&package(&files), 3), [[""; 0]; 0]);
        files[3].1 = "use crate::d; pub struct C;";
        let files = ["src/a.rs", "src/b.rs", "src/c.rs", "src/d.rs"];
        let found = package(&[
            ROOT,
            ("a", "use crate::b::B; pub struct A;"),
            ("b", "use crate::c::C; pub struct B;"),
            ("c", "use crate::d; pub struct C;"),
            ("d", "use crate::a::A; pub struct D;"),
        ]);
        assert_eq!(rings(&found, 3), [files]);
        assert_eq!(ties(&found, &files.map(String::from)).len(), 4);
    }

    #[test]
    fn a_re_export_is_followed_to_the_file_that_defines_the_name() {
        // `a`, `b` and `c` take names from the root, which defines none: no ring through the root.
        let files = [
            ("lib", "mod a; mod b; mod c; pub use a::A; pub use b::B; pub use c::C;"),
            ("a", "pub struct A;"),
            ("b", "use crate::A; pub struct B;"),
            ("c", "use crate::{A, B}; pub struct C;"),
        ];
        assert_eq!(rings(&package(&files), 1), [[""; 0]; 0]);
    }
}
