//! Checks the words of the pages: names of the code exist, numbers of packages and versions are those of the code, pages
//! are short, and words that the field does not use stay away.

use std::collections::BTreeSet;
use std::path::Path;

use tonic_rdma_checks::pages::{self, BOOK, Page, inline_code};
use tonic_rdma_checks::{files_of, read, root};

use crate::api::{ITEMS, PUBLISHED};

/// Names of other software that look like names of the code, and types of ours whose name another crate has, too.
const FOREIGN: &[&str] =
    &["BackendBase", "Bytes", "Channel", "Request", "default", "siw_check_sgl_tx", "std"];

/// Words that these pages once had, and the field's words.
const VOCABULARY: &[(&str, &str)] = &[
    ("floors", "layers, lower bounds"),
    ("for ever", "indefinitely"),
    ("mended", "fixed"),
    ("newcomer", "default, out of the box"),
    ("nobody who", "no process that"),
    ("stranger", "untrusted peer"),
    ("strangers", "untrusted peers"),
    ("what it costs", "overhead"),
    ("whoever", "a process that"),
];

/// The page, and the most lines that it has.
const LENGTHS: [(&str, usize); 2] = [("README.md", 120), (BOOK, 200)];

const NUMBERS: [&str; 11] =
    ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"];

#[test]
fn names_and_words_of_the_pages_are_right() {
    let known = Known::read();
    let faults: Vec<String> = pages::all().iter().flat_map(|page| known.faults(page)).collect();
    assert!(faults.is_empty(), "\n{}", faults.join("\n"));
}

#[test]
fn wrong_names_and_words_are_found() {
    let known = Known::read();
    let found = |text: &str| {
        let page = Page { path: "docs/book/src/faq.md".into(), text: format!("{text}\n") };
        known.faults(&page).len()
    };
    let right = "`RdmaChannel::connect`, `Policy::Require`, `tonic_rdma::memory`, `info.verdict()`, version 4 of the protocol";
    assert_eq!(found(&format!("{right}, `Endpoint::new(x)`\n```sh\nnewcomer\n```\n")), 0);
    for wrong in [
        "`RdmaChannel::dial_now`",
        "`RdmaChannel::reason`",
        "`info.verdict_now()`",
        "`RdmaDialer`",
        "The repository has four libraries",
        "121 packages",
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
        let versions = versions(&root().join(path));
        assert!(
            versions.contains(&cells[1]),
            "{}: the page says {}, the code {versions:?}",
            cells[0],
            cells[1]
        );
    }
}

#[test]
fn the_tables_of_features_name_the_packages_that_have_them() {
    let folders = PUBLISHED.iter().map(|(_, sources)| sources.trim_end_matches("src")).chain(["flight"]);
    let manifests: Vec<_> = folders.map(|folder| read(&root().join(folder).join("Cargo.toml"))).collect();
    let name = |text: &str| text.split("\nname = \"").nth(1).unwrap().split('"').next().unwrap().to_owned();
    let rows: Vec<_> =
        pages::of_book("").iter().flat_map(Page::rows).filter(|(head, _)| head == "feature").collect();
    assert!(rows.len() > 3, "only {} features were found: is this check broken?", rows.len());
    for (_, cells) in rows {
        for feature in inline_code(&cells[0]).0 {
            let having = manifests.iter().filter(|text| text.contains(&format!("\n{feature} = [")));
            let having: BTreeSet<String> = having.map(|text| name(text)).collect();
            let stated = inline_code(&cells[1]).0;
            let is_all = cells[1] == "all packages" && having.len() == manifests.len();
            assert!(
                is_all
                    || having.iter().all(|name| stated.iter().any(|of| name.ends_with(&**of)))
                        && having.len() == stated.len(),
                "{feature}: {having:?} have it, the page says {}",
                cells[1]
            );
        }
    }
}

/// Returns the versions that a file, or those of a folder, states, as the page writes them.
fn versions(path: &Path) -> Vec<String> {
    let files = if path.is_dir() { files_of(path, "rs") } else { vec![path.to_owned()] };
    let text: String = files.iter().map(|file| read(file)).collect();
    let numbers = |mark: &'static str| {
        let digits = |text: &str| text.chars().take_while(char::is_ascii_digit).collect::<String>();
        let of = move |rest: &str| -> Vec<String> {
            rest.split(['}', ')', ';'])
                .next()
                .unwrap()
                .split([' ', '(', '_'])
                .map(digits)
                .filter(|of| !of.is_empty())
                .collect()
        };
        text.split(mark).skip(1).map(of).collect::<Vec<_>>()
    };
    let stated = [numbers("Versions::only"), numbers("= Versions {")].concat();
    let magic = numbers("MAGIC: u64 = ")
        .into_iter()
        .filter_map(|of| Some(of.last()?.trim_start_matches('0').to_owned()));
    stated.iter().map(|of| of.join(" and ")).chain(magic).collect()
}

/// What the code has.
struct Known {
    /// All words of programs.
    words: BTreeSet<String>,
    /// The paths of public items, also without their first parts.
    paths: BTreeSet<String>,
    members: usize,
    behaviours: String,
    /// The versions of the protocol.
    versions: Vec<String>,
}

