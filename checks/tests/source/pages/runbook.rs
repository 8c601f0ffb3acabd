//! Compares the runbook with the code and with the page of metrics: a misspelt metric, label or code gives an empty
//! answer, which reads as good health.

use std::collections::BTreeSet;

use regex::Regex;
use tonic_rdma_checks::pages::{self, Page};
use tonic_rdma_checks::{read, root};

/// What other exporters provide.
const OTHERS: [&str; 3] =
    ["container_cpu_cfs_periods_total", "container_cpu_cfs_throttled_periods_total", "up"];
/// Labels of Prometheus itself, and of histograms.
const LABELS: [&str; 5] = ["alertname", "alertstate", "instance", "job", "le"];

#[test]
fn every_reason_has_a_remedy() {
    let label = Regex::new(r#"^    \w+ => "(\w+)";"#).unwrap();
    let source = read(&root().join("src/endpoint/reason.rs"));
    let code: BTreeSet<String> =
        source.lines().filter_map(|line| Some(label.captures(line)?[1].to_owned())).collect();
    let rows = pages::of_book("runbook-reasons.md").into_iter().flat_map(|page| page.rows());
    let page: BTreeSet<String> = rows
        .filter(|(header, _)| header == "code")
        .map(|(_, cells)| cells[0].trim_matches('`').to_owned())
        .collect();
    assert!(code.len() > 10, "only {code:?} were found: is this check broken?");
    assert_eq!(code, page, "the code has the left ones, docs/book/src/runbook-reasons.md the right ones");
}

#[test]
fn queries_name_metrics_and_labels_that_exist() {
    let known = known();
    let faults: Vec<String> =
        pages::of_book("runbook").iter().flat_map(queries).flat_map(|query| faults(&query, &known)).collect();
    assert!(faults.is_empty(), "docs/book/src/metrics.md lacks these: {faults:?}");
}

#[test]
fn wrong_queries_are_found() {
    let known = ["tonic_rdma_a_total", "tonic_rdma_b_seconds", "reason"].map(str::to_owned).into();
    let found = |query: &str| faults(query, &known);
    let right =
        r#"histogram_quantile(0.9, sum by (job, le) (rate(tonic_rdma_b_seconds_bucket{reason="c"}[5m])))"#;
    assert_eq!(found(right), [""; 0]);
    assert_eq!(found("up == 0"), [""; 0]);
    assert_eq!(found("rate(tonic_rdma_c_total[5m])"), ["tonic_rdma_c_total"]);
    assert_eq!(found(r#"tonic_rdma_a_total{cause="x", reason="y"}"#), ["cause"]);
    assert_eq!(found("sum by (job, cause) (tonic_rdma_a_total)"), ["cause"]);
}

/// Returns the queries of a page.
fn queries(page: &Page) -> Vec<String> {
    let blocks = page.text.split("```promql\n").skip(1);
    let found: Vec<String> =
        blocks.filter_map(|rest| Some(rest.split("```").next()?.trim().to_owned())).collect();
    assert!(page.name() != "runbook.md" || found.len() > 12, "only {} queries were found", found.len());
    found
}

/// Returns the metrics of the page, and their labels.
pub(super) fn known() -> BTreeSet<String> {
    let rows = pages::of_book("metrics.md").into_iter().flat_map(|page| page.rows());
    let metrics = rows.filter(|(header, _)| header == "metric");
    let word = Regex::new(r"\w+").unwrap();
    metrics.flat_map(|(_, cells)| words(&word, &format!("{} {}", cells[0], cells[3]))).collect()
}

/// Returns the metrics and labels of a query that do not exist.
pub(super) fn faults(query: &str, known: &BTreeSet<String>) -> Vec<String> {
    let metrics = Regex::new(r"\b(tonic_rdma_\w+|container_\w+|up)\b").unwrap();
    let metrics = words(&metrics, query).into_iter().filter(|name| {
        let of_histogram = ["_bucket", "_count", "_sum"].iter().filter_map(|part| name.strip_suffix(part));
        let is_known = |name: &str| known.contains(name) || OTHERS.contains(&name);
        !is_known(name) && !of_histogram.into_iter().any(is_known)
    });
    let (by, selector) =
        (Regex::new(r"by \(([^)]*)\)").unwrap(), Regex::new(r"\w+\s*(?:=|!=|=~|!~)\s*\x22").unwrap());
    let name = Regex::new(r"\w+").unwrap();
    let grouped = by.captures_iter(query).flat_map(|found| words(&name, &found[1])).collect::<Vec<_>>();
    let selected =
        words(&selector, query).into_iter().flat_map(|text| words(&name, &text)).collect::<Vec<_>>();
    let labels = grouped.into_iter().chain(selected);
    metrics.chain(labels.filter(|label| !known.contains(label) && !LABELS.contains(&&**label))).collect()
}

fn words(pattern: &Regex, text: &str) -> Vec<String> {
    pattern.find_iter(text).map(|found| found.as_str().to_owned()).collect()
}
