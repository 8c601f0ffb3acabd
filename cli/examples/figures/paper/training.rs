//! The convergence of training: figure 10 of the paper. `tonic-rdma-training` writes a result for each mode, with all steps. Of
//! these, a stored figure keeps a row for each mode.

#[allow(dead_code, reason = "the training uses the rest")]
#[path = "../../../../training/src/plot.rs"]
mod plot;

use serde_json::{Value, json};

use super::pictures::colour;
use super::ratio;
use super::summary::{Cells, Line};
use crate::columns::Row;
use crate::error::FigureError;
use crate::page::Figure;

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
pub(super) fn training(cells: &Cells<'_>) -> Vec<Line> {
    let mut lines = Vec::new();
    for cell in cells {
        let of = |mode: &str| time(cell.iter().find(|row| row.mode() == mode)?);
        for (under, paper) in [("grpc-tcp", "3, 2.6, 1.85"), ("grpc-rdma", "1.53, 1.18, –")] {
            let times = of(under).zip(of("rdma-zerocp")).map(|(under, over)| under / over);
            lines.push(Line {
                figure: "10",
                what: format!("training, {}: time of {under} ÷ time of rdma-zerocp", cell[0].run),
                paper,
                here: times.map_or_else(|| "–".to_owned(), ratio),
            });
        }
    }
    lines
}

/// Draws for each run how good the model is, by the time of the training. Returns the names and contents of the files.
pub(crate) fn curves(name: &str, figure: &Figure) -> Result<Vec<(String, String)>, FigureError> {
    let mut drawn = Vec::new();
    for cell in figure.cells()? {
        let [first, ..] = cell.as_slice() else { continue };
        let losses = first.value["of"] == "loss";
        let line = |row: &Row<'_>| plot::Line {
            name: row.mode().to_owned(),
            colour: colour(row.mode()),
            points: points(row, if losses { 1.0 } else { 100.0 }),
        };
        let title = if losses {
            format!("{}: cross entropy of tested texts (lower is better)", first.run)
        } else {
            format!("{}: accuracy on tested pictures (higher is better)", first.run)
        };
        let plot = plot::Plot {
            title: &title,
            x_axis: "seconds of training, without tests",
            y_axis: if losses { "cross entropy" } else { "% right" },
            lines: cell.iter().map(line).collect(),
            marks: true,
        };
        let svg = plot::draw(&plot).map_err(|error| FigureError::Curve(Box::new(error)))?;
        drawn.push((format!("{name}-{}.svg", first.run), svg));
    }
    Ok(drawn)
}

fn points(row: &Row<'_>, factor: f64) -> Vec<(f64, f64)> {
    let points = row.value["points"].as_array().into_iter().flatten();
    points.filter_map(|point| Some((point[0].as_f64()?, point[1].as_f64()? * factor))).collect()
}

#[cfg(test)]
mod into_rows_tests {
    use super::*;

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
