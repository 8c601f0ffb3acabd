//! Follows the links of all pages to files and headings, and looks for the files that pages name in code, and
//! the tests that the software device's promise names. A page of the book without a link in the summary is a
//! fault too, because readers can't find this page.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use tonic_rdma_checks::pages::{self, BOOK, Page, targets};
use tonic_rdma_checks::{files_of, read, root};

#[test]
fn every_link_leads_somewhere() {
    let pages = pages::all();
    assert!(pages.iter().any(|page| page.path == Path::new("README.md")), "README was not read");
    let faults = [pages.iter().flat_map(|page| faults(page, &pages)).collect(), orphans(&pages)].concat();
    assert!(faults.is_empty(), "links that lead nowhere:\n{}", faults.join("\n"));
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
fn links_that_lead_nowhere_are_found() {
    let found = |text: &str| {
        let page = Page { path: "docs/book/src/faq.md".into(), text: format!("# A\n\n{text}\n") };
        faults(&page, &pages::of_book("start.md")).len()
    };
    let right =
        "[b](start.md) [b](start.md#packages-and-features) [a](#a) [x](https://example.com/) `src/lib.rs`";
    assert_eq!(found(&format!("{right} `[b](no.md)`\n```text\n[b](no.md)\n```")), 0);
    for text in [
        "[b\nc](no.md)",
        "[b](start.md#one)",
        "[a](#b)",
        "[x](http://example.com/)",
        // Not part of the web site.
        "[x](../../../README.md)",
        "`src/{lib,no}.rs`",
        "<a href=\"start.md\">b</a>",
    ] {
        assert_eq!(found(text), 1, "{text}");
    }
    let page = |path: &str, text: &str| Page { path: path.into(), text: text.into() };
    let pages = [page("docs/book/src/SUMMARY.md", "- [A](c/a.md)"), page("docs/book/src/c/a.md", "")];
    assert_eq!(orphans(&pages), [""; 0]);
    assert_eq!(
        orphans(&[&pages[..1], &[page("docs/book/src/b.md", "")]].concat()),
        ["SUMMARY.md does not have docs/book/src/b.md"]
    );
}

#[test]
fn every_promise_has_tests_that_exist() {
    let tests: String = files_of(root(), "rs").iter().map(|file| read(file)).collect();
    let rows = pages::of_book("").into_iter().flat_map(|page| page.rows());
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
        targets(&summary.prose()).iter().map(|(_, target)| Path::new(BOOK).join(target)).collect();
    let is_orphan = |page: &&Page| {
        page.path.starts_with(BOOK)
            && page.path != summary.path
            && !is_table(&page.path)
            && !listed.contains(&page.path)
    };
    pages
        .iter()
        .filter(is_orphan)
        .map(|page| format!("SUMMARY.md does not have {}", page.path.display()))
        .collect()
}

/// Returns whether the file has a table that pages copy.
fn is_table(path: &Path) -> bool {
    ["figures", "tables"].iter().any(|folder| path.starts_with(Path::new(BOOK).join(folder)))
}

fn exists(path: &Path) -> bool {
    root().join(path).exists()
}

/// Returns the faults of a page's links.
fn faults(page: &Page, pages: &[Page]) -> Vec<String> {
    let (code, text) = pages::inline_code(&page.prose());
    let mut faults: Vec<String> =
        targets(&text).iter().filter_map(|(_, target)| fault(page, target, pages)).collect();
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

fn fault(page: &Page, target: &str, pages: &[Page]) -> Option<String> {
    if target.contains("://") || target.starts_with("mailto:") {
        return (!target.starts_with("https://")).then(|| format!("{target} is not https"));
    }
    // The pages that have the table are checked.
    if is_table(&page.path) {
        return None;
    }
    let (file, heading) = target.split_once('#').unwrap_or((target, ""));
    let relative = if file.is_empty() { page.path.clone() } else { page.path.parent().unwrap().join(file) };
    let Ok(path) = root().join(&relative).canonicalize() else {
        return Some(format!("{target}: there is no {}", relative.display()));
    };
    let path = path.strip_prefix(root().canonicalize().unwrap()).unwrap_or(&path);
    if page.path.starts_with(BOOK) && !path.starts_with(BOOK) {
        return Some(format!("{target} is not part of the book's web site: name the file in code"));
    }
    if heading.is_empty() {
        return None;
    }
    let of = pages.iter().chain([page]).find(|of| of.path == path);
    let has = of.is_some_and(|page| headings(page).iter().any(|found| found == heading));
    (!has).then(|| format!("{target}: {} has no such heading", path.display()))
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

/// Returns the files of this repository that an inline code names; braces stand for several.
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
