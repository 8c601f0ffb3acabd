//! Compares the book's pages of variables with the code: names, defaults, values and examples.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use tonic_rdma::Config;
use tonic_rdma_collective::{Launch, PlanChoice};

use tonic_rdma_checks::{files_of, pages, read, root};

/// The lines of a page about a variable ("- Default: ", "- Accepts: " and so on), by their first word.
type Section = BTreeMap<String, String>;

/// The beginning of the variables that [`Launch`] reads.
const LAUNCH: &str = "RDMA_COLLECTIVE_";

/// The variable that a communicator reads.
const PLANS: &str = "RDMA_COLLECTIVE_PLANS";

#[test]
fn the_pages_have_every_variable_of_the_code_and_no_other() {
    let (code, pages): (BTreeSet<String>, BTreeSet<String>) = (asked_for(), sections().into_keys().collect());
    let differ: Vec<_> = code.symmetric_difference(&pages).collect();
    assert!(
        differ.is_empty(),
        "docs/book/src/variables*.md lack these, or the code does not read them: {differ:?}"
    );
}

#[test]
fn a_warning_of_unknown_variables_knows_all_of_them() {
    assert_eq!(tonic_rdma::unstable::known_variables(), asked_for());
}

#[test]
fn defaults_values_and_examples_are_those_of_the_code() {
    let of = |name: &str, value: &str| Config::from_variables(|asked| (asked == name).then(|| value.into()));
    for (name, section) in sections().into_iter().filter(|(name, _)| !name.starts_with(LAUNCH)) {
        let line = |word: &str| &section[word];
        // Some defaults are words and no value, such as "the first active port".
        if let Some((value, _)) = line("Default").strip_prefix('`').and_then(|rest| rest.split_once('`')) {
            assert_eq!(of(&name, value), Ok(Config::default()), "{name}: the default is not {value}");
        }
        let refused = of(&name, "").err().unwrap_or_else(|| panic!("{name}: the code takes anything"));
        let refused = refused.accepted().unwrap();
        assert_eq!(refused, format!("takes {}", line("Accepts")), "{name}");
        let config = of(&name, example(&name, &section))
            .unwrap_or_else(|error| panic!("the example of {name}: {error}"));
        // The software device reads its variables itself. A configuration only checks their values.
        if !name.starts_with("RDMA_SOFT_") {
            assert_ne!(config, Config::default(), "the example of {name} changes nothing");
        }
    }
}

#[test]
fn values_and_examples_of_the_launch_are_those_of_the_code() {
    let is_of_launch = |name: &String| name.starts_with(LAUNCH) && name != PLANS;
    let sections: Vec<_> = sections().into_iter().filter(|(name, _)| is_of_launch(name)).collect();
    let set: BTreeMap<String, String> =
        sections.iter().map(|(name, section)| (name.clone(), example(name, section).to_owned())).collect();
    let of = |set: &BTreeMap<String, String>| Launch::from_variables(|asked| set.get(asked).map(Into::into));
    assert!(of(&set).is_ok(), "the examples together: {:?}", of(&set));
    assert_eq!(sections.len(), 4);
    for (name, section) in sections {
        let mut bad = set.clone();
        bad.insert(name.clone(), String::new());
        let refused = of(&bad).unwrap_err().to_string();
        assert_eq!(refused, format!("{name}=\"\": takes {}", section["Accepts"]));
    }
}

#[test]
fn the_variable_of_plans_has_the_default_and_an_example_of_the_code() {
    let section = sections().remove(PLANS).unwrap();
    let value = section["Default"].trim_matches('`').parse::<PlanChoice>().unwrap();
    assert_eq!(value, PlanChoice::default(), "the default of {PLANS}");
    let example = example(PLANS, &section);
    assert!(matches!(example.parse(), Ok(PlanChoice::Pinned(_))), "{example}");
}

#[test]
fn pages_name_only_known_variables() {
    let known = asked_for();
    let folders = [
        "tests",
        "checks/src",
        "cli/tests",
        "collective/src",
        "src/endpoint/config",
        "tensor/tests",
        "verbs/tests",
    ];
    let tests = folders.iter().flat_map(|folder| files_of(&root().join(folder), "rs"));
    let tests: String = tests.map(|path| read(&path)).collect();
    for page in pages::all() {
        for name in names(&page.text) {
            let is_known = known.contains(&name) || tests.contains(&format!("\"{name}\""));
            assert!(is_known, "{} names {name}, which is no variable", page.path.display());
        }
    }
}

/// Returns the names of all variables that the code asks for.
fn asked_for() -> BTreeSet<String> {
    let asked = RefCell::new(BTreeSet::new());
    let config = Config::from_variables(|name| {
        // A former name is asked for, too, and refused.
        asked.borrow_mut().extend((name != "RDMA_CQS").then(|| name.to_owned()));
        None
    });
    assert_eq!(config, Ok(Config::default()));
    let _no_launcher = Launch::from_variables(|name| {
        if name.starts_with(LAUNCH) {
            asked.borrow_mut().insert(name.to_owned());
        }
        None
    });
    let mut asked = asked.into_inner();
    // Variables outside of the configuration.
    for (_, source) in pages::sources() {
        for call in ["var_os(\"RDMA_", "var(\"RDMA_", "env = \"RDMA_"] {
            let names = source.split(call).skip(1).filter_map(|rest| rest.split_once('"'));
            asked.extend(names.map(|(name, _)| format!("RDMA_{name}")));
        }
    }
    asked
}

/// Returns the value that the example of a variable sets.
fn example<'a>(name: &str, section: &'a Section) -> &'a str {
    let value = section["Example"].trim_matches('`').strip_prefix(&format!("{name}="));
    value.unwrap_or_else(|| panic!("{name}: the example sets another variable"))
}

/// Reads the sections of the pages. The heading of each is a variable's name.
fn sections() -> BTreeMap<String, Section> {
    let mut sections = BTreeMap::new();
    for page in pages::of_book("variables") {
        let text = page.prose();
        for section in text.split("\n### ").skip(1) {
            let (name, body) = section.split_once('\n').unwrap();
            let body =
                body.split("\n## ").next().unwrap().replace("\n  ", " ").replace("- Takes: ", "- Accepts: ");
            let entries = body.lines().filter_map(|line| line.strip_prefix("- ")?.split_once(": "));
            let entries: Section = entries.map(|(word, rest)| (word.to_owned(), rest.to_owned())).collect();
            for word in ["Default", "Accepts", "Example"] {
                let line = entries.get(word).unwrap_or_else(|| panic!("{name} has no line \"- {word}: \""));
                assert!(!line.is_empty(), "{name}: {word}");
            }
            assert_eq!(sections.insert(name.to_owned(), entries), None, "{name} has two sections");
        }
    }
    sections
}

/// Returns the names of variables in a text; `RDMA_*` stands for several.
fn names(text: &str) -> Vec<String> {
    let is_part = |letter: char| letter.is_ascii_uppercase() || letter.is_ascii_digit() || letter == '_';
    let words = text.split(|letter: char| !is_part(letter));
    words.filter(|word| word.starts_with("RDMA_") && !word.ends_with('_')).map(str::to_owned).collect()
}
