//! Turns stored runs of `tonic-rdma` into the tables of README and of the book. `benches/figures` calls it.
//!
//! ```text
//! figures store FOLDER NAME COLUMNS ROWS DATE (LABEL COMMAND FILE)...   stores runs as NAME.json, and renders them
//! figures columns COLUMNS                                               fails if the columns can't be shown
//! figures render FOLDER                                                 renders all stored figures
//! figures check FOLDER                                                  fails if a page differs from its runs
//! ```
//!
//! `NAME.json` has the commands, the columns, the selected rows, the date, and the JSON of each run.
//! `NAME.md` is made only from this file. `headline.json` also gives `latency.svg` and the table `mission.md`,
//! `defaults.json` also gives `defaults.svg`. The figures of `benches/paper` also give a picture each, and
//! together the table `paper-summary.md` and the sentences `paper-statements.md`.
#![forbid(unsafe_code)]

mod bars;
mod page;
mod paper;
mod pictures;
mod statements;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::ExitCode;

use page::{Figure, Run};
use tonic_rdma_commands::{Context as _, Failure, output, status};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match arguments.as_slice() {
        ["store", folder, name, columns, rows, date, runs @ ..] if runs.len() >= 3 && runs.len() % 3 == 0 => {
            store(Path::new(folder), name, [columns, rows, date], runs)
        }
        ["columns", columns] => page::parse(columns).map(drop),
        ["render", folder] => render(Path::new(folder)),
        ["check", folder] => check(Path::new(folder)),
        _ => Err(Failure::usage(
            "the arguments are wrong; the beginning of this program's source shows the right ones",
        )),
    };
    status("figures", outcome)
}

/// Stores runs, and renders them.
fn store(folder: &Path, name: &str, [columns, rows, date]: [&str; 3], runs: &[&str]) -> Result<(), Failure> {
    let run = |parts: &[&str]| {
        let (label, command, file) = (parts[0].to_owned(), parts[1].to_owned(), Path::new(parts[2]));
        let mut result: serde_json::Value = parse(file)?;
        paper::into_rows(&mut result);
        // The first two numbers of the version are enough. The rest is a detail of this machine.
        if let Some(kernel) = result.pointer_mut("/machine/kernel") {
            let version: Vec<&str> = kernel.as_str().unwrap_or_default().split('.').take(2).collect();
            *kernel = version.join(".").into();
        }
        Ok(Run { label, command, result })
    };
    let runs = runs.chunks(3).map(run).collect::<Result<_, Failure>>()?;
    let [columns, rows, date] = [columns, rows, date].map(str::to_owned);
    let figure = Figure { columns, rows, date, runs };
    fs::create_dir_all(folder).context(folder.display().to_string())?;
    // A table that can't be made must not replace a good one.
    for (file, content) in pages(name, &figure)? {
        output::write_file(&folder.join(file), &content)?;
    }
    output::write_json(&folder.join(format!("{name}.json")), &figure)?;
    for (file, content) in of_all(&figures(folder)?)? {
        output::write_file(&folder.join(file), &content)?;
    }
    Ok(())
}

/// Renders all figures stored in `folder`.
fn render(folder: &Path) -> Result<(), Failure> {
    for (file, content) in all_pages(folder)? {
        output::write_file(&folder.join(file), &content)?;
    }
    Ok(())
}

/// Fails if a page in `folder` differs from its runs, is missing, or has no runs.
fn check(folder: &Path) -> Result<(), Failure> {
    let mut made = all_pages(folder)?;
    let mut wrong = Vec::new();
    for name in files(folder)?.into_iter().filter(|name| !name.ends_with(".json")) {
        match made.remove(&name) {
            Some(content) if content == read(&folder.join(&name))? => {}
            Some(_) => wrong.push(format!("{name} is not what its JSON gives")),
            None => wrong.push(format!("{name} has no JSON")),
        }
    }
    wrong.extend(made.into_keys().map(|name| format!("{name} is missing")));
    match wrong.is_empty() {
        true => Ok(()),
        false => Err(Failure::run(format!("{} (benches/figures --render)", wrong.join("; ")))),
    }
}

