//! `diff`: files that `compare` really wrote, stored files with a known difference, and bad input.

use std::fs;
use std::path::Path;
use std::process::Output;

use serde_json::{Value, json};

use super::process::{compare, refused, run};

/// Writes the results of five runs of two modes, of which `small` has these latencies.
fn write(file: &Path, small: [f64; 5], change: impl FnOnce(&mut Value)) {
    let row = |mode: &str, runs: [f64; 5]| {
        let mut sorted = runs;
        sorted.sort_by(f64::total_cmp);
        let speeds = runs.map(|micros| 1e6 / micros);
        json!({ "mode": mode, "bytes": 64, "inflight": 1, "direction": "up", "ops": 9, "errors": 0, "p50_us": sorted[2],
                "p50_us_runs": runs, "p99_us": null, "ops_per_s": 1e6 / sorted[2], "ops_per_s_runs": speeds, "cpu_us_per_op": 5.0 })
    };
    let tcp = [100.0, 101.0, 99.0, 102.0, 98.0];
    let mut results = json!({ "version": "0.1.0", "allocator": "mimalloc", "machine": { "cores": 2 }, "rounds": 5,
                              "rows": [row("grpc-tcp", tcp), row("grpc-native", small)] });
    change(&mut results);
    fs::write(file, results.to_string()).unwrap();
}

const BEFORE: [f64; 5] = [10.0, 10.2, 9.9, 10.1, 9.8];
const SLOWER: [f64; 5] = [20.0, 20.2, 19.9, 20.1, 19.8];
/// Slower, but one run is as fast as before.
const PERHAPS_SLOWER: [f64; 5] = [20.0, 20.2, 19.9, 20.1, 9.9];

/// Compares `old` with `new`.
fn diff(old: &Path, new: &Path, arguments: &[&str]) -> Output {
    run(&[&["diff", old.to_str().unwrap(), new.to_str().unwrap()], arguments].concat())
}

#[test]
fn a_cell_that_is_slower_beyond_the_spread_is_named_and_fails_on_request() {
    let folder = tempfile::tempdir().unwrap();
    let [old, new] = ["old.json", "new.json"].map(|name| folder.path().join(name));
    write(&old, BEFORE, |_| {});
    for (runs, said, failure) in [
        (BEFORE, "0 are worse beyond it, 0 are better", None),
        (SLOWER, "2 are worse beyond it, 0 are better", Some("grpc-native, 64 B × 1: latency 0.50; ")),
        (PERHAPS_SLOWER, "0 are worse beyond it", None),
    ] {
        write(&new, runs, |_| {});
        let output = diff(&old, &new, &[]);
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains(said), "{text}");
        let output = diff(&old, &new, &["--at-least", "0.9"]);
        match failure {
            None => assert!(output.status.success(), "{output:?}"),
            Some(named) => refused(&output, 1, &[named, "throughput 0.50"]),
        }
        assert!(diff(&old, &new, &["--at-least", "0.4"]).status.success());
    }
    write(&new, SLOWER, |_| {});
    let output = diff(&new, &old, &["--json", "-"]);
    let written: Value = serde_json::from_slice(&output.stdout).unwrap();
    let native = &written["rows"][1];
    assert_eq!((&native["mode"], &native["latency_ratio"]), (&"grpc-native".into(), &2.0.into()));
    assert_eq!((&native["p50_us_old"], &native["p50_us_new"]), (&20.0.into(), &10.0.into()));
    assert_eq!(
        (&native["latency_beyond_spread"], &native["cpu_beyond_spread"]),
        (&true.into(), &Value::Null)
    );
    assert!(native.get("p99_ratio").is_none(), "{native}");
}

