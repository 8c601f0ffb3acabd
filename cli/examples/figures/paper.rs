//! The figures of Xue et al., "Fast Distributed Deep Learning over RDMA" (EuroSys 2019), beside ours, and those of
//! two other texts: Baidu's on the ring all-reduce, and AR-gRPC's table of ResNet-50. `benches/paper` stores ours
//! as `paper-8` to `paper-12`, with the numbers of the paper's figures, `paper-baidu` and `paper-ar-grpc`. The
//! results of `tonic-rdma-training` and `tonic-rdma-allreduce` become rows, one for each mode.

#[allow(dead_code, reason = "the command uses the rest")]
#[path = "../../src/workload/models.rs"]
mod models;

use std::collections::BTreeMap;

use clap::ValueEnum as _;
use models::Model;
use serde_json::{Value, json};
use tonic_rdma_commands::ends::Machine;
use tonic_rdma_commands::statistics::{median, range};
use tonic_rdma_commands::table::dash;
use tonic_rdma_commands::{Failure, units};

use crate::page::{Figure, Row, SAMPLES, SETTINGS, divided, of_mode, ratio, with_spread};

/// The paper's six models, in the order of its table 2.
const MODELS: [&str; 6] = ["alexnet", "inception-v3", "vgg16", "lstm", "gru", "fcn5"];

