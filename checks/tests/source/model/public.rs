//! Lists the items that users of a package can name: public items outside of hidden modules, each with its public path.

use std::collections::BTreeSet;

use syn::visit::{self, Visit};
use syn::{Attribute, Fields, ImplItem, Item, ReturnType, Signature, TraitItem, Type};

use super::package::{Package, join};
use super::resolve::{Target, defined_name, leaves};
use super::text::{code, docs, is_hidden, is_public, is_test};

/// A public item, or a part of one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PublicItem {
    /// Its path for users, without the name of the crate, such as `memory::Pool::lease`.
    pub(crate) path: String,
    pub(crate) kind: Kind,
    /// Its line in the file of the public API.
    pub(crate) line: String,
    pub(crate) docs: String,
    /// The module that defines it.
    pub(crate) defined: String,
    /// True for a function that takes no `self` and returns its type.
    pub(crate) constructs: bool,
    /// The package's own items in its declaration.
    pub(crate) types: BTreeSet<Target>,
    /// The item itself, if it is a type, a trait, a constant or an alias.
    pub(crate) target: Option<Target>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Module,
    /// A type, a trait, a constant or an alias.
    Named,
    /// A free function.
    Function,
    /// A function of a type or of a trait.
    Method,
    /// A variant, a field or an associated type, which is not counted.
    Part,
}

impl PublicItem {
    /// Returns the last name of its path.
    pub(crate) fn name(&self) -> &str {
        self.path.rsplit("::").next().unwrap_or_default()
    }

    /// Returns the path of the item that has this part or method.
    pub(crate) fn parent(&self) -> &str {
        self.path.rsplit_once("::").map_or("", |(parent, _)| parent)
    }

    /// Returns true if the item counts for the limit on the number of public items.
    pub(crate) fn counts(&self) -> bool {
        self.kind != Kind::Part
    }
}

/// Returns the public items of `package`, sorted. Names of other crates are left out. `of_macros` are the types that a macro
/// defines, which no source file shows.
pub(crate) fn public_items(package: &Package, of_macros: &[&str]) -> BTreeSet<PublicItem> {
    let mut walker =
        Walker { package, of_macros, found: BTreeSet::new(), types: BTreeSet::new(), target: None };
    walker.module("", "");
    walker.found
}

struct Walker<'a> {
    package: &'a Package,
    of_macros: &'a [&'a str],
    found: BTreeSet<PublicItem>,
    /// The package's items in the declaration that is added next.
    types: BTreeSet<Target>,
    /// The item that is added next.
    target: Option<Target>,
}

/// Collects the paths of types and traits.
#[derive(Default)]
struct Paths(Vec<Vec<String>>);

impl<'ast> Visit<'ast> for Paths {
    fn visit_path(&mut self, path: &'ast syn::Path) {
        self.0.push(path.segments.iter().map(|segment| segment.ident.to_string()).collect());
        visit::visit_path(self, path);
    }

    fn visit_attribute(&mut self, _: &'ast Attribute) {}
}

impl Walker<'_> {
    /// Stores the types in a declaration of `module` for the item that is added next.
    fn note(&mut self, module: &str, visit: impl FnOnce(&mut Paths)) {
        let mut paths = Paths::default();
        visit(&mut paths);
        let found = paths.0.iter().filter_map(|path| self.package.resolve(module, path));
        self.types.extend(found.filter(|target| matches!(target, Target::Item { .. })));
    }

