//! Compares the Rust code of the pages with the code in `checks/tests/readme`, in `flight/tests/flight/page` for Arrow Flight, and in
//! `graph/tests/command/page` for graphs.
//!
//! Blank lines divide a block into parts, such as a server and its client, which are two functions in the tests. All lines of a part,
//! with their comments, must follow one another in one of the files. Only white space may differ. After a line that asks the reader to
//! "fill it", the test may have lines that fill it. A part that begins with the comment `// build.rs` must be in
//! `proto/generate`.
//!
//! A block that is a whole file, such as `// src/bin/server.rs`, stands in no test: `examples/from-pages` makes crates of these files, and runs
//! them.

use std::path::{Path, PathBuf};

use tonic_rdma_checks::{files_of, read, root};

/// The words in a line after which a test may have its own code.
const GAP: &str = "fill it";
/// Maximum number of lines of this code.
const LONGEST_GAP: usize = 10;
/// The first line of a part that is code of a build script.
const BUILD_SCRIPT: &str = "// build.rs";
const BUILD_SCRIPTS: [&str; 1] = ["proto/generate/src/main.rs"];

/// The script that builds the blocks that are whole files.
const PROGRAMS: &str = "examples/from-pages";

/// One block of Rust of a page.
struct Block {
    page: PathBuf,
    /// The number of its first line.
    line: usize,
    text: String,
}

#[test]
fn every_block_runs_here() {
    let root = root();
    let folders = ["checks/tests/readme", "flight/tests/flight/page", "graph/tests/command/page"];
    let files = folders.map(|folder| files_of(&root.join(folder), "rs")).concat();
    let sources: Vec<Vec<String>> = files.iter().map(|file| lines(&read(file))).collect();
    // A build script needs no `out_dir`, because Cargo names the folder.
    let scripts =
        BUILD_SCRIPTS.map(|file| lines(&read(&root.join(file)).replace(".out_dir(folder)", ""))).to_vec();
    let mut pages = vec![root.join("README.md")];
    pages.extend(files_of(&root.join("docs/book"), "md"));
    let of_page = |page: &PathBuf| blocks(page.strip_prefix(root).unwrap(), &read(page));
    let blocks: Vec<Block> = pages.iter().flat_map(of_page).collect();
    assert!(!blocks.is_empty(), "the pages have no block of Rust");
    let programs = read(&root.join(PROGRAMS));
    let is_built = |block: &Block| {
        let files = format!("\nfiles {}\n", block.page.display());
        is_file(block) && programs.contains(&files)
    };
    let (built, others): (Vec<&Block>, Vec<&Block>) = blocks.iter().partition(|block| is_built(block));
    assert!(!built.is_empty(), "{PROGRAMS} builds no page");
    let missing: Vec<String> = others.iter().flat_map(|block| missing(block, &sources, &scripts)).collect();
    assert!(
        missing.is_empty(),
        "these stand in no file of checks/tests/readme, flight/tests/flight/page or graph/tests/command/page as they are:\n{}",
        missing.join("\n")
    );
}

#[test]
fn differences_are_found() {
    let source = [lines("fn main() {\n    // a\n    let  x = 1;\n    x.fill(1);\n    send(x);\n}")];
    let find = |text: &str| missing(&block(text), &source, &[]).len();
    assert_eq!(find("// a\nlet x   = 1;\n"), 0);
    assert_eq!(find("let x = 1;\n\n// a\n"), 0, "parts by themselves");
    assert_eq!(find("let x = 1;\nsend(x);\n"), 1, "a line is between them");
    assert_eq!(find("// b\nlet x = 1;\n"), 1, "another comment");
    assert_eq!(find("let x = 1; // a\n"), 1, "one comment more");
    assert_eq!(find("// build.rs\nsend(x);\n"), 1, "in no build script");
    let source = [lines("let x = 1; // fill it\nx.fill(1);\nsend(x);")];
    assert_eq!(missing(&block("let x = 1; // fill it\nsend(x);\n"), &source, &[]).len(), 0);
}

#[test]
fn only_blocks_of_rust_are_read() {
    let page = "a\n```sh\nls\n```\n```rust\none\n```\n- ```rust,no_run\n  two\n  ```\n```text\nthree\n```\n";
    let found: Vec<_> = blocks(Path::new("page"), page).into_iter().map(|it| (it.line, it.text)).collect();
    assert_eq!(found, [(6, "one\n".into()), (9, "  two\n".into())]);
}

#[test]
fn files_begin_with_their_path() {
    for (text, expected) in [
        ("// src/bin/server.rs\nfn main() {}\n", true),
        ("// build.rs\nfn main() {}\n", true),
        ("// build.rs\nconfigure()\n", false),
        ("// server\nfn main() {}\n", false),
    ] {
        assert_eq!(is_file(&block(text)), expected, "{text}");
    }
}

fn block(text: &str) -> Block {
    Block { page: "page".into(), line: 1, text: text.into() }
}

/// Returns whether the block is a whole file: its first line is a path, and for a build script, of which pages also show single lines, the
/// second line begins `main`.
fn is_file(block: &Block) -> bool {
    let mut lines = block.text.lines();
    let first = lines.next().unwrap_or_default();
    let is_source = first.starts_with("// src/") && first.ends_with(".rs");
    is_source || first == BUILD_SCRIPT && lines.next().is_some_and(|line| line.starts_with("fn main"))
}

/// Returns the first lines of the parts that are in none of the files.
fn missing(block: &Block, sources: &[Vec<String>], scripts: &[Vec<String>]) -> Vec<String> {
    let lines = lines(&block.text);
    let parts = lines.split(String::is_empty).filter(|part| !part.is_empty());
    let absent = parts.filter(|part| match part.split_first() {
        Some((first, rest)) if first == BUILD_SCRIPT => !scripts.iter().any(|file| holds(file, rest)),
        _ => !sources.iter().any(|file| holds(file, part)),
    });
    let (page, line) = (block.page.display(), block.line);
    absent.map(|part| format!("{page}, block in line {line}: {}", part[0])).collect()
}

/// Returns true if a file has these lines.
fn holds(file: &[String], part: &[String]) -> bool {
    (0..file.len()).any(|start| begins(&file[start..], part))
}

fn begins(file: &[String], part: &[String]) -> bool {
    let Some((first, rest)) = part.split_first() else { return true };
    if file.first() != Some(first) {
        return false;
    }
    let gap = if first.contains(GAP) { LONGEST_GAP } else { 0 };
    (1..file.len().min(gap + 1) + 1).any(|next| begins(&file[next..], rest))
}

/// Returns the lines of a text, with single blanks between words.
fn lines(text: &str) -> Vec<String> {
    text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
}

/// Returns the blocks of Rust of a page.
fn blocks(page: &Path, text: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    let mut lines = text.lines().zip(1..);
    while let Some((line, number)) = lines.next() {
        let Some((_, language)) = line.split_once("```") else { continue };
        let body: String = lines
            .by_ref()
            .take_while(|(line, _)| !line.trim_start().starts_with("```"))
            .map(|(line, _)| format!("{line}\n"))
            .collect();
        if language.split(',').next() == Some("rust") {
            blocks.push(Block { page: page.to_owned(), line: number + 1, text: body });
        }
    }
    blocks
}
