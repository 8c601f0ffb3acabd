//! Checks the layers of the source: imports go down only, unsafe code is in one package and in one file for
//! each other language, the core has no clock and no I/O, and no more than three files import one another in a ring.

use std::collections::BTreeSet;

use proc_macro2::{TokenStream, TokenTree};
use tonic_rdma_checks::{files_of, read, root};

use crate::model::{Import, Package, Target, code, imports, rings};

/// The workspace's crates, with the folders of their sources, and their layers. A crate imports crates of
/// lower layers only.
const PACKAGES: &[(&str, &str, u8)] = &[
    ("tonic_rdma_verbs", "verbs/src", 0),
    ("tonic_rdma_models", "verbs/models/src", 4),
    ("tonic_rdma", "src", 1),
    ("tonic_rdma_tensor", "tensor/src", 2),
    ("tonic_rdma_collective", "collective/src", 3),
    ("tonic_rdma_flight", "flight/src", 3),
    ("tonic_rdma_graph", "graph/src", 3),
    ("tonic_rdma_opentelemetry", "opentelemetry/src", 3),
    ("tonic_rdma_proto", "proto/generated/src", 3),
    ("tonic_rdma_commands", "commands/src", 3),
    ("tonic_rdma_cli", "cli/src", 4),
    ("tonic_rdma_graph_command", "graph/src/bin/tonic-rdma-graph", 4),
    ("tonic_rdma_allreduce", "collective/command/src", 4),
    ("tonic_rdma_collective_c", "collective/c/src", 4),
    ("tonic_rdma_training", "training/src", 4),
    ("tonic_rdma_python", "python/src", 4),
    ("tonic_rdma_interop", "interop/src", 4),
    ("tonic_rdma_interop_matrix", "interop/src/matrix", 4),
    ("tonic_rdma_generate", "proto/generate/src", 4),
    ("tonic_rdma_checks", "checks/src", 4),
    ("tonic_rdma_book", "checks/book/src", 4),
    ("tonic_rdma_test_support", "tests/support/src", 4),
];

/// The layers of the modules at the root of a crate, from the lowest to the highest. A module imports from
/// lower layers only. Two modules of one layer do not import one another, except those in place of `*`: all
/// modules that the line does not name, which define types.
pub(crate) const LAYERS: &[(&str, &str)] = &[
    ("tonic_rdma", "error wire < protocol < endpoint < transport < grpc"),
    ("tonic_rdma_collective", "error < plan reduce memory group < link < engine < communicator < fusion"),
    ("tonic_rdma_flight", "encode decode < client server"),
    ("tonic_rdma_opentelemetry", "instruments < record < layers"),
    (
        "tonic_rdma_graph",
        "error < dataflow < placement < partition sites onnx < schedule < transfer explain < session",
    ),
    // `discover` finds the devices of both providers.
    ("tonic_rdma_verbs", "* < soft ibverbs memory < discover"),
];

/// The modules at a crate's root that re-export items for other crates of the repository.
const UNSTABLE: &[&str] = &["unstable"];

/// Modules that compute, and neither wait nor read the time. Their child modules are included.
const PURE: &[(&str, &[&str])] = &[
    ("tonic_rdma", &["wire", "protocol"]),
    ("tonic_rdma_tensor", &["wire", "named"]),
    ("tonic_rdma_collective", &["plan", "reduce", "engine"]),
    ("tonic_rdma_graph", &["dataflow", "placement", "partition"]),
];

/// Paths, and parts of paths, that pure modules must not use. `Instant` is not among them: callers pass the
/// time. A method has an empty name before its own.
const IMPURE: &str = "tokio rustix libc socket2 std::net std::os std::fs std::io Instant::now SystemTime thread::sleep ::elapsed";

/// The package that may have unsafe code, and its folder.
const WITH_UNSAFE_CODE: (&str, &str) = ("tonic_rdma_verbs", "verbs/");