    /// Lists `module`, whose public path is `front`.
    fn module(&mut self, module: &str, front: &str) {
        let package = self.package;
        let content = &package.modules[module];
        if content.hidden || content.attributes.iter().any(is_hidden) {
            return;
        }
        if !front.is_empty() {
            let docs = docs(&content.attributes);
            self.add(Kind::Module, "mod ", front, "", docs, module, false);
        }
        for (path, child) in &package.modules {
            let is_child = path.strip_prefix(module).is_some_and(|rest| {
                let name = if module.is_empty() { Some(rest) } else { rest.strip_prefix("::") };
                name.is_some_and(|name| !name.is_empty() && !name.contains("::"))
            });
            if is_child && child.public {
                let name = path.rsplit("::").next().unwrap_or_default();
                self.module(path, &join(front, name));
            }
        }
        for item in &content.items {
            match item {
                Item::Use(item) if is_public(&item.vis) && !item.attrs.iter().any(is_hidden) => {
                    for leaf in leaves(&item.tree) {
                        self.re_export(module, front, leaf.name.as_deref(), &leaf.path);
                    }
                }
                item => self.item(module, item, front, None),
            }
        }
    }

    fn re_export(&mut self, module: &str, front: &str, name: Option<&str>, path: &[String]) {
        let Some(name) = name else {
            if let Some(Target::Module(other)) = self.package.resolve(module, path) {
                self.module(&other, front);
            }
            return;
        };
        match self.package.resolve(module, path) {
            Some(Target::Module(other)) => self.module(&other, &join(front, name)),
            Some(Target::Item { module: other, name: original }) => {
                let package = self.package;
                let items = package.modules[&other].items.iter();
                for item in items.filter(|item| defined_name(item).as_deref() == Some(&original)) {
                    self.item(&other, item, front, Some(name));
                }
            }
            None if self.of_macros.contains(&name) => {
                self.add(
                    Kind::Named,
                    "type ",
                    &join(front, name),
                    " (of a macro)",
                    String::new(),
                    module,
                    false,
                );
            }
            // A name of another crate. The compiler refuses undefined names.
            None => {}
        }
    }

    /// Lists an item of `module`, its methods and parts, with the public name.
    fn item(&mut self, module: &str, item: &Item, front: &str, renamed: Option<&str>) {
        let Some((attributes, public)) = attributes(item) else { return };
        if !public || attributes.iter().any(|attribute| is_hidden(attribute) || is_test(attribute)) {
            return;
        }
        let original = defined_name(item).unwrap_or_default();
        let path = join(front, renamed.unwrap_or(&original));
        let text = docs(attributes);
        self.target = Some(Target::Item { module: module.to_owned(), name: original.clone() });
        match item {
            Item::Fn(item) => {
                let (before, after) = signature(&item.sig);
                self.note(module, |paths| paths.visit_signature(&item.sig));
                self.add(Kind::Function, &before, &path, &after, text, module, false);
                return;
            }
            Item::Const(item) => {
                let after = format!(": {}", code(&item.ty));
                self.add(Kind::Named, "const ", &path, &after, text, module, false);
            }
            Item::Type(item) => {
                self.note(module, |paths| paths.visit_type(&item.ty));
                let after = format!("{} = {}", code(&item.generics), code(&item.ty));
                self.add(Kind::Named, "type ", &path, &after, text, module, false);
                return;
            }
            Item::Struct(item) => {
                let after = code(&item.generics);
                self.add(Kind::Named, "struct ", &path, &after, text, module, false);
                self.fields(&item.fields, &path, module);
            }
            Item::Enum(item) => {
                let after = code(&item.generics);
                self.add(Kind::Named, "enum ", &path, &after, text, module, false);
                for variant in &item.variants {
                    self.note(module, |paths| paths.visit_fields(&variant.fields));
                    let (path, after) = (format!("{path}::{}", variant.ident), fields(&variant.fields));
                    self.add(Kind::Part, "variant ", &path, &after, docs(&variant.attrs), module, false);
                }
            }
            Item::Trait(item) => {
                let bounds = if item.supertraits.is_empty() {
                    String::new()
                } else {
                    format!(": {}", code(&item.supertraits))
                };
                let after = format!("{}{bounds}", code(&item.generics));
                self.add(Kind::Named, "trait ", &path, &after, text, module, false);
                for item in &item.items {
                    self.trait_item(item, &path, module);
                }
                return;
            }
            _ => return,
        }
        self.methods(module, &original, &path);
    }

