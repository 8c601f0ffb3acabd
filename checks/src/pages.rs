//! Reads the pages: README, the other pages beside it, and all pages below `docs`.

use std::fs;
use std::path::{Path, PathBuf};

use regex::Regex;

use crate::{files_of, read, root};

/// The folder of the book's pages.
pub const BOOK: &str = "docs/book/src";

/// A page of Markdown.
#[derive(Clone, Debug)]
pub struct Page {
    /// The path of the page from the root of the repository.
    pub path: PathBuf,
    /// The Markdown of the page.
    pub text: String,
}

/// Returns all pages that are checked: `*.md` of the root, and all below `docs`.
pub fn all() -> Vec<Page> {
    let beside = |path: &PathBuf| path.extension().is_some_and(|ending| ending == "md");
    let mut paths: Vec<PathBuf> =
        fs::read_dir(root()).unwrap().map(|entry| entry.unwrap().path()).filter(beside).collect();
    paths.sort();
    paths.extend(files_of(&root().join("docs"), "md"));
    paths.iter().map(|path| Page::read(path)).collect()
}

/// Returns the book's pages whose names begin with `prefix`.
pub fn of_book(prefix: &str) -> Vec<Page> {
    let is_of_book = |page: &Page| page.path.starts_with(BOOK) && page.name().starts_with(prefix);
    let found: Vec<Page> = all().into_iter().filter(is_of_book).collect();
    assert!(!found.is_empty(), "the book has no page whose name begins with {prefix}");
    found
}

/// Returns the sources of the packages, of the command and of what commands share, without the sources of tests.
pub fn sources() -> Vec<(PathBuf, String)> {
    let files = ["src", "collective/src", "commands/src", "graph/src", "tensor/src", "verbs/src", "cli/src"]
        .into_iter()
        .flat_map(|folder| files_of(&root().join(folder), "rs"));
    let is_test = |path: &PathBuf| path.components().any(|part| part.as_os_str() == "tests");
    files.filter(|path| !is_test(path)).map(|path| (path.clone(), read(&path))).collect()
}

impl Page {
    fn read(path: &Path) -> Self {
        let text = read(path);
        Self { path: path.strip_prefix(root()).unwrap().to_owned(), text }
    }

    /// Returns the name of the page's file.
    pub fn name(&self) -> &str {
        self.path.file_name().unwrap().to_str().unwrap()
    }

    /// Returns the page's text without blocks of code and without comments.
    pub fn prose(&self) -> String {
        let (mut in_code, mut in_comment) = (false, false);
        let is_prose = |line: &&str| {
            let line = line.trim_start();
            let fence = line.starts_with("```");
            in_code ^= fence;
            let begins = line.starts_with("<!--");
            let is_comment = begins || in_comment;
            in_comment = is_comment && !line.ends_with("-->");
            !in_code && !fence && !is_comment
        };
        self.text.lines().filter(is_prose).map(|line| format!("{line}\n")).collect()
    }

    /// Returns the commands in the page's blocks of shell commands, as one line each, without comments.
    pub fn commands(&self) -> Vec<String> {
        let blocks = self.text.split("```sh\n").skip(1).filter_map(|rest| rest.split("```").next());
        let lines = blocks.map(|block| block.replace("\\\n", " "));
        let plain = |line: &str| format!(" {line}").split(" #").next().unwrap_or_default().to_owned();
        let commands = lines.flat_map(|block| block.lines().map(plain).collect::<Vec<_>>());
        let commands = commands.flat_map(|line| line.split(" && ").map(words).collect::<Vec<_>>());
        commands.filter(|command| !command.is_empty()).collect()
    }

    /// Returns the rows of the page's tables: the first cell of the table's head, and the cells of the row.
    pub fn rows(&self) -> Vec<(String, Vec<String>)> {
        let mut rows = Vec::new();
        let mut head: Option<String> = None;
        for line in self.prose().lines() {
            let Some(line) = line.trim().strip_prefix('|') else {
                head = None;
                continue;
            };
            let cells: Vec<String> =
                line.trim_end_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect();
            match &head {
                None => head = Some(cells[0].clone()),
                Some(_) if cells.iter().all(|cell| cell.starts_with("--")) => {}
                Some(head) => rows.push((head.clone(), cells)),
            }
        }
        rows
    }
}

/// Returns the words of a text with one blank between them.
fn words(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Returns the texts and the targets of the links and pictures of a text.
pub fn targets(text: &str) -> Vec<(String, String)> {
    let link = Regex::new(r"\[([^\]]*)\]\(([^)]*)\)").unwrap();
    link.captures_iter(text).map(|found| (found[1].to_owned(), found[2].to_owned())).collect()
}

/// Returns each inline code of a text, and the text without inline code.
pub fn inline_code(prose: &str) -> (Vec<String>, String) {
    let (mut code, mut rest) = (Vec::new(), String::new());
    // Inline code may contain a line break, but no empty line.
    for paragraph in prose.split("\n\n") {
        let pieces: Vec<&str> = paragraph.split('`').collect();
        for (index, piece) in pieces.iter().enumerate() {
            if index % 2 == 1 && index + 1 < pieces.len() {
                code.push(piece.replace('\n', " "));
            } else {
                rest.push_str(piece);
            }
        }
        rest.push_str("\n\n");
    }
    (code, rest)
}
