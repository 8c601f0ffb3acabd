//! The rules. Each takes sources and returns violations.

use std::collections::BTreeSet;

use proc_macro2::{TokenStream, TokenTree};

use crate::model::{Import, Package, Target, code, imports};

/// Layers of the modules at the root of a crate. A module imports from lower layers only. Two modules of one layer do not import
/// one another.
const LAYERS: &[(&str, &[(&str, u8)])] = &[
    (
        "tonic_rdma",
        &[("error", 0), ("wire", 0), ("protocol", 1), ("endpoint", 2), ("transport", 3), ("grpc", 4)],
    ),
    (
        "tonic_rdma_collective",
        &[
            ("error", 0),
            ("plan", 1),
            ("reduce", 1),
            ("memory", 1),
            ("group", 1),
            ("link", 2),
            ("engine", 3),
            ("communicator", 4),
            ("fusion", 5),
        ],
    ),
    ("tonic_rdma_flight", &[("encode", 0), ("decode", 0), ("client", 1), ("server", 1)]),
    (
        "tonic_rdma_graph",
        &[
            ("error", 0),
            ("dataflow", 1),
            ("placement", 2),
            ("partition", 3),
            ("sites", 3),
            ("onnx", 3),
            ("schedule", 4),
            ("transfer", 5),
            ("explain", 5),
            ("session", 6),
        ],
    ),
    // All other modules of this crate are in the lowest layer. They define types, and may import from one another.
    (
        "tonic_rdma_verbs",
        // `discover` finds the devices of both providers.
        &[("soft", 1), ("ibverbs", 1), ("memory", 1), ("discover", 2)],
    ),
];

/// The lowest layer.
const LOWEST: u8 = 0;

/// The crates in which modules without a layer in [`LAYERS`] are in the lowest layer.
const WITH_LOWEST: &[&str] = &["tonic_rdma_verbs"];

/// Modules at a crate's root that re-export items for other crates of the repository.
const UNSTABLE_MODULES: &[&str] = &["internal", "unstable"];

/// Modules that compute, and neither wait nor look at the time: the crate and the module. Their child modules are included.
const PURE: &[(&str, &str)] = &[
    ("tonic_rdma", "wire"),
    ("tonic_rdma", "protocol"),
    ("tonic_rdma_tensor", "wire"),
    ("tonic_rdma_tensor", "named"),
    ("tonic_rdma_collective", "plan"),
    ("tonic_rdma_collective", "reduce"),
    ("tonic_rdma_collective", "engine"),
    ("tonic_rdma_graph", "dataflow"),
    ("tonic_rdma_graph", "placement"),
    ("tonic_rdma_graph", "partition"),
];

/// Paths, and parts of paths, that pure modules must not use. `Instant` is not among them: callers pass the time.
const IMPURE: &[&str] = &[
    "tokio",
    "rustix",
    "libc",
    "socket2",
    "std::net",
    "std::os",
    "std::fs",
    "std::io",
    "Instant::now",
    "SystemTime",
    "thread::sleep",
];

/// Methods that pure modules must not call.
const IMPURE_METHODS: &[&str] = &["elapsed"];

/// The package that may have unsafe code.
const WITH_UNSAFE_CODE: &str = "tonic_rdma_verbs";

/// Its folder.
const UNSAFE_FOLDER: &str = "verbs/";

/// Tests and benches with unsafe code outside of that package, and the reason.
const UNSAFE_TESTS: &[(&str, &str)] = &[
    ("tensor/tests/tensor/dlpack.rs", "calls the functions of a DLPack tensor as a foreign library does"),
    ("tests/steady_state/allocations.rs", "is a global allocator that counts"),
    ("collective/tests/churn.rs", "is a global allocator that counts"),
    ("tests/steady_state/system_calls.rs", "installs a seccomp filter that counts"),
];

/// A file, by its path from the root of the repository.
#[derive(Debug)]
pub(crate) struct SourceFile {
    path: String,
    text: String,
}

impl SourceFile {
    pub(crate) fn new(path: impl Into<String>, text: impl Into<String>) -> Self {
        Self { path: path.into(), text: text.into() }
    }
}

