//! Reads a package: parses its files with `syn`, and follows `mod` declarations from `lib.rs` or `main.rs`.

use std::collections::BTreeMap;
use std::path::Path;

use syn::{Attribute, Expr, Item, ItemMod, Lit, Meta};
use tonic_rdma_checks::{files_of, read, root};

use super::text::{is_hidden, is_public, is_test};

/// The files that a package's modules begin with.
const ENTRIES: [&str; 2] = ["lib.rs", "main.rs"];

/// A package of the workspace, without its tests.
pub(crate) struct Package {
    /// The name of its crate, such as `tonic_rdma`.
    pub(crate) name: String,
    /// The modules by path, such as `endpoint::tuner`. The path of the root is empty.
    pub(crate) modules: BTreeMap<String, Module>,
}

/// A module, in a file of its own or inside another module.
pub(crate) struct Module {
    /// The path of its file, from the root of the repository.
    pub(crate) file: String,
    pub(crate) items: Vec<Item>,
    pub(crate) attributes: Vec<Attribute>,
    pub(crate) public: bool,
    /// True if rustdoc leaves the module out.
    pub(crate) hidden: bool,
}

impl Package {
    /// Reads the package whose sources are in `folder`, such as `tensor/src`.
    pub(crate) fn read(name: &str, folder: &str) -> Self {
        let relative = |path: &Path| path.strip_prefix(root()).unwrap().to_string_lossy().into_owned();
        let files = files_of(&root().join(folder), "rs");
        let files = files.iter().map(|path| (relative(path), read(path)));
        Self::from_files(name, folder, files)
    }

    /// Makes a package of files with these paths and texts.
    pub(crate) fn from_files(
        name: &str,
        folder: &str,
        files: impl IntoIterator<Item = (String, String)>,
    ) -> Self {
        let files: BTreeMap<String, String> = files.into_iter().collect();
        let entry = ENTRIES.map(|entry| format!("{folder}/{entry}"));
        let entry = entry.iter().find(|entry| files.contains_key(*entry));
        let entry = entry.unwrap_or_else(|| panic!("{folder} has neither lib.rs nor main.rs"));
        let mut reader = Reader { files: &files, modules: BTreeMap::new() };
        reader.file(entry, folder, String::new(), true, false);
        Self { name: name.to_owned(), modules: reader.modules }
    }
}

struct Reader<'a> {
    files: &'a BTreeMap<String, String>,
    modules: BTreeMap<String, Module>,
}

impl Reader<'_> {
    /// Reads `file` as the module `path`. Its children are in `folder`.
    fn file(&mut self, file: &str, folder: &str, path: String, public: bool, hidden: bool) {
        let text = self.files.get(file).unwrap_or_else(|| panic!("there is no {file}"));
        let parsed = syn::parse_file(text).unwrap_or_else(|error| panic!("{file}: {error}"));
        if parsed.attrs.iter().any(is_test) {
            return;
        }
        let hidden = hidden || parsed.attrs.iter().any(is_hidden);
        let module =
            Module { file: file.to_owned(), items: Vec::new(), attributes: parsed.attrs, public, hidden };
        self.module(module, parsed.items, folder, path);
    }

    /// Stores a module, and reads its children.
    fn module(&mut self, mut module: Module, items: Vec<Item>, folder: &str, path: String) {
        let (children, items) = items.into_iter().partition(|item| matches!(item, Item::Mod(_)));
        module.items = items;
        let file = module.file.clone();
        self.modules.insert(path.clone(), module);
        let children: Vec<Item> = children;
        for child in children {
            if let Item::Mod(child) = child {
                self.child(child, &file, folder, &path);
            }
        }
    }

    fn child(&mut self, item: ItemMod, file: &str, folder: &str, parent: &str) {
        if item.attrs.iter().any(is_test) {
            return;
        }
        let name = item.ident.to_string();
        let path = join(parent, &name);
        let (public, hidden) = (is_public(&item.vis), item.attrs.iter().any(is_hidden));
        let inside = format!("{folder}/{name}");
        if let Some((_, items)) = item.content {
            let module =
                Module { file: file.to_owned(), items: Vec::new(), attributes: item.attrs, public, hidden };
            return self.module(module, items, &inside, path);
        }
        let declared = item.attrs.iter().find_map(path_attribute);
        let candidates = match declared {
            Some(declared) => vec![format!("{}/{declared}", file.rsplit_once('/').unwrap().0)],
            None => vec![format!("{inside}.rs"), format!("{inside}/mod.rs")],
        };
        let found = candidates.iter().find(|candidate| self.files.contains_key(*candidate));
        let found = found.unwrap_or_else(|| panic!("{file}: module {name} has no file")).clone();
        self.file(&found, &inside, path, public, hidden);
    }
}

/// Returns the path of the module `child` of `module`.
pub(super) fn join(module: &str, child: &str) -> String {
    if module.is_empty() { child.to_owned() } else { format!("{module}::{child}") }
}

/// Returns the file that `#[path = "…"]` names.
fn path_attribute(attribute: &Attribute) -> Option<String> {
    let Meta::NameValue(pair) = &attribute.meta else { return None };
    match &pair.value {
        Expr::Lit(literal) if pair.path.is_ident("path") => match &literal.lit {
            Lit::Str(file) => Some(file.value()),
            _ => None,
        },
        _ => None,
    }
}
