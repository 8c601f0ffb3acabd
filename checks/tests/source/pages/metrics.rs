//! Compares the book's page of metrics with the metrics that the code records: names, kinds, units and labels.

use std::collections::{BTreeMap, BTreeSet};

use tonic_rdma_checks::pages;

use crate::model::{macro_calls, string};

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
fn metrics_are_found_in_the_code() {
    let code = r#"
        const LATE: &str = "tonic_rdma_late_seconds";
        fn f() {
            describe_counter!("tonic_rdma_a_total", Unit::Bytes, "x");
            metrics::counter!("tonic_rdma_a_total", "route" => name(), "why" => why).increment(1);
            metrics::histogram!(LATE).record(1);
        }
        counters! { calls => "tonic_rdma_calls_total"; }
    "#;
    let metric = |name: &str, kind: &str, labels: &[&str]| {
        let labels = labels.iter().map(|label| (*label).to_owned()).collect();
        (format!("tonic_rdma_{name}"), Metric { kinds: [kind.to_owned()].into(), labels })
    };
    let page: Metrics = [
        metric("a_total", "counter", &["route", "why"]),
        metric("late_seconds", "histogram", &[]),
        metric("calls_total", "counter", &[]),
    ]
    .into();
    assert_eq!(recorded(&[code.to_owned()]), page);
    assert_eq!(differences(&Metrics::new(), &page).len(), 3);
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
    const PREFIX: &str = "tonic_rdma_";
    let mut metrics = Metrics::new();
    for source in sources.iter().filter(|source| source.contains(PREFIX)) {
        for name in source.split(&format!("\"{PREFIX}")).skip(1).filter_map(|rest| rest.split('"').next()) {
            metrics.entry(format!("{PREFIX}{name}")).or_default();
        }
        let constants: BTreeMap<&str, &str> = source.split("const ").skip(1).filter_map(constant).collect();
        for (kind, arguments) in macro_calls(source) {
            let texts: Vec<String> = arguments.iter().filter_map(string).collect();
            // The table of the macro `counters!`, which makes the calls.
            if kind == "counters" {
                for text in &texts {
                    metrics.entry(text.clone()).or_default().kinds.insert("counter".into());
                }
            }
            let first = arguments.first().map(ToString::to_string).unwrap_or_default();
            let name = constants.get(&*first).copied().unwrap_or(&first).trim_matches('"');
            let Some(metric) = metrics.get_mut(name) else { continue };
            if ["counter", "gauge", "histogram"].contains(&&*kind) {
                metric.kinds.insert(kind);
                let labels = arguments.windows(3).filter(|of| format!("{}{}", of[1], of[2]) == "=>");
                metric.labels.extend(labels.filter_map(|of| string(&of[0])));
            }
        }
    }
    metrics
}

/// Returns the name and the text of a constant of type `&str`.
fn constant(rest: &str) -> Option<(&str, &str)> {
    let (name, value) = rest.split_once(": &str = ")?;
    Some((name, value.split_once(';')?.0)).filter(|(name, _)| !name.contains(char::is_whitespace))
}
