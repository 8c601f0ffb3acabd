//! The rules, each from source files to a list of violations.

use crate::lexer::{Token, tokens};
use crate::paths::root_names;

/// Floor of each module at the root of the crate, in tenths: a module imports from lower floors only. Two modules with
/// the same number don't know each other.
const FLOORS: &[(&str, u8)] = &[
    ("wire", 0),
    // Counters and spans that any floor above may use; knows none of them.
    ("telemetry", 5),
    ("protocol", 10),
    ("verbs", 10),
    ("memory", 20),
    // Settings, read by the endpoint and all above.
    ("config", 25),
    ("endpoint", 30),
    ("transport", 40),
    ("grpc", 40),
    // Its devices find one another over the transport.
    ("tensor", 45),
    ("collective", 50),
    ("graph", 50),
];

/// Modules that may contain unsafe code.
const UNSAFE: &[&str] = &["verbs", "memory"];

/// Modules, with all that is in them, that compute, and neither wait nor look at the time.
const PURE: &[&str] = &["wire", "protocol", "tensor::rendezvous"];

/// What they don't name. Not `Instant`: they are given the time.
const IMPURE: &[&str] = &[
    "tokio",
    "rustix",
    "libc",
    "socket2",
    "std :: net",
    "std :: os",
    "Instant :: now",
    ". elapsed ( )",
    "SystemTime",
    "thread :: sleep",
];

/// Lines that a file may have.
const LINES: usize = 600;

/// A file, by its path from the root of the repository.
pub(crate) struct SourceFile {
    pub(crate) path: String,
    text: String,
    tokens: Vec<Token>,
}

impl SourceFile {
    pub(crate) fn new(path: impl Into<String>, text: impl Into<String>) -> Self {
        let text = text.into();
        Self { path: path.into(), tokens: tokens(&text), text }
    }

    /// Where its content is in the crate: `["verbs", "soft"]` for `src/verbs/soft/mod.rs`, nothing for `src/lib.rs`.
    fn module(&self) -> Vec<String> {
        let inner = self.path.trim_start_matches("src/").trim_end_matches(".rs");
        let mut module: Vec<_> = inner.split('/').map(str::to_owned).collect();
        if matches!(module.last().map(String::as_str), Some("mod" | "lib")) {
            module.pop();
        }
        module
    }

    /// Line of each place where the tokens of `pattern`, separated by blanks, follow one another.
    fn lines_with(&self, pattern: &str) -> Vec<usize> {
        let pattern: Vec<_> = pattern.split(' ').collect();
        let windows = self.tokens.windows(pattern.len());
        let hits = windows.filter(|window| window.iter().map(|token| &token.text).eq(&pattern));
        hits.map(|window| window[0].line).collect()
    }
}

/// Imports that don't go down.
pub(crate) fn imports(file: &SourceFile) -> Vec<String> {
    let module = file.module();
    let Some(top) = module.first() else { return Vec::new() };
    let Some(floor) = floor(top) else {
        return vec![format!(
            "{}: module `{top}` has no floor: give it one in tests/layering/rules.rs",
            file.path
        )];
    };
    let mut violations = Vec::new();
    for found in root_names(&file.tokens, &module) {
        let place = format!("{}:{}", file.path, found.line);
        let Some(name) = found.name else {
            violations.push(format!("{place}: imports the root of the crate: name the module"));
            continue;
        };
        match self::floor(&name) {
            _ if name == *top => {}
            Some(other) if other < floor => {}
            Some(other) => {
                let direction = if other == floor { "sideways" } else { "up" };
                violations.push(format!("{place}: `{top}` reaches {direction} to `{name}`"));
            }
            None => violations
                .push(format!("{place}: `crate::{name}` is not a module with a floor: name its module")),
        }
    }
    violations
}

/// Modules outside [`UNSAFE`] that don't forbid unsafe code.
pub(crate) fn unsafe_code(files: &[SourceFile]) -> Vec<String> {
    let is_root_of_module = |file: &&SourceFile| match &file.module()[..] {
        [top] => !UNSAFE.contains(&top.as_str()),
        _ => false,
    };
    let allowed = |file: &&SourceFile| file.lines_with("# ! [ forbid ( unsafe_code ) ]").is_empty();
    let open = files.iter().filter(is_root_of_module).filter(allowed);
    open.map(|file| format!("{}: begin with #![forbid(unsafe_code)]", file.path)).collect()
}

/// Clocks and IO where there should be none.
pub(crate) fn purity(file: &SourceFile) -> Vec<String> {
    let module = file.module();
    // Tests need a moment to begin at.
    if module.iter().any(|name| name == "tests") {
        return Vec::new();
    }
    let path = module.join("::");
    let is_in = |pure: &&&str| {
        path.strip_prefix(**pure).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
    };
    let Some(top) = PURE.iter().find(is_in) else { return Vec::new() };
    let hits = IMPURE.iter().flat_map(|what| file.lines_with(what).into_iter().map(move |line| (what, line)));
    hits.map(|(what, line)| format!("{}:{line}: `{}` in `{top}`", file.path, what.replace(' ', ""))).collect()
}