    fn fields(&mut self, fields: &Fields, path: &str, module: &str) {
        for (index, field) in fields.iter().enumerate().filter(|(_, field)| is_public(&field.vis)) {
            let name = field.ident.as_ref().map_or(index.to_string(), ToString::to_string);
            let after = format!(": {}", code(&field.ty));
            self.note(module, |paths| paths.visit_type(&field.ty));
            self.add(
                Kind::Part,
                "field ",
                &format!("{path}::{name}"),
                &after,
                docs(&field.attrs),
                module,
                false,
            );
        }
    }

    fn trait_item(&mut self, item: &TraitItem, path: &str, module: &str) {
        match item {
            TraitItem::Fn(item) if !item.attrs.iter().any(is_hidden) => {
                let (before, after) = signature(&item.sig);
                self.note(module, |paths| paths.visit_signature(&item.sig));
                let path = format!("{path}::{}", item.sig.ident);
                self.add(Kind::Method, &before, &path, &after, docs(&item.attrs), module, false);
            }
            TraitItem::Type(item) => {
                let path = format!("{path}::{}", item.ident);
                self.add(Kind::Part, "type ", &path, "", docs(&item.attrs), module, false);
            }
            TraitItem::Const(item) => {
                let (path, after) = (format!("{path}::{}", item.ident), format!(": {}", code(&item.ty)));
                self.add(Kind::Named, "const ", &path, &after, docs(&item.attrs), module, false);
            }
            _ => {}
        }
    }

    /// Lists the public functions and constants of the type `name` of `module`, whose `impl` blocks are anywhere in the package.
    fn methods(&mut self, module: &str, name: &str, path: &str) {
        let package = self.package;
        let own = Target::Item { module: module.to_owned(), name: name.to_owned() };
        for (place, content) in &package.modules {
            for item in &content.items {
                let Item::Impl(block) = item else { continue };
                if block.trait_.is_some()
                    || block.attrs.iter().any(is_test)
                    || type_path(&block.self_ty).and_then(|path| package.resolve(place, &path)).as_ref()
                        != Some(&own)
                {
                    continue;
                }
                for item in &block.items {
                    self.impl_item(item, name, path, module, place);
                }
            }
        }
    }

    fn impl_item(&mut self, item: &ImplItem, of: &str, path: &str, module: &str, place: &str) {
        match item {
            ImplItem::Fn(item) if is_public(&item.vis) => {
                if item.attrs.iter().any(|attribute| is_hidden(attribute) || is_test(attribute)) {
                    return;
                }
                let (before, after) = signature(&item.sig);
                self.note(place, |paths| paths.visit_signature(&item.sig));
                let path = format!("{path}::{}", item.sig.ident);
                let constructs = constructs(&item.sig, of);
                self.add(Kind::Method, &before, &path, &after, docs(&item.attrs), module, constructs);
            }
            ImplItem::Const(item) if is_public(&item.vis) => {
                let (path, after) = (format!("{path}::{}", item.ident), format!(": {}", code(&item.ty)));
                self.add(Kind::Named, "const ", &path, &after, docs(&item.attrs), module, false);
            }
            _ => {}
        }
    }

    #[allow(clippy::too_many_arguments, reason = "the parts of one line")]
    fn add(
        &mut self,
        kind: Kind,
        before: &str,
        path: &str,
        after: &str,
        docs: String,
        defined: &str,
        constructs: bool,
    ) {
        let line = format!("{before}{}::{path}{after}", self.package.name);
        let (path, defined) = (path.to_owned(), defined.to_owned());
        let types = std::mem::take(&mut self.types);
        let target = self.target.take();
        self.found.insert(PublicItem { path, kind, line, docs, defined, constructs, types, target });
    }
}

/// Returns the fields of a variant, without their documentation.
fn fields(fields: &Fields) -> String {
    let types = |field: &syn::Field| match &field.ident {
        Some(name) => format!("{name}: {}", code(&field.ty)),
        None => code(&field.ty),
    };
    let all = fields.iter().map(types).collect::<Vec<_>>().join(", ");
    match fields {
        Fields::Named(_) => format!(" {{ {all} }}"),
        Fields::Unnamed(_) => format!("({all})"),
        Fields::Unit => String::new(),
    }
}