/// Returns the imports that don't go down: between the modules of `package`, and between `crates`.
pub(crate) fn layers(package: &Package, crates: &[(&str, &str, u8)]) -> Vec<String> {
    let layers = LAYERS.iter().find(|(name, _)| *name == package.name).map_or(&[][..], |(_, layers)| layers);
    let has_lowest = WITH_LOWEST.contains(&package.name.as_str());
    let layer_of = |module: &str| match layers.iter().find(|(name, _)| *name == module) {
        Some((_, layer)) => Some(*layer),
        None => has_lowest.then_some(LOWEST),
    };
    let crate_layer = |name: &str| crates.iter().find(|(other, ..)| *other == name).map(|(.., layer)| *layer);
    let mut violations = Vec::new();
    for (path, module) in &package.modules {
        let top = path.split("::").next().unwrap_or_default();
        let is_root_or_unstable = module.file == package.modules[""].file || UNSTABLE_MODULES.contains(&top);
        if !layers.is_empty() && !is_root_or_unstable && layer_of(top).is_none() {
            violations.push(format!("{}: `{top}` has no layer: give it one", module.file));
        }
        for import in imports(package, path) {
            let place = format!("{}: `{}`", module.file, import.path.join("::"));
            if let (Some(own), Some(other)) = (crate_layer(&package.name), crate_layer(&import.path[0]))
                && other >= own
                && import.path[0] != package.name
            {
                violations.push(format!("{place} is a crate that is not below this one"));
            }
            let Some(own) = layer_of(top).filter(|_| !is_root_or_unstable) else { continue };
            match import.target.as_ref().map(top_of) {
                Some(other) if other == top => {}
                // `pub(crate)` in a macro.
                Some("") if import.path == ["crate"] => {}
                Some("") => violations.push(format!("{place} is defined at the root of the crate")),
                Some(other) => match layer_of(other) {
                    Some(layer) if layer < own => {}
                    Some(LOWEST) if own == LOWEST && has_lowest => {}
                    Some(layer) if layer == own => {
                        violations.push(format!("{place} leads sideways to `{other}`"))
                    }
                    Some(_) => violations.push(format!("{place} leads up to `{other}`")),
                    None => violations.push(format!("{place} leads to `{other}`, which has no layer")),
                },
                None => {}
            }
        }
    }
    violations
}

/// Returns the module at the crate's root in which a target is, or an empty name for the root itself.
fn top_of(target: &Target) -> &str {
    let (Target::Module(module) | Target::Item { module, .. }) = target;
    module.split("::").next().unwrap_or_default()
}

/// Returns a violation for each package that has to forbid unsafe code, and does not.
pub(crate) fn forbids_unsafe_code(packages: &[Package]) -> Vec<String> {
    let open = packages.iter().filter(|package| package.name != WITH_UNSAFE_CODE).filter(|package| {
        !package.modules[""].attributes.iter().any(|attribute| code(&attribute.meta) == "forbid(unsafe_code)")
    });
    open.map(|package| format!("{}: begin with #![forbid(unsafe_code)]", package.modules[""].file)).collect()
}

/// Returns a violation for each file with unsafe code that is neither in the package for it nor in [`UNSAFE_TESTS`], and for each entry
/// of this list without such a file.
pub(crate) fn unsafe_code(files: &[SourceFile]) -> Vec<String> {
    let mut listed: BTreeSet<&str> = UNSAFE_TESTS.iter().map(|(path, _)| *path).collect();
    let mut violations = Vec::new();
    for file in files.iter().filter(|file| !file.path.starts_with(UNSAFE_FOLDER)) {
        let entry = UNSAFE_TESTS.iter().find(|(path, _)| file.path == *path);
        if has_unsafe_code(file) && !entry.is_some_and(|(path, _)| listed.remove(path)) {
            violations.push(format!("{}: unsafe code belongs into `{UNSAFE_FOLDER}`", file.path));
        }
    }
    violations
        .extend(listed.iter().map(|path| format!("{path}: has no unsafe code: remove it from the list")));
    violations
}