/// Returns every file that the figures in `folder` give, by name.
fn all_pages(folder: &Path) -> Result<BTreeMap<String, String>, Failure> {
    let mut made = BTreeMap::new();
    let figures = figures(folder)?;
    for (name, figure) in &figures {
        made.extend(pages(name, figure).context(format!("{name}.json"))?);
    }
    made.extend(of_all(&figures)?);
    if made.is_empty() {
        return Err(Failure::run(format!("{} has no figures", folder.display())));
    }
    Ok(made)
}

/// Returns all figures that `folder` has, by name.
fn figures(folder: &Path) -> Result<BTreeMap<String, Figure>, Failure> {
    let mut figures = BTreeMap::new();
    for file in files(folder)? {
        let Some(name) = file.strip_suffix(".json") else { continue };
        figures.insert(name.to_owned(), parse(&folder.join(&file))?);
    }
    Ok(figures)
}

/// Returns the files that one figure gives.
fn pages(name: &str, figure: &Figure) -> Result<Vec<(String, String)>, Failure> {
    let mut pages = vec![(format!("{name}.md"), figure.markdown()?)];
    if name == "headline" {
        pages.push(("mission.md".to_owned(), figure.mission()?));
    }
    pages.extend(pictures::pictures(name, figure)?);
    Ok(pages)
}

/// Returns the files that the paper's figures give together.
fn of_all(figures: &BTreeMap<String, Figure>) -> Result<Vec<(String, String)>, Failure> {
    let Some(summary) = paper::summary(figures)? else { return Ok(Vec::new()) };
    let mut made = vec![
        (paper::SUMMARY.to_owned(), summary),
        (paper::STATEMENTS.to_owned(), statements::statements(figures)?),
        (paper::SIZES.to_owned(), pictures::sizes()?),
        (paper::REDUCERS.to_owned(), pictures::reducers(figures.get("paper-baidu"))?),
    ];
    // The book's pages have a place for each.
    for name in paper::FIGURES.iter().filter(|name| !figures.contains_key(&format!("paper-{name}"))) {
        let text = format!("Not measured yet: `benches/paper {name}` makes this table.\n");
        made.push((format!("paper-{name}.md"), text));
    }
    Ok(made)
}

fn files(folder: &Path) -> Result<Vec<String>, Failure> {
    let entries = fs::read_dir(folder).context(folder.display().to_string())?;
    let name =
        |entry: std::io::Result<fs::DirEntry>| Some(entry.ok()?.file_name().to_string_lossy().into_owned());
    let mut names: Vec<String> = entries.filter_map(name).collect();
    names.sort();
    Ok(names)
}

fn read(path: &Path) -> Result<String, Failure> {
    fs::read_to_string(path).context(path.display().to_string())
}

