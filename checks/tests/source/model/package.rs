//! Reads a package: parses its files with `syn`, and follows `mod` declarations from `lib.rs` or `main.rs`.

use std::collections::BTreeMap;
use std::path::Path;

use syn::{Attribute, Item};
use tonic_rdma_checks::{files_of, read, root};

use super::text::{is_hidden, is_public, is_test};

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
        let entry = ["lib.rs", "main.rs"].map(|entry| format!("{folder}/{entry}"));
        let entry = entry.iter().find(|entry| files.contains_key(*entry));
        let entry = entry.unwrap_or_else(|| panic!("{folder} has neither lib.rs nor main.rs"));
        let mut reader = Reader { files: &files, modules: BTreeMap::new() };
        reader.file(entry, folder, "", (true, Vec::new()));
        Self { name: name.to_owned(), modules: reader.modules }
    }
}

struct Reader<'a> {
    files: &'a BTreeMap<String, String>,
    modules: BTreeMap<String, Module>,
}

impl Reader<'_> {
    /// Reads `file` as the module `path`, which is declared as public or not, with these attributes. Its
    /// children are in `folder`.
    fn file(
        &mut self,
        file: &str,
        folder: &str,
        path: &str,
        (public, mut attributes): (bool, Vec<Attribute>),
    ) {
        let parsed = syn::parse_file(&self.files[file]).unwrap_or_else(|error| panic!("{file}: {error}"));
        attributes.extend(parsed.attrs);
        self.module(file, parsed.items, folder, path, (public, attributes));
    }

    /// Stores a module, and reads its children.
    fn module(
        &mut self,
        file: &str,
        items: Vec<Item>,
        folder: &str,
        path: &str,
        (public, attributes): (bool, Vec<Attribute>),
    ) {
        if attributes.iter().any(is_test) {
            return;
        }
        let (children, items) = items.into_iter().partition(|item| matches!(item, Item::Mod(_)));
        let hidden = attributes.iter().any(is_hidden);
        let module = Module { file: file.to_owned(), items, attributes, public, hidden };
        self.modules.insert(path.to_owned(), module);
        let children: Vec<Item> = children;
        for child in children {
            let Item::Mod(child) = child else { continue };
            let name = child.ident.to_string();
            let (path, inside) = (join(path, &name), format!("{folder}/{name}"));
            let declared = (is_public(&child.vis), child.attrs);
            if let Some((_, items)) = child.content {
                self.module(file, items, &inside, &path, declared);
            } else if !declared.1.iter().any(is_test) {
                let candidates = [format!("{inside}.rs"), format!("{inside}/mod.rs")];
                let found = candidates.iter().find(|candidate| self.files.contains_key(*candidate));
                self.file(
                    found.unwrap_or_else(|| panic!("{file}: no file of {name}")),
                    &inside,
                    &path,
                    declared,
                );
            }
        }
    }
}

/// Returns the path of the module `child` of `module`.
pub(super) fn join(module: &str, child: &str) -> String {
    if module.is_empty() { child.to_owned() } else { format!("{module}::{child}") }
}
