//! The table of the paper's figures beside ours.

use std::collections::BTreeMap;

use super::sizes::shares;
use super::training::training;
use super::{MODELS, range, ratio, speed_up, time_ratio};
use crate::columns::Row;
use crate::error::FigureError;
use crate::page::Figure;

/// The file of the table.
pub(crate) const SUMMARY: &str = "paper-summary.md";

/// The label of figure 11's run in which the computing grows with the workers.
const OWN_NETWORK: &str = "a network each";

/// A line of the table.
pub(super) struct Line {
    pub(super) figure: &'static str,
    pub(super) what: String,
    /// The number that the paper's text gives.
    pub(super) paper: &'static str,
    pub(super) here: String,
}

/// The cells of a figure.
pub(super) type Cells<'a> = Vec<Vec<Row<'a>>>;

/// Returns the table, or `None` if `figures` has none of the paper's.
pub(crate) fn summary(figures: &BTreeMap<String, Figure>) -> Result<Option<String>, FigureError> {
    let cells = |name: &str| figures.get(name).map(Figure::cells).transpose();
    let mut lines = Vec::new();
    if let Some(cells) = cells("paper-8")? {
        lines.extend(sizes_of_variables());
        lines.extend(transfers(&cells));
    }
    if let Some(cells) = cells("paper-9")? {
        lines.extend(batches(&cells));
    }
    if let Some(cells) = cells("paper-10")? {
        lines.extend(training(&cells));
    }
    if let Some(cells) = cells("paper-11")? {
        lines.extend(workers(&cells));
    }
    if let Some(cells) = cells("paper-12")? {
        lines.extend(copies(&cells));
    }
    if lines.is_empty() {
        return Ok(None);
    }
    let mut page = "| figure | what | paper | here |\n|---|---|---|---|\n".to_owned();
    for Line { figure, what, paper, here } in lines {
        page.push_str(&format!("| {figure} | {what} | {paper} | {here} |\n"));
    }
    if figures.iter().any(|(name, figure)| name.starts_with("paper-") && figure.is_unoptimised()) {
        page.push_str("\n(UNOPTIMISED: these figures only show that the script works.)\n");
    }
    Ok(Some(page))
}

fn line(figure: &'static str, what: impl Into<String>, paper: &'static str, here: String) -> Line {
    Line { figure, what: what.into(), paper, here }
}

fn sizes_of_variables() -> Vec<Line> {
    let shares = shares();
    let percent = |share: f64| format!("{:.0} %", share * 100.0);
    vec![
        line("7", "variables above 10 KB", "more than 50 %", percent(shares.above_10_kb)),
        line("7", "variables above 1 MB", "more than 20 %", percent(shares.above_1_mb)),
        line("7", "bytes in variables above 1 MB", "96 %", percent(shares.bytes_above_1_mb)),
    ]
}

fn transfers(cells: &Cells<'_>) -> Vec<Line> {
    let against = |mode: &str, paper| {
        let here = range(cells.iter().filter_map(|cell| time_ratio(cell, "rdma-zerocp", mode)));
        line("8", format!("one tensor, all sizes: rdma-zerocp × {mode}"), paper, here)
    };
    vec![
        against("grpc-tcp", "1.7 to 61"),
        against("grpc-rdma", "1.3 to 14"),
        against("rdma-cp", "1.2 to 1.8"),
    ]
}

/// The improvement over gRPC.RDMA as the text has it in percent, as a ratio: 145 % is 2.45.
fn batches(cells: &Cells<'_>) -> Vec<Line> {
    let here = |model: &str, under: &str| {
        let of = |compute: &str| {
            let cells = cells.iter().filter(|cell| cell[0].has("model", &[model]));
            let cells = cells.filter(|cell| cell[0].has("compute", &[compute]));
            range(cells.filter_map(|cell| speed_up(cell, "rdma-zerocp", under)))
        };
        format!("wait {}; work {}", of("wait"), of("work"))
    };
    let papers = ["up to 2.69", "up to 1.65", "2.17 to 2.45", "up to 2.18", "up to 1.69", "up to 2.51"];
    let mut lines: Vec<Line> = MODELS
        .into_iter()
        .zip(papers)
        .map(|(model, paper)| {
            line(
                "9",
                format!("{model}, batch 1 to 64: rdma-zerocp × grpc-rdma"),
                paper,
                here(model, "grpc-rdma"),
            )
        })
        .collect();
    lines.push(line("9", "vgg16, batch 1 to 64: rdma-zerocp × grpc-tcp", "25", here("vgg16", "grpc-tcp")));
    lines
}

