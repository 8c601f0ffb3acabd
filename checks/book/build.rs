//! Makes a doc test of each block of Rust in README and the book. What a reader need not see of a block, the page has in
//! comments directly before, between and after its parts, which no viewer of Markdown shows:
//!
//! ````text
//! <!-- test
//! use tonic_rdma_book::*;
//! run(async || {
//! -->
//! ```rust
//! let channel = RdmaChannel::connect(uri).await?;
//! ```
//! <!-- test
//! Ok(()) });
//! -->
//! ````
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "for tests")]

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs};

fn main() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
    let out = PathBuf::from(env::var_os("OUT_DIR").unwrap());
    let book = root.join("docs/book/src");
    let mut pages: Vec<PathBuf> = fs::read_dir(&book).unwrap().map(|entry| entry.unwrap().path()).collect();
    pages.push(root.join("README.md"));
    pages.sort();
    println!("cargo::rerun-if-changed={}", book.display());

    let mut tests = String::new();
    for page in pages.iter().filter(|page| page.extension().is_some_and(|ending| ending == "md")) {
        println!("cargo::rerun-if-changed={}", page.display());
        let text = fs::read_to_string(page).unwrap();
        if text.contains("```rust") {
            let name = page.file_stem().unwrap().to_str().unwrap();
            fs::write(out.join(name), joined(name, &text)).unwrap();
            let item = name.to_lowercase().replace('-', "_");
            writeln!(
                tests,
                "#[cfg(doctest)]\n#[doc = include_str!({:?})]\npub mod {item} {{}}",
                out.join(name)
            )
            .unwrap();
        }
    }
    fs::write(out.join("pages.rs"), tests).unwrap();
}

/// Returns the page with each block and the comments that belong to it as one block, in which hidden lines begin with
/// `# `. Every line keeps its number, so that a failure names the line of the page.
fn joined(page: &str, text: &str) -> String {
    let mut out = String::new();
    let lines: Vec<&str> = text.lines().collect();
    let mut within = Within::Text;
    for (index, line) in lines.iter().enumerate() {
        let bare = line.trim_start();
        let next = lines.get(index + 1).map_or("", |line| line.trim_start());
        let (now, shown) = match within {
            Within::Text if bare == "<!-- test" => {
                let fence = lines[index..]
                    .iter()
                    .map(|line| line.trim_start())
                    .find(|line| line.starts_with("```rust"));
                let fence =
                    fence.unwrap_or_else(|| panic!("{page}:{}: no block follows this comment", index + 1));
                (Within::Comment, line.replace("<!-- test", fence))
            }
            Within::Text if bare.starts_with("```rust") => (Within::Block, (*line).to_owned()),
            Within::Text => (Within::Text, (*line).to_owned()),
            Within::Block if bare == "```" && next == "<!-- test" => {
                (Within::Block, line.replacen(bare, "#", 1))
            }
            Within::Block if bare == "```" => (Within::Text, (*line).to_owned()),
            Within::Block if bare == "<!-- test" => (Within::Comment, line.replacen(bare, "#", 1)),
            Within::Block => (Within::Block, (*line).to_owned()),
            // The fence of the next part becomes a hidden line; where no part follows, the comment's end ends the block.
            Within::Comment if bare == "-->" && next.starts_with("```rust") => {
                (Within::Fence, line.replacen(bare, "#", 1))
            }
            Within::Comment if bare == "-->" => (Within::Text, line.replace("-->", "```")),
            Within::Comment => (Within::Comment, line.replacen(bare, &format!("# {bare}"), 1)),
            Within::Fence => (Within::Block, line.replacen(bare, "#", 1)),
        };
        within = now;
        writeln!(out, "{shown}").unwrap();
    }
    assert!(matches!(within, Within::Text), "{page}: a block does not end");
    out
}

/// What the line before belongs to.
#[derive(Clone, Copy)]
enum Within {
    Text,
    Comment,
    /// The comment has ended, and the fence of a block follows.
    Fence,
    Block,
}
