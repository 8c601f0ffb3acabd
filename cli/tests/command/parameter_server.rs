//! `parameter-server`: its rows, its output, and the end of its processes.

use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use serde_json::Value;

use super::process::{is_gone, refused, tonic_rdma, wait_for};

const MODES: [&str; 7] = [
    "grpc-tcp",
    "grpc-rdma",
    "grpc-rdma-gather",
    "grpc-native",
    "grpc-native-gather",
    "rdma-cp",
    "rdma-zerocp",
];

fn parameter_server(arguments: &[&str]) -> Command {
    tonic_rdma(&[&["parameter-server"], arguments].concat())
}

/// Makes a run that must succeed. Returns its JSON and its output.
fn measure(arguments: &[&str]) -> (Value, String) {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("rows.json");
    let output =
        parameter_server(&[&["--json", json.to_str().unwrap()], arguments].concat()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let written = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    (written, String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The largest variable of this model, of 392 MiB, is longer than the default of native calls' budget for
/// messages that land.
#[test]
fn native_calls_carry_the_largest_variable_of_all_models() {
    let modes = ["--modes", "grpc-native-gather", "--models", "vgg16", "--steps", "1"];
    let (written, _) = measure(&modes);
    let rows = written["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 1);
    assert_measured(&rows[0]);
}

fn assert_measured(row: &Value) {
    let figures = ["minibatches_per_s", "p50_ms", "max_ms", "gbytes_per_s", "cpu_ms_per_minibatch"];
    for figure in figures {
        assert!(row[figure].as_f64().unwrap() > 0.0, "{figure} in {row}");
    }
}

#[test]
fn all_modes_are_measured_checked_and_written() {
    let (written, printed) = measure(&["--models", "gru", "--steps", "2"]);
    assert_eq!((&written["provider"], &written["http2"]), (&"soft".into(), &"default".into()));
    assert_eq!((&written["turns"], &written["rounds"]), (&3.into(), &1.into()));
    assert_eq!(written["payloads"][0]["name"], "gru");
    // In each direction, of eleven variables: every byte of two mini-batches in each mode, and the stamps of
    // three trials of two.
    assert_eq!(written["checks"]["every_byte"], MODES.len() * 2 * 2 * 11);
    assert_eq!(written["checks"]["stamps"], MODES.len() * 3 * 2 * 2 * 11);
    let rows = written["rows"].as_array().unwrap();
    assert_eq!(rows.iter().map(|row| row["mode"].as_str().unwrap()).collect::<Vec<_>>(), MODES);
    for row in rows {
        assert_measured(row);
        assert_eq!((&row["model"], &row["workers"]), (&"gru".into(), &1.into()));
        assert_eq!((&row["variables"], &row["bytes"]), (&11.into(), &29_278_112.into()));
        assert_eq!(row["minibatches"], 3 * 2);
    }
    for text in ["rdma-zerocp", "reduce_max", "27.9 MiB in 11", "mimalloc"] {
        assert!(printed.contains(text), "{text:?} is not in {printed}");
    }
}

#[test]
fn more_workers_than_cores_all_make_progress() {
    let modes = ["--modes", "grpc-rdma,rdma-zerocp", "--consume", "none"];
    let (written, _) =
        measure(&[&["--models", "gru", "--workers", "3", "--steps", "1"], &modes[..]].concat());
    let rows = written["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 2);
    for row in rows {
        assert_measured(row);
        assert_eq!((&row["workers"], &row["minibatches"]), (&3.into(), &(3 * 3).into()));
    }
}

/// Returns the rows in `written` of this mode, way to compute and batch.
fn rows_of<'a>(written: &'a Value, mode: &str, compute: &str, batch: Option<u64>) -> Vec<&'a Value> {
    let rows = written["rows"].as_array().unwrap().iter();
    rows.filter(|row| row["mode"] == mode && row["compute"] == compute && row["batch"].as_u64() == batch)
        .collect()
}

#[test]
fn workers_compute_for_each_batch_as_a_wait_and_as_work() {
    let (written, printed) = measure(&[
        "--models",
        "gru",
        "--steps",
        "1",
        "--modes",
        "grpc-tcp,rdma-zerocp",
        "--compute",
        "none,wait,work",
        "--batch",
        "1,64",
        "--compute-scale",
        "2",
    ]);
    assert_eq!(
        (written["compute_scale"].as_str(), written["rows"].as_array().unwrap().len()),
        (Some("2"), 2 * 5)
    );
    for mode in ["grpc-tcp", "rdma-zerocp"] {
        for (compute, batch, milliseconds) in [
            ("wait", Some(1), 60.88),
            ("wait", Some(64), 121.76),
            ("work", Some(1), 60.88),
            ("work", Some(64), 121.76),
        ] {
            let rows = rows_of(&written, mode, compute, batch);
            assert_eq!(rows.len(), 1, "{mode} {compute} {batch:?}");
            let row = rows[0];
            assert_measured(row);
            assert_eq!(row["compute_ms"], milliseconds);
            // A mini-batch has the computing in it, and work takes this much of a core.
            assert!(row["p50_ms"].as_f64().unwrap() >= milliseconds, "{row}");
            let cpu = row["cpu_ms_per_minibatch"].as_f64().unwrap();
            assert!(compute == "wait" || cpu >= milliseconds, "{row}");
            let times = row["minibatches_per_s"].as_f64().unwrap() * milliseconds / 1e3;
            assert!((row["times_local"].as_f64().unwrap() - times).abs() < 1e-9, "{row}");
            assert!(times > 0.0 && times <= 1.0, "{row}");
        }
        let row = rows_of(&written, mode, "none", None)[0];
        assert_measured(row);
        assert!(row.get("compute_ms").is_none() && row.get("times_local").is_none(), "{row}");
    }
    for text in ["× local", "wait 60.9 ms", "work 122 ms", "table 2 of the paper × 2"] {
        assert!(printed.contains(text), "{text:?} is not in {printed}");
    }
}

#[test]
fn runs_settings_of_http2_and_scales_are_rows_of_one_run() {
    let (written, printed) = measure(&[
        "--models",
        "gru",
        "--steps",
        "2",
        "--runs",
        "3",
        "--modes",
        "grpc-tcp,grpc-native-gather,rdma-zerocp",
        "--http2",
        "default,tuned",
        "--workers",
        "2",
        "--servers",
        "workers",
        "--compute",
        "wait",
        "--compute-scale",
        "0.1*workers,0.1",
    ]);
    assert_eq!((&written["turns"], &written["rounds"]), (&1.into(), &3.into()));
    assert_eq!(
        (&written["http2"], &written["compute_scale"]),
        (&"default,tuned".into(), &"0.1*workers,0.1".into())
    );
    let rows = written["rows"].as_array().unwrap();
    let name = |row: &Value| {
        let text = |field: &str| row.get(field).and_then(Value::as_str).unwrap_or("-").to_owned();
        [text("mode"), text("http2"), text("compute_scale")].join(" ")
    };
    let mut expected = Vec::new();
    for scale in ["0.1*workers", "0.1"] {
        let contenders = ["grpc-tcp default", "grpc-tcp tuned", "grpc-native-gather -", "rdma-zerocp -"];
        expected.extend(contenders.map(|contender| format!("{contender} {scale}")));
    }
    assert_eq!(rows.iter().map(name).collect::<Vec<_>>(), expected);
    for (row, milliseconds) in rows.iter().zip([6.088; 4].into_iter().chain([3.044; 4])) {
        assert_measured(row);
        assert!((row["compute_ms"].as_f64().unwrap() - milliseconds).abs() < 1e-6, "{row}");
        // Two mini-batches of two workers in each run.
        assert_eq!(row["minibatches"], 3 * 2 * 2);
        for figure in ["minibatches_per_s", "p50_ms", "cpu_ms_per_minibatch"] {
            let of_runs: Vec<f64> = serde_json::from_value(row[format!("{figure}_runs")].clone()).unwrap();
            let mut sorted = of_runs.clone();
            sorted.sort_unstable_by(f64::total_cmp);
            assert_eq!((sorted.len(), &row[figure]), (3, &sorted[1].into()), "{row}");
            assert_eq!(
                (&row[format!("{figure}_min")], &row[format!("{figure}_max")]),
                (&sorted[0].into(), &sorted[2].into())
            );
        }
    }
    for text in ["in all runs", "grpc-tcp (tuned)", "wait 6.09 ms × 0.1*workers", "3 runs of one trial"] {
        assert!(printed.contains(text), "{text:?} is not in {printed}");
    }
}

#[test]
fn several_servers_hold_the_variables_in_trial() {
    let modes = ["grpc-tcp", "grpc-rdma", "grpc-native-gather", "rdma-zerocp"];
    let (written, printed) = measure(&[
        "--modes",
        &modes.join(","),
        "--models",
        "gru",
        "--steps",
        "2",
        "--workers",
        "1,3",
        "--servers",
        "workers",
        "--compute",
        "wait",
        "--compute-scale",
        "0.1*workers",
    ]);
    let rows = written["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 2 * modes.len());
    for row in rows {
        assert_measured(row);
        let workers = row["workers"].as_u64().unwrap();
        assert_eq!((&row["servers"], &row["minibatches"]), (&workers.into(), &(3 * 2 * workers).into()));
        let milliseconds = row["compute_ms"].as_f64().unwrap();
        assert!((milliseconds - 3.044 * workers as f64).abs() < 1e-6 && row["batch"] == 32, "{row}");
    }
    // Each worker receives each variable from one server, and each gradient arrives at one.
    let tensors = 11 * modes.len() * 2 * (1 + 3);
    assert_eq!(written["checks"]["every_byte"], tensors * 2);
    assert_eq!(written["checks"]["stamps"], tensors * 3 * 2);
    assert!(
        printed.contains("servers share half of the cores") || printed.contains("not pinned"),
        "{printed}"
    );
}

#[test]
fn bad_input_is_named_in_one_line() {
    for (arguments, named) in [
        (&["--compute", "sleep"][..], &["sleep", "none, wait, work"][..]),
        (&["--compute", "wait", "--batch", "65"], &["--batch", "\"65\"", "from 1 to 64"]),
        (&["--compute", "wait", "--batch", "0"], &["\"0\"", "from 1 to 64"]),
        (&["--batch", "8"], &["--batch", "--compute wait"]),
        (&["--compute", "wait", "--models", "resnet50"], &["resnet50", "table 2", "--models"]),
        (&["--compute-scale", "0"], &["--compute-scale", "\"0\"", "0.001 to 100", "NUMBER*workers"]),
        (&["--servers", "9"], &["--servers", "\"9\"", "from 1 to 8, or workers"]),
        (&["--models", "vgg19"], &["vgg19", "vgg16", "resnet50"]),
        (&["--models", "gru,gru"], &["gru", "twice"]),
        (&["--models", ""], &["--models", "empty"]),
        (&["--workers", "9"], &["\"9\"", "from 1 to 8"]),
        (&["--workers", "0"], &["\"0\"", "from 1 to 8"]),
        (&["--workers", "1,x"], &["\"x\"", "from 1 to 8"]),
        (
            &["--modes", "grpc-uds"],
            &[
                "grpc-uds",
                "grpc-tcp, grpc-rdma, grpc-rdma-gather, grpc-native, grpc-native-gather, rdma-cp, rdma-zerocp",
            ],
        ),
        (&["--steps", "0"], &["--steps", "1..=10000"]),
        (&["--steps", "3", "--duration", "1"], &["--steps", "--duration"]),
        (&["--duration", "0"], &["--duration", "0.001 to 3600"]),
        (&["--inflight", "0"], &["--inflight", "from 1 to 1024"]),
        (&["--consume", "auto"], &["--consume", "reduce-max, none"]),
        (&["--http2", "fast"], &["default, tuned"]),
        (&["--http2", "tuned,tuned"], &["--http2", "twice"]),
        (&["--runs", "0"], &["--runs", "from 1 to 99"]),
        (&["--compute-scale", "1,workers,1"], &["--compute-scale", "twice"]),
        (&["--provider", "mlx5_9"], &["mlx5_9", "auto, soft"]),
        (&["--json", "/no/such/folder/x.json"], &["--json", "/no/such/folder/x.json"]),
        (&["--fast"], &["--fast", "--models, --workers, --servers"]),
    ] {
        refused(&parameter_server(arguments).output().unwrap(), 2, named);
    }
    let output = parameter_server(&[]).env("RDMA_PROVIDER", "card").output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && said.contains("RDMA_PROVIDER"), "{said}");
}

/// Returns the processes of a run that have `kind` on their command line.
fn children_of(parent: u32, kind: &str) -> Vec<u32> {
    let children = std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children"));
    let children = children.unwrap_or_default();
    let is_of_kind = |child: &u32| {
        let line = std::fs::read(format!("/proc/{child}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).split('\0').any(|argument| argument == kind)
    };
    children.split_whitespace().filter_map(|child| child.parse().ok()).filter(is_of_kind).collect()
}

/// Starts a run of two workers that would take an hour.
fn start(modes: &str) -> Child {
    start_with(modes, &[])
}

fn start_with(modes: &str, more: &[&str]) -> Child {
    let usual = ["--models", "gru", "--workers", "2", "--duration", "3600", "--modes", modes];
    let arguments = [&usual, more].concat();
    parameter_server(&arguments).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

fn kill(process: u32) {
    assert!(Command::new("kill").args(["-9", &process.to_string()]).status().unwrap().success());
}

fn ended(parent: Child) -> Output {
    parent.wait_with_output().unwrap()
}

#[test]
fn a_killed_process_is_named_in_every_mode() {
    for mode in ["grpc-tcp", "grpc-rdma-gather", "rdma-zerocp"] {
        for (kind, name) in
            [("parameter-server-worker", "worker process"), ("parameter-server-server", "the server process")]
        {
            let parent = start(mode);
            let workers = wait_for("no workers", || {
                Some(children_of(parent.id(), "parameter-server-worker")).filter(|found| found.len() == 2)
            });
            // Kills the process while it works.
            std::thread::sleep(Duration::from_millis(500));
            let victim = children_of(parent.id(), kind)[0];
            kill(victim);
            let output = ended(parent);
            let said = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "{mode}, {kind}: {said}");
            assert!(said.contains(name) && said.contains("signal: 9"), "{mode}, {kind}: {said}");
            for worker in workers {
                wait_for("a worker outlives the run", || is_gone(worker));
            }
        }
    }
}

#[test]
fn a_killed_server_of_several_is_named() {
    for mode in ["grpc-rdma", "rdma-zerocp"] {
        let parent = start_with(mode, &["--servers", "2", "--compute", "wait"]);
        wait_for("no workers", || {
            Some(children_of(parent.id(), "parameter-server-worker")).filter(|found| found.len() == 2)
        });
        // Kills the process while it works.
        std::thread::sleep(Duration::from_millis(500));
        kill(children_of(parent.id(), "parameter-server-server")[1]);
        let output = ended(parent);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{mode}: {said}");
        assert!(said.contains("server process 1") && said.contains("signal: 9"), "{mode}: {said}");
    }
}

#[test]
fn all_processes_end_with_their_parent() {
    let mut parent = start("grpc-tcp,rdma-cp");
    let workers = wait_for("no workers", || {
        Some(children_of(parent.id(), "parameter-server-worker")).filter(|found| found.len() == 2)
    });
    let servers = children_of(parent.id(), "parameter-server-server");
    assert_eq!(servers.len(), 1);
    parent.kill().unwrap();
    parent.wait().unwrap();
    for child in workers.into_iter().chain(servers) {
        wait_for("a process outlives its parent", || is_gone(child));
    }
}
