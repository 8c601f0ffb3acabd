//! Checks the words of the pages: names of the code exist, numbers of packages and versions are those of the code, pages
//! are short, and words that the field does not use stay away.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::LazyLock;

use regex::{Captures, Regex};
use tonic_rdma_checks::pages::{self, BOOK, Page, inline_code};
use tonic_rdma_checks::{files_of, read, root};

use crate::api::{ITEMS, PUBLISHED};
use crate::layering::LAYERS;

/// Names of other software that look like names of the code, and types of ours whose name another crate has, too.
const FOREIGN: &str = "BackendBase Bytes Channel Request default siw_check_sgl_tx std";

/// Words that these pages once had, and the field's words.
const VOCABULARY: &[(&str, &str)] = &[
    ("floors", "layers, lower bounds"),
    ("for ever", "indefinitely"),
    ("mended", "fixed"),
    ("newcomers?", "default, out of the box"),
    ("nobody who", "no process that"),
    ("strangers?", "untrusted peer"),
    ("what it costs", "overhead"),
    ("whoever", "a process that"),
];

/// The pages, and the most lines that each has.
const LENGTHS: [(&str, usize); 2] = [("README.md", 120), (BOOK, 200)];

const NUMBERS: &str = "zero one two three four five six seven eight nine ten";

#[test]
fn names_and_words_of_the_pages_are_right() {
    let faults: Vec<String> = pages::all().iter().flat_map(|page| KNOWN.faults(page)).collect();
    assert!(faults.is_empty(), "\n{}", faults.join("\n"));
}

#[test]
fn wrong_names_and_words_are_found() {
    let found = |text: &str| {
        let page = Page { path: "docs/book/src/faq.md".into(), text: format!("{text}\n") };
        KNOWN.faults(&page).len()
    };
    let right = "`RdmaChannel::connect`, `Policy::Require`, `tonic_rdma::memory`, `info.verdict()`";
    let right = format!("{right}, `Endpoint::new(x)`, version 4 of the protocol\n```sh\nnewcomer\n```\n");
    assert_eq!(found(&right), 0);
    for wrong in [
        "`RdmaChannel::dial_now`",
        "`RdmaChannel::reason`",
        "`info.verdict_now()`",
        "`RdmaDialer`",
        "The repository has four libraries",
        "These are 121 packages",
        "12 behaviours",
        "Version 2 of the protocol",
        "A newcomer's calls",
        "waits for\never",
        &"a\n".repeat(201),
    ] {
        assert_eq!(found(wrong), 1, "{wrong}");
    }
}

#[test]
fn the_table_of_versions_is_that_of_the_code() {
    let rows = pages::of_book("versions.md").remove(0).rows();
    let rows: Vec<_> = rows.into_iter().filter(|(head, _)| head == "what").collect();
    assert!(rows.len() > 5, "only {} versions were found: is this check broken?", rows.len());
    for (_, cells) in rows {
        let path = cells[2].split('`').find(|part| part.contains('/')).unwrap();
        let found = versions(path);
        assert!(found.contains(&cells[1]), "{}: the page says {}, the code {found:?}", cells[0], cells[1]);
    }
}

#[test]
fn the_tables_of_features_name_the_packages_that_have_them() {
    let folders = PUBLISHED.iter().map(|(_, sources)| sources.trim_end_matches("src"));
    let manifests: Vec<_> = folders.map(|folder| read(&root().join(folder).join("Cargo.toml"))).collect();
    let rows = pages::of_book("").into_iter().flat_map(|page| page.rows());
    let rows: Vec<_> = rows.filter(|(head, _)| head == "feature").collect();
    assert!(rows.len() > 3, "only {} features were found: is this check broken?", rows.len());
    for (_, cells) in rows {
        for feature in inline_code(&cells[0]).0 {
            let having = manifests.iter().filter(|text| text.contains(&format!("\n{feature} = [")));
            let having: BTreeSet<&str> = having
                .map(|text| text.split("\nname = \"").nth(1).unwrap().split('"').next().unwrap())
                .collect();
            let short = |name: &str| name.starts_with('-').then(|| format!("tonic-rdma{name}"));
            let stated = inline_code(&cells[1]).0.into_iter().map(|name| short(&name).unwrap_or(name));
            let stated: BTreeSet<String> = stated.collect();
            let is_all = cells[1] == "all packages" && having.len() == manifests.len();
            assert!(is_all || stated.iter().eq(&having), "{feature}: {having:?} have it, not {}", cells[1]);
        }
    }
}