fn workers(cells: &Cells<'_>) -> Vec<Line> {
    let mut lines = Vec::new();
    for (model, zerocp_local, rdma_local, alone, over_rdma) in [
        ("lstm", "5", "1.5", "more than 7", "1.98"),
        ("inception-v3", "7.9", "6", "more than 7", "1.12"),
        ("vgg16", "4.3", "above 1", "5.2", "more than 2.4"),
    ] {
        let of: Vec<&Vec<Row<'_>>> = cells
            .iter()
            .filter(|cell| cell[0].run == OWN_NETWORK && cell[0].has("model", &[model]))
            .filter(|cell| cell[0].each_second().is_some())
            .collect();
        let count = |cell: &[Row<'_>]| cell[0].number("workers").unwrap_or(0.0);
        let most = of.iter().max_by(|one, other| count(one).total_cmp(&count(other)));
        let Some(most) = most else { continue };
        let one = of.iter().find(|cell| count(cell) == 1.0);
        let local_in =
            |cell: &[Row<'_>], mode: &str| cell.iter().find(|row| row.mode() == mode)?.number("times_local");
        let local = |mode: &str| local_in(most, mode);
        let alone_here = || Some(local("rdma-zerocp")? / local_in(one?, "rdma-zerocp")?);
        let text = |value: Option<f64>| value.map_or_else(|| "–".to_owned(), ratio);
        let what = |what: &str| format!("{model}, 8 workers (here {}): {what}", count(most));
        lines.extend([
            line("11", what("rdma-zerocp × local"), zerocp_local, text(local("rdma-zerocp"))),
            line("11", what("grpc-rdma × local"), rdma_local, text(local("grpc-rdma"))),
            line("11", what("rdma-zerocp × itself with 1 worker"), alone, text(alone_here())),
            line(
                "11",
                what("rdma-zerocp × grpc-rdma"),
                over_rdma,
                text(speed_up(most, "rdma-zerocp", "grpc-rdma")),
            ),
        ]);
    }
    lines
}

fn copies(cells: &Cells<'_>) -> Vec<Line> {
    let here = |compute: &str, models: &[&str]| {
        let cells = cells.iter().filter(|cell| cell[0].has("compute", &[compute]));
        let cells = cells.filter(|cell| cell[0].has("model", models));
        range(cells.filter_map(|cell| speed_up(cell, "rdma-zerocp", "rdma-cp")))
    };
    let small = ["inception-v3", "gru"];
    let others = MODELS.map(|model| if small.contains(&model) { "" } else { model });
    vec![
        line("12", "batch 8, wait: rdma-zerocp × rdma-cp", "up to 1.21", here("wait", &others)),
        line("12", "inception-v3 and gru", "relatively small", here("wait", &small)),
        line("12", "all six without computing", "–", here("none", &MODELS)),
    ]
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use serde_json::{Value, json};

    use super::*;
    use crate::page::Run;

    fn figure(runs: Vec<(&str, Vec<Value>)>) -> Figure {
        let run = |(label, rows): (&str, Vec<Value>)| {
            let result = json!({ "optimised": true, "rows": rows });
            Run { label: label.to_owned(), command: "tonic-rdma".to_owned(), result }
        };
        let runs = runs.into_iter().map(run).collect();
        Figure { columns: "mode=mode".to_owned(), rows: String::new(), date: "2026-01-02".to_owned(), runs }
    }

    fn minibatches(mode: &str, model: &str, workers: u64, compute: &str, each_second: f64) -> Value {
        json!({ "mode": mode, "model": model, "servers": 1, "workers": workers, "compute": compute, "batch": 32,
                "minibatches_per_s": each_second, "times_local": each_second / 10.0, "p50_ms": 1.0 })
    }

    fn table(name: &str, figure: Figure) -> String {
        summary(&BTreeMap::from([(name.to_owned(), figure)])).unwrap().unwrap()
    }

    #[test]
    fn transfers_are_compared_over_all_sizes() {
        let row = |mode: &str, bytes: u64, p50: f64| json!({ "mode": mode, "bytes": bytes, "inflight": 1, "p50_us": p50 });
        let rows = vec![
            row("grpc-tcp", 64, 100.0),
            row("rdma-zerocp", 64, 10.0),
            row("grpc-tcp", 1024, 300.0),
            row("rdma-zerocp", 1024, 200.0),
        ];
        let table = table("paper-8", figure(vec![("", rows)]));
        assert!(table.contains("rdma-zerocp × grpc-tcp | 1.7 to 61 | 1.50 to 10.0 |"), "{table}");
        assert!(table.contains("× grpc-rdma | 1.3 to 14 | – |"), "{table}");
        assert!(table.contains("| 7 | bytes in variables above 1 MB | 96 % | 9"), "{table}");
    }

    #[test]
    fn ways_to_compute_are_apart() {
        let rows = vec![
            minibatches("grpc-rdma", "vgg16", 1, "wait", 2.0),
            minibatches("rdma-zerocp", "vgg16", 1, "wait", 4.0),
            minibatches("grpc-rdma", "vgg16", 1, "work", 2.0),
            minibatches("rdma-zerocp", "vgg16", 1, "work", 3.0),
        ];
        let table = table("paper-9", figure(vec![("", rows)]));
        assert!(table.contains("× grpc-rdma | 2.17 to 2.45 | wait 2.00; work 1.50 |"), "{table}");
        assert!(
            table.contains("gru, batch 1 to 64: rdma-zerocp × grpc-rdma | up to 1.69 | wait –; work – |"),
            "{table}"
        );
    }

    #[test]
    fn scaling_is_that_of_the_most_workers_measured() {
        let rows = |factor: f64| {
            let mut skipped = minibatches("rdma-zerocp", "lstm", 8, "wait", 0.0);
            skipped["skipped"] = "no memory".into();
            vec![
                minibatches("grpc-rdma", "lstm", 1, "wait", 5.0 * factor),
                minibatches("rdma-zerocp", "lstm", 1, "wait", 8.0 * factor),
                minibatches("grpc-rdma", "lstm", 4, "wait", 12.0 * factor),
                minibatches("rdma-zerocp", "lstm", 4, "wait", 24.0 * factor),
                skipped,
            ]
        };
        let table = table("paper-11", figure(vec![(OWN_NETWORK, rows(1.0)), ("shared", rows(9.0))]));
        for text in [
            "lstm, 8 workers (here 4): rdma-zerocp × local | 5 | 2.40 |",
            "grpc-rdma × local | 1.5 | 1.20 |",
            "rdma-zerocp × itself with 1 worker | more than 7 | 3.00 |",
            "rdma-zerocp × grpc-rdma | 1.98 | 2.00 |",
        ] {
            assert!(table.contains(text), "{text} in {table}");
        }
        assert!(!table.contains("vgg16"), "{table}");
    }

    #[test]
    fn copies_are_compared_with_and_without_computing() {
        let rows = vec![
            minibatches("rdma-cp", "gru", 1, "wait", 10.0),
            minibatches("rdma-zerocp", "gru", 1, "wait", 11.0),
            minibatches("rdma-cp", "fcn5", 1, "wait", 10.0),
            minibatches("rdma-zerocp", "fcn5", 1, "wait", 13.0),
            minibatches("rdma-cp", "fcn5", 1, "none", 10.0),
            minibatches("rdma-zerocp", "fcn5", 1, "none", 17.0),
        ];
        let table = table("paper-12", figure(vec![("", rows)]));
        for text in
            ["| up to 1.21 | 1.30 |", "inception-v3 and gru | relatively small | 1.10 |", "| – | 1.70 |"]
        {
            assert!(table.contains(text), "{text} in {table}");
        }
    }

    #[test]
    fn other_figures_give_no_table_and_slow_builds_are_named() {
        assert_eq!(summary(&BTreeMap::from([("headline".to_owned(), figure(Vec::new()))])).unwrap(), None);
        let mut slow = figure(vec![("", vec![minibatches("rdma-cp", "gru", 1, "wait", 10.0)])]);
        slow.runs[0].result["optimised"] = false.into();
        assert!(table("paper-12", slow).contains("UNOPTIMISED"));
    }
}
