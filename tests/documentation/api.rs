//! Reads what the library offers, from its source: public names of a module, wherever they are defined, with their
//! documentation and their functions.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use syn::{Attribute, Expr, ImplItem, Item, Lit, Meta, ReturnType, Signature, Type, UseTree, Visibility};

/// All files of the library.
pub(crate) struct Library {
    /// By the path of the module, such as `tensor::types`; empty for the root.
    modules: BTreeMap<String, syn::File>,
}

/// A public name: a type or a trait with its functions, or a function.
#[derive(Debug)]
pub(crate) struct Named {
    /// As it is called in front, which may be another name than where it is defined.
    pub(crate) name: String,
    /// The module that defines it.
    pub(crate) defined: String,
    pub(crate) docs: String,
    /// Public functions of the type.
    pub(crate) functions: Vec<Function>,
    /// The function itself, if it is one.
    pub(crate) free: Option<Function>,
}

/// What a path leads to.
enum Found {
    Named(Named),
    /// A module, a constant, or what else has no functions.
    Other,
    /// Nothing that this test can see.
    Nothing,
}

/// A public function.
#[derive(Debug)]
pub(crate) struct Function {
    pub(crate) name: String,
    pub(crate) docs: String,
    /// Whether it takes no `self` and returns one.
    pub(crate) constructs: bool,
}