impl Known {
    fn read() -> Self {
        let mut words = BTreeSet::new();
        let is_part = |letter: char| letter.is_alphanumeric() || letter == '_';
        let mut add = |text: &str| words.extend(text.split(|letter| !is_part(letter)).map(str::to_owned));
        let files = ["rs", "py", "pyi", "proto"].iter().flat_map(|ending| files_of(root(), ending));
        // This file has wrong names.
        files.filter(|file| !file.ends_with("pages/words.rs")).for_each(|file| add(&read(&file)));
        pages::all().iter().flat_map(|page| page.text.split("```").skip(1).step_by(2)).for_each(add);
        let mut paths = BTreeSet::new();
        for (name, items) in &*ITEMS {
            for item in items {
                let path = format!("{name}::{}", item.path);
                paths.extend(path.match_indices("::").map(|(at, _)| path[at + 2..].to_owned()));
                paths.insert(path);
            }
        }
        let manifest = read(&root().join("Cargo.toml"));
        let members =
            manifest.lines().find(|line| line.starts_with("members = ")).unwrap().split(", ").count();
        let semantics = pages::of_book("semantics.md").remove(0).text;
        let behaviours =
            semantics.split(" behaviours").next().unwrap().rsplit(' ').next().unwrap().to_owned();
        let versions = versions(&root().join("src/wire/hello.rs")).concat();
        let versions = versions.split(" and ").map(str::to_owned).collect();
        Self { words, paths, members, behaviours, versions }
    }

    fn faults(&self, page: &Page) -> Vec<String> {
        let prose = page.prose();
        let (code, text) = inline_code(&prose);
        // The changelog says what was, and has names that are gone.
        let is_now = page.path != Path::new("CHANGELOG.md");
        let mut faults: Vec<String> = Vec::new();
        if is_now {
            let unknown = code.iter().filter(|code| !self.has(code, page));
            faults.extend(unknown.map(|code| format!("`{code}` is not in the code")));
            faults.extend(self.wrong_numbers(&text));
            let plain = text.to_lowercase().replace(|letter: char| !letter.is_alphanumeric(), " ");
            let plain = format!(" {} ", plain.split_whitespace().collect::<Vec<_>>().join(" "));
            let homely = VOCABULARY.iter().filter(|(word, _)| plain.contains(&format!(" {word} ")));
            faults.extend(homely.map(|(word, better)| format!("has \"{word}\"; the field says: {better}")));
        }
        let lines = page.text.lines().count();
        let is_long = |(of, most): &&(&str, usize)| page.path.starts_with(of) && lines > *most;
        faults.extend(
            LENGTHS.iter().find(is_long).map(|(_, most)| format!("has {lines} lines, and may have {most}")),
        );
        faults.iter().map(|fault| format!("{}: {fault}", page.path.display())).collect()
    }

    /// Returns whether the code has what an inline code names: paths, functions, and types such as `RdmaChannel`.
    fn has(&self, code: &str, page: &Page) -> bool {
        let is_inner = page.path.starts_with(format!("{BOOK}/design")) || !page.path.starts_with("docs");
        let is_part = |letter: char| letter.is_alphanumeric() || "_:".contains(letter);
        let mut rest = code;
        while let Some(start) = rest.find(is_part) {
            let name = &rest[start..];
            let name = &name[..name.find(|letter| !is_part(letter)).unwrap_or(name.len())];
            rest = &rest[start + name.len()..];
            let parts: Vec<&str> = name.split("::").filter(|part| !part.is_empty()).collect();
            let is_type = name.chars().filter(char::is_ascii_uppercase).count() > 1
                && name.starts_with(|letter: char| letter.is_ascii_uppercase())
                && name.contains(|letter: char| letter.is_ascii_lowercase());
            let is_name =
                parts.len() > 1 && name.contains("::") || rest.starts_with('(') || is_type && name == code;
            let is_foreign = parts.iter().any(|part| FOREIGN.contains(part));
            if !is_name || is_foreign || name.contains(|letter: char| !letter.is_ascii()) {
                continue;
            }
            let is_known = parts.iter().all(|part| self.words.contains(*part));
            // A part of a public type, for users, is public.
            let is_hidden = || {
                let [.., of, _] = &parts[..] else { return false };
                let path = parts[parts.len() - 2..].join("::");
                !is_inner
                    && of.starts_with(|letter: char| letter.is_ascii_uppercase())
                    && self.paths.contains(*of)
                    && !self.paths.contains(&path)
            };
            if !is_known || is_hidden() {
                return false;
            }
        }
        true
    }

    /// Finds numbers of packages, behaviours and versions that are not those of the code.
    fn wrong_numbers(&self, text: &str) -> Vec<String> {
        let lower = text.to_lowercase();
        let words: Vec<&str> =
            lower.split_whitespace().map(|word| word.trim_matches(['.', ',', ':', ';', '*', '('])).collect();
        let number = |word: &str| {
            let spelled = NUMBERS.iter().position(|number| *number == word).map(|number| number.to_string());
            spelled.or_else(|| word.parse::<usize>().ok().map(|number| number.to_string()))
        };
        let libraries = (PUBLISHED.len() + 1).to_string();
        let known = |what: &[&str]| match what {
            ["libraries", ..] => Some(vec![libraries.clone()]),
            ["packages", ..] => Some(vec![libraries.clone(), self.members.to_string()]),
            ["behaviours", ..] => Some(vec![self.behaviours.clone()]),
            ["of", "the", "protocol"] => Some(self.versions.clone()),
            _ => None,
        };
        let mut faults = Vec::new();
        for (at, word) in words.iter().enumerate() {
            let what = &words[at + 1..words.len().min(at + 4)];
            if let (Some(number), Some(known)) = (number(word), known(what))
                && number != "1"
                && !known.contains(&number)
            {
                faults.push(format!(
                    "says \"{word} {}\", and the code has {}",
                    what.join(" "),
                    known.join(", ")
                ));
            }
        }
        faults
    }
}