#[test]
fn lists_that_the_code_has_are_complete_elsewhere() {
    let log = Regex::new(r"\b(error|warn|info|debug)!\(|throttled!\(").unwrap();
    let logs = |(_, folder): &&(&str, &str)| {
        files_of(&root().join(folder), "rs").iter().any(|file| log.is_match(&read(file)))
    };
    let packages =
        PUBLISHED.iter().filter(logs).map(|(name, _)| (format!("`{name}`"), "docs/book/src/logs.md"));
    let (_, layers) = LAYERS.iter().find(|(name, _)| *name == "tonic_rdma").unwrap();
    let layers = layers.split([' ', '<']).filter(|layer| !["", "error"].contains(layer));
    let drawn = layers.chain(PUBLISHED.iter().filter_map(|(name, _)| name.strip_prefix("tonic_rdma_")));
    let drawn = drawn.map(|name| (format!(">{name}<"), "docs/book/src/pictures/layers.svg"));
    let begins = Regex::new(r"^(Rdma\w+)::(new|connect|bind)$").unwrap();
    let entries = ITEMS["tonic_rdma"]
        .iter()
        .filter_map(|item| Some(begins.captures(&item.path)?[1].to_owned()))
        .filter(|name| !name.ends_with("Builder"));
    let all: Vec<_> =
        packages.chain(drawn).chain(entries.map(|name| (format!("[`{name}`]"), "src/lib.rs"))).collect();
    assert!(all.len() > 15, "the code is read: {all:?}");
    for (name, file) in all {
        assert!(read(&root().join(file)).contains(&name), "{file} lacks {name}");
    }
}

/// Returns the versions that a file, or those of a folder, states, as the page writes them.
fn versions(path: &str) -> Vec<String> {
    let path = root().join(path);
    let files = if path.is_dir() { files_of(&path, "rs") } else { vec![path] };
    let text: String = files.iter().map(|file| read(file)).collect();
    let stated =
        r"Versions::only\((\d+)\)|Versions \{ oldest: (\d+), newest: (\d+) \}|MAGIC: u64 = \w+_0*(\d+);";
    let numbers = |found: Captures<'_>| {
        let groups: Vec<&str> = found.iter().skip(1).flatten().map(|number| number.as_str()).collect();
        groups.join(" and ")
    };
    Regex::new(stated).unwrap().captures_iter(&text).map(numbers).collect()
}

static KNOWN: LazyLock<Known> = LazyLock::new(Known::read);

/// What the code has.
struct Known {
    /// All words of programs.
    words: BTreeSet<String>,
    /// The paths of public items, also without their first parts.
    paths: BTreeSet<String>,
    /// The names in an inline code: a path, a function, or a type such as `RdmaChannel`.
    name: Regex,
    /// Patterns with a number, and the numbers that it may be.
    numbers: Vec<(Regex, Vec<String>)>,
    /// The patterns of words, and better ones.
    vocabulary: Vec<(Regex, &'static str)>,
}

impl Known {
    fn read() -> Self {
        let files = ["rs", "py", "pyi", "proto", "yaml"].iter().flat_map(|ending| files_of(root(), ending));
        // This file has wrong names.
        let texts = files.filter(|file| !file.ends_with("pages/words.rs")).map(|file| read(&file));
        let pages: Vec<Page> = pages::all();
        let blocks = pages.iter().flat_map(|page| page.text.split("```").skip(1).step_by(2));
        let texts: Vec<String> = texts.chain(blocks.map(str::to_owned)).collect();
        // Without optimization, a pattern would need many times as long.
        let is_end = |letter: char| !letter.is_alphanumeric() && letter != '_';
        let words = texts.iter().flat_map(|text| text.split(is_end)).map(str::to_owned);
        let items = ITEMS.iter().flat_map(|(name, items)| items.iter().map(move |item| (name, &item.path)));
        let mut paths = BTreeSet::new();
        for path in items.map(|(name, path)| format!("{name}::{path}")) {
            paths.extend(path.match_indices("::").map(|(at, _)| path[at + 2..].to_owned()));
            paths.insert(path);
        }
        let libraries = (PUBLISHED.len() + 1).to_string();
        let members =
            read(&root().join("Cargo.toml")).lines().nth(1).unwrap().split(", ").count().to_string();
        let semantics = pages::of_book("semantics.md").remove(0).text;
        let behaviours =
            semantics.split(" behaviours").next().unwrap().rsplit(' ').next().unwrap().to_owned();
        let protocol = versions("src/wire/hello.rs").concat().split(" and ").map(str::to_owned).collect();
        let pattern = |text: &str| Regex::new(&format!(r"(?i)\b{}\b", text.replace(' ', r"\s+"))).unwrap();
        let number =
            |text: &str| pattern(&text.replace('N', &format!(r"(\d+|{})", NUMBERS.replace(' ', "|"))));
        Self {
            words: words.collect(),
            paths,
            name: Regex::new(r"(\w+(?:::\w+)+)|(\w+)\(|^([A-Z]+[a-z]\w*[A-Z]\w*)$").unwrap(),
            numbers: vec![
                (number("(?:has|all|are) N libraries"), vec![libraries.clone()]),
                (number("(?:has|all|are) N packages"), vec![libraries, members]),
                (number("N behaviours"), vec![behaviours]),
                (number("version N of the protocol"), protocol),
            ],
            vocabulary: VOCABULARY.iter().map(|(word, better)| (pattern(word), *better)).collect(),
        }
    }

