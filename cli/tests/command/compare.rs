//! `compare`: the rows that it writes, the table that it prints, and the end of its processes.

use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use super::process::{compare, is_gone, refused, run, tonic_rdma, wait_for};

/// The modes that `compare` measures by default.
const MODES: [&str; 12] = [
    "grpc-tcp",
    "grpc-tcp-busy",
    "grpc-tcp-tuned",
    "grpc-uds",
    "grpc-rdma",
    "grpc-rdma-gather",
    "grpc-native",
    "grpc-native-gather",
    "grpc-reference",
    "rdma-cp",
    "rdma-zerocp",
    "rdma-zerocp-await",
];

/// Checks that a percentile is there if and only if enough operations were timed.
fn assert_percentile(row: &Value, name: &str, operations: u64) {
    let enough = row["ops"].as_u64().unwrap() + row["unsent"].as_u64().unwrap_or(0) >= operations;
    assert_eq!(row[name].as_f64().is_some_and(|micros| micros > 0.0), enough, "{name} in {row}");
    assert!(enough || row[name].is_null(), "{name} in {row}");
}

#[test]
fn json_to_a_dash_is_all_that_stdout_has() {
    let folder = tempfile::tempdir().unwrap();
    for (arguments, printed) in [
        (&["compare", "--modes", "memcpy", "--sizes", "64", "--duration", "50ms"][..], "memcpy"),
        (&["tune", "--device", "soft0"], "choice: "),
        (&["parameter-server", "--models", "gru", "--modes", "rdma-zerocp", "--steps", "1"], "rdma-zerocp"),
    ] {
        // Without a file it is stdout, too.
        for dash in [&["-"][..], &[]] {
            let arguments = [arguments, &["--json"], dash].concat();
            let output = tonic_rdma(&arguments).current_dir(&folder).output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success() && said.contains(printed), "{said}");
            assert!(
                serde_json::from_slice::<Value>(&output.stdout).is_ok_and(|json| json.is_object()),
                "{output:?}"
            );
        }
    }
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0, "no file is made");
}

#[test]
fn csv_and_markdown_have_the_rows_of_the_json() {
    let folder = tempfile::tempdir().unwrap();
    let files = ["rows.json", "rows.csv", "rows.md"].map(|name| folder.path().join(name));
    let [json, csv, markdown] = files.each_ref().map(|file| file.to_str().unwrap());
    for (arguments, rows, first) in [
        (
            &[
                "compare",
                "--modes",
                "grpc-tcp,memcpy",
                "--sizes",
                "64,1KiB",
                "--runs",
                "2",
                "--duration",
                "0.02",
            ][..],
            4,
            ["grpc-tcp", "64 B"],
        ),
        (
            &["parameter-server", "--models", "gru", "--modes", "rdma-zerocp", "--steps", "1"],
            1,
            ["rdma-zerocp", "gru"],
        ),
    ] {
        let output = run(&[arguments, &["--json", json, "--csv", csv, "--markdown", markdown]].concat());
        assert!(output.status.success() && !output.stdout.is_empty(), "{output:?}");
        let written: Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
        let written = written["rows"].as_array().unwrap();

        let mut reader = csv::Reader::from_path(csv).unwrap();
        let names = reader.headers().unwrap().clone();
        assert_eq!(names.get(0), Some("mode"));
        let records: Vec<csv::StringRecord> = reader.records().map(Result::unwrap).collect();
        assert_eq!((records.len(), written.len()), (rows, rows));
        for (record, row) in records.iter().zip(written) {
            let row = row.as_object().unwrap();
            assert!(row.keys().all(|name| names.iter().any(|other| other == name)), "{names:?}");
            for (name, field) in names.iter().zip(record) {
                let same = match row.get(name) {
                    None | Some(Value::Null) => field.is_empty(),
                    Some(Value::String(text)) => field == text,
                    Some(Value::Number(number)) => field.parse::<f64>().ok() == number.as_f64(),
                    Some(Value::Array(values)) => {
                        let numbers = field.split(' ').map(|number| number.parse::<f64>().ok());
                        numbers.eq(values.iter().map(Value::as_f64))
                    }
                    Some(other) => field.parse::<Value>().ok().as_ref() == Some(other),
                };
                assert!(same, "{name} is {field:?} in {row:?}");
            }
        }

        let text = std::fs::read_to_string(markdown).unwrap();
        let table: Vec<Vec<&str>> = text
            .lines()
            .take_while(|line| line.starts_with('|'))
            .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
            .collect();
        // The headings, a line, and the rows.
        assert_eq!(
            (table.len(), &table[0][..2], &table[2][..2]),
            (rows + 2, &["mode", table[0][1]][..], &first[..])
        );
        assert!(table.iter().all(|row| row.len() == table[0].len()), "{text}");
        assert!(table[1].iter().all(|cell| cell.chars().all(|dash| dash == '-')), "{text}");
        assert!(text.contains("\n- this machine: a round trip between two threads"), "{text}");
    }
    let stdout = ["compare", "--modes", "memcpy", "--sizes", "64", "--duration", "20ms", "--csv", "-"];
    let output = run(&stdout);
    assert_eq!(csv::Reader::from_reader(&output.stdout[..]).records().count(), 1);
    assert!(String::from_utf8_lossy(&output.stderr).contains("this machine"));
    refused(&run(&[&stdout[..], &["--json", "-"]].concat()), 2, &["--csv: - is stdout, which --json has"]);
    // A full disk does not lose the table.
    let full = run(&[&stdout[..stdout.len() - 2], &["--csv", "/dev/full"]].concat());
    assert!(String::from_utf8_lossy(&full.stdout).contains("memcpy"), "{full:?}");
    refused(&full, 1, &["can't write /dev/full", "No space left"]);
}

