//! `benches/against`: the verdict on stored runs, real runs of this command, and bad input.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::json;

use super::process::refused;

/// One run's figures of two cells: p50 in µs of a small and of a large message.
type Run = [f64; 2];

const ROUNDS: usize = 7;
/// An old revision whose runs differ by up to 4 %.
const OLD: [Run; ROUNDS] =
    [[10.0, 100.0], [10.2, 101.0], [9.9, 99.0], [10.1, 102.0], [10.0, 98.0], [9.8, 100.0], [10.3, 100.0]];

#[test]
fn stored_runs_decide() {
    let times = |small: f64, large: f64| OLD.map(|[one, other]| [one * small, other * large]);
    for (new, exceptions, status, said) in [
        (times(1.0, 1.0), &[][..], 0, &["geometric mean of 4 ratios: 0.998; 7 rounds", "\nheld"][..]),
        // Slower, but within the spread.
        (
            times(1.01, 1.0),
            &[],
            0,
            &["| grpc-rdma/64/1 | latency | 10.0 µs | 10.1 µs | 0.985 | 0.961 to 1.041 |  |", "\nheld"],
        ),
        // One cell is slower, and the other makes up for it in the mean.
        (times(1.5, 0.5), &[], 1, &["below its spread: grpc-rdma/64/1/latency (0.663", "\nNOT HELD"]),
        (
            times(1.5, 0.5),
            &["grpc-rdma/64/1=checks more"],
            0,
            &["excepted: grpc-rdma/64/1/throughput (0.663", "): checks more\n", "\nheld"],
        ),
        (
            times(1.5, 0.5),
            &["grpc-rdma/64/1/latency=checks more"],
            1,
            &["excepted: grpc-rdma/64/1/latency", "below its spread: grpc-rdma/64/1/throughput"],
        ),
        // All cells are excepted, but the mean has its limit.
        (
            times(1.1, 1.1),
            &["grpc-rdma/64/1=a", "grpc-rdma/64KiB/1=b"],
            1,
            &["the geometric mean is below 0.98", "\nNOT HELD"],
        ),
    ] {
        let folder = stored(&new);
        let mut arguments = vec!["--from", folder.path().to_str().unwrap()];
        arguments.extend(exceptions.iter().flat_map(|exception| ["--except", exception]));
        let Some(output) = against(&arguments) else { return };
        let text = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.code(), Some(status), "{text}{}", String::from_utf8_lossy(&output.stderr));
        for words in said {
            assert!(text.contains(words), "{words:?} is missing in {text}");
        }
    }
}

#[test]
fn runs_of_allreduce_have_no_throughput() {
    let folder = tempfile::tempdir().unwrap();
    let row = json!({ "ranks": 2, "bytes": 1024, "algorithm": "ring", "type": "f32", "operand": "slice", "reduction": "sum",
                      "iterations": 9, "p50_us": 4.0, "p99_us": 9.0, "bus_gbytes_per_s": 1.0, "errors": 0 });
    for (name, round) in
        ["old", "new", "old-again"].into_iter().flat_map(|name| (1..=ROUNDS).map(move |round| (name, round)))
    {
        fs::write(folder.path().join(format!("{name}.{round}.json")), json!({ "rows": [row] }).to_string())
            .unwrap();
    }
    let Some(output) = against(&["--command", "allreduce", "--from", folder.path().to_str().unwrap()]) else {
        return;
    };
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        text.contains("\n| ring/1KiB/2/slice | latency | 4.00 µs | 4.00 µs | 1.000 | 1.000 to 1.000 |  |\n"),
        "{text}"
    );
    assert!(text.contains("mean of 1 ratios") && output.status.success(), "{text}");
}

#[test]
fn runs_with_faults_are_no_comparison() {
    let error = json!({ "errors": 2, "first_error": "wrong content" });
    for (name, change, named) in [
        ("new.3.json", Some(error), "new, round 3: grpc-rdma/64/1: errors: wrong content"),
        ("old.2.json", Some(json!({ "skipped": "too little memory" })), "skipped: too little memory"),
        ("old.1.json", Some(json!({ "p50_us": 0.0 })), "no latency"),
        ("new.1.json", Some(json!({ "mode": "grpc-quic" })), "is not measured in every run"),
        ("old-again.7.json", None, "old-again.7.json can't be read"),
    ] {
        let folder = stored(&OLD);
        let file = folder.path().join(name);
        match change {
            None => fs::remove_file(file).unwrap(),
            Some(change) => {
                let mut run: serde_json::Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
                let row = run["rows"][0].as_object_mut().unwrap();
                row.extend(change.as_object().unwrap().clone());
                fs::write(file, run.to_string()).unwrap();
            }
        }
        let Some(output) = against(&["--from", folder.path().to_str().unwrap()]) else { return };
        refused(&output, 1, &[named]);
    }
}

