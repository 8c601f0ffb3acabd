//! Compares the alerts and the dashboard with the pages of alerts and metrics.

use regex::Regex;
use tonic_rdma_checks::pages;
use tonic_rdma_checks::{read, root};

use super::runbook::{faults, known};

const FOLDER: &str = "docs/deploy/watch";

#[test]
fn the_page_has_every_alert_of_the_file() {
    let text = read(&root().join(FOLDER).join("alerts.yaml"));
    let alert = Regex::new(
        r"- alert: (\w+)\n[^#]*? for: (\w+)\n[^#]*?severity: (\w+)\n[^#]*?runbook_url: \S*/(runbook\S*)\n",
    )
    .unwrap();
    let file: Vec<Vec<String>> =
        alert.captures_iter(&text).map(|of| (1..=4).map(|at| of[at].to_owned()).collect()).collect();
    assert_eq!(file.len(), text.matches("- alert: ").count(), "an alert lacks a field, or has another order");
    let rows = pages::of_book("alerts.md").into_iter().flat_map(|page| page.rows());
    let page: Vec<Vec<String>> = rows
        .filter(|(head, _)| head == "alert")
        .map(|(_, cells)| {
            let [alert, _, wait, severity, _, runbook] = &cells[..] else {
                panic!("other columns: {cells:?}")
            };
            let (_, runbook) = pages::targets(runbook).remove(0);
            vec![alert.trim_matches('`').to_owned(), wait.clone(), severity.clone(), runbook]
        })
        .collect();
    assert_eq!(file, page, "alerts.yaml has the left ones, docs/book/src/alerts.md the right ones");
}

#[test]
fn queries_name_metrics_and_labels_that_exist() {
    for name in ["alerts.yaml", "dashboard.json"] {
        let text = read(&root().join(FOLDER).join(name)).replace("\\\"", "\"");
        assert!(text.matches("tonic_rdma_").count() > 20, "{name} has few metrics: is this check broken?");
        let found = faults(&text, &known());
        assert!(found.is_empty(), "{name} has what docs/book/src/metrics.md does not: {found:?}");
    }
}