impl Library {
    pub(crate) fn read() -> Self {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let mut files = Vec::new();
        list(&root, &mut files);
        let mut modules = BTreeMap::new();
        for path in files {
            let text = fs::read_to_string(&path).expect("a readable file");
            let parsed = syn::parse_file(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            modules.insert(module_of(path.strip_prefix(&root).expect("below src")), parsed);
        }
        assert!(modules.contains_key(""), "src/lib.rs is read");
        Self { modules }
    }

    /// The documentation inside `module`.
    pub(crate) fn docs_of_module(&self, module: &str) -> String {
        docs(&self.modules[module].attrs)
    }

    /// The public names of `module`, but for modules and constants. `of_macros` are names that a macro defines, which are in no
    /// source; any other name that is not found is a failure.
    pub(crate) fn public(&self, module: &str, of_macros: &[&str]) -> Vec<Named> {
        let items = self.items(module).unwrap_or_else(|| panic!("no module {module}"));
        let mut found = Vec::new();
        for item in items {
            match item {
                Item::Use(item) if is_public(&item.vis) => {
                    for (name, path) in leaves(&item.tree) {
                        let of_macro = of_macros.contains(&name.as_str());
                        match self.resolve(module, &path) {
                            Found::Nothing => {
                                assert!(of_macro, "`{module}` has `{name}` from nowhere: {path:?}")
                            }
                            _ if of_macro => panic!("{name} is in the source: it is no exception any more"),
                            Found::Named(named) => found.push(Named { name, ..named }),
                            Found::Other => {}
                        }
                    }
                }
                other => found.extend(self.defined(module, other)),
            }
        }
        found
    }

    /// What `path` names in `module`.
    fn resolve(&self, module: &str, path: &[String]) -> Found {
        let Some((name, through)) = path.split_last() else { return Found::Nothing };
        let mut at = module.to_owned();
        for segment in through {
            match segment.as_str() {
                "crate" => at.clear(),
                "self" => {}
                "super" => at.truncate(at.rfind("::").unwrap_or(0)),
                child => at = join(&at, child),
            }
        }
        let Some(items) = self.items(&at) else { return Found::Nothing };
        if let Some(item) = items.iter().find(|item| ident(item).is_some_and(|(found, _)| found == *name)) {
            return self.defined(&at, item).map_or(Found::Other, Found::Named);
        }
        if self.items(&join(&at, name)).is_some() {
            return Found::Other;
        }
        let uses = items.iter().filter_map(|item| match item {
            Item::Use(item) => Some(leaves(&item.tree)),
            _ => None,
        });
        match uses.flatten().find(|(found, _)| found == name) {
            Some((_, path)) => self.resolve(&at, &path),
            None => Found::Nothing,
        }
    }

    /// The public name that `item` of `module` defines.
    fn defined(&self, module: &str, item: &Item) -> Option<Named> {
        let (name, _) = ident(item).filter(|(_, public)| *public)?;
        let (attributes, free) = match item {
            Item::Fn(item) => (&item.attrs, Some(function(&item.attrs, &item.sig, None))),
            Item::Struct(item) => (&item.attrs, None),
            Item::Enum(item) => (&item.attrs, None),
            Item::Trait(item) => (&item.attrs, None),
            Item::Type(item) => (&item.attrs, None),
            _ => return None,
        };
        let functions = if free.is_some() { Vec::new() } else { self.functions(module, &name, item) };
        Some(Named { defined: module.to_owned(), docs: docs(attributes), name, functions, free })
    }

    /// Public functions of the type `name` of `module`, whose `impl`s are anywhere on the same floor.
    fn functions(&self, module: &str, name: &str, item: &Item) -> Vec<Function> {
        if let Item::Trait(item) = item {
            let methods = item.items.iter().filter_map(|item| match item {
                syn::TraitItem::Fn(item) => Some(function(&item.attrs, &item.sig, None)),
                _ => None,
            });
            return methods.collect();
        }
        let floor = module.split("::").next().unwrap_or_default();
        let on_floor = |path: &str| path.split("::").next() == Some(floor);
        let files = self.modules.iter().filter(|(path, _)| on_floor(path));
        let mut found = Vec::new();
        for item in files.flat_map(|(_, file)| &file.items) {
            let Item::Impl(block) = item else { continue };
            if block.trait_.is_some() || type_name(&block.self_ty).as_deref() != Some(name) {
                continue;
            }
            for item in &block.items {
                if let ImplItem::Fn(item) = item
                    && is_public(&item.vis)
                {
                    found.push(function(&item.attrs, &item.sig, Some(name)));
                }
            }
        }
        found
    }

    /// The items of a module, which has a file of its own or stands in its parent's.
    fn items(&self, module: &str) -> Option<&[Item]> {
        if let Some(file) = self.modules.get(module) {
            return Some(&file.items);
        }
        let (parent, name) = module.rsplit_once("::").unwrap_or(("", module));
        self.modules.get(parent)?.items.iter().find_map(|item| match item {
            Item::Mod(item) if item.ident == name => item.content.as_ref().map(|(_, items)| items.as_slice()),
            _ => None,
        })
    }
}

/// All Rust files below `folder`.
pub(crate) fn list(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a readable folder") {
        let path = entry.expect("a readable folder").path();
        if path.is_dir() {
            list(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files.sort();
}

/// `tensor::types` for `tensor/types/mod.rs`.
fn module_of(file: &Path) -> String {
    let path = file.with_extension("").to_string_lossy().replace('/', "::");
    match path.as_str() {
        "lib" => String::new(),
        path => path.strip_suffix("::mod").unwrap_or(path).to_owned(),
    }
}

fn join(module: &str, child: &str) -> String {
    if module.is_empty() { child.to_owned() } else { format!("{module}::{child}") }
}

/// Each name that a `use` brings, and the path of what it names.
fn leaves(tree: &UseTree) -> Vec<(String, Vec<String>)> {
    match tree {
        UseTree::Name(name) => vec![(name.ident.to_string(), vec![name.ident.to_string()])],
        UseTree::Rename(rename) => vec![(rename.rename.to_string(), vec![rename.ident.to_string()])],
        UseTree::Group(group) => group.items.iter().flat_map(leaves).collect(),
        UseTree::Path(path) => {
            let within = |(name, mut rest): (String, Vec<String>)| {
                rest.insert(0, path.ident.to_string());
                (name, rest)
            };
            leaves(&path.tree).into_iter().map(within).collect()
        }
        _ => Vec::new(),
    }
}

/// The name that an item defines, and whether it is public.
fn ident(item: &Item) -> Option<(String, bool)> {
    let (ident, visibility) = match item {
        Item::Fn(item) => (&item.sig.ident, &item.vis),
        Item::Struct(item) => (&item.ident, &item.vis),
        Item::Enum(item) => (&item.ident, &item.vis),
        Item::Trait(item) => (&item.ident, &item.vis),
        Item::Type(item) => (&item.ident, &item.vis),
        Item::Const(item) => (&item.ident, &item.vis),
        _ => return None,
    };
    Some((ident.to_string(), is_public(visibility)))
}

fn is_public(visibility: &Visibility) -> bool {
    matches!(visibility, Visibility::Public(_))
}

fn function(attributes: &[Attribute], signature: &Signature, of: Option<&str>) -> Function {
    let constructs = match (&signature.output, of) {
        (ReturnType::Type(_, output), Some(name)) if signature.receiver().is_none() => {
            names(output).iter().any(|found| found == "Self" || found == name)
        }
        _ => false,
    };
    Function { name: signature.ident.to_string(), docs: docs(attributes), constructs }
}

/// The last segment of a type's path.
fn type_name(of: &Type) -> Option<String> {
    match of {
        Type::Path(path) => path.path.segments.last().map(|segment| segment.ident.to_string()),
        _ => None,
    }
}

/// Types that a type consists of: `Result` and `Self` of `Result<Self, Error>`.
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

/// The text of the documentation among `attributes`.
fn docs(attributes: &[Attribute]) -> String {
    let mut text = String::new();
    for attribute in attributes {
        if let Meta::NameValue(pair) = &attribute.meta
            && pair.path.is_ident("doc")
            && let Expr::Lit(literal) = &pair.value
            && let Lit::Str(line) = &literal.lit
        {
            let line = line.value();
            text += line.strip_prefix(' ').unwrap_or(&line);
            text.push('\n');
        }
    }
    text
}