#[test]
fn files_without_runs_are_judged_by_the_ratio_alone() {
    let folder = tempfile::tempdir().unwrap();
    let [old, new] = ["old.json", "new.json"].map(|name| folder.path().join(name));
    let single = |results: &mut Value| {
        for row in results["rows"].as_array_mut().unwrap() {
            row.as_object_mut().unwrap().retain(|name, _| !name.ends_with("_runs"));
        }
    };
    write(&old, BEFORE, single);
    write(&new, PERHAPS_SLOWER, single);
    let output = diff(&old, &new, &["--at-least", "0.9"]);
    assert!(String::from_utf8_lossy(&output.stdout).contains("unknown, because both files need --runs 4"));
    refused(&output, 1, &["grpc-native, 64 B × 1: latency 0.50"]);
}

#[test]
fn cells_that_can_not_be_compared_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let [old, new] = ["old.json", "new.json"].map(|name| folder.path().join(name));
    write(&old, BEFORE, |_| {});
    for (change, named) in [
        (json!({ "errors": 2, "first_error": "it broke" }), "grpc-native, 64 B × 1: 2 errors (it broke) in "),
        (json!({ "skipped": "too large" }), "grpc-native, 64 B × 1: not measured (too large) in "),
        (json!({ "mode": "grpc-uds" }), "grpc-native, 64 B × 1: not in "),
    ] {
        write(&new, BEFORE, |results| {
            results["rows"][1].as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        });
        let output = diff(&old, &new, &[]);
        assert!(
            output.status.success() && String::from_utf8_lossy(&output.stdout).contains(named),
            "{output:?}"
        );
        refused(&diff(&old, &new, &["--at-least", "0.5"]), 1, &["not compared: ", named]);
    }
    // The same if no other cell is left.
    let alone = |results: &mut Value| drop(results["rows"].as_array_mut().unwrap().pop());
    write(&old, BEFORE, alone);
    write(&new, BEFORE, |results| {
        alone(results);
        results["rows"][0]["errors"] = 2.into();
    });
    let nothing = ["have no cell to compare; the first: grpc-tcp, 64 B × 1: 2 errors"];
    refused(&diff(&old, &new, &["--at-least", "0.5"]), 1, &nothing);
    refused(&diff(&old, &new, &[]), 2, &nothing);
    // What is new has nothing to be compared with.
    let uds = |results: &mut Value| results["rows"][1]["mode"] = "grpc-uds".into();
    write(&old, BEFORE, |results| drop(results["rows"].as_array_mut().unwrap().pop()));
    write(&new, BEFORE, uds);
    let output = diff(&old, &new, &["--at-least", "0.9"]);
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("left out: grpc-uds, 64 B × 1: not in "));
}

#[test]
fn a_figure_that_is_gone_is_no_pass() {
    let folder = tempfile::tempdir().unwrap();
    let [old, new] = ["old.json", "new.json"].map(|name| folder.path().join(name));
    write(&old, BEFORE, |_| {});
    for (field, value, named) in [
        ("ops_per_s", json!(0.0), "grpc-native, 64 B × 1: no throughput in "),
        ("p50_us", Value::Null, "grpc-native, 64 B × 1: no latency in "),
    ] {
        write(&new, BEFORE, |results| results["rows"][1][field] = value);
        let output = diff(&old, &new, &[]);
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains(&format!("left out: {named}")), "{output:?}");
        refused(&diff(&old, &new, &["--at-least", "0.5"]), 1, &["not compared: ", named, "new.json"]);
        // What was not measured before can't be worse.
        assert!(diff(&new, &old, &["--at-least", "0.5"]).status.success());
    }
}

#[test]
fn calls_that_a_load_gave_up_are_a_fault_and_cells_are_told_apart_by_their_values() {
    let folder = tempfile::tempdir().unwrap();
    let [old, new] = ["old.json", "new.json"].map(|name| folder.path().join(name));
    let load = |unsent: u64| {
        move |results: &mut Value| {
            for (row, rate) in results["rows"].as_array_mut().unwrap().iter_mut().zip([10_000, 10_020]) {
                row.as_object_mut().unwrap().remove("direction");
                (row["mode"], row["rate"], row["unsent"]) = ("native".into(), rate.into(), 0.into());
            }
            results["rows"][1]["unsent"] = unsent.into();
        }
    };
    write(&old, BEFORE, load(0));
    write(&new, SLOWER, load(0));
    let slower = ["native, 64 B × 1, 10.0 k/s: latency 0.50"];
    refused(&diff(&old, &new, &["--at-least", "0.9"]), 1, &slower);
    write(&new, BEFORE, load(7));
    let given_up = ["native, 64 B × 1, 10.0 k/s: 7 calls were given up in "];
    refused(&diff(&old, &new, &["--at-least", "0.9"]), 1, &given_up);
}

