//! Finds the module or item of a path, through imports and re-exports, within one package.

use syn::{Item, ItemUse, UseTree};

use super::package::{Module, Package, join};
use super::text::{is_test, parts};

/// The module or item that a path leads to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Target {
    Module(String),
    /// An item that a module defines.
    Item {
        module: String,
        name: String,
    },
}

/// A name that a `use` brings into a module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Leaf {
    /// The name in the module; `None` for `*`.
    pub(crate) name: Option<String>,
    pub(crate) path: Vec<String>,
}

/// Maximum number of steps. A path with more steps is taken for an endless circle of imports.
const DEPTH: u8 = 16;

impl Package {
    /// Returns the module or item that `path` leads to from code in `module`. Returns `None` for a path into
    /// another crate, and for a path whose first name is no item of the package: a local variable, a type
    /// parameter, or a name of the prelude.
    pub(crate) fn resolve(&self, module: &str, path: &[String]) -> Option<Target> {
        self.resolve_within(module, path, DEPTH)
    }

    /// Returns the target of `path`, or the target of its longest part that leads to one. The last name may
    /// be of another crate, or an item that a macro defines.
    pub(crate) fn resolve_roughly(&self, module: &str, path: &[String]) -> Option<Target> {
        let shorter = || self.resolve_roughly(module, path.split_last()?.1);
        self.resolve(module, path).or_else(shorter)
    }

    fn resolve_within(&self, module: &str, path: &[String], depth: u8) -> Option<Target> {
        let depth = depth.checked_sub(1)?;
        let (first, rest) = path.split_first()?;
        let mut at = match first.as_str() {
            "crate" => Target::Module(String::new()),
            "self" => Target::Module(module.to_owned()),
            "super" => Target::Module(parent(module)),
            name => self.name(module, name, rest.is_empty(), depth)?,
        };
        for (index, segment) in rest.iter().enumerate() {
            let Target::Module(module) = &at else { break };
            at = match segment.as_str() {
                "super" => Target::Module(parent(module)),
                "self" => at,
                name => self.name(module, name, index + 1 == rest.len(), depth)?,
            };
        }
        Some(at)
    }

    /// Returns the item, child module or import with this `name` in `module`.
    fn name(&self, module: &str, name: &str, is_last: bool, depth: u8) -> Option<Target> {
        let content = self.modules.get(module)?;
        if content.items.iter().any(|item| defined_name(item).as_deref() == Some(name)) {
            return Some(Target::Item { module: module.to_owned(), name: name.to_owned() });
        }
        let child = join(module, name);
        if self.modules.contains_key(&child) {
            // After `mod name; use name::name;` the path `name` leads to the function, and a longer path
            // leads into the module.
            let leaf = content.uses().flat_map(|item| leaves(&item.tree)).find(|leaf| {
                leaf.name.as_deref() == Some(name) && leaf.path.first().map(String::as_str) == Some(name)
            });
            let inside = leaf.filter(|leaf| is_last && leaf.path.len() > 1);
            let inside = inside.and_then(|leaf| self.resolve_within(&child, &leaf.path[1..], depth));
            return inside.or(Some(Target::Module(child)));
        }
        let leaves: Vec<Leaf> = content.uses().flat_map(|item| leaves(&item.tree)).collect();
        // `#[macro_export]` puts a macro at the root.
        if module.is_empty()
            && let Some(home) = self.exported_macro(name)
        {
            return Some(Target::Item { module: home, name: name.to_owned() });
        }
        // `use name::name` must not look for `name` in itself.
        let from_elsewhere = |leaf: &&Leaf| leaf.path.first().map(String::as_str) != Some(name);
        let named = leaves.iter().find(|leaf| leaf.name.as_deref() == Some(name)).filter(from_elsewhere);
        if let Some(leaf) = named {
            return self.resolve_within(module, &leaf.path, depth);
        }
        let globs = leaves.iter().filter(|leaf| leaf.name.is_none());
        globs.filter_map(|leaf| self.resolve_within(module, &leaf.path, depth)).find_map(
            |target| match target {
                Target::Module(other) if other != module => {
                    self.name(&other, name, is_last, depth.checked_sub(1)?)
                }
                _ => None,
            },
        )
    }