/// Returns the text before and the text after the name in a function's declaration.
fn signature(signature: &Signature) -> (String, String) {
    let text = code(signature);
    let name = signature.ident.to_string();
    let (before, after) = text.split_once(&format!("fn {name}")).unwrap_or(("", &text));
    (format!("{before}fn "), after.to_owned())
}

/// Returns true if a function of the type `of` takes no `self`, and its result has this type, as such or in a type such as `Result`.
fn constructs(signature: &Signature, of: &str) -> bool {
    let ReturnType::Type(_, output) = &signature.output else { return false };
    signature.receiver().is_none() && names(output).iter().any(|name| name == "Self" || name == of)
}

/// Returns the names in a type and in its generic arguments.
fn names(of: &Type) -> Vec<String> {
    let Type::Path(path) = of else { return Vec::new() };
    let mut found = Vec::new();
    for segment in &path.path.segments {
        found.push(segment.ident.to_string());
        if let syn::PathArguments::AngleBracketed(arguments) = &segment.arguments {
            for argument in &arguments.args {
                if let syn::GenericArgument::Type(argument) = argument {
                    found.extend(names(argument));
                }
            }
        }
    }
    found
}

fn type_path(of: &Type) -> Option<Vec<String>> {
    let Type::Path(path) = of else { return None };
    Some(path.path.segments.iter().map(|segment| segment.ident.to_string()).collect())
}

/// Returns the attributes of an item that has a public name, and whether it is public.
fn attributes(item: &Item) -> Option<(&[Attribute], bool)> {
    let (attributes, visibility) = match item {
        Item::Fn(item) => (&item.attrs, &item.vis),
        Item::Struct(item) => (&item.attrs, &item.vis),
        Item::Enum(item) => (&item.attrs, &item.vis),
        Item::Trait(item) => (&item.attrs, &item.vis),
        Item::Type(item) => (&item.attrs, &item.vis),
        Item::Const(item) => (&item.attrs, &item.vis),
        _ => return None,
    };
    Some((attributes, is_public(visibility)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn public_items_are_listed_under_their_public_path() {
        let files = [
            (
                "src/lib.rs",
                "mod a; pub mod b; #[doc(hidden)] pub mod internal { pub struct Hidden; } pub use a::{A as Renamed, f}; pub use other::Foreign;",
            ),
            (
                "src/a.rs",
                "pub struct A<T> { pub x: u8, y: T } impl<T> A<T> { pub fn new() -> Self { } fn g() {} #[doc(hidden)] pub fn h(&self) {} } pub fn f(a: &str) -> u8 { 0 } pub struct Unreachable;",
            ),
            (
                "src/b.rs",
                "pub enum E { V(u8), W, /** Doc. */ X { /** Doc. */ a: u8 } } pub(crate) struct C; pub trait T: Send { type O; fn m(&self); } impl super::a::A<u8> { pub const N: usize = 1; }",
            ),
        ];
        let files = files.map(|(path, text)| (path.to_owned(), text.to_owned()));
        let found = public_items(&Package::from_files("p", "src", files), &[]);
        let lines: Vec<_> = found.iter().map(|item| item.line.as_str()).collect();
        assert_eq!(
            lines,
            [
                "struct p::Renamed<T>",
                "const p::Renamed::N: usize",
                "fn p::Renamed::new() -> Self",
                "field p::Renamed::x: u8",
                "mod p::b",
                "enum p::b::E",
                "variant p::b::E::V(u8)",
                "variant p::b::E::W",
                "variant p::b::E::X { a: u8 }",
                "trait p::b::T: Send",
                "type p::b::T::O",
                "fn p::b::T::m(&self)",
                "fn p::f(a: &str) -> u8",
            ]
        );
        assert_eq!(found.iter().filter(|item| item.counts()).count(), 8);
    }
}