#[test]
fn bad_files_and_other_settings_are_named_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let [old, new] = ["old.json", "new.json"].map(|name| folder.path().join(name));
    write(&old, BEFORE, |_| {});
    write(&new, BEFORE, |results| {
        results["allocator"] = "system".into();
        results["machine"]["cores"] = 4.into();
        results["version"] = "0.2.0".into();
    });
    let differ =
        ["settings of", "differ: allocator (mimalloc, system), machine.cores (2, 4);", "--ignore-settings"];
    refused(&diff(&old, &new, &[]), 2, &differ);
    let output = diff(&old, &new, &["--ignore-settings"]);
    assert!(
        output.status.success() && String::from_utf8_lossy(&output.stdout).contains("differs: allocator")
    );

    for (text, named) in [
        ("no json", "it is no JSON object"),
        ("[1, 2]", "it is no JSON object"),
        (r#"{"sizes": []}"#, "it has no rows; accepted: a file that --json of compare"),
        (r#"{"rows": []}"#, "it has no rows"),
        (
            r#"{"rows": [{"mode": "grpc-tcp", "p50_us": 1}, {"mode": "grpc-tcp", "seconds": 1}]}"#,
            "row 2 has no p50_us or p50_ms",
        ),
        (
            r#"{"rows": [{"mode": "x", "p50_us": 1}, {"mode": "x", "p50_us": 1}]}"#,
            "the cell x is there twice",
        ),
    ] {
        fs::write(&new, text).unwrap();
        refused(&diff(&old, &new, &[]), 2, &[named, "new.json"]);
    }
    fs::write(&new, r#"{"rows": [{"mode": "x", "p50_us": 1}]}"#).unwrap();
    let named = ["have no cell to compare; the first: grpc-tcp, 64 B × 1: not in "];
    refused(&diff(&old, &new, &["--ignore-settings"]), 2, &named);
    refused(&diff(&old, Path::new("/no/such/file.json"), &[]), 2, &["can't read /no/such/file.json"]);
    refused(&diff(&old, &new, &["--at-least", "half"]), 2, &["--at-least", "half", "0.01 to 1000"]);
}

#[test]
fn what_commands_write_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let cell = ["--modes", "grpc-tcp,memcpy", "--sizes", "64", "--duration", "0.02"];
    let files = ["1", "5"].map(|runs| {
        let file = folder.path().join(runs);
        let (written, _) = compare(&[&cell[..], &["--runs", runs]].concat());
        fs::write(&file, written.to_string()).unwrap();
        file
    });
    for (old, new, spread) in
        [(0, 1, "unknown"), (1, 1, "figures 0 are worse beyond it, 0 are better beyond it")]
    {
        let output = diff(&files[old], &files[new], &[]);
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{output:?}");
        assert!(
            text.contains("grpc-tcp, 64 B × 1") && text.contains(spread) && text.contains("1.00") || old == 0,
            "{text}"
        );
    }
    // A mode is as fast as itself.
    assert!(diff(&files[1], &files[1], &["--at-least", "1"]).status.success());

    let file = folder.path().join("training.json");
    let training =
        ["parameter-server", "--models", "gru", "--modes", "rdma-zerocp", "--steps", "1", "--json"];
    let output = run(&[&training[..], &[file.to_str().unwrap()]].concat());
    assert!(output.status.success(), "{output:?}");
    let output = diff(&file, &file, &["--at-least", "1"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("rdma-zerocp, gru, 1 server, 1 worker"), "{output:?}");
}