    /// Returns the module that defines an exported macro.
    fn exported_macro(&self, name: &str) -> Option<String> {
        let is_it = |item: &Item| matches!(item, Item::Macro(of) if of.ident.as_ref().is_some_and(|ident| ident == name) && of.attrs.iter().any(|found| found.path().is_ident("macro_export")));
        self.modules.iter().find(|(_, content)| content.items.iter().any(is_it)).map(|(path, _)| path.clone())
    }

    /// Returns the file that defines a target.
    pub(crate) fn file(&self, target: &Target) -> &str {
        let (Target::Module(module) | Target::Item { module, .. }) = target;
        &self.modules[module].file
    }
}

impl Module {
    /// Returns its imports and re-exports.
    pub(crate) fn uses(&self) -> impl Iterator<Item = &ItemUse> {
        self.items.iter().filter_map(|item| match item {
            Item::Use(item) if !item.attrs.iter().any(is_test) => Some(item),
            _ => None,
        })
    }
}

/// Returns all names that a `use` brings.
pub(crate) fn leaves(tree: &UseTree) -> Vec<Leaf> {
    let leaf = |name: Option<String>, path: Vec<String>| vec![Leaf { name, path }];
    match tree {
        UseTree::Name(name) => leaf(Some(name.ident.to_string()), vec![name.ident.to_string()]),
        UseTree::Rename(rename) => leaf(Some(rename.rename.to_string()), vec![rename.ident.to_string()]),
        UseTree::Glob(_) => leaf(None, Vec::new()),
        UseTree::Group(group) => group.items.iter().flat_map(leaves).collect(),
        UseTree::Path(path) => {
            let within = |mut leaf: Leaf| {
                let own = path.ident.to_string();
                // `a::{self}` brings `a`.
                if leaf.path == ["self"] {
                    leaf.path.clear();
                    leaf.name = leaf.name.map(|name| if name == "self" { own.clone() } else { name });
                }
                leaf.path.insert(0, own);
                leaf
            };
            leaves(&path.tree).into_iter().map(within).collect()
        }
    }
}

/// Returns the name that an item defines; `None` for imports, `impl` blocks and calls of macros.
pub(crate) fn defined_name(item: &Item) -> Option<String> {
    parts(item).0.map(ToString::to_string)
}

fn parent(module: &str) -> String {
    module.rsplit_once("::").map_or(String::new(), |(parent, _)| parent.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_lead_through_imports_to_definitions() {
        let files = [
            ("lib", "mod a; mod b; pub use a::inner::Deep; use b::*;"),
            (
                "a",
                "pub mod inner; pub use inner::Deep as Renamed; use super::b::{self, Other}; mod here { struct In; }",
            ),
            ("a/inner", "use super::super::b::Other; pub struct Deep;"),
            ("b", "pub struct Other; pub use std::io::Error;"),
        ];
        let files = files.map(|(path, text)| (format!("src/{path}.rs"), text.to_owned()));
        let package = Package::from_files("p", "src", files);
        for (module, path, expected) in [
            ("", "Deep", "a::inner::Deep"),
            ("", "Other", "b::Other"),
            ("a", "b::Other::new", "b::Other"),
            ("a", "here", "mod a::here"),
            ("a::here", "super::Renamed", "a::inner::Deep"),
            ("a::inner", "crate::a::Renamed", "a::inner::Deep"),
            ("a::inner", "super::super::b", "mod b"),
            // Names of other crates, and local ones.
            ("b", "Error", ""),
            ("a", "local", ""),
            ("a::inner", "Renamed", ""),
        ] {
            let path: Vec<String> = path.split("::").map(str::to_owned).collect();
            let found = package.resolve(module, &path).map(|target| match target {
                Target::Module(module) => format!("mod {module}"),
                Target::Item { module, name } => format!("{module}::{name}"),
            });
            assert_eq!(found.unwrap_or_default(), expected, "{path:?} in {module}");
        }
        let item: ItemUse = syn::parse_str("use a::{b, c as d, e::*, f::{self, g}};").unwrap();
        let text = |leaf: Leaf| format!("{}={}", leaf.name.unwrap_or("*".into()), leaf.path.join("::"));
        let found: Vec<_> = leaves(&item.tree).into_iter().map(text).collect();
        assert_eq!(found, ["b=a::b", "d=a::c", "*=a::e", "f=a::f", "g=a::f::g"]);
    }
}