/// The packages for other languages, which deny unsafe code and allow it in one file.
const FOREIGN: [&str; 2] = ["tonic_rdma_python", "tonic_rdma_collective_c"];

/// Files with unsafe code outside of the package that may have it, and the reason.
const UNSAFE_FILES: &[(&str, &str)] = &[
    ("python/src/memory.rs", "reads and makes buffers of Python"),
    ("collective/c/src/boundary.rs", "has the functions that C calls, and C's memory"),
    ("tensor/tests/tensor/dlpack.rs", "calls the functions of a DLPack tensor as a foreign library does"),
    ("tests/support/src/allocator.rs", "is a global allocator that counts"),
    ("tests/steady_state/system_calls.rs", "installs a seccomp filter that counts"),
];

#[test]
fn imports_go_down_only_and_the_core_has_no_clock_and_no_io() {
    let packages: Vec<_> = PACKAGES.iter().map(|(name, folder, _)| Package::read(name, folder)).collect();
    assert_none(packages.iter().flat_map(|package| {
        let mut violations = [forbids_unsafe_code(package), rings(package)].concat();
        for module in package.modules.keys() {
            let imports = imports(package, module);
            violations.extend(layers(package, module, &imports));
            violations.extend(impure(package, module, &imports));
        }
        violations
    }));
}

#[test]
fn unsafe_code_is_in_one_package() {
    let relative = |path: &std::path::Path| path.strip_prefix(root()).unwrap().to_string_lossy().into_owned();
    let files: Vec<_> =
        files_of(root(), "rs").into_iter().map(|path| (relative(&path), read(&path))).collect();
    assert!(files.len() > 300, "only {} files were found: is this check broken?", files.len());
    let mut listed: BTreeSet<&str> = UNSAFE_FILES.iter().map(|(path, _)| *path).collect();
    let others = files.iter().filter(|(path, _)| !path.starts_with(WITH_UNSAFE_CODE.1));
    let found = others.filter(|(path, text)| has_unsafe_code(path, text) && !listed.remove(&**path));
    assert_none(found.map(|(path, _)| format!("{path}: unsafe code belongs into `{}`", WITH_UNSAFE_CODE.1)));
    assert_none(listed.iter().map(|path| format!("{path}: has no unsafe code: remove it from the list")));
}

#[test]
fn every_member_of_the_workspace_is_checked() {
    let manifest = read(&root().join("Cargo.toml"));
    let members =
        manifest.lines().find_map(|line| line.strip_prefix("members = [")).expect("a list of members");
    for member in members.split('"').skip(1).step_by(2) {
        let sources = if member == "." { "src".to_owned() } else { format!("{member}/src") };
        assert!(PACKAGES.iter().any(|(_, folder, _)| *folder == sources), "add {member} to PACKAGES");
    }
}

fn assert_none(violations: impl IntoIterator<Item = String>) {
    let violations: Vec<_> = violations.into_iter().collect();
    assert!(violations.is_empty(), "\n{}\n", violations.join("\n"));
}