#[test]
fn bad_input_is_named_in_one_line() {
    let folder = stored(&OLD);
    let folder = folder.path().to_str().unwrap();
    for (arguments, named) in [
        (&[][..], &["REV", "--from"][..]),
        (&["no-such-revision"], &["'no-such-revision' is no revision"]),
        (&["HEAD", "--from", folder], &["one of REV"]),
        (&["HEAD", "--fast"], &["--fast"]),
        (&["HEAD", "--rounds", "0"], &["--rounds", "'0'", "1 to 99"]),
        (&["HEAD", "--command", "tune"], &["--command", "'tune'", "compare", "allreduce"]),
        (&["HEAD", "--build", "interop"], &["'interop'", "PACKAGE:BINARY"]),
        (&["--from", folder, "--except", "grpc-rdma/64/1"], &["grpc-rdma/64/1", "CELL=REASON"]),
        (&["--from", folder, "--except", "grpc-tcp/64/1=slow"], &["'grpc-tcp/64/1'", "grpc-rdma/64KiB/1"]),
        (&["--from", folder, "--", "--quick"], &["--from", "ARGUMENTS"]),
        (&["--from", "/no/such/folder"], &["/no/such/folder"]),
        (&["--binaries", "/no/such/program", "/bin/true"], &["/no/such/program"]),
        (&["--binaries", COMMAND, COMMAND, "--", "--fast"], &["old does not take these arguments", "--fast"]),
    ] {
        let Some(output) = against(arguments) else { return };
        let said = String::from_utf8_lossy(&output.stderr);
        // Lines of progress come before the message.
        let last = Output { stderr: said.lines().last().unwrap().into(), ..output };
        refused(&last, 2, named);
    }
}

#[test]
fn runs_of_this_command_are_read() {
    let cell = ["--modes", "grpc-tcp", "--sizes", "64", "--inflight", "1", "--duration", "0.01"];
    let arguments = [&["--binaries", COMMAND, COMMAND, "--rounds", "1", "--"], &cell[..]].concat();
    let Some(output) = against(&arguments) else { return };
    let (text, said) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    // One round shows nothing.
    assert_eq!(output.status.code(), Some(1), "{said}");
    for words in [
        "| grpc-tcp/64/1 | latency |",
        "| grpc-tcp/64/1 | throughput |",
        "a trial",
        "\nround 1 of 1: old-again",
    ] {
        assert!(format!("{said}{text}").contains(words), "{words:?} is missing in {said}{text}");
    }
}

const COMMAND: &str = env!("CARGO_BIN_EXE_tonic-rdma");

/// Runs the script. It keeps its files in a folder that ends with the run. Returns `None` without Python.
fn against(arguments: &[&str]) -> Option<Output> {
    if Command::new("python3").arg("--version").output().is_err() {
        eprintln!("skipped: there is no python3");
        return None;
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../benches/against");
    let folder = tempfile::tempdir().unwrap();
    Some(Command::new(script).args(arguments).env("CARGO_TARGET_DIR", folder.path()).output().unwrap())
}

/// Stores rounds of an old revision that varies, and of a new one.
fn stored(new: &[Run; ROUNDS]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    // Its second runs are those of the next round, so the old revision varies within each round.
    let again = |round: usize| OLD[(round + 1) % ROUNDS];
    for round in 0..ROUNDS {
        for (name, run) in [("old", OLD[round]), ("new", new[round]), ("old-again", again(round))] {
            let row = |bytes: u64, p50: f64| {
                json!({ "mode": "grpc-rdma", "bytes": bytes, "inflight": 1, "direction": "up", "ops": 9, "errors": 0,
                        "p50_us": p50, "ops_per_s": 1e6 / p50 })
            };
            let rows = json!({ "rows": [row(64, run[0]), row(64 << 10, run[1])] });
            fs::write(folder.path().join(format!("{name}.{}.json", round + 1)), rows.to_string()).unwrap();
        }
    }
    folder
}
