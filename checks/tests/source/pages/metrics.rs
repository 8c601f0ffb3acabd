//! Compares the book's page of metrics with the metrics that the code records: names, kinds, units and labels.

use std::collections::{BTreeMap, BTreeSet};

use tonic_rdma_checks::pages;

/// The kinds and labels of a metric, in the code or on the page.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Metric {
    kinds: BTreeSet<String>,
    labels: BTreeSet<String>,
}

type Metrics = BTreeMap<String, Metric>;

#[test]
fn the_page_has_every_metric_of_the_code_and_no_other() {
    let sources: Vec<String> = pages::sources().into_iter().map(|(_, text)| text).collect();
    let (recorded, page) = (recorded(&sources), on_the_page());
    assert!(recorded.len() > 20, "only {} metrics were found: is this check broken?", recorded.len());
    let differ = differences(&recorded, &page);
    assert!(differ.is_empty(), "docs/book/src/metrics.md and the code differ:\n{}", differ.join("\n"));
}

#[test]
fn differences_are_found() {
    let source = r#"
        const LATE: &str = "tonic_rdma_late_seconds";
        fn f() {
            describe_counter!("tonic_rdma_a_total", Unit::Bytes, "x");
            metrics::counter!("tonic_rdma_a_total", "route" => name(), "why" => why).increment(1);
            metrics::histogram!(LATE).record(1);
        }
        counters! { calls => "tonic_rdma_calls_total"; }
    "#;
    let code = recorded(&[source.to_owned()]);
    let metric = |kind: &str, labels: &[&str]| Metric {
        kinds: [kind.to_owned()].into(),
        labels: labels.iter().map(|label| (*label).to_owned()).collect(),
    };
    let page: Metrics = [
        ("tonic_rdma_a_total", metric("counter", &["route", "why"])),
        ("tonic_rdma_late_seconds", metric("histogram", &[])),
        ("tonic_rdma_calls_total", metric("counter", &[])),
    ]
    .map(|(name, metric)| (name.to_owned(), metric))
    .into();
    assert_eq!(differences(&code, &page), [""; 0]);
    let changed = |change: fn(&mut Metrics)| {
        let mut page = page.clone();
        change(&mut page);
        differences(&code, &page).len()
    };
    assert_eq!(changed(|page| drop(page.remove("tonic_rdma_calls_total"))), 1, "one is missing");
    assert_eq!(
        changed(|page| drop(page.insert("tonic_rdma_b".into(), Metric::default()))),
        1,
        "one too many"
    );
    let labels = |page: &mut Metrics| page.get_mut("tonic_rdma_a_total").unwrap().labels.clear();
    assert_eq!(changed(labels), 1, "other labels");
    let kind = |page: &mut Metrics| *page.get_mut("tonic_rdma_calls_total").unwrap() = Metric::default();
    assert_eq!(changed(kind), 1, "another kind");
}

fn differences(code: &Metrics, page: &Metrics) -> Vec<String> {
    let names: BTreeSet<&String> = code.keys().chain(page.keys()).collect();
    let difference = |name: &String| match (code.get(name), page.get(name)) {
        (Some(code), Some(page)) if code == page => None,
        (Some(_), None) => Some(format!("{name} is not on the page")),
        (None, _) => Some(format!("{name} is not in the code")),
        (code, page) => Some(format!("{name}: the code has {code:?}, the page {page:?}")),
    };
    names.into_iter().filter_map(difference).collect()
}

/// Reads the page's tables, and checks that the units fit the names.
fn on_the_page() -> Metrics {
    let mut metrics = Metrics::new();
    for (head, cells) in pages::of_book("metrics.md").iter().flat_map(|page| page.rows()) {
        if head != "metric" {
            continue;
        }
        let [name, kind, unit, labels, meaning] = &cells[..] else {
            panic!("a row with other columns: {cells:?}")
        };
        let name = name.trim_matches('`').to_owned();
        let expected = match &*name {
            name if name.contains("_bytes") => "bytes",
            name if name.ends_with("_seconds") => "seconds",
            _ => unit,
        };
        assert!(unit == expected && !unit.is_empty(), "{name} in {unit:?}");
        assert!(!meaning.is_empty(), "{name} has no meaning");
        assert_eq!(kind == "counter", name.ends_with("_total"), "{name} is a {kind}");
        let labels = labels.split(',').map(|label| label.trim().trim_matches('`').to_owned());
        let labels = labels.filter(|label| !label.is_empty()).collect();
        let metric = Metric { kinds: [kind.clone()].into(), labels };
        assert_eq!(metrics.insert(name.clone(), metric), None, "{name} stands on the page twice");
    }
    metrics
}

/// Reads the metrics of the code: all strings that begin with `tonic_rdma_`, with the kinds and labels of the calls that record them.
fn recorded(sources: &[String]) -> Metrics {
    const PREFIX: &str = "\"tonic_rdma_";
    let mut metrics = Metrics::new();
    for source in sources {
        let constants: BTreeMap<&str, &str> = source.split("const ").skip(1).filter_map(constant).collect();
        for literal in source.split(PREFIX).skip(1).filter_map(|rest| rest.split_once('"')) {
            metrics.entry(format!("tonic_rdma_{}", literal.0)).or_default();
        }
        for kind in ["counter", "gauge", "histogram"] {
            for call in calls(source, kind) {
                let first = call.split(',').next().unwrap_or_default().trim();
                let name = constants.get(first).copied().unwrap_or(first).trim_matches('"');
                let Some(metric) = metrics.get_mut(name) else { continue };
                metric.kinds.insert(kind.to_owned());
                let arrows = call.match_indices("=>").map(|(at, _)| call[..at].trim_end());
                let labels = arrows.filter_map(|before| before.strip_suffix('"')?.rsplit('"').next());
                metric.labels.extend(labels.map(str::to_owned));
            }
        }
        // The table of the macro `counters!`, which makes the calls.
        for row in source.split("=> \"tonic_rdma_").skip(1).filter_map(|rest| rest.split_once("\";")) {
            metrics.entry(format!("tonic_rdma_{}", row.0)).or_default().kinds.insert("counter".into());
        }
    }
    metrics
}

/// Returns the name and the text of a constant of type `&str`.
fn constant(rest: &str) -> Option<(&str, &str)> {
    let (name, value) = rest.split_once(": &str = ")?;
    Some((name, value.split_once(';')?.0)).filter(|(name, _)| !name.contains(char::is_whitespace))
}

/// Returns the arguments of each call of a macro of `metrics`.
fn calls<'a>(source: &'a str, kind: &str) -> Vec<&'a str> {
    let name = format!("{kind}!(");
    let starts = source.match_indices(&name);
    let own = starts.filter(|(at, _)| !source[..*at].ends_with("describe_"));
    own.map(|(at, _)| arguments(&source[at + name.len()..])).collect()
}

/// Returns the text before the closing parenthesis.
fn arguments(rest: &str) -> &str {
    let mut depth = 1;
    for (at, letter) in rest.char_indices() {
        match letter {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return &rest[..at];
        }
    }
    rest
}