/// Returns the imports of `module` that don't go down: between the modules of `package`, and between crates.
fn layers(package: &Package, module: &str, imports: &BTreeSet<Import>) -> Vec<String> {
    let line = LAYERS.iter().find(|(name, _)| *name == package.name).map_or("", |(_, line)| line);
    let layer_of = |module: &str| {
        let find =
            |name: &str| line.split(" < ").position(|layer| layer.split(' ').any(|other| other == name));
        find(module).or_else(|| find("*"))
    };
    let crate_layer =
        |name: &str| PACKAGES.iter().find(|(other, ..)| *other == name).map(|(.., layer)| *layer);
    let (top, file) = (top_of(module), &package.modules[module].file);
    let is_root_or_unstable = *file == package.modules[""].file || UNSTABLE.contains(&top);
    let own = layer_of(top).filter(|_| !is_root_or_unstable);
    let mut violations = Vec::new();
    if !line.is_empty() && !is_root_or_unstable && own.is_none() {
        violations.push(format!("{file}: `{top}` has no layer: give it one"));
    }
    for import in imports {
        let mut found =
            |what: String| violations.push(format!("{file}: `{}` {what}", import.path.join("::")));
        if let (Some(own), Some(other)) = (crate_layer(&package.name), crate_layer(&import.path[0]))
            && other >= own
            && import.path[0] != package.name
        {
            found("is a crate that is not below this one".into());
        }
        let (Some(own), Some(target)) = (own, &import.target) else { continue };
        let (Target::Module(target) | Target::Item { module: target, .. }) = target;
        match top_of(target) {
            other if other == top => {}
            // `pub(crate)` in a macro.
            "" if import.path == ["crate"] => {}
            "" => found("is defined at the root of the crate".into()),
            other => match layer_of(other) {
                Some(layer) if layer < own || layer == own && line.starts_with('*') && own == 0 => {}
                Some(layer) if layer == own => found(format!("leads sideways to `{other}`")),
                Some(_) => found(format!("leads up to `{other}`")),
                None => found(format!("leads to `{other}`, which has no layer")),
            },
        }
    }
    violations
}

/// Returns the module at the crate's root in which a module is, or an empty name for the root itself.
fn top_of(module: &str) -> &str {
    module.split("::").next().unwrap_or_default()
}

/// Returns a violation if the package has to forbid unsafe code, and does not.
fn forbids_unsafe_code(package: &Package) -> Vec<String> {
    let root = &package.modules[""];
    let lint = if FOREIGN.contains(&&*package.name) { "deny(unsafe_code)" } else { "forbid(unsafe_code)" };
    let forbids = root.attributes.iter().any(|attribute| code(&attribute.meta) == lint);
    // Tests share an allocator that counts.
    let may = [WITH_UNSAFE_CODE.0, "tonic_rdma_test_support"];
    let is_open = !forbids && !may.contains(&&*package.name);
    is_open.then(|| format!("{}: begin with #![{lint}]", root.file)).into_iter().collect()
}

/// Returns whether a file has the word `unsafe` outside of comments and strings.
fn has_unsafe_code(path: &str, text: &str) -> bool {
    fn has(tokens: TokenStream) -> bool {
        tokens.into_iter().any(|token| match token {
            TokenTree::Group(group) => has(group.stream()),
            TokenTree::Ident(name) => name == "unsafe",
            _ => false,
        })
    }
    text.contains("unsafe") && has(text.parse().unwrap_or_else(|error| panic!("{path}: {error}")))
}

