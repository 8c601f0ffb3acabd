//! Compares the book's page of metrics with the metrics that the code records, names, kinds, units and labels,
//! and with those that it describes to a recorder.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};
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

/// The kind, the unit and the text of a metric.
type Description = (&'static str, Option<Unit>, String);

/// The metrics that were described.
#[derive(Default)]
struct Described(Mutex<BTreeMap<String, Description>>);

impl Described {
    fn add(&self, name: &KeyName, kind: &'static str, unit: Option<Unit>, text: &str) {
        let before = self.0.lock().unwrap().insert(name.as_str().to_owned(), (kind, unit, text.to_owned()));
        assert_eq!(before, None, "{} is described twice", name.as_str());
    }
}

impl Recorder for Described {
    fn describe_counter(&self, name: KeyName, unit: Option<Unit>, text: SharedString) {
        self.add(&name, "counter", unit, &text);
    }

    fn describe_gauge(&self, name: KeyName, unit: Option<Unit>, text: SharedString) {
        self.add(&name, "gauge", unit, &text);
    }

    fn describe_histogram(&self, name: KeyName, unit: Option<Unit>, text: SharedString) {
        self.add(&name, "histogram", unit, &text);
    }

    fn register_counter(&self, _: &Key, _: &Metadata<'_>) -> Counter {
        Counter::noop()
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

/// What the exporter's output has as HELP.
#[test]
fn every_metric_of_the_page_is_described() {
    let described = Described::default();
    metrics::with_local_recorder(&described, tonic_rdma::describe_metrics);
    let mut described = described.0.into_inner().unwrap();
    // The command describes its own.
    for (kind, unit, name, text) in pages::sources().iter().flat_map(|(_, text)| described_in(text)) {
        assert_eq!(described.insert(name.clone(), (kind, unit, text)), None, "{name} is described twice");
    }
    let of_histogram = |name: &str| name.ends_with("_bucket") || name.ends_with("_count");
    for (name, (kind, unit, text)) in &described {
        let expected = match name.trim_end_matches("_sum") {
            name if of_histogram(name) => Unit::Count,
            name if name.contains("_bytes") => Unit::Bytes,
            name if name.ends_with("_seconds") => Unit::Seconds,
            _ => Unit::Count,
        };
        assert_eq!(unit.unwrap_or(Unit::Count), expected, "{name}");
        assert!(text.len() > 10 && !text.ends_with('.'), "{name}, a {kind}: {text:?}");
        assert!(text.trim() == text && !text.contains('\n'), "{name}: {text:?}");
    }
    // The library's histograms are a counter for the buckets, a counter of all values, and a gauge of their sum.
    for part in ["_bucket", "_count", "_sum"] {
        let kind = if part == "_sum" { "gauge" } else { "counter" };
        let names: Vec<_> = described.keys().filter_map(|name| name.strip_suffix(part)).collect();
        for name in names.into_iter().map(str::to_owned).collect::<Vec<_>>() {
            let (of_part, unit, text) = described.remove(&format!("{name}{part}")).unwrap();
            assert_eq!(of_part, kind, "{name}{part}");
            described.insert(name, ("histogram", unit, text));
        }
    }
    let page = on_the_page();
    let names = |metrics: Vec<&String>| metrics.into_iter().cloned().collect::<BTreeSet<_>>();
    assert_eq!(names(described.keys().collect()), names(page.keys().collect()), "described, and on the page");
    for (name, (kind, ..)) in &described {
        assert!(page[name].contains(*kind), "{name} is described as a {kind}");
    }
}

/// Reads the calls of the macros `describe_…!` with constants as names.
fn described_in(source: &str) -> Vec<(&'static str, Option<Unit>, String, String)> {
    let constants: BTreeMap<&str, &str> = source.split("const ").skip(1).filter_map(constant).collect();
    let mut found = Vec::new();
    for (kind, arguments) in macro_calls(source) {
        let Some(kind) = kind.strip_prefix("describe_") else { continue };
        let kind = ["counter", "gauge", "histogram"].into_iter().find(|known| *known == kind).unwrap();
        let first = arguments.first().map(ToString::to_string).unwrap_or_default();
        let Some(name) = constants.get(&*first) else { continue };
        let words: String = arguments.iter().map(ToString::to_string).collect();
        let unit = match () {
            () if words.contains("Unit::Bytes") => Some(Unit::Bytes),
            () if words.contains("Unit::Seconds") => Some(Unit::Seconds),
            () => None,
        };
        let text = arguments.iter().filter_map(string).next_back().unwrap_or_default();
        found.push((kind, unit, name.trim_matches('"').to_owned(), text));
    }
    found
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