/// A file that is too long.
pub(crate) fn length(file: &SourceFile) -> Option<String> {
    let lines = file.text.lines().count();
    (lines > LINES).then(|| {
        format!("{}: {lines} lines, {LINES} at most: what is the second thing that it is about?", file.path)
    })
}

fn floor(module: &str) -> Option<u8> {
    FLOORS.iter().find(|(name, _)| *name == module).map(|&(_, floor)| floor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_import_that_does_not_go_down_is_named() {
        let cases = [
            (
                "src/memory/pool.rs",
                "\nuse crate::endpoint::X;",
                "src/memory/pool.rs:2: `memory` reaches up to `endpoint`",
            ),
            (
                "src/protocol/mod.rs",
                "use crate::verbs::X;",
                "src/protocol/mod.rs:1: `protocol` reaches sideways to `verbs`",
            ),
            (
                "src/verbs/soft/ring.rs",
                "use super::super::super::memory::X;",
                "`verbs` reaches up to `memory`",
            ),
            ("src/wire/mod.rs", "use super::{verbs};", "`wire` reaches up to `verbs`"),
            ("src/verbs/mod.rs", "use crate::{wire, transport};", "`verbs` reaches up to `transport`"),
            ("src/verbs/mod.rs", "use crate::Config;", "`crate::Config` is not a module with a floor"),
            ("src/verbs/mod.rs", "use crate::*;", "imports the root of the crate"),
            ("src/news/mod.rs", "", "module `news` has no floor"),
            ("src/news.rs", "", "module `news` has no floor"),
        ];
        for (path, text, expected) in cases {
            let found = imports(&SourceFile::new(path, text));
            assert!(found.len() == 1 && found[0].contains(expected), "{path}, {text}: {found:?}");
        }
    }

    #[test]
    fn an_import_that_goes_down_is_fine() {
        let cases = [
            ("src/memory/pool.rs", "use crate::verbs::X; use crate::memory::Y; use super::Z;"),
            ("src/endpoint/stream/mod.rs", "use crate::{config::Config, memory, protocol, verbs, wire};"),
            (
                "src/verbs/mod.rs",
                "// use crate::endpoint::X;\n/// [`crate::endpoint`]\nconst A: &str = \"crate::endpoint\";",
            ),
            ("src/lib.rs", "pub use crate::transport::X;"),
        ];
        for (path, text) in cases {
            assert_eq!(imports(&SourceFile::new(path, text)), [""; 0], "{path}");
        }
    }

    #[test]
    fn a_module_that_does_not_forbid_unsafe_code_is_named() {
        let file = |path: &str, text: &str| SourceFile::new(path, text);
        let files = [
            file("src/lib.rs", ""),
            file("src/wire/mod.rs", "//! Docs.\n#![forbid(unsafe_code)]"),
            file("src/wire/head.rs", ""),
            file("src/memory/mod.rs", ""),
            file("src/verbs/soft/mod.rs", ""),
            file("src/endpoint/mod.rs", "//! #![forbid(unsafe_code)]"),
            file("src/config.rs", "#![deny(unsafe_code)]"),
        ];
        let found = unsafe_code(&files);
        let expected = ["src/endpoint/mod.rs", "src/config.rs"]
            .map(|path| format!("{path}: begin with #![forbid(unsafe_code)]"));
        assert_eq!(found, expected);
    }

    #[test]
    fn clocks_and_io_in_the_core_are_named() {
        for bad in [
            "use tokio::time;",
            "Instant::now()",
            "std::time::SystemTime::UNIX_EPOCH",
            "start.elapsed()",
            "use std::net::IpAddr;",
        ] {
            assert_eq!(purity(&SourceFile::new("src/protocol/core.rs", bad)).len(), 1, "{bad}");
            assert_eq!(purity(&SourceFile::new("src/tensor/rendezvous/core.rs", bad)).len(), 1, "{bad}");
            for path in ["src/endpoint/core.rs", "src/tensor/link.rs", "src/tensor/rendezvous2.rs"] {
                assert_eq!(purity(&SourceFile::new(path, bad)), [""; 0], "{bad}");
            }
        }
        let good = "use std::time::Instant; fn f(now: Instant, elapsed: Duration) { now.duration_since(self.start) } // tokio";
        assert_eq!(purity(&SourceFile::new("src/protocol/core.rs", good)), [""; 0]);
    }

    #[test]
    fn a_long_file_is_named() {
        assert_eq!(length(&SourceFile::new("src/a.rs", "\n".repeat(600))), None);
        assert!(length(&SourceFile::new("src/a.rs", "\n".repeat(601))).is_some());
    }
}
