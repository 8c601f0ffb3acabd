//! Lists the paths in a module's code, and the items that they lead to.

use std::collections::BTreeSet;

use syn::visit::{self, Visit};
use syn::{Attribute, Item, Visibility};

use super::package::{Module, Package};
use super::resolve::{Target, leaves};
use super::text::{is_test, without_strings};

/// A path in the code of a module.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Import {
    pub(crate) module: String,
    pub(crate) path: Vec<String>,
    /// The module or item of the package that the path leads to; `None` for names of other crates and for local names.
    pub(crate) target: Option<Target>,
}

/// Returns the paths in `module`: the paths of its `use` items and the paths in its code, with those in calls of macros. Tests are left
/// out. A `pub use` is no import, because the module does not depend on a name that it only re-exports.
pub(crate) fn imports(package: &Package, module: &str) -> BTreeSet<Import> {
    let import = |path: Vec<String>| {
        let target = package.resolve_roughly(module, &path);
        Import { module: module.to_owned(), path, target }
    };
    mentions(&package.modules[module]).into_iter().map(import).collect()
}

/// Returns the paths in a module, and the methods that its code calls, as paths that begin with an empty name.
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
        if attributes(item).iter().any(is_test) {
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
        self.paths.extend(paths_in(&call.tokens.to_string()));
        visit::visit_macro(self, call);
    }

    fn visit_attribute(&mut self, _: &'ast Attribute) {}

    fn visit_visibility(&mut self, _: &'ast Visibility) {}
}

/// Returns the paths in a text of tokens: words that `::` joins, such as `a :: b`. In macros `$crate` has a blank.
fn paths_in(tokens: &str) -> Vec<Vec<String>> {
    let tokens = without_strings(tokens).replace("::", " :: ");
    let mut paths: Vec<Vec<String>> = Vec::new();
    let mut joined = false;
    for word in tokens.split(|letter: char| letter.is_whitespace() || "$(){}[]<>,;&*!?=.".contains(letter)) {
        let is_name = word.starts_with(|letter: char| letter.is_alphabetic() || letter == '_');
        match word {
            "" => {}
            "::" => joined = true,
            word if is_name => match paths.last_mut().filter(|_| joined) {
                Some(path) => path.push(word.to_owned()),
                None => paths.push(vec![word.to_owned()]),
            },
            _ => {}
        }
        joined = word == "::" || (joined && word.is_empty());
    }
    paths
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
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
        assert_eq!(found("use a::{b, c::*};"), ["a::b", "a::c"]);
        assert_eq!(found("struct S { f: a::T<b::U> }"), ["a::T", "b::U"]);
        assert_eq!(found("fn f() { a::g(); x.h() }"), ["::h", "a::g", "x"]);
        assert_eq!(found("fn f() { println!(\"{}\", a::b::g(c)) }"), ["a::b::g", "c", "println"]);
        assert_eq!(
            found("macro_rules! m { () => { /** d::e */ $crate::a::f(\"b::c\") } }"),
            ["crate::a::f", "doc", "macro_rules"]
        );
        assert_eq!(found("fn f() { use a::b; }"), ["a::b"]);
    }

    #[test]
    fn tests_comments_and_re_exports_are_no_imports() {
        assert_eq!(
            found("/// [`a::b`]\npub use a::c; // d::e\n#[cfg(test)] mod tests { use f::g; }"),
            [""; 0]
        );
        assert_eq!(found("#[cfg(test)] use a::b; #[cfg(test)] impl S { fn f() { c::d() } }"), [""; 0]);
        assert_eq!(found("const A: &str = \"a::b\";"), ["str"]);
    }
}
