//! Keeps the source in its floors: imports go down only, unsafe code stays in two folders, the protocol core has no
//! clock and no IO, no file is too long. Works on the text of `src/`, so a violation is named by file and line.
#![allow(clippy::expect_used, reason = "tests")]

mod lexer;
mod paths;
mod rules;

use std::fs;
use std::path::{Path, PathBuf};

use rules::SourceFile;

#[test]
fn imports_go_down_only() {
    let sources = library();
    assert_none(sources.iter().flat_map(rules::imports));
}

#[test]
fn unsafe_code_stays_in_verbs_and_memory() {
    let sources = library();
    assert_none(rules::unsafe_code(&sources));
}

#[test]
fn the_core_has_no_clock_and_no_io() {
    let sources = library();
    assert_none(sources.iter().flat_map(rules::purity));
}

#[test]
fn no_file_is_too_long() {
    let folders = ["src", "tests", "benches", "examples", "cli", "interop", "proto"];
    let sources: Vec<_> = folders.iter().flat_map(|folder| read(folder)).collect();
    assert!(sources.len() > library().len(), "the folders are read");
    assert_none(sources.iter().flat_map(rules::length));
}

fn library() -> Vec<SourceFile> {
    let sources = read("src");
    assert!(sources.iter().any(|source| source.path == "src/lib.rs"), "src is read");
    sources
}

fn assert_none(violations: impl IntoIterator<Item = String>) {
    let violations: Vec<_> = violations.into_iter().collect();
    assert!(violations.is_empty(), "\n{}\n", violations.join("\n"));
}

/// All Rust files below `folder`, none if there is no such folder.
fn read(folder: &str) -> Vec<SourceFile> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    list(&root.join(folder), &mut files);
    files.sort();
    let load = |file: PathBuf| {
        let path = file.strip_prefix(root).expect("below the root").to_string_lossy().into_owned();
        SourceFile::new(path, fs::read_to_string(&file).expect("a readable file"))
    };
    files.into_iter().map(load).collect()
}

fn list(folder: &Path, files: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries {
        let path = entry.expect("a readable folder").path();
        if path.is_dir() && !path.ends_with("target") {
            list(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}
