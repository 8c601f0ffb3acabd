//! Compares the book's page of metrics with the metrics that the code records: names, kinds, units and
//! labels.

use std::collections::{BTreeMap, BTreeSet};

use tonic_rdma_checks::pages;

use crate::model::{macro_calls, string};

/// The metrics by name, each with its kind and its labels.
type Metrics = BTreeMap<String, BTreeSet<String>>;

#[test]
fn the_page_has_every_metric_of_the_code_and_no_other() {
    let sources: Vec<String> = pages::sources().into_iter().map(|(_, text)| text).collect();
    let (recorded, page) = (recorded(&sources), on_the_page());
    assert!(recorded.len() > 20, "only {} metrics were found: is this check broken?", recorded.len());
    for name in recorded.keys().chain(page.keys()) {
        let (code, page) = (recorded.get(name), page.get(name));
        assert_eq!(code, page, "{name}: the code has the left one, docs/book/src/metrics.md the right one");
    }
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
    let found = recorded(&[code.to_owned()]);
    let found: Vec<_> = found.iter().map(|(name, of)| format!("{} {of:?}", &name[11..])).collect();
    let expected = [
        r#"a_total {"counter", "route", "why"}"#,
        r#"calls_total {"counter"}"#,
        r#"late_seconds {"histogram"}"#,
    ];
    assert_eq!(found, expected);
}

/// Reads the page's tables, and checks that the units fit the names.
fn on_the_page() -> Metrics {
    let mut metrics = Metrics::new();
    let rows = pages::of_book("metrics.md").into_iter().flat_map(|page| page.rows());
    for (_, cells) in rows.filter(|(header, _)| header == "metric") {
        let [name, kind, unit, labels, meaning] = &cells[..] else {
            panic!("a row with other columns: {cells:?}")
        };
        let name = name.trim_matches('`').to_owned();
        let expected = match &*name {
            name if name.contains("_bytes") => "bytes",
            name if name.ends_with("_seconds") => "seconds",
            _ => unit,
        };
        assert!(unit == expected && !unit.is_empty() && !meaning.is_empty(), "{name} in {unit:?}: {meaning}");
        assert_eq!(kind == "counter", name.ends_with("_total"), "{name} is a {kind}");
        let labels = labels.split(',').map(|label| label.trim().trim_matches('`').to_owned());
        let metric = labels.filter(|label| !label.is_empty()).chain([kind.clone()]).collect();
        assert_eq!(metrics.insert(name.clone(), metric), None, "{name} is on the page twice");
    }
    metrics
}

/// Reads the metrics of the code: all strings that begin with `tonic_rdma_`, with the kinds and labels of the
/// calls that record them.
fn recorded(sources: &[String]) -> Metrics {
    const PREFIX: &str = "\"tonic_rdma_";
    let mut metrics = Metrics::new();
    for source in sources.iter().filter(|source| source.contains(PREFIX)) {
        for name in source.split(PREFIX).skip(1).filter_map(|rest| rest.split('"').next()) {
            metrics.entry(format!("tonic_rdma_{name}")).or_default();
        }
        let constants: BTreeMap<&str, &str> = source.split("const ").skip(1).filter_map(constant).collect();
        for (kind, arguments) in macro_calls(source) {
            // The table of the macro `counters!`, which makes the calls.
            if kind == "counters" {
                for name in arguments.iter().filter_map(string) {
                    metrics.entry(name).or_default().insert("counter".into());
                }
            }
            let first = arguments.first().map(ToString::to_string).unwrap_or_default();
            let name = constants.get(&*first).copied().unwrap_or(&first).trim_matches('"');
            let Some(metric) = metrics.get_mut(name) else { continue };
            if ["counter", "gauge", "histogram"].contains(&&*kind) {
                let labels = arguments.windows(3).filter(|of| format!("{}{}", of[1], of[2]) == "=>");
                metric.extend(labels.filter_map(|of| string(&of[0])).chain([kind]));
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
