//! Lists the items that users of a package can name: public items outside of hidden modules, each with its
//! public path.

use std::collections::{BTreeMap, BTreeSet};

use quote::ToTokens;
use syn::{Attribute, Fields, ImplItem, Item, ItemImpl, Signature, TraitItem, Type};

use super::package::{Package, join};
use super::resolve::{Target, defined_name, leaves};
use super::text::{code, docs, is_hidden, is_public, is_test, parts};

/// A public item, or a part of one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PublicItem {
    /// Its path for users, without the name of the crate, such as `memory::Pool::lease`.
    pub(crate) path: String,
    /// Its line in the file of the public API.
    pub(crate) line: String,
    pub(crate) docs: String,
}

/// Returns the public items of `package`, sorted. A name of another crate is one item.
pub(crate) fn public_items(package: &Package) -> BTreeSet<PublicItem> {
    let mut walker = Walker { package, found: BTreeSet::new(), blocks: BTreeMap::new() };
    for (module, content) in &package.modules {
        for item in &content.items {
            let Item::Impl(block) = item else { continue };
            let Type::Path(of) = &*block.self_ty else { continue };
            let names: Vec<_> = of.path.segments.iter().map(|segment| segment.ident.to_string()).collect();
            if block.trait_.is_none()
                && !block.attrs.iter().any(is_test)
                && let Some(target) = package.resolve(module, &names)
            {
                walker.blocks.entry(target).or_default().push(block);
            }
        }
    }
    walker.module("", "");
    walker.found
}

struct Walker<'a> {
    package: &'a Package,
    found: BTreeSet<PublicItem>,
    /// The `impl` blocks of types, which are anywhere in the package.
    blocks: BTreeMap<Target, Vec<&'a ItemImpl>>,
}

impl Walker<'_> {
    fn add(&mut self, before: &str, path: &str, after: &str, attributes: &[Attribute]) {
        let line = format!("{before} {}::{path}{after}", self.package.name);
        self.found.insert(PublicItem { path: path.to_owned(), line, docs: docs(attributes) });
    }

    /// Lists `module`, whose public path is `front`.
    fn module(&mut self, module: &str, front: &str) {
        let package = self.package;
        let content = &package.modules[module];
        if content.hidden {
            return;
        }
        if !front.is_empty() {
            self.add("mod", front, "", &content.attributes);
        }
        for path in package.modules.iter().filter(|(_, child)| child.public).map(|(path, _)| path) {
            let (parent, name) = path.rsplit_once("::").unwrap_or(("", path));
            if parent == module && !path.is_empty() {
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
        match (self.package.resolve(module, path), name) {
            (Some(Target::Module(other)), name) => {
                self.module(&other, &name.map_or(front.to_owned(), |name| join(front, name)));
            }
            (Some(Target::Item { module: other, name: original }), name) => {
                let package = self.package;
                let items = package.modules[&other].items.iter();
                for item in items.filter(|item| defined_name(item).as_deref() == Some(&original)) {
                    self.item(&other, item, front, name);
                }
            }
            // A name of another crate, or a type that a macro defines. The compiler refuses undefined names.
            (None, name) => {
                self.add("use", &join(front, name.unwrap_or("*")), &format!(" = {}", path.join("::")), &[]);
            }
        }
    }

    /// Lists an item of `module`, its methods and parts, with the public name.
    fn item(&mut self, module: &str, item: &Item, front: &str, renamed: Option<&str>) {
        let (Some(name), attributes, visibility) = parts(item) else { return };
        let name = name.to_string();
        if !is_public(visibility) || attributes.iter().any(is_left_out) {
            return;
        }
        let path = &join(front, renamed.unwrap_or(&name));
        match item {
            Item::Fn(item) => self.function(&item.sig, path, attributes),
            Item::Const(item) => self.add("const", path, &typed(&item.ty), attributes),
            Item::Type(item) => {
                self.add("type", path, &format!("{} = {}", code(&item.generics), code(&item.ty)), attributes);
            }
            Item::Struct(item) => {
                self.add("struct", path, &code(&item.generics), attributes);
                for (index, field) in item.fields.iter().enumerate().filter(|(_, of)| is_public(&of.vis)) {
                    let name = field.ident.as_ref().map_or(index.to_string(), ToString::to_string);
                    self.add("field", &join(path, &name), &typed(&field.ty), &field.attrs);
                }
                self.methods(module, &name, path);
            }
            Item::Enum(item) => {
                self.add("enum", path, &code(&item.generics), attributes);
                for variant in &item.variants {
                    let path = join(path, &variant.ident.to_string());
                    self.add("variant", &path, &fields(&variant.fields), &variant.attrs);
                }
                self.methods(module, &name, path);
            }
            Item::Trait(item) => {
                let bounds = Some(code(&item.supertraits)).filter(|bounds| !bounds.is_empty());
                let bounds = bounds.map_or(String::new(), |bounds| format!(": {bounds}"));
                self.add("trait", path, &format!("{}{bounds}", code(&item.generics)), attributes);
                for item in &item.items {
                    self.trait_item(item, path);
                }
            }
            _ => {}
        }
    }

    fn function(&mut self, signature: &Signature, path: &str, attributes: &[Attribute]) {
        let (text, name) = (code(signature), format!("fn {}", signature.ident));
        let (before, after) = text.split_once(&name).unwrap_or(("", &text));
        self.add(&format!("{before}fn"), path, after, attributes);
    }

    fn trait_item(&mut self, item: &TraitItem, path: &str) {
        match item {
            TraitItem::Fn(item) if !item.attrs.iter().any(is_hidden) => {
                self.function(&item.sig, &join(path, &item.sig.ident.to_string()), &item.attrs);
            }
            TraitItem::Type(item) => self.add("type", &join(path, &item.ident.to_string()), "", &item.attrs),
            TraitItem::Const(item) => {
                self.add("const", &join(path, &item.ident.to_string()), &typed(&item.ty), &item.attrs);
            }
            _ => {}
        }
    }

    /// Lists the public functions and constants of the type `name` of `module`.
    fn methods(&mut self, module: &str, name: &str, path: &str) {
        let own = Target::Item { module: module.to_owned(), name: name.to_owned() };
        for block in self.blocks.get(&own).cloned().unwrap_or_default() {
            for item in &block.items {
                self.impl_item(item, path);
            }
        }
    }

    fn impl_item(&mut self, item: &ImplItem, path: &str) {
        match item {
            ImplItem::Fn(item) if is_public(&item.vis) && !item.attrs.iter().any(is_left_out) => {
                self.function(&item.sig, &join(path, &item.sig.ident.to_string()), &item.attrs);
            }
            ImplItem::Const(item) if is_public(&item.vis) => {
                self.add("const", &join(path, &item.ident.to_string()), &typed(&item.ty), &item.attrs);
            }
            _ => {}
        }
    }
}

fn is_left_out(attribute: &Attribute) -> bool {
    is_hidden(attribute) || is_test(attribute)
}

fn typed(of: &impl ToTokens) -> String {
    format!(": {}", code(of))
}

/// Returns the fields of a variant, without their documentation.
fn fields(fields: &Fields) -> String {
    let text = |field: &syn::Field| {
        field.ident.as_ref().map_or(String::new(), |name| format!("{name}: ")) + &code(&field.ty)
    };
    let all = fields.iter().map(text).collect::<Vec<_>>().join(", ");
    match fields {
        Fields::Named(_) => format!(" {{ {all} }}"),
        Fields::Unnamed(_) => format!("({all})"),
        Fields::Unit => String::new(),
    }
}
