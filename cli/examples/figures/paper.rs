//! The figures of Xue et al., "Fast Distributed Deep Learning over RDMA" (EuroSys 2019), beside ours.
//! `benches/paper` stores ours as `paper-8` to `paper-12`, with the numbers of the paper's figures. Of the
//! result of `tonic-rdma-training`, which has all steps of each mode, a stored figure keeps a row for each
//! mode.

#[allow(dead_code, reason = "the command uses the rest")]
#[path = "../../src/workload/models.rs"]
mod models;

use std::collections::BTreeMap;

use clap::ValueEnum as _;
use models::Model;
use serde_json::{Value, json};
use tonic_rdma_commands::Failure;
use tonic_rdma_commands::table::dash;

use crate::page::{Figure, Row, of_mode, ratio};

/// The paper's six models, in the order of its table 2.
const MODELS: [&str; 6] = ["alexnet", "inception-v3", "vgg16", "lstm", "gru", "fcn5"];

/// Returns `over`'s operations a second divided by those of `under`, in one cell.
pub(crate) fn speed_up(cell: &[Row<'_>], over: &str, under: &str) -> Option<f64> {
    Some(of_mode(cell, over)?.each_second()? / of_mode(cell, under)?.each_second()?)
}

/// Returns `under`'s median time divided by that of `over`, in one cell.
pub(crate) fn time_ratio(cell: &[Row<'_>], over: &str, under: &str) -> Option<f64> {
    Some(of_mode(cell, under)?.p50()? / of_mode(cell, over)?.p50()?)
}

/// Returns the least and the largest of `values` as text, or a dash without values.
fn range(values: impl IntoIterator<Item = f64>) -> String {
    let (least, most) = values
        .into_iter()
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(least, most), value| (least.min(value), most.max(value)));
    match (ratio(least), ratio(most)) {
        _ if least > most => dash(),
        (least, most) if least == most => least,
        (least, most) => format!("{least} to {most}"),
    }
}

/// The file of the table.
pub(crate) const SUMMARY: &str = "paper-summary.md";

/// The label of figure 11's run in which the computing grows with the workers.
const OWN_NETWORK: &str = "a network each";

/// A line of the table.
struct Line {
    figure: &'static str,
    what: String,
    /// The number that the paper's text gives.
    paper: &'static str,
    here: String,
}

/// The cells of a figure.
type Cells<'a> = Vec<Vec<Row<'a>>>;

/// Returns the table, or `None` if `figures` has none of the paper's.
pub(crate) fn summary(figures: &BTreeMap<String, Figure>) -> Result<Option<String>, Failure> {
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

/// Figure 7, from the tables of models that the command uses.
fn sizes_of_variables() -> Vec<Line> {
    let measured = Model::value_variants().iter().filter(|model| **model != Model::Resnet50);
    let sizes: Vec<u64> = measured.flat_map(|model| model.variables()).map(|one| one.bytes()).collect();
    let above = |least: u64| sizes.iter().copied().filter(move |bytes| *bytes > least);
    let percent = |some: f64, all: f64| format!("{:.0} %", some / all * 100.0);
    let count = |least: u64| percent(above(least).count() as f64, sizes.len() as f64);
    let bytes = percent(above(1 << 20).sum::<u64>() as f64, sizes.iter().sum::<u64>() as f64);
    vec![
        line("7", "variables above 10 KB", "more than 50 %", count(10 << 10)),
        line("7", "variables above 1 MB", "more than 20 %", count(1 << 20)),
        line("7", "bytes in variables above 1 MB", "96 %", bytes),
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
        let local_in = |cell: &[Row<'_>], mode: &str| of_mode(cell, mode)?.number("times_local");
        let local = |mode: &str| local_in(most, mode);
        let alone_here = || Some(local("rdma-zerocp")? / local_in(one?, "rdma-zerocp")?);
        let text = |value: Option<f64>| value.map_or_else(dash, ratio);
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

/// Turns the result of a training into rows, one for each mode. Leaves other results as they are.
pub(crate) fn into_rows(result: &mut Value) {
    let Some(modes) = result["modes"].as_array() else { return };
    let network = result["model"].as_object().and_then(|model| model.iter().next());
    let texts = network.is_some_and(|(kind, _)| kind == "recurrent");
    let rows: Vec<Value> = modes.iter().map(|mode| row(mode, result, texts)).collect();
    *result = json!({
        "rows": rows,
        "target": result["target"],
        "optimised": result["optimised"],
        "machine": { "cores": result["cores"] },
    });
}

fn row(mode: &Value, result: &Value, texts: bool) -> Value {
    let numbers = |list: &Value| -> Vec<f64> {
        list.as_array().map(|list| list.iter().filter_map(Value::as_f64).collect()).unwrap_or_default()
    };
    let all = numbers(&mode["steps_s"]);
    // The first step is slower in all modes, because nothing is in registered memory yet.
    let mut later: Vec<f64> = all.iter().skip(1).copied().collect();
    later.sort_unstable_by(f64::total_cmp);
    let points: Vec<Value> = mode["points"].as_array().cloned().unwrap_or_default();
    let value = if texts { "loss" } else { "accuracy" };
    let last = points.last().cloned().unwrap_or_default();
    json!({
        "mode": mode["mode"],
        "workers": result["workers"],
        "batch": result["batch"],
        "steps": all.len(),
        "p50_ms": later.get(later.len() / 2).map(|seconds| seconds * 1e3),
        "seconds": mode["seconds"],
        "target_s": mode["time_to_target_s"],
        "loss": last["loss"],
        "accuracy": last["accuracy"],
        "weights": mode["weights"],
        "copied_later": mode["sent_later"]["copied"],
        "of": value,
        "points": points.iter().map(|point| json!([point["seconds"], point[value]])).collect::<Vec<_>>(),
    })
}

/// Returns the time until the accuracy was reached or, without one, the time of all steps.
fn time(row: &Row<'_>) -> Option<f64> {
    row.number("target_s").or_else(|| row.number("seconds"))
}

/// Returns the lines of figure 10.
fn training(cells: &Cells<'_>) -> Vec<Line> {
    let mut lines = Vec::new();
    for cell in cells {
        let of = |mode: &str| time(&of_mode(cell, mode)?);
        for (under, paper) in [("grpc-tcp", "3, 2.6, 1.85"), ("grpc-rdma", "1.53, 1.18, –")] {
            let times = of(under).zip(of("rdma-zerocp")).map(|(under, over)| under / over);
            lines.push(Line {
                figure: "10",
                what: format!("training, {}: time of {under} ÷ time of rdma-zerocp", cell[0].run),
                paper,
                here: times.map_or_else(dash, ratio),
            });
        }
    }
    lines
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

    #[test]
    fn ranges_have_both_ends_or_one_value() {
        assert_eq!(range([2.0, 1.5, 14.2]), "1.50 to 14.2");
        assert_eq!(range([2.0, 2.001]), "2.00");
        assert_eq!(range([]), "–");
    }

    #[test]
    fn a_training_gives_a_row_for_each_mode() {
        let point = |seconds: f64| json!({ "step": 50, "seconds": seconds, "loss": 0.5, "accuracy": 0.75 });
        let mode = |mode: &str, step: f64| {
            json!({ "mode": mode, "losses": [2.0, 1.0, 0.5], "steps_s": [9.0, step, step], "seconds": 9.0 + 2.0 * step,
                    "points": [point(step)], "time_to_target_s": null, "weights": "a", "sent_later": { "copied": 0 } })
        };
        let mut result = json!({ "model": { "pictures": "cnn" }, "workers": 2, "batch": 64, "cores": 2, "target": 0.85,
                                 "modes": [mode("grpc-tcp", 0.5), mode("rdma-zerocp", 0.25)] });
        into_rows(&mut result);
        let row = &result["rows"][1];
        assert_eq!((&row["mode"], &row["p50_ms"]), (&"rdma-zerocp".into(), &250.0.into()));
        assert_eq!(
            (&row["steps"], &row["accuracy"], &row["copied_later"]),
            (&3.into(), &0.75.into(), &0.into())
        );
        assert_eq!(row["points"], json!([[0.25, 0.75]]));
        assert!(row.get("losses").is_none() && result["target"] == 0.85, "{result}");
        let mut other = json!({ "rows": [1] });
        into_rows(&mut other);
        assert_eq!(other, json!({ "rows": [1] }));
    }

    #[test]
    fn texts_are_judged_by_their_loss() {
        let mode =
            json!({ "mode": "grpc-tcp", "points": [{ "seconds": 1.0, "loss": 2.5, "accuracy": 0.1 }] });
        let mut result = json!({ "model": { "recurrent": { "hidden": 8 } }, "modes": [mode] });
        into_rows(&mut result);
        assert_eq!(
            (&result["rows"][0]["of"], &result["rows"][0]["points"]),
            (&"loss".into(), &json!([[1.0, 2.5]]))
        );
    }
}