    fn faults(&self, page: &Page) -> Vec<String> {
        let (code, text) = inline_code(&page.prose());
        let mut faults: Vec<String> = Vec::new();
        let lines = page.text.lines().count();
        let is_long = |(of, most): &&(&str, usize)| page.path.starts_with(of) && lines > *most;
        let long = LENGTHS.iter().find(is_long);
        faults.extend(long.map(|(_, most)| format!("has {lines} lines, and may have {most}")));
        // The changelog says what was, and has names that are gone.
        if page.path != Path::new("CHANGELOG.md") {
            let is_for_users =
                page.path.starts_with(BOOK) && !page.path.starts_with(format!("{BOOK}/design"));
            let unknown = code.iter().filter(|code| !self.has(code, is_for_users));
            faults.extend(unknown.map(|code| format!("`{code}` is not in the code")));
            let numbers = self.numbers.iter().filter_map(|(pattern, known)| wrong(pattern, known, &text));
            faults.extend(numbers);
            let homely =
                self.vocabulary.iter().filter_map(|(word, better)| Some((word.find(&text)?, better)));
            faults.extend(
                homely.map(|(word, better)| format!("has \"{}\"; the field says: {better}", word.as_str())),
            );
        }
        faults.iter().map(|fault| format!("{}: {fault}", page.path.display())).collect()
    }

    /// Returns whether the code has what an inline code names. For users, parts of a public type are public.
    fn has(&self, code: &str, is_for_users: bool) -> bool {
        self.name.captures_iter(code).all(|found| {
            let name = found.iter().skip(1).flatten().next().unwrap().as_str();
            let parts: Vec<&str> = name.split("::").collect();
            let is_foreign = parts.iter().any(|part| FOREIGN.split(' ').any(|of| of == *part));
            let is_hidden = is_for_users
                && parts.len() > 1
                && parts[parts.len() - 2].starts_with(char::is_uppercase)
                && self.paths.contains(parts[parts.len() - 2])
                && !self.paths.contains(&parts[parts.len() - 2..].join("::"));
            is_foreign || !is_hidden && parts.iter().all(|part| self.words.contains(*part))
        })
    }
}

/// Returns the first number in the text that is not one of the known ones. "One package" may be any.
fn wrong(pattern: &Regex, known: &[String], text: &str) -> Option<String> {
    let value = |found: &str| NUMBERS.split(' ').position(|number| number == found.to_lowercase());
    let value = |found: &str| value(found).map_or(found.to_owned(), |value| value.to_string());
    let is_wrong = |number: &String| number != "1" && !known.contains(number);
    let found = pattern.captures_iter(text).find(|found| is_wrong(&value(&found[1])))?;
    Some(format!("says \"{}\", and the code has {}", &found[0], known.join(", ")))
}