/// Returns `over`'s operations a second divided by those of `under`, in one cell, for each run.
pub(crate) fn speed_ups(cell: &[Row<'_>], over: &str, under: &str) -> Vec<f64> {
    let rates = |mode: &str| of_mode(cell, mode).map_or_else(Vec::new, |row| row.rates());
    divided(&rates(over), &rates(under))
}

/// Returns `under`'s median time divided by that of `over`, in one cell, for each run.
pub(crate) fn time_ratios(cell: &[Row<'_>], over: &str, under: &str) -> Vec<f64> {
    let p50s = |mode: &str| of_mode(cell, mode).map_or_else(Vec::new, |row| row.p50s());
    divided(&p50s(under), &p50s(over))
}

/// Returns the median of the runs.
pub(crate) fn middle(runs: &[f64]) -> Option<f64> {
    (!runs.is_empty()).then(|| median(runs.iter().copied()))
}

/// Returns the least and the largest of `values` as text, or a dash without values.
pub(crate) fn between(values: &[f64]) -> String {
    let Some([least, most]) = range(values).map(|ends| ends.map(ratio)) else { return dash() };
    if least == most { least } else { format!("{least} to {most}") }
}

/// Returns the least and the largest median of some cells as text and, if they have several runs, those of all
/// runs.
fn over_cells(cells: impl IntoIterator<Item = Vec<f64>>) -> String {
    let cells: Vec<Vec<f64>> = cells.into_iter().collect();
    let medians = between(&cells.iter().filter_map(|runs| middle(runs)).collect::<Vec<_>>());
    let all = cells.iter().any(|runs| runs.len() > 1).then(|| between(&cells.concat()));
    all.map_or_else(|| medians.clone(), |all| format!("{medians} (in all runs {all})"))
}

/// The file of the table.
pub(crate) const SUMMARY: &str = "paper-summary.md";

/// The file of the sentences about the figures.
pub(crate) const STATEMENTS: &str = "paper-statements.md";

/// The file of figure 7, which comes from the definitions of the models.
pub(crate) const SIZES: &str = "paper-7.svg";

/// A line of the table.
#[derive(Clone)]
struct Line {
    figure: &'static str,
    what: String,
    /// The number that the paper's text gives.
    paper: &'static str,
    here: String,
}

/// The picture of Baidu's reducers, which has the text's formulas, too.
pub(crate) const REDUCERS: &str = "paper-baidu.svg";

/// What `benches/paper` measures, by the names of its arguments.
pub(crate) const FIGURES: [&str; 7] = ["8", "9", "10", "11", "12", "baidu", "ar-grpc"];

type LinesOf = fn(&Cells<'_>) -> Vec<Line>;

/// What compares the cell of most workers with that of one worker, run by run.
type Scaling<'a> = dyn Fn(&[Row<'_>], &[Row<'_>]) -> Vec<f64> + 'a;

/// The cells of a figure.
pub(crate) type Cells<'a> = Vec<Vec<Row<'a>>>;

/// Returns the table, or `None` if `figures` has none of the paper's.
pub(crate) fn summary(figures: &BTreeMap<String, Figure>) -> Result<Option<String>, Failure> {
    let cells = |name: &str| figures.get(name).map(Figure::cells).transpose();
    let mut lines = Vec::new();
    if let Some(cells) = cells("paper-8")? {
        lines.extend(sizes_of_variables());
        lines.extend(transfers(&cells));
    }
    let rest: [(_, LinesOf); 6] = [
        ("paper-9", batches),
        ("paper-10", training),
        ("paper-11", workers),
        ("paper-12", copies),
        ("paper-baidu", reducers),
        ("paper-ar-grpc", images),
    ];
    for (name, of) in rest {
        lines.extend(cells(name)?.iter().flat_map(of));
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

/// Returns the lengths of the variables of the paper's six models, in bytes.
fn variables() -> Vec<u64> {
    let measured = Model::value_variants().iter().filter(|model| **model != Model::Resnet50);
    measured.flat_map(|model| model.variables()).map(|one| one.bytes()).collect()
}

/// Figure 7: points of the length in bytes, and of the share in percent of the variables that are longer, and of
/// their bytes. The share falls at each length that a variable has.
pub(crate) fn shares() -> [Vec<(f64, f64)>; 2] {
    let mut sizes = variables();
    sizes.sort_unstable();
    let all: u64 = sizes.iter().sum();
    let (mut count, mut bytes) = (sizes.len() as f64, all as f64);
    let [mut counts, mut sums] = [Vec::new(), Vec::new()];
    for of_size in sizes.chunk_by(|one, next| one == next) {
        let size = of_size[0] as f64;
        for (points, left, whole, gone) in [
            (&mut counts, &mut count, sizes.len() as f64, of_size.len() as f64),
            (&mut sums, &mut bytes, all as f64, size * of_size.len() as f64),
        ] {
            points.push((size, *left / whole * 100.0));
            *left -= gone;
            points.push((size, *left / whole * 100.0));
        }
    }
    [counts, sums]
}

/// Figure 7, from the tables of models that the command uses.
fn sizes_of_variables() -> Vec<Line> {
    let sizes = variables();
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

/// What a figure compares: a mode with another one. The paper has no numbers of the modes that it lacks.
const COMPARED: [(&str, &str); 8] = [
    ("rdma-zerocp", "grpc-tcp"),
    ("rdma-zerocp", "grpc-tcp-tuned"),
    ("rdma-zerocp", "grpc-rdma"),
    ("rdma-zerocp", "grpc-rdma-tuned"),
    ("rdma-zerocp", "rdma-cp"),
    ("grpc-native-gather", "rdma-zerocp"),
    ("rdma-dynamic", "rdma-zerocp"),
    ("rdma-named", "rdma-zerocp"),
];

fn transfers(cells: &Cells<'_>) -> Vec<Line> {
    let against = |(over, under): (&str, &str)| {
        let paper = match under {
            "grpc-tcp" => "1.7 to 61",
            "grpc-rdma" => "1.3 to 14",
            "rdma-cp" => "1.2 to 1.8",
            _ => "–",
        };
        let here = over_cells(cells.iter().map(|cell| time_ratios(cell, over, under)));
        line("8", format!("one tensor, all sizes: {over} × {under}"), paper, here)
    };
    measured(COMPARED.into_iter().map(against))
}

/// Returns the lines that the paper has or that were measured.
fn measured(lines: impl Iterator<Item = Line>) -> Vec<Line> {
    lines.filter(|line| line.paper != "–" || line.here.contains(|it: char| it.is_ascii_digit())).collect()
}

/// The improvement over gRPC.RDMA as the text has it in percent, as a ratio: 145 % is 2.45.
fn batches(cells: &Cells<'_>) -> Vec<Line> {
    let here = |models: &[&str], over: &str, under: &str| {
        let of = |compute: &str| {
            let cells = cells.iter().filter(|cell| cell[0].has("model", models));
            let cells = cells.filter(|cell| cell[0].has("compute", &[compute]));
            over_cells(cells.map(|cell| speed_ups(cell, over, under)))
        };
        format!("wait {}; work {}", of("wait"), of("work"))
    };
    let papers = ["up to 2.69", "up to 1.65", "2.17 to 2.45", "up to 2.18", "up to 1.69", "up to 2.51"];
    let of_model = |(model, paper): (&str, _)| {
        let what = format!("{model}: rdma-zerocp × grpc-rdma");
        line("9", what, paper, here(&[model], "rdma-zerocp", "grpc-rdma"))
    };
    let mut lines: Vec<Line> = MODELS.into_iter().zip(papers).map(of_model).collect();
    lines.push(line("9", "vgg16: rdma-zerocp × grpc-tcp", "25", here(&["vgg16"], "rdma-zerocp", "grpc-tcp")));
    let others = COMPARED.into_iter().filter(|(_, under)| !["grpc-tcp", "grpc-rdma"].contains(under));
    let of_all = |(over, under): (&str, &str)| {
        line("9", format!("all six: {over} × {under}"), "–", here(&MODELS, over, under))
    };
    lines.extend(measured(others.map(of_all)));
    lines
}

/// Returns the cell of figure 11 in which most workers trained `model`, in one setting, and that of one worker.
pub(crate) fn most_workers<'a, 'b>(
    cells: &'a Cells<'b>,
    setting: &str,
    model: &str,
) -> Option<(&'a [Row<'b>], &'a [Row<'b>])> {
    let of = || {
        let of =
            cells.iter().filter(move |cell| cell[0].setting() == setting && cell[0].has("model", &[model]));
        of.filter(|cell| cell[0].each_second().is_some()).map(Vec::as_slice)
    };
    let count = |cell: &&[Row<'_>]| cell[0].number("workers").unwrap_or(0.0);
    Some((
        of().max_by(|one, other| count(one).total_cmp(&count(other)))?,
        of().find(|cell| count(cell) == 1.0)?,
    ))
}

fn workers(cells: &Cells<'_>) -> Vec<Line> {
    let mut lines = Vec::new();
    for (model, zerocp_local, rdma_local, alone, over_rdma) in [
        ("lstm", "5", "1.5", "more than 7", "1.98"),
        ("inception-v3", "7.9", "6", "more than 7", "1.12"),
        ("vgg16", "4.3", "above 1", "5.2", "more than 2.4"),
    ] {
        let found = SETTINGS.map(|(_, setting)| (setting, most_workers(cells, setting, model)));
        let Some((_, Some((most, _)))) = found.iter().find(|(_, found)| found.is_some()) else { continue };
        let what = |what: &str| format!("{model}, 8 workers (here {}): {what}", most[0].field("workers"));
        // Both settings, because each favours another side.
        let here = |value: &Scaling<'_>| {
            let here = found.iter().filter_map(|(setting, found)| {
                let (most, one) = (*found)?;
                Some(format!("{setting} {}", with_spread(&value(most, one), ratio)))
            });
            here.collect::<Vec<_>>().join("; ")
        };
        let locals =
            |cell: &[Row<'_>], mode: &str| of_mode(cell, mode).map_or_else(Vec::new, |row| row.locals());
        let over = |over, under| move |most: &[Row<'_>], _: &[Row<'_>]| speed_ups(most, over, under);
        let (zerocp, gather) = ("rdma-zerocp", "grpc-native-gather");
        lines.extend(measured(
            [
                line("11", what("rdma-zerocp × local"), zerocp_local, here(&|most, _| locals(most, zerocp))),
                line("11", what("grpc-rdma × local"), rdma_local, here(&|most, _| locals(most, "grpc-rdma"))),
                line(
                    "11",
                    what("rdma-zerocp × itself with 1 worker"),
                    alone,
                    here(&|most, one| divided(&locals(most, zerocp), &locals(one, zerocp))),
                ),
                line("11", what("rdma-zerocp × grpc-rdma"), over_rdma, here(&over(zerocp, "grpc-rdma"))),
                line(
                    "11",
                    what("rdma-zerocp × grpc-rdma-tuned"),
                    "–",
                    here(&over(zerocp, "grpc-rdma-tuned")),
                ),
                line("11", what("grpc-native-gather × rdma-zerocp"), "–", here(&over(gather, zerocp))),
            ]
            .into_iter(),
        ));
    }
    lines
}

fn copies(cells: &Cells<'_>) -> Vec<Line> {
    let here = |compute: &str, models: &[&str]| {
        let cells = cells.iter().filter(|cell| cell[0].has("compute", &[compute]));
        let cells = cells.filter(|cell| cell[0].has("model", models));
        over_cells(cells.map(|cell| speed_ups(cell, "rdma-zerocp", "rdma-cp")))
    };
    let small = ["inception-v3", "gru"];
    let others = MODELS.map(|model| if small.contains(&model) { "" } else { model });
    vec![
        line("12", "batch 8, wait: rdma-zerocp × rdma-cp", "up to 1.21", here("wait", &others)),
        line("12", "inception-v3 and gru", "relatively small", here("wait", &small)),
        line("12", "all six without computing", "–", here("none", &MODELS)),
    ]
}

/// Returns how many times the operand the rank receives that receives most, by the number of ranks.
pub(crate) fn received(cells: &Cells<'_>, algorithm: &str) -> Vec<(f64, f64)> {
    let point = |cell: &Vec<Row<'_>>| {
        let row = of_mode(cell, algorithm)?;
        Some((row.number("ranks")?, row.number("received_bytes")? / row.number("bytes")?))
    };
    cells.iter().filter_map(point).collect()
}

/// Baidu's text gives formulas. Its reducer, of whom it says that two GPUs cost 1.2 s and ten 10.8 s, receives
/// N − 1 operands, and each rank of its ring 2 (N − 1) / N.
fn reducers(cells: &Cells<'_>) -> Vec<Line> {
    let here = |algorithm: &str| {
        let of = |(ranks, times): &(f64, f64)| format!("{ranks} ranks {}", ratio(*times));
        let points = received(cells, algorithm);
        points.iter().filter(|(ranks, _)| *ranks > 1.0).map(of).collect::<Vec<_>>().join(", ")
    };
    vec![
        line("Baidu", "single reducer: operands that it receives", "N − 1", here("naive")),
        line("Baidu", "ring: operands that each rank receives", "2 (N − 1) / N", here("ring")),
    ]
}

/// The images a second of AR-gRPC's table over gRPC.
const GRPC_IMAGES: f64 = 91.06;

/// Returns the images a second of `mode` if all modes had to compute for a time with which `grpc-tcp` has as many
/// as in AR-gRPC's table, which does not say how long its workers compute.
pub(crate) fn images_with_computing(cell: &[Row<'_>], mode: &str) -> Option<f64> {
    // How long all workers together take for a mini-batch.
    let step = |mode: &str| Some(1.0 / of_mode(cell, mode)?.each_second()?);
    let computing = SAMPLES / GRPC_IMAGES - step("grpc-tcp")?;
    Some(SAMPLES / (computing + step(mode)?)).filter(|_| computing > 0.0)
}

fn images(cells: &Cells<'_>) -> Vec<Line> {
    let Some(cell) = cells.first() else { return Vec::new() };
    let of = |value: Option<f64>| value.map_or_else(dash, units::digits);
    let here = |mode: &str| {
        let alone = of_mode(cell, mode).and_then(|row| row.each_second()).map(|each| each * SAMPLES);
        format!("transfers alone {}; with computing {}", of(alone), of(images_with_computing(cell, mode)))
    };
    let what = |mode: &str| format!("resnet50, synthetic steps, images/s: {mode}");
    let papers = [
        ("grpc-tcp", "gRPC 91.06"),
        ("grpc-rdma", "gRPC + Verbs 103.21"),
        ("grpc-native-gather", "–"),
        ("rdma-zerocp", "–"),
    ];
    let mut lines = papers.map(|(mode, paper)| line("AR-gRPC", what(mode), paper, here(mode))).to_vec();
    lines.push(line("AR-gRPC", "resnet50: gRPC + MPI, a channel that this library lacks", "84.45", dash()));
    lines
}

/// Makes rows of a result, one for each mode, where the command has other ones.
pub(crate) fn into_rows(result: &mut Value) {
    if result["modes"].is_array() {
        of_training(result);
    } else if result["plans"].is_array() {
        of_allreduce(result);
    }
    for row in result["rows"].as_array_mut().into_iter().flatten() {
        // The modes of one cell that differ by their windows alone. Ratios are to grpc-tcp with default windows.
        if row["http2"] == "tuned" {
            row["mode"] = format!("{}-tuned", row["mode"].as_str().unwrap_or_default()).into();
            if let Some(row) = row.as_object_mut() {
                row.retain(|name, _| !name.contains("_ratio"));
            }
        }
    }
}

/// Takes the algorithms of `tonic-rdma-allreduce` as modes, each with what the rank received that received most.
/// Ranks that share cores have no times.
fn of_allreduce(result: &mut Value) {
    let machine = Machine::this();
    let is_of = |row: &Value, counted: &Value| {
        ["ranks", "bytes", "algorithm", "type"].iter().all(|name| row[name] == counted[name])
    };
    let most = |counted: &Value| {
        let ranks = counted["received_bytes"].as_array()?.iter().filter_map(Value::as_f64);
        Some(ranks.fold(0.0, f64::max).round() as u64)
    };
    let counters = result["counters"].as_array().cloned().unwrap_or_default();
    let row = |row: &Value| {
        let own_cores = row["ranks"].as_u64().is_some_and(|ranks| ranks <= machine.cores() as u64);
        let counted = counters.iter().find(|counted| is_of(row, counted));
        json!({
            "mode": row["algorithm"],
            "ranks": row["ranks"],
            "bytes": row["bytes"],
            "ops": row["iterations"],
            "p50_us": own_cores.then(|| row["p50_us"].clone()),
            "received_bytes": counted.and_then(most),
        })
    };
    let rows: Vec<Value> = result["rows"].as_array().into_iter().flatten().map(row).collect();
    *result = json!({ "rows": rows, "machine": machine, "optimised": result["optimised"] });
}

/// Takes the modes of `tonic-rdma-training`.
fn of_training(result: &mut Value) {
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
        assert!(table.contains("gru: rdma-zerocp × grpc-rdma | up to 1.69 | wait –; work – |"), "{table}");
        assert!(!table.contains("-tuned"), "{table}");
    }

    #[test]
    fn scaling_is_that_of_the_most_workers_measured() {
        let rows = |factor: f64| {
            let mut skipped = minibatches("rdma-zerocp", "lstm", 8, "wait", 0.0);
            skipped["skipped"] = "no memory".into();
            let gather = minibatches("grpc-native-gather", "lstm", 4, "wait", 24.0 * factor);
            vec![
                gather,
                minibatches("grpc-rdma", "lstm", 1, "wait", 5.0 * factor),
                minibatches("rdma-zerocp", "lstm", 1, "wait", 8.0 * factor),
                minibatches("grpc-rdma", "lstm", 4, "wait", 12.0 * factor),
                minibatches("rdma-zerocp", "lstm", 4, "wait", 24.0 * factor),
                skipped,
            ]
        };
        let table = table(
            "paper-11",
            figure(vec![("a network each", rows(1.0)), ("one machine for all", rows(0.5))]),
        );
        for text in [
            "lstm, 8 workers (here 4): rdma-zerocp × local | 5 | a network each 2.40; one machine for all 1.20 |",
            "grpc-rdma × local | 1.5 | a network each 1.20; one machine for all 0.60 |",
            "rdma-zerocp × itself with 1 worker | more than 7 | a network each 3.00; one machine for all 3.00 |",
            "rdma-zerocp × grpc-rdma | 1.98 | a network each 2.00; one machine for all 2.00 |",
            "grpc-native-gather × rdma-zerocp | – | a network each 1.00; one machine for all 1.00 |",
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
    fn the_spread_of_runs_stands_beside_the_medians_of_cells() {
        assert_eq!(between(&[2.0, 1.5, 14.2]), "1.50 to 14.2");
        assert_eq!(between(&[2.0, 2.001]), "2.00");
        assert_eq!(over_cells([vec![2.0], vec![3.0]]), "2.00 to 3.00");
        assert_eq!(
            over_cells([vec![2.0, 1.0, 2.5], vec![3.0, 3.5, 2.9]]),
            "2.00 to 3.00 (in all runs 1.00 to 3.50)"
        );
        assert_eq!(over_cells([]), "–");
    }

    #[test]
    fn shares_of_sizes_begin_at_all_and_end_at_nothing() {
        for points in shares() {
            assert_eq!((points[0].1, points.last().unwrap().1.round()), (100.0, 0.0));
            assert!(points.windows(2).all(|pair| pair[0].0 <= pair[1].0 && pair[0].1 >= pair[1].1));
        }
        // The summary's shares of variables and of bytes above 1 MiB.
        let above =
            |points: &[(f64, f64)]| points.iter().rfind(|point| point.0 <= f64::from(1 << 20)).unwrap().1;
        assert_eq!(shares().map(|points| above(&points).round()), [21.0, 97.0]);
    }

    #[test]
    fn ranks_have_what_the_busiest_received_and_times_only_with_cores_of_their_own() {
        let key = |ranks: u64, algorithm: &str| json!({ "ranks": ranks, "bytes": 100, "algorithm": algorithm, "type": "f32" });
        let with = |mut row: Value, name: &str, value: Value| {
            row[name] = value;
            row
        };
        let mut result = json!({
            "plans": [],
            "optimised": false,
            "rows": [with(key(1, "ring"), "p50_us", 2.5.into()), with(key(5000, "naive"), "p50_us", 2.5.into())],
            "counters": [with(key(1, "ring"), "received_bytes", json!([0.0])),
                         with(key(5000, "ring"), "received_bytes", json!([1.0, 2.0])),
                         with(key(5000, "naive"), "received_bytes", json!([400.0, 100.0, 100.0]))],
        });
        into_rows(&mut result);
        let [one, many] = [0, 1].map(|index| &result["rows"][index]);
        assert_eq!(
            (&one["mode"], &one["p50_us"], &one["received_bytes"]),
            (&"ring".into(), &2.5.into(), &0.into())
        );
        assert_eq!((&many["mode"], &many["received_bytes"]), (&"naive".into(), &400.into()));
        assert!(many["p50_us"].is_null() && result["machine"]["cores"].as_u64() > Some(0), "{result}");
        let figure = Figure {
            columns: String::new(),
            rows: String::new(),
            date: String::new(),
            runs: vec![Run { label: String::new(), command: String::new(), result }],
        };
        assert!(figure.is_unoptimised());
        let table = table("paper-baidu", figure);
        assert!(table.contains("that it receives | N − 1 | 5000 ranks 4.00 |"), "{table}");
    }

    #[test]
    fn a_mode_with_tuned_windows_has_a_name_of_its_own() {
        let row =
            |http2: &str| json!({ "mode": "grpc-rdma", "http2": http2, "latency_ratio": 2.0, "p50_us": 1.0 });
        let mut result = json!({ "rows": [row("default"), row("tuned")] });
        into_rows(&mut result);
        assert_eq!(result["rows"][0], row("default"));
        assert_eq!(result["rows"][1], json!({ "mode": "grpc-rdma-tuned", "http2": "tuned", "p50_us": 1.0 }));
    }

    #[test]
    fn images_are_those_of_transfers_and_of_a_common_computing_time() {
        let of = |mode: &str, rate: f64| minibatches(mode, "resnet50", 3, "none", rate);
        let rows = vec![of("grpc-tcp", 8.0), of("grpc-rdma", 16.0), of("rdma-zerocp", 40.0)];
        let table = table("paper-ar-grpc", figure(vec![("", rows)]));
        assert!(
            table.contains("grpc-tcp | gRPC 91.06 | transfers alone 256; with computing 91.1 |"),
            "{table}"
        );
        assert!(
            table.contains("grpc-rdma | gRPC + Verbs 103.21 | transfers alone 512; with computing 111 |"),
            "{table}"
        );
        assert!(table.contains("rdma-zerocp | – | transfers alone 1280; with computing 127 |"), "{table}");
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
