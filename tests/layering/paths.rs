//! Finds what a file names at the root of the crate: `crate::a`, `crate::{a, b}`, `super::super::a` and the like.

use crate::lexer::Token;

/// A name at the root of the crate. `None` stands for the root itself, by `crate::*` or `use crate as other`, behind
/// which anything could be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RootName {
    pub(crate) name: Option<String>,
    pub(crate) line: usize,
}

/// All root names in `tokens`, the content of the module `module` (`["verbs", "soft"]` for `src/verbs/soft/mod.rs`).
pub(crate) fn root_names(tokens: &[Token], module: &[String]) -> Vec<RootName> {
    let mut walker = Walker { tokens, found: Vec::new() };
    let mut inline = InlineModules { module: module.to_vec(), open: Vec::new(), depth: 0 };
    let mut at = 0;
    while at < tokens.len() {
        inline.see(tokens, at);
        let after_path = at > 0 && tokens[at - 1].text == "::";
        at = match walker.text(at) {
            // `extern crate self as root`
            "crate" if walker.text(at + 1) == "self" => {
                walker.found.push(RootName { name: None, line: tokens[at].line });
                at + 2
            }
            "crate" | "super" if !after_path => walker.path(at, inline.module.clone()),
            "self" if !after_path && walker.text(at + 1) == "::" => walker.path(at, inline.module.clone()),
            _ => at + 1,
        };
    }
    walker.found
}

struct Walker<'a> {
    tokens: &'a [Token],
    found: Vec<RootName>,
}

impl Walker<'_> {
    fn text(&self, at: usize) -> &str {
        self.tokens.get(at).map_or("", |token| &token.text)
    }

    /// Follows the path that begins at `at` within module `base`, as far as its first name; returns where that ends.
    fn path(&mut self, mut at: usize, mut base: Vec<String>) -> usize {
        loop {
            match self.text(at) {
                "crate" => base.clear(),
                "super" => drop(base.pop()),
                "self" => {}
                "{" => return self.group(at + 1, &base),
                _ => {
                    if base.is_empty() {
                        let name = Some(self.text(at).to_owned()).filter(|name| name != "*");
                        self.found.push(RootName { name, line: self.tokens[at].line });
                    }
                    return at + 1;
                }
            }
            if self.text(at + 1) != "::" {
                let renamed = self.text(at + 1) == "as";
                if base.is_empty() && renamed {
                    self.found.push(RootName { name: None, line: self.tokens[at].line });
                }
                return at + 1;
            }
            at += 2;
        }
    }

    /// The members of a group, whose opening brace is just before `at`; returns where it ends.
    fn group(&mut self, mut at: usize, base: &[String]) -> usize {
        let mut depth = 1;
        let mut first = true;
        while depth > 0 && at < self.tokens.len() {
            if first && !matches!(self.text(at), "}" | ",") {
                first = false;
                at = self.path(at, base.to_vec());
                continue;
            }
            match self.text(at) {
                "{" => depth += 1,
                "}" => depth -= 1,
                "," if depth == 1 => first = true,
                _ => {}
            }
            at += 1;
        }
        at
    }
}

/// Keeps track of `mod name { … }` within a file.
struct InlineModules {
    module: Vec<String>,
    /// Brace depth inside each open inline module.
    open: Vec<usize>,
    depth: usize,
}

impl InlineModules {
    fn see(&mut self, tokens: &[Token], at: usize) {
        let text = |back: usize| at.checked_sub(back).map_or("", |at| tokens[at].text.as_str());
        match text(0) {
            "{" => {
                self.depth += 1;
                if text(2) == "mod" {
                    self.module.push(text(1).to_owned());
                    self.open.push(self.depth);
                }
            }
            "}" => {
                if self.open.last() == Some(&self.depth) {
                    self.open.pop();
                    self.module.pop();
                }
                self.depth = self.depth.saturating_sub(1);
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lexer::tokens;

    fn names(source: &str, module: &[&str]) -> Vec<String> {
        let module: Vec<_> = module.iter().map(|&name| name.to_owned()).collect();
        let found = root_names(&tokens(source), &module).into_iter();
        found.map(|found| found.name.unwrap_or_else(|| "*".to_owned())).collect()
    }

    #[test]
    fn paths_from_the_root() {
        assert_eq!(names("use crate::verbs::Access;", &["memory"]), ["verbs"]);
        assert_eq!(names("let x: crate::wire::Head = f(crate::verbs::g());", &["memory"]), ["wire", "verbs"]);
        assert_eq!(
            names("use crate::{wire, verbs::{a, b}, memory as m};", &["x"]),
            ["wire", "verbs", "memory"]
        );
        assert_eq!(names("use {crate::wire, crate::verbs};", &["x"]), ["wire", "verbs"]);
        assert_eq!(names("macro_rules! m { () => { $crate::wire::f() } }", &["x"]), ["wire"]);
        assert_eq!(names("pub(crate) fn f() {} pub(in crate::memory) fn g() {}", &["memory"]), ["memory"]);
    }

    #[test]
    fn relative_paths_that_reach_the_root() {
        assert_eq!(names("use super::wire;", &["memory"]), ["wire"]);
        assert_eq!(names("use super::slab::Slab;", &["memory", "pool"]), [""; 0]);
        assert_eq!(names("use super::super::endpoint::X;", &["memory", "pool"]), ["endpoint"]);
        assert_eq!(names("use super::{slab, super::endpoint};", &["memory", "pool"]), ["endpoint"]);
        assert_eq!(
            names("use super::super::{wire, endpoint::{A, B}};", &["memory", "pool"]),
            ["wire", "endpoint"]
        );
        assert_eq!(names("use self::super::super::endpoint;", &["memory", "pool"]), ["endpoint"]);
        assert_eq!(names("fn f(&self) { self.g(); }", &["memory"]), [""; 0]);
    }

    #[test]
    fn inline_modules_are_a_level() {
        let source = "mod tests { use super::*; use super::super::wire; mod deep { use super::super::Pool; } } \
                      use super::verbs;";
        assert_eq!(names(source, &["memory"]), ["wire", "verbs"]);
    }

    #[test]
    fn the_root_itself() {
        for source in ["use crate::*;", "use crate as root;", "use crate::{self as root};", "use super::*;"] {
            assert_eq!(names(source, &["memory"]), ["*"], "{source}");
        }
        assert_eq!(names("extern crate self as root;", &["memory"]), ["*"]);
        assert_eq!(names("use super::super as root;", &["memory", "pool"]), ["*"]);
    }
}