/// Returns the uses of clocks and of I/O, if `module` is pure.
fn impure(package: &Package, module: &str, imports: &BTreeSet<Import>) -> Vec<String> {
    let pure = PURE.iter().filter(|(name, _)| *name == package.name).flat_map(|(_, modules)| *modules);
    if !pure.into_iter().any(|name| *name == top_of(module)) {
        return Vec::new();
    }
    let is_impure = |import: &&Import| {
        let path = format!("::{}::", import.path.join("::"));
        IMPURE.split(' ').any(|impure| path.contains(&format!("::{impure}::")))
    };
    let text = |import: &Import| {
        format!("{}: `{}` in a pure module", package.modules[module].file, import.path.join("::"))
    };
    imports.iter().filter(is_impure).map(text).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the violations in a package of four layers, with `text` in the module `name`.
    fn found(name: &str, text: &str) -> Vec<String> {
        let modules = ["wire", "protocol", "endpoint", "transport"];
        let root =
            "mod wire; mod protocol; mod endpoint; mod transport; pub use endpoint::Config; pub struct Root;";
        let text = |module| if module == name { text } else { "" };
        let file = |module| {
            (format!("src/{module}.rs"), format!("pub struct X; pub struct Config; {}", text(module)))
        };
        let files = modules.into_iter().map(file).chain([("src/lib.rs".to_owned(), root.to_owned())]);
        violations(&Package::from_files("tonic_rdma", "src", files))
    }

    fn violations(package: &Package) -> Vec<String> {
        let of = |module| {
            let imports = imports(package, module);
            [layers(package, module, &imports), impure(package, module, &imports)].concat()
        };
        package.modules.keys().flat_map(|module| of(module)).collect()
    }

    #[test]
    fn an_import_that_does_not_go_down_is_named() {
        for (module, text, expected) in [
            ("protocol", "use crate::endpoint::X as Y;", "`crate::endpoint::X` leads up to `endpoint`"),
            ("wire", "fn f() { crate::transport::g() }", "leads up to `transport`"),
            ("wire", "mod deep { use crate::Config; }", "leads up to `endpoint`"),
            ("endpoint", "use crate::Root;", "is defined at the root of the crate"),
            ("endpoint", "use tonic_rdma_tensor::Tensor;", "is a crate that is not below this one"),
            ("protocol", "mod deep { fn f() { debug_assert!(Instant::now() > x) } }", "in a pure module"),
            ("protocol", "fn f() { start.elapsed() }", "in a pure module"),
            ("wire", "use std::net::IpAddr;", "in a pure module"),
        ] {
            let found = found(module, text);
            assert!(found.len() == 1 && found[0].contains(expected), "{module}, {text}: {found:?}");
        }
    }

    #[test]
    fn an_import_that_goes_down_is_fine() {
        for (module, text) in [
            (
                "endpoint",
                "use crate::{protocol::X as P, wire}; use tonic_rdma_verbs::memory; fn f() { tokio::f() }",
            ),
            ("transport", "use crate::Config as C; mod deep { use super::X; }"),
            ("wire", "/// [`crate::endpoint`]\n#[cfg(test)] mod tests { use crate::endpoint::X; }"),
            (
                "protocol",
                "use std::time::Instant; fn f(now: Instant) { now.duration_since(self.start) } // tokio",
            ),
        ] {
            assert_eq!(found(module, text), [""; 0], "{module}, {text}");
        }
    }

    #[test]
    fn modules_without_a_layer_are_the_lowest_one_in_verbs_only() {
        for (name, low, work, expected) in [
            ("tonic_rdma_verbs", "error", "work", ""),
            ("tonic_rdma_verbs", "soft", "work", ""),
            ("tonic_rdma_verbs", "soft", "memory", "sideways to `memory`"),
            ("tonic_rdma", "news", "wire", "`news` has no layer"),
        ] {
            let root = format!("mod {low}; mod {work};");
            let files =
                [("lib", root), (low, format!("use crate::{work}::W;")), (work, "pub struct W;".into())];
            let files = files.map(|(path, text)| (format!("src/{path}.rs"), text));
            let found = violations(&Package::from_files(name, "src", files)).concat();
            assert!(found.contains(expected) && found.is_empty() == expected.is_empty(), "{low}: {found}");
        }
    }

    #[test]
    fn unsafe_code_is_found() {
        for text in ["fn f() { g(unsafe { h() }) }", "unsafe trait T {}", "#[unsafe(no_mangle)] fn f() {}"] {
            assert!(has_unsafe_code("f", text), "{text}");
        }
        let none = "#![forbid(unsafe_code)]\n/// unsafe\nfn unsafe_name() { \"unsafe\"; } // unsafe";
        assert!(!has_unsafe_code("f", none));
        for (name, text, faults) in [
            ("p", "#![deny(unsafe_code)]", 1),
            ("p", "#![forbid(unsafe_code)]", 0),
            (FOREIGN[1], "", 1),
            (FOREIGN[0], "#![deny(unsafe_code)]", 0),
        ] {
            let package = Package::from_files(name, "src", [("src/lib.rs".to_owned(), text.to_owned())]);
            assert_eq!(forbids_unsafe_code(&package).len(), faults, "{name}: {text}");
        }
    }
}