#[test]
fn modes_are_listed_with_their_meanings() {
    let output = run(&["compare", "--list-modes"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    assert_eq!(text.lines().count(), 1 + MODES.len() + 5);
    let on_request = ["grpc-tcp-shared", "grpc-reference-tcp", "rdma-dynamic", "rdma-named", "memcpy"];
    for mode in MODES.iter().chain(&on_request) {
        let line = text.lines().find(|line| line.split_whitespace().next() == Some(mode));
        assert!(line.is_some_and(|line| line.split_whitespace().count() > 4), "{mode} in {text}");
    }
}

#[test]
fn a_comparison_is_measured_checked_and_written() {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("rows.json");
    let output = run(&[
        "compare",
        "--sizes",
        "64,100KiB",
        "--inflight",
        "1,8",
        "--duration",
        "0.1",
        "--json",
        json.to_str().unwrap(),
    ]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    // A successful run prints no warning.
    assert_eq!(said, "");
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(
        printed.contains("grpc-rdma") && printed.contains("soft") && printed.contains("mimalloc"),
        "{printed}"
    );

    let written: Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    assert_eq!(written["provider"], "soft");
    let rows = written["rows"].as_array().unwrap();
    assert_eq!(rows.len(), MODES.len() * 2 * 2);
    for row in rows {
        assert_eq!(row["errors"], 0, "{row}");
        assert!(row["ops"].as_u64().unwrap() > 0, "{row}");
        for figure in ["p50_us", "ops_per_s", "gbytes_per_s", "cpu_us_per_op"] {
            assert!(row[figure].as_f64().unwrap() > 0.0, "{figure} in {row}");
        }
        assert_percentile(row, "p99_us", 100);
        assert_percentile(row, "p999_us", 1000);
        assert!(MODES.contains(&row["mode"].as_str().unwrap()));
        assert!(row["bytes"].is_u64() && row["inflight"].is_u64());
    }
}

#[test]
fn connections_are_counted_in_rows_with_their_memory() {
    let arguments = ["--connections", "3", "--inflight", "2", "--duration", "0.05"];
    let (written, printed) = compare(&arguments);
    let rows = written["rows"].as_array().unwrap();
    // One connection, then two and three with one of them busy and with all of them busy.
    let cells = [(1, 1), (2, 1), (2, 2), (3, 1), (3, 3)];
    assert_eq!(rows.len(), cells.len() * 3);
    for (group, (connections, busy)) in rows.chunks(3).zip(cells) {
        let modes: Vec<_> = group.iter().map(|row| row["mode"].as_str().unwrap()).collect();
        assert_eq!(modes, ["grpc-tcp", "grpc-rdma", "grpc-native"]);
        for row in group {
            assert_eq!((&row["connections"], &row["busy"]), (&connections.into(), &busy.into()), "{row}");
            assert!(row["errors"] == 0 && row["ops"].as_u64() > Some(0), "{row}");
            assert!(row["p50_us"].as_f64() > Some(0.0) && row["memory_bytes_each"].is_u64(), "{row}");
            assert!(row["inflight"] == 2 && row["bytes"] == 64, "{row}");
            let idles = (connections, busy) == (3, 1);
            assert_eq!(row["idle_cpu_percent"].is_f64() && row["idle_sleeps_per_s"].is_f64(), idles, "{row}");
        }
    }
    // Both ends of a TCP connection.
    let tcp = rows.iter().find(|row| row["connections"] == 3 && row["mode"] == "grpc-tcp").unwrap();
    assert_eq!(tcp["descriptors_each"], 2, "{tcp}");
    assert_eq!(written["checks"]["mismatches"], 0);
    assert!(
        printed.contains("memory each") && printed.contains("idle CPU") && printed.contains("grpc-native"),
        "{printed}"
    );
}

#[test]
fn workloads_are_measured_beside_sizes() {
    let (written, printed) = compare(&[
        "--workload",
        "random,gru",
        "--sizes",
        "64",
        "--inflight",
        "3",
        "--duration",
        "0.1",
        "--encode",
        "gather",
    ]);
    assert_eq!(written["runtime"], "idle-polling");
    assert_eq!(written["checks"]["mismatches"], 0);
    let rows = written["rows"].as_array().unwrap();
    assert_eq!(rows.len(), MODES.len() * 3);
    for row in rows {
        assert_eq!(row["errors"], 0, "{row}");
        for figure in ["ops", "p50_us", "ops_per_s", "gbytes_per_s", "cpu_us_per_op"] {
            assert!(row[figure].as_f64().unwrap() > 0.0, "{figure} in {row}");
        }
        assert!(row.get("rate").is_none() && row["inflight"] == 3, "{row}");
    }
    let of = |workload| rows.iter().filter(|row| row["workload"] == workload).collect::<Vec<_>>();
    assert_eq!((of(Value::Null).len(), of("random".into()).len()), (MODES.len(), MODES.len()));
    // 7 319 528 parameters of four bytes.
    assert!(of("gru".into()).iter().all(|row| row["bytes"] == 29_278_112), "{rows:?}");
    assert!(printed.contains("gru: a set of 11 variables"), "{printed}");
    // The lengths of the messages, as a curve.
    let payloads = written["payloads"].as_array().unwrap();
    assert_eq!((payloads.len(), &payloads[1]["name"]), (2, &"gru".into()));
    assert_eq!(payloads[1]["sizes"][3], serde_json::json!([4 << 20, 6]));
    assert!(printed.contains("gru: ████▆▆▆▆▅··· of the messages"), "{printed}");
}

#[test]
fn consume_selects_the_modes_that_consume_payloads() {
    let sizes = ["--sizes", "100KiB", "--workload", "skew", "--inflight", "2", "--duration", "0.02"];
    let modes = MODES.join(",") + ",memcpy";
    for (consume, named) in [
        (
            "reduce-max",
            "grpc-tcp, grpc-tcp-busy, grpc-tcp-tuned, grpc-uds, grpc-rdma, grpc-rdma-gather, grpc-native, grpc-native-gather, grpc-reference, rdma-cp, rdma-zerocp, rdma-zerocp-await, memcpy",
        ),
        ("auto", "before it answers: rdma-cp, rdma-zerocp, rdma-zerocp-await"),
        ("none", "leaves payloads as they are"),
    ] {
        let (written, printed) = compare(&[&sizes[..], &["--modes", &modes, "--consume", consume]].concat());
        let reducing = written["reducing_modes"].as_array().unwrap().len();
        let expected = match consume {
            "auto" => 3,
            "none" => 0,
            _ => MODES.len() + 1,
        };
        assert_eq!((&written["consume"], reducing), (&consume.into(), expected));
        let rows = written["rows"].as_array().unwrap();
        assert_eq!(rows.len(), (MODES.len() + 1) * 2);
        for row in rows {
            assert!(row["errors"] == 0 && row["ops"].as_u64() > Some(0), "{row}");
        }
        assert!(printed.contains(named), "{printed}");
    }
}

#[test]
fn memcpy_copies_scattered_blocks() {
    let arguments = ["--modes", "memcpy", "--workload", "blocks", "--sizes", "1MiB", "--duration", "0.05"];
    let (written, printed) = compare(&arguments);
    assert_eq!(written["provider"], "none");
    // The size comes first, then the workload. Every byte of both is checked before and after.
    let rows = written["rows"].as_array().unwrap();
    assert_eq!((&rows[1]["workload"], &rows[1]["bytes"]), (&"blocks".into(), &(4096 * 16_384).into()));
    assert_eq!(written["checks"]["every_byte"], 2 * (1 + 4096));
    for row in rows {
        assert_eq!((&row["mode"], &row["errors"]), (&"memcpy".into(), &0.into()), "{row}");
        for figure in ["ops", "p50_us", "ops_per_s", "gbytes_per_s", "cpu_us_per_op"] {
            assert!(row[figure].as_f64().unwrap() > 0.0, "{figure} in {row}");
        }
    }
    assert!(printed.contains("blocks: a set of 4096 blocks"), "{printed}");
}

#[test]
fn tensors_are_placed_one_by_one_in_sets_in_batches_and_in_an_open_loop() {
    let all = "rdma-cp,rdma-zerocp,rdma-zerocp-await,rdma-dynamic,rdma-named";
    let modes = ["--modes", all, "--duration", "0.02"];
    for arguments in [
        &["--sizes", "1,4097,3MiB", "--inflight", "3"][..],
        &["--workload", "random,gru,blocks", "--inflight", "2"],
        &["--sizes", "64,100KiB", "--rate", "200"],
        &["--sizes", "64", "--inflight", "2000"],
        &["--sizes", "64", "--runtime", "multi-thread:2"],
    ] {
        let (written, printed) = compare(&[&modes[..], arguments].concat());
        assert_eq!((&written["provider"], &written["checks"]["mismatches"]), (&"soft".into(), &0.into()));
        for row in written["rows"].as_array().unwrap() {
            assert!(row["errors"] == 0 && row["ops"].as_u64() > Some(0), "{row}");
        }
        assert!(printed.contains("no RPC") && printed.contains("tensors over soft0"), "{printed}");
    }
}

#[test]
fn settings_of_http2_are_rows_of_one_run() {
    let modes = "grpc-tcp,grpc-uds,grpc-rdma-gather,grpc-native,rdma-zerocp";
    let (written, printed) = compare(&[
        "--modes",
        modes,
        "--http2",
        "default,64KiB/64KiB/16KiB",
        "--sizes",
        "1MiB",
        "--duration",
        "0.05",
        "--direction",
        "up",
    ]);
    assert_eq!(written["http2"]["setting"], "default,65536/65536/16384");
    let rows = written["rows"].as_array().unwrap();
    let settings = [Value::from("default"), Value::from("65536/65536/16384")];
    let twice = ["grpc-tcp", "grpc-uds", "grpc-rdma-gather"].into_iter();
    let mut expected: Vec<_> =
        twice.flat_map(|mode| settings.iter().map(move |setting| (mode, Some(setting)))).collect();
    expected.extend([("grpc-native", None), ("rdma-zerocp", None)]);
    let found: Vec<_> = rows.iter().map(|row| (row["mode"].as_str().unwrap(), row.get("http2"))).collect();
    assert_eq!(found, expected);
    assert!(
        rows.iter().all(|row| row["errors"] == 0 && row["latency_ratio"].as_f64() > Some(0.0)),
        "{written}"
    );
    // Each is compared with TCP of its own setting.
    assert_eq!([&rows[0]["latency_ratio"], &rows[1]["latency_ratio"]], [&Value::from(1.0); 2]);
    assert!(printed.contains("grpc-uds (65536/65536/16384)"), "{printed}");
}

#[test]
fn an_open_loop_offers_its_rate_and_names_modes_that_fall_behind() {
    let arguments = ["--rate", "20,200", "--sizes", "64", "--workload", "uniform", "--duration", "0.2"];
    let (written, printed) = compare(&arguments);
    let rows = written["rows"].as_array().unwrap();
    assert_eq!(rows.len(), MODES.len() * 2 * 2);
    for row in rows {
        assert_eq!(row["errors"], 0, "{row}");
        assert!(row["saturated"].is_boolean() && row["unsent"].is_u64(), "{row}");
        let [switches, sleeps] = ["switches_per_op", "sleeps_per_op"].map(|name| row[name].as_f64().unwrap());
        // A server that waits for TCP sleeps until a call comes.
        assert!(switches >= sleeps && (row["mode"] != "grpc-tcp" || sleeps > 0.0), "{row}");
        // Three trials. Each takes a third of the time, made longer until the number of calls is whole.
        let offered = row["ops"].as_u64().unwrap() + row["unsent"].as_u64().unwrap();
        assert_eq!(offered, if row["rate"] == 20.0 { 3 * 2 } else { 3 * 14 }, "{row}");
        assert_percentile(row, "p99_us", 100);
    }
    assert!(printed.contains("offered/s") && printed.contains("open loop"), "{printed}");
    assert!(printed.contains("uniform") && printed.contains("switches/op"), "{printed}");
}

#[test]
fn a_mode_below_the_offered_rate_is_reported_as_saturated() {
    let arguments =
        ["--modes", "grpc-tcp,grpc-rdma", "--sizes", "1MiB", "--inflight", "2", "--duration", "0.1"];
    let (written, printed) = compare(&[&arguments[..], &["--rate", "300000"]].concat());
    for row in written["rows"].as_array().unwrap() {
        assert_eq!((&row["saturated"], &row["errors"]), (&true.into(), &0.into()), "{row}");
        assert!(row["unsent"].as_u64().unwrap() > 0, "{row}");
    }
    assert!(printed.contains("saturated"), "{printed}");
}

/// Returns the server process of a comparison, a child of `parent`.
fn child_of(parent: u32) -> Option<u32> {
    let children = std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).ok()?;
    children.split_whitespace().next()?.parse().ok()
}

#[test]
fn the_server_process_ends_with_its_parent() {
    let mut parent = tonic_rdma(&["compare", "--modes", "grpc-tcp", "--sizes", "64", "--duration", "30"])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let child = wait_for("no server process", || child_of(parent.id()));
    parent.kill().unwrap();
    parent.wait().unwrap();
    wait_for("the server process outlives its parent", || is_gone(child));
}

#[test]
fn a_server_process_that_dies_ends_the_run_with_the_reason() {
    for modes in ["grpc-tcp,grpc-rdma", "rdma-cp,rdma-zerocp", "rdma-zerocp-await"] {
        a_server_process_dies(&["compare", "--sizes", "64", "--duration", "30", "--modes", modes]);
    }
}

fn a_server_process_dies(arguments: &[&str]) {
    let parent = tonic_rdma(arguments).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let child = wait_for("no server process", || child_of(parent.id()));
    std::thread::sleep(Duration::from_millis(300));
    assert!(Command::new("kill").args(["-9", &child.to_string()]).status().unwrap().success());
    let output = parent.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("server process ended"), "{said}");
}
