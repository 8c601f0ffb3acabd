//! Reads the files of the repository for `tests/source`, which checks layers, public API, documentation, links and lists.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "for tests")]

use std::fs;
use std::path::{Path, PathBuf};

pub mod pages;

/// Returns the root of the repository.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("/"))
}

/// Returns the text of a file.
///
/// # Panics
/// The file can't be read.
pub fn read(file: &Path) -> String {
    fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

/// Returns the files below `folder` whose extension is `ending`, or none if there is no such folder. Leaves
/// out Cargo's folders `target`, which are next to a manifest.
pub fn files_of(folder: &Path, ending: &str) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut files = Vec::new();
    for path in entries.flatten().map(|entry| entry.path()) {
        let is_built = path.ends_with("target") && folder.join("Cargo.toml").exists();
        if path.is_dir() && !is_built {
            files.extend(files_of(&path, ending));
        } else if path.extension().is_some_and(|found| found == ending) {
            files.push(path);
        }
    }
    files.sort();
    files
}