fn parse<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T, Failure> {
    serde_json::from_str(&read(path)?).context(path.display().to_string())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use serde_json::json;

    use super::*;

    fn row(mode: &str, bytes: u64, p50: f64, ops: u64) -> serde_json::Value {
        json!({ "mode": mode, "bytes": bytes, "inflight": 1, "ops": ops, "errors": 0, "p50_us": p50, "p99_us": 2.0 * p50,
                "ops_per_s": 1e6 / p50, "gbytes_per_s": 1.0, "cpu_us_per_op": 7.0 })
    }

    fn stored(folder: &Path, columns: &str, rows: &str) -> String {
        let run = json!({
            "machine": { "cpu": "a processor", "cores": 2, "kernel": "6.1.0-of-mine" }, "allocator": "mimalloc", "optimised": true,
            "round_trips": { "spin_us": 0.2, "wake_us": 14.0 },
            "rows": [row("grpc-tcp", 64, 100.0, 5000), row("grpc-rdma", 64, 20.0, 5000),
                     row("grpc-tcp", 1 << 20, 900.0, 99), row("grpc-rdma", 1 << 20, 300.0, 99)],
        });
        let file = folder.join("run");
        output::write_file(&file, &run.to_string()).unwrap();
        let run = ["", "tonic-rdma compare", file.to_str().unwrap()];
        let kept = folder.join("kept");
        store(&kept, "headline", [columns, rows, "2026-01-02"], &run).unwrap();
        read(&kept.join("headline.md")).unwrap()
    }

    #[test]
    fn a_table_by_mode_has_the_command_and_no_p99_of_few_operations() {
        let folder = tempfile::tempdir().unwrap();
        let columns = "payload=payload|mode=mode|p50=p50|p99=p99|latency ×=latency";
        let page = stored(folder.path(), columns, "");
        assert!(page.starts_with("```sh\ntonic-rdma compare\n```\n"), "{page}");
        for line in [
            "| payload | mode | p50 | p99 | latency × |",
            "| 64 B | grpc-rdma | 20.0 µs | 40.0 µs | 5.00 |",
            "| 1 MiB | grpc-rdma | 300 µs | – | 3.00 |",
        ] {
            assert!(page.lines().any(|other| other == line), "{line} in {page}");
        }
        assert!(page.contains("14.0 µs") && page.contains("2026-01-02"), "{page}");
        assert!(page.contains("Linux 6.1;") && !page.contains("mine"), "{page}");
    }

    #[test]
    fn a_table_by_cell_compares_modes_and_shows_only_chosen_cells() {
        let folder = tempfile::tempdir().unwrap();
        let columns = "payload=payload|in flight=inflight|TCP=p50:grpc-tcp|RDMA ×=latency:grpc-rdma/grpc-tcp";
        let page = stored(folder.path(), columns, "1MiB/1");
        assert!(page.contains("\n| 1 MiB | 1 | 900 µs | 3.00 |\n") && !page.contains("64 B"), "{page}");
        let svg = read(&folder.path().join("kept/latency.svg")).unwrap();
        assert!(svg.contains("grpc-rdma") && svg.contains("1 MiB") && !svg.contains("\n\n"));
    }

    #[test]
    fn the_mission_has_a_row_for_each_mode_and_no_small_payload() {
        let folder = tempfile::tempdir().unwrap();
        stored(folder.path(), "mode=mode", "");
        let page = read(&folder.path().join("kept/mission.md")).unwrap();
        for line in [
            "| p50, × grpc-tcp | 1 MiB |",
            "| gRPC over TCP (`grpc-tcp`) | 900 µs |",
            "| gRPC, drop-in (`grpc-rdma`) | 300 µs, 3.00 × |",
            "| tensors, no calls (`rdma-zerocp`) | – |",
        ] {
            assert!(page.lines().any(|other| other == line), "{line} in {page}");
        }
    }

    #[test]
    fn bars_are_as_long_as_their_values_and_say_them() {
        let folder = tempfile::tempdir().unwrap();
        let run = json!({ "optimised": true, "machine": { "cpu": "a processor", "cores": 2, "kernel": "6.1" },
            "rows": [row("grpc-tcp", 64, 100.0, 5000), row("grpc-native", 64, 25.0, 5000)] });
        let file = folder.path().join("run");
        output::write_file(&file, &run.to_string()).unwrap();
        let run = ["", "tonic-rdma compare", file.to_str().unwrap()];
        store(folder.path(), "defaults", ["payload=payload|mode=mode", "", "2026-01-02"], &run).unwrap();
        let svg = read(&folder.path().join("defaults.svg")).unwrap();
        for part in ["width=\"220.0\"", "width=\"55.0\"", ">100 µs<", ">25.0 µs<", ">native calls<"] {
            assert!(svg.contains(part), "{part} in {svg}");
        }
        assert!(!svg.contains("1 MiB") && !svg.contains("\n\n"), "{svg}");
    }

    #[test]
    fn rows_at_a_rate_have_it_as_their_load_and_no_latency_if_saturated() {
        let folder = tempfile::tempdir().unwrap();
        let at = |mode: &str, p50: f64, saturated: bool| {
            let mut row = row(mode, 64, p50, 5000);
            (row["rate"], row["saturated"], row["switches_per_op"]) =
                (3e4.into(), saturated.into(), 2.5.into());
            row
        };
        let run = json!({ "optimised": true, "machine": { "cpu": "a processor", "cores": 2, "kernel": "6.1" },
            "rows": [row("grpc-tcp", 64, 100.0, 5000), row("grpc-rdma", 64, 20.0, 5000),
                     at("grpc-tcp", 900.0, true), at("grpc-rdma", 30.0, false)] });
        let file = folder.path().join("run");
        output::write_file(&file, &run.to_string()).unwrap();
        let columns = "load=load|TCP=p50:grpc-tcp|×=latency:grpc-rdma|p99 ×=p99 ratio:grpc-rdma|\
                       CPU ×=CPU ratio:grpc-rdma|switches=switches:grpc-rdma";
        let run = ["", "tonic-rdma compare", file.to_str().unwrap()];
        store(folder.path(), "defaults", [columns, "", "2026-01-02"], &run).unwrap();
        let page = read(&folder.path().join("defaults.md")).unwrap();
        for line in
            ["| × 1 | 100 µs | 5.00 | 5.00 | 1.00 | – |", "| 30.0 k/s | saturated | – | – | 1.00 | 2.50 |"]
        {
            assert!(page.lines().any(|other| other == line), "{line} in {page}");
        }
    }

    #[test]
    fn ratios_of_rounds_are_those_of_the_run_and_not_of_its_medians() {
        let folder = tempfile::tempdir().unwrap();
        let mut rdma = row("grpc-rdma", 64, 20.0, 5000);
        (rdma["latency_ratio"], rdma["p99_ratio"]) = (2.5.into(), serde_json::Value::Null);
        (rdma["throughput_ratio"], rdma["latency_ratio_range"]) = (3.5.into(), json!([0.9, 12.0]));
        let run = json!({ "optimised": true, "machine": { "cpu": "a processor", "cores": 2, "kernel": "6.1" }, "rounds": 5,
            "rows": [row("grpc-tcp", 64, 100.0, 5000), row("grpc-uds", 64, 40.0, 5000), rdma] });
        let file = folder.path().join("run");
        output::write_file(&file, &run.to_string()).unwrap();
        let columns = "×=latency:grpc-rdma|in all=latency range:grpc-rdma|p99 ×=p99 ratio:grpc-rdma|\
                       throughput ×=throughput:grpc-rdma|over UDS ×=latency:grpc-rdma/grpc-uds";
        let run = ["", "tonic-rdma compare --runs 5", file.to_str().unwrap()];
        store(folder.path(), "rates", [columns, "", "2026-01-02"], &run).unwrap();
        let page = read(&folder.path().join("rates.md")).unwrap();
        assert!(page.contains("\n| 2.50 | 0.90 to 12.0 | – | 3.50 | 2.00 |\n"), "{page}");
        assert!(page.contains("Medians of 5 runs; ×"), "{page}");
    }

    #[test]
    fn a_spread_is_that_of_the_ratios_run_by_run() {
        let folder = tempfile::tempdir().unwrap();
        let of = |mode: &str, rates: [f64; 3]| {
            json!({ "mode": mode, "model": "gru", "minibatches_per_s": rates[1], "minibatches_per_s_runs": rates,
                    "times_local": rates[1] / 10.0 })
        };
        let run = json!({ "optimised": true, "machine": { "cpu": "a processor", "cores": 2, "kernel": "6.1" }, "rounds": 3,
            "turns": 1, "round_trips": { "spin_us": 0.2 },
            "rows": [of("grpc-tcp", [10.0, 20.0, 30.0]), of("rdma-zerocp", [30.0, 50.0, 60.0])] });
        let store_run = |run: &serde_json::Value| {
            let file = folder.path().join("run");
            output::write_file(&file, &run.to_string()).unwrap();
            let columns = "×=throughput ±:rdma-zerocp|TCP=each second ±:grpc-tcp|local=local ±:rdma-zerocp";
            let of_file = ["", "tonic-rdma parameter-server", file.to_str().unwrap()];
            store(folder.path(), "workers", [columns, "", "2026-01-02"], &of_file).unwrap();
            read(&folder.path().join("workers.md")).unwrap()
        };
        let page = store_run(&run);
        assert!(
            page.contains("\n| 2.50 (2.00 to 3.00) | 20.0 (10.0 to 30.0) | 5.00 (3.00 to 6.00) |\n"),
            "{page}"
        );
        assert!(page.contains("Medians of 3 runs, with the least and the largest in brackets; ×"), "{page}");
        assert!(page.contains("threads that spin 0.20 µs"), "{page}");
        // Results of one run, whose costs are from after it.
        let mut old = run;
        old["rounds"] = serde_json::Value::Null;
        for row in old["rows"].as_array_mut().unwrap() {
            row["minibatches_per_s_runs"] = serde_json::Value::Null;
        }
        let page = store_run(&old);
        assert!(page.contains("\n| 2.50 | 20.0 | 5.00 |\n") && !page.contains("spin"), "{page}");
        assert!(page::parse("a=payload ±").unwrap_err().to_string().contains("each second"));
    }

    #[test]
    fn a_field_selects_cells() {
        let folder = tempfile::tempdir().unwrap();
        let page = stored(folder.path(), "payload=payload|mode=mode", "bytes=1048576");
        assert!(page.contains("\n| 1 MiB | grpc-tcp |\n") && !page.contains("64 B"), "{page}");
    }

    #[test]
    fn a_figure_of_the_paper_gives_a_picture_and_the_summary() {
        let folder = tempfile::tempdir().unwrap();
        let run = json!({ "optimised": true, "machine": { "cpu": "a processor", "cores": 2, "kernel": "6.1" },
            "rows": [row("grpc-tcp", 64, 100.0, 5000), row("rdma-zerocp", 64, 20.0, 5000)] });
        let (file, kept) = (folder.path().join("run"), folder.path().join("kept"));
        output::write_file(&file, &run.to_string()).unwrap();
        let run = ["", "tonic-rdma compare", file.to_str().unwrap()];
        store(&kept, "paper-8", ["payload=payload|mode=mode", "", "2026-01-02"], &run).unwrap();
        assert!(read(&kept.join("paper-8.svg")).unwrap().contains("rdma-zerocp"));
        assert!(read(&kept.join("paper-summary.md")).unwrap().contains("| 1.7 to 61 | 5.00 |"));
        check(&kept).unwrap();
        assert!(read(&kept.join("paper-7.svg")).unwrap().contains("of their bytes"));
        assert!(read(&kept.join("paper-9.md")).unwrap().contains("`benches/paper 9`"));
        fs::remove_file(kept.join("paper-summary.md")).unwrap();
        assert!(check(&kept).unwrap_err().to_string().contains("paper-summary.md is missing"));
    }

    #[test]
    fn rows_of_connections_are_compared_within_their_number() {
        let folder = tempfile::tempdir().unwrap();
        let of = |mode: &str, connections: u64, busy: u64, p50: f64| {
            let mut row = row(mode, 64, p50, 5000);
            (row["connections"], row["busy"]) = (connections.into(), busy.into());
            row["memory_bytes_each"] = (40 << 10).into();
            row
        };
        let run = json!({
            "machine": { "cpu": "a processor", "cores": 2, "kernel": "6.1" }, "allocator": "mimalloc", "optimised": true,
            "round_trips": { "spin_us": 0.2, "wake_us": 14.0 },
            "rows": [of("grpc-tcp", 8, 1, 100.0), of("grpc-native", 8, 1, 4.0),
                     of("grpc-tcp", 8, 8, 400.0), of("grpc-native", 8, 8, 10.0)],
        });
        let file = folder.path().join("run");
        output::write_file(&file, &run.to_string()).unwrap();
        let columns = "connections=connections|busy=busy|mode=mode|memory=memory|latency ×=latency";
        let run = ["", "tonic-rdma compare --connections 8", file.to_str().unwrap()];
        store(folder.path(), "connections", [columns, "", "2026-01-02"], &run).unwrap();
        let page = read(&folder.path().join("connections.md")).unwrap();
        for line in ["| 8 | 1 | grpc-native | 40.0 KiB | 25.0 |", "| 8 | 8 | grpc-native | 40.0 KiB | 40.0 |"]
        {
            assert!(page.lines().any(|other| other == line), "{line} in {page}");
        }
    }

    #[test]
    fn stale_pages_missing_pages_and_pages_without_runs_are_found() {
        let folder = tempfile::tempdir().unwrap();
        let columns = "payload=payload|mode=mode|p99=p99";
        let page = stored(folder.path(), columns, "");
        let kept = folder.path().join("kept");
        check(&kept).unwrap();
        // A p99 of 99 operations, added by hand.
        let file = kept.join("headline.md");
        output::write_file(&file, &page.replacen('–', "1.80 ms", 1)).unwrap();
        assert!(check(&kept).unwrap_err().to_string().contains("headline.md is not what its JSON gives"));
        render(&kept).unwrap();
        check(&kept).unwrap();
        fs::rename(&file, kept.join("other.md")).unwrap();
        let reason = check(&kept).unwrap_err().to_string();
        assert!(
            reason.contains("other.md has no JSON") && reason.contains("headline.md is missing"),
            "{reason}"
        );
        assert!(check(folder.path().join("nowhere").as_path()).is_err());
    }

    #[test]
    fn unknown_columns_and_missing_rows_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        stored(folder.path(), "mode=mode", "");
        let kept = folder.path().join("kept/headline.json");
        let figure: Figure = serde_json::from_str(&read(&kept).unwrap()).unwrap();
        for (columns, rows, named) in [
            ("a=p51", "", "p51"),
            ("a=p50:grpc-quic", "", "grpc-quic"),
            ("a=latency:grpc-rdma/grpc-uds", "", "grpc-uds"),
            ("p50", "", "p50"),
            ("a=p50", "4KiB/1", "4KiB/1"),
            ("a=p50", "bytes=64,3", "bytes=3"),
        ] {
            let other = Figure { columns: columns.to_owned(), rows: rows.to_owned(), ..figure.clone() };
            let reason = other.markdown().unwrap_err().to_string();
            assert!(reason.contains(named), "{reason}");
        }
    }

    /// The tables that README and the book show.
    #[test]
    fn stored_tables_match_their_runs() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/book/src/figures");
        if folder.exists() {
            check(&folder).unwrap();
        }
    }

    /// README shows some rows of the output of `compare`. They are those of the stored run, so that README has one
    /// value for one thing.
    #[test]
    fn the_output_in_readme_is_that_of_the_stored_run() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let figure: Figure = parse(&root.join("docs/book/src/figures/defaults.json")).unwrap();
        let (cells, readme) = (figure.cells().unwrap(), read(&root.join("README.md")).unwrap());
        for (bytes, size) in [(64, "64 B"), (1 << 20, "1 MiB")] {
            let cell = cells.iter().find(|cell| cell[0].is_of(bytes, 1)).unwrap();
            for mode in ["grpc-tcp", "grpc-rdma", "grpc-native"] {
                let row = page::of_mode(cell, mode).unwrap();
                let [p50, cpu] =
                    [row.p50(), row.cpu()].map(|value| tonic_rdma_commands::units::micros(value.unwrap()));
                let ratio = row.number("latency_ratio").unwrap();
                let line = format!("│ {mode:<11} ┆ {size:>5} ┆ {p50:>7} ┆ {cpu:>7} ┆ {ratio:>9.2} │");
                assert!(readme.lines().any(|other| other == line), "README lacks: {line}");
            }
        }
    }
}
