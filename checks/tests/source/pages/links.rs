//! Follows the links of all pages to files and headings, and looks for the files that pages name in code. A page of the book without
//! a link in the summary is a fault too, because readers can't find this page.

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

use tonic_rdma_checks::pages::{self, BOOK, Page};
use tonic_rdma_checks::{files_of, read, root};

#[test]
fn every_link_leads_somewhere() {
    let pages = pages::all();
    assert!(pages.iter().any(|page| page.path == Path::new("README.md")), "README was not read");
    let faults: Vec<String> = pages.iter().flat_map(|page| faults(page, &pages, exists)).collect();
    assert!(faults.is_empty(), "links that lead nowhere:\n{}", faults.join("\n"));
}

#[test]
fn the_summary_has_every_page_of_the_book() {
    let pages = pages::all();
    let faults = orphans(&pages);
    assert!(faults.is_empty(), "pages that docs/book/src/SUMMARY.md does not have:\n{}", faults.join("\n"));
}

#[test]
fn the_code_names_pages_that_exist() {
    let ends = |letter: char| letter.is_whitespace() || "`()[]\"'".contains(letter);
    for (file, text) in pages::sources() {
        let named = text.split(ends).filter(|word| word.starts_with("docs/"));
        for page in named.map(|word| word.trim_end_matches(['.', ',', ';', ':'])) {
            assert!(exists(Path::new(page)), "{}: there is no {page}", file.display());
        }
    }
}

#[test]
fn pages_are_short() {
    let long = |page: &Page| page.path.starts_with(BOOK) || page.path == Path::new("README.md");
    for page in pages::all().iter().filter(|page| long(page)) {
        // Readers do not see the lines that prepare an example.
        let text = read(&root().join(&page.path));
        let lines = text.lines().filter(|line| !line.starts_with("# ")).count();
        assert!(lines <= 200, "{} has {lines} lines", page.path.display());
    }
}

#[test]
fn links_that_lead_nowhere_are_found() {
    let target = Page { path: "docs/book/src/b.md".into(), text: "# B\n## One `two`: three!\n".into() };
    let found = |text: &str| {
        let page = Page { path: "docs/book/src/a.md".into(), text: format!("# A\n\n{text}\n") };
        let exists = |path: &Path| {
            [Path::new("docs/book/src/b.md"), Path::new("src/lib.rs"), Path::new("README.md")].contains(&path)
        };
        faults(&page, std::slice::from_ref(&target), exists).len()
    };
    assert_eq!(found("[b](b.md) [b](b.md#one-two-three) [a](#a) [x](https://example.com/) `src/lib.rs`"), 0);
    assert_eq!(found("```text\n[b](c.md)\n```"), 0, "not a link");
    assert_eq!(found("`[b](c.md)`"), 0, "not a link");
    assert_eq!(found("[b](c.md)"), 1, "no such file");
    assert_eq!(found("[b\nc](c.md)"), 1, "no such file");
    assert_eq!(found("[b](b.md#one)"), 1, "no such heading");
    assert_eq!(found("[a](#b)"), 1, "no such heading here");
    assert_eq!(found("[x](http://example.com/)"), 1, "not https");
    assert_eq!(found("[x](../../../README.md)"), 1, "not part of the web site");
    assert_eq!(found("`src/no.rs`"), 1, "no such file");
    assert_eq!(found("`src/{lib,no}.rs`"), 1, "one of two");
    assert_eq!(found("<a href=\"b.md\">b</a>"), 1, "links are written as Markdown");
}

#[test]
fn every_promise_has_tests_that_exist() {
    let tests: String = files_of(root(), "rs").iter().map(|file| read(file)).collect();
    let rows = pages::of_book("software-device.md").into_iter().flat_map(|page| page.rows());
    let promises: Vec<_> = rows.filter(|(header, _)| header == "promise").collect();
    assert!(promises.len() > 15, "only {} promises were found: is this check broken?", promises.len());
    for (_, cells) in promises {
        let names: Vec<_> = cells.last().unwrap().split('`').skip(1).step_by(2).collect();
        // Some tests are lines of a macro.
        let is_there =
            |name: &&str| tests.contains(&format!("fn {name}(")) || tests.contains(&format!(" {name}: "));
        assert!(!names.is_empty() && names.iter().all(is_there), "{}: one of {names:?} is no test", cells[0]);
    }
}