/// Returns whether a file has the word `unsafe` outside of comments and strings.
fn has_unsafe_code(file: &SourceFile) -> bool {
    fn has(tokens: TokenStream) -> bool {
        tokens.into_iter().any(|token| match token {
            TokenTree::Group(group) => has(group.stream()),
            TokenTree::Ident(name) => name == "unsafe",
            _ => false,
        })
    }
    file.text.contains("unsafe")
        && has(file.text.parse().unwrap_or_else(|error| panic!("{}: {error}", file.path)))
}

/// Returns the uses of clocks and of IO in pure modules.
pub(crate) fn purity(package: &Package) -> Vec<String> {
    let is_in = |module: &str, top: &str| {
        module.strip_prefix(top).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
    };
    let mut violations = Vec::new();
    for (path, module) in &package.modules {
        let Some((_, top)) = PURE.iter().find(|(name, top)| *name == package.name && is_in(path, top)) else {
            continue;
        };
        let impure = imports(package, path).into_iter().filter(is_impure);
        violations
            .extend(impure.map(|import| format!("{}: `{}` in `{top}`", module.file, import.path.join("::"))));
    }
    violations
}

fn is_impure(import: &Import) -> bool {
    if let [first, method] = &import.path[..]
        && first.is_empty()
    {
        return IMPURE_METHODS.contains(&method.as_str());
    }
    let path = format!("::{}::", import.path.join("::"));
    IMPURE.iter().any(|impure| path.contains(&format!("::{impure}::")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CRATES: &[(&str, &str, u8)] =
        &[("tonic_rdma_verbs", "", 0), ("tonic_rdma", "", 1), ("tonic_rdma_tensor", "", 2)];

    /// Returns a package of four layers, with `text` in the module `name`.
    fn with(name: &str, text: &str) -> Package {
        let modules = ["wire", "protocol", "endpoint", "transport"];
        let mut files = vec![(
            "src/lib.rs".to_owned(),
            modules.map(|name| format!("mod {name};")).concat()
                + "pub use endpoint::Config; pub struct Root;",
        )];
        for module in modules {
            let text = if module == name { text } else { "" };
            files.push((format!("src/{module}/mod.rs"), format!("pub struct X; pub struct Config; {text}")));
        }
        Package::from_files("tonic_rdma", "src", files)
    }

    #[test]
    fn an_import_that_does_not_go_down_is_named() {
        for (module, text, expected) in [
            ("protocol", "use crate::endpoint::X as Y;", "`crate::endpoint::X` leads up to `endpoint`"),
            ("wire", "use super::{protocol};", "leads up to `protocol`"),
            ("wire", "fn f() { crate::transport::g() }", "leads up to `transport`"),
            ("wire", "mod deep { fn f() -> super::super::protocol::X {} }", "leads up to `protocol`"),
            ("wire", "mod deep { use crate::Config; }", "leads up to `endpoint`"),
            ("endpoint", "use crate::Root;", "is defined at the root of the crate"),
            ("endpoint", "use tonic_rdma_tensor::Tensor;", "is a crate that is not below this one"),
        ] {
            let found = layers(&with(module, text), CRATES);
            assert!(found.len() == 1 && found[0].contains(expected), "{module}, {text}: {found:?}");
        }
        let files = [("src/lib.rs", "mod news;"), ("src/news.rs", "")];
        let files = files.map(|(path, text)| (path.to_owned(), text.to_owned()));
        let found = layers(&Package::from_files("tonic_rdma", "src", files), CRATES);
        assert!(found.len() == 1 && found[0].contains("`news` has no layer"), "{found:?}");
    }

    #[test]
    fn an_import_that_goes_down_is_fine() {
        for (module, text) in [
            (
                "endpoint",
                "use crate::{protocol::X as P, wire}; use tonic_rdma_verbs::memory; fn f() { self::g() }",
            ),
            ("transport", "use crate::Config as C; mod deep { use super::X; }"),
            (
                "wire",
                "// use crate::endpoint::X;\n/// [`crate::endpoint`]\nconst A: &str = \"crate::endpoint\";",
            ),
            ("wire", "#[cfg(test)] mod tests { use crate::endpoint::X; }"),
        ] {
            assert_eq!(layers(&with(module, text), CRATES), [""; 0], "{module}, {text}");
        }
    }

    #[test]
    fn modules_of_the_lowest_layer_are_a_group_in_verbs_only() {
        let package = |name: &str, low: &str| {
            let files = [
                ("src/lib.rs".to_owned(), format!("mod {low}; mod work;")),
                (format!("src/{low}.rs"), "use crate::work::W;".to_owned()),
                ("src/work.rs".to_owned(), "pub struct W;".to_owned()),
            ];
            Package::from_files(name, "src", files)
        };
        assert_eq!(layers(&package("tonic_rdma_verbs", "error"), CRATES), [""; 0]);
        assert_eq!(layers(&package("tonic_rdma_verbs", "soft"), CRATES), [""; 0]);
        let files = [
            ("src/lib.rs", "mod soft; mod memory;"),
            ("src/soft.rs", "use crate::memory::M;"),
            ("src/memory.rs", "pub struct M;"),
        ];
        let files = files.map(|(path, text)| (path.to_owned(), text.to_owned()));
        let found = layers(&Package::from_files("tonic_rdma_verbs", "src", files), CRATES);
        assert!(found.len() == 1 && found[0].contains("sideways to `memory`"), "{found:?}");
    }

    #[test]
    fn a_package_that_does_not_forbid_unsafe_code_is_named() {
        let package = |name: &str, text: &str| {
            Package::from_files(name, "src", [("src/lib.rs".to_owned(), text.to_owned())])
        };
        let packages = [
            package("tonic_rdma_verbs", ""),
            package("tonic_rdma", "//! Docs.\n#![forbid(unsafe_code)]"),
            package("tonic_rdma_tensor", "//! #![forbid(unsafe_code)]"),
            package("tonic_rdma_cli", "#![deny(unsafe_code)]"),
        ];
        assert_eq!(forbids_unsafe_code(&packages).len(), 2);
    }

    #[test]
    fn unsafe_code_outside_its_package_is_named() {
        let found = |path: &str, text: &str| {
            let listed = UNSAFE_TESTS.len();
            unsafe_code(&[SourceFile::new(path, text)]).len() - listed
        };
        for text in [
            "fn f() { unsafe { g() } }",
            "unsafe fn f() {}",
            "unsafe impl Send for A {}",
            "unsafe trait T {}",
            "extern \"C\" { fn f(); } trait T { unsafe fn g(); }",
            "#[unsafe(no_mangle)] fn f() {}",
            "fn f() { assert!(unsafe { g() }) }",
        ] {
            assert_eq!(found("tests/new.rs", text), 1, "{text}");
            assert_eq!(found("verbs/src/new.rs", text), 0, "{text}");
        }
        assert_eq!(
            found(
                "tests/new.rs",
                "#![forbid(unsafe_code)]\n/// unsafe\nfn unsafe_name() { \"unsafe\"; } // unsafe"
            ),
            0
        );
    }

    #[test]
    fn clocks_and_io_in_the_core_are_named() {
        for bad in [
            "use tokio::time;",
            "fn f() { Instant::now() }",
            "fn f() { std::time::SystemTime::UNIX_EPOCH }",
            "fn f() { start.elapsed() }",
            "fn f() { debug_assert!(Instant::now() > x) }",
            "use std::net::IpAddr;",
        ] {
            assert_eq!(purity(&with("protocol", bad)).len(), 1, "{bad}");
            assert_eq!(purity(&with("protocol", &format!("mod deep {{ {bad} }}"))).len(), 1, "{bad}");
            assert_eq!(purity(&with("endpoint", bad)), [""; 0], "{bad}");
            assert_eq!(
                purity(&with("protocol", &format!("#[cfg(test)] mod tests {{ {bad} }}"))),
                [""; 0],
                "{bad}"
            );
        }
        let good = "use std::time::Instant; fn f(now: Instant, elapsed: u8) { now.duration_since(self.start) } // tokio";
        assert_eq!(purity(&with("protocol", good)), [""; 0]);
    }
}
