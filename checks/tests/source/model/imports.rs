//! Lists the paths in a module's code, and the items that they lead to.

use std::collections::BTreeSet;

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{Attribute, Item, Visibility};

use super::package::{Module, Package};
use super::resolve::{Target, leaves};
use super::text::{is_test, parts};

/// A path in the code of a module.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Import {
    pub(crate) module: String,
    pub(crate) path: Vec<String>,
    /// The module or item of the package that the path leads to; `None` for names of other crates and for
    /// local names.
    pub(crate) target: Option<Target>,
}

/// Returns the paths in `module`: the paths of its `use` items and the paths in its code, with those in calls
/// of macros. Tests are left out. A `pub use` is no import, because the module does not depend on a name that
/// it only re-exports.
pub(crate) fn imports(package: &Package, module: &str) -> BTreeSet<Import> {
    let import = |path: Vec<String>| {
        let target = package.resolve_roughly(module, &path);
        Import { module: module.to_owned(), path, target }
    };
    mentions(&package.modules[module]).into_iter().map(import).collect()
}

/// Returns the paths in a module, and the methods that its code calls, as paths that begin with an empty
/// name.
fn mentions(module: &Module) -> BTreeSet<Vec<String>> {
    let mut collector = Collector { paths: BTreeSet::new() };
    for item in &module.items {
        collector.visit_item(item);
    }
    collector.paths
}

struct Collector {
    paths: BTreeSet<Vec<String>>,
}

impl<'ast> Visit<'ast> for Collector {
    fn visit_item(&mut self, item: &'ast Item) {
        if parts(item).1.iter().any(is_test) {
            return;
        }
        match item {
            Item::Use(item) if matches!(item.vis, Visibility::Inherited) => {
                self.paths.extend(leaves(&item.tree).into_iter().map(|leaf| leaf.path));
            }
            Item::Use(_) => {}
            item => visit::visit_item(self, item),
        }
    }

    // A `use` within a function.
    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        self.paths.extend(leaves(&item.tree).into_iter().map(|leaf| leaf.path));
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if !item.attrs.iter().any(is_test) {
            visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        self.paths.insert(path.segments.iter().map(|segment| segment.ident.to_string()).collect());
        visit::visit_path(self, path);
    }

    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        self.paths.insert(vec![String::new(), call.method.to_string()]);
        visit::visit_expr_method_call(self, call);
    }

    // syn does not parse the arguments of macros. All paths among their tokens count.
    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        paths_in(call.tokens.clone(), &mut self.paths);
        visit::visit_macro(self, call);
    }

    fn visit_attribute(&mut self, _: &'ast Attribute) {}

    fn visit_visibility(&mut self, _: &'ast Visibility) {}
}

/// Adds the paths among tokens: names that `::` joins.
fn paths_in(tokens: TokenStream, paths: &mut BTreeSet<Vec<String>>) {
    let (mut path, mut colons) = (Vec::new(), 0);
    for token in tokens {
        match token {
            TokenTree::Ident(name) if colons == 2 && !path.is_empty() => path.push(name.to_string()),
            TokenTree::Ident(name) => _ = paths.insert(std::mem::replace(&mut path, vec![name.to_string()])),
            TokenTree::Punct(mark) if mark.as_char() == ':' => {
                colons += 1;
                continue;
            }
            TokenTree::Group(group) => paths_in(group.stream(), paths),
            _ => _ = paths.insert(std::mem::take(&mut path)),
        }
        colons = 0;
    }
    paths.insert(path);
    paths.remove(&Vec::new());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Vec<String> {
        let files = [("src/lib.rs".to_owned(), text.to_owned())];
        let package = Package::from_files("p", "src", files);
        imports(&package, "").into_iter().map(|import| import.path.join("::")).collect()
    }

    #[test]
    fn paths_are_found_in_all_of_the_code() {
        assert_eq!(found("use a::{b, c::*}; struct S { f: d::T<e::U> }"), ["a::b", "a::c", "d::T", "e::U"]);
        assert_eq!(found("fn f() { use c::d; a::g(); x.h() }"), ["::h", "a::g", "c::d", "x"]);
        assert_eq!(
            found("macro_rules! m { () => { /** d::e */ $crate::a::f(\"b::c\") } }"),
            ["crate::a::f", "doc", "macro_rules"]
        );
        let none = "/// [`a::b`]\npub use a::c; // d::e\n#[cfg(test)] mod tests { use f::g; } #[cfg(test)] use a::b;";
        assert_eq!(found(none), [""; 0]);
    }
}