/// Returns the pages below the book's folder to which the summary has no link.
fn orphans(pages: &[Page]) -> Vec<String> {
    let summary = pages.iter().find(|page| page.path == Path::new(BOOK).join("SUMMARY.md")).unwrap();
    let listed: BTreeSet<PathBuf> =
        targets(&summary.prose()).iter().map(|target| Path::new(BOOK).join(target)).collect();
    let is_orphan = |page: &&Page| {
        page.path.starts_with(BOOK) && page.path != summary.path && !listed.contains(&page.path)
    };
    pages.iter().filter(is_orphan).map(|page| page.path.display().to_string()).collect()
}

fn exists(path: &Path) -> bool {
    root().join(path).exists()
}

/// Returns the faults of a page's links.
fn faults(page: &Page, pages: &[Page], exists: impl Fn(&Path) -> bool) -> Vec<String> {
    let (code, text) = pages::inline_code(&page.prose());
    let mut faults: Vec<String> =
        targets(&text).iter().filter_map(|target| fault(page, target, pages, &exists)).collect();
    for path in code.iter().flat_map(|code| named_files(code)) {
        if !exists(Path::new(&path)) {
            faults.push(format!("names a file that does not exist: {path}"));
        }
    }
    if text.contains("<a ") || text.contains("<img ") {
        faults.push("has a link in HTML".into());
    }
    faults.iter().map(|fault| format!("{}: {fault}", page.path.display())).collect()
}

fn fault(page: &Page, target: &str, pages: &[Page], exists: impl Fn(&Path) -> bool) -> Option<String> {
    if target.contains("://") || target.starts_with("mailto:") {
        return (!target.starts_with("https://")).then(|| format!("{target} is not https"));
    }
    // The page that includes such a file is checked, with the links of the file.
    if page.path.starts_with("docs/book/figures") {
        return None;
    }
    let (file, heading) = target.split_once('#').unwrap_or((target, ""));
    let path = if file.is_empty() { page.path.clone() } else { resolve(&page.path, file) };
    if page.path.starts_with(BOOK) && !path.starts_with(BOOK) {
        return Some(format!("{target} is not part of the book's web site: name the file in code"));
    }
    if !file.is_empty() && !exists(&path) {
        return Some(format!("{target}: there is no {}", path.display()));
    }
    if heading.is_empty() {
        return None;
    }
    let of = pages.iter().chain([page]).find(|page| page.path == path);
    let has = of.is_some_and(|page| headings(page).iter().any(|found| found == heading));
    (!has).then(|| format!("{target}: {} has no such heading", path.display()))
}

/// Returns the path from the root of a `file` that `page` names relative to itself.
fn resolve(page: &Path, file: &str) -> PathBuf {
    let mut path = page.parent().unwrap().to_owned();
    for part in Path::new(file).components() {
        match part {
            Component::ParentDir => {
                path.pop();
            }
            Component::CurDir => {}
            part => path.push(part),
        }
    }
    path
}

/// Returns the targets of the links and pictures of a text.
fn targets(text: &str) -> Vec<String> {
    text.split("](")
        .skip(1)
        .filter_map(|rest| rest.split_once(')'))
        .map(|(target, _)| target.to_owned())
        .collect()
}

/// Returns the anchors of a page's headings, as mdBook and GitHub make them.
fn headings(page: &Page) -> Vec<String> {
    let kept = |letter: char| match letter {
        ' ' => Some('-'),
        '-' | '_' => Some(letter),
        letter => letter.is_alphanumeric().then_some(letter),
    };
    let prose = page.prose();
    let titles = prose
        .lines()
        .filter_map(|line| line.trim_start_matches('#').strip_prefix(' ').filter(|_| line.starts_with('#')));
    titles.map(|title| title.to_lowercase().chars().filter_map(kept).collect()).collect()
}

/// Returns the files of this repository that a piece of code names; braces stand for several.
fn named_files(code: &str) -> Vec<String> {
    let first = code.split_whitespace().next().unwrap_or_default();
    let folder = first.split_once('/').map_or("", |(folder, _)| folder);
    let is_path = !["", "target"].contains(&folder) && root().join(folder).is_dir();
    if !is_path || first.contains(['*', ':', '(']) {
        return Vec::new();
    }
    expand(first)
}

fn expand(path: &str) -> Vec<String> {
    let braces = path.split_once('{').and_then(|(before, rest)| Some((before, rest.split_once('}')?)));
    let Some((before, (choices, after))) = braces else { return vec![path.to_owned()] };
    choices.split(',').flat_map(|choice| expand(&format!("{before}{choice}{after}"))).collect()
}
