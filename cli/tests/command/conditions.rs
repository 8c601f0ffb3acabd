//! Conditions of `compare`: runtimes, cores, allocators, a container for the server, and the demanded ratio.
#![allow(clippy::print_stdout, reason = "tests that are skipped say so")]

use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use super::process::{compare, refused, run, tonic_rdma};

/// Options of a short run with several sizes and modes.
const SHORT: [&str; 6] = [
    "--sizes",
    "64,100KiB",
    "--modes",
    "grpc-tcp,grpc-rdma,rdma-zerocp,rdma-zerocp-await",
    "--duration",
    "0.05",
];

/// Makes a short run that must succeed. Returns its JSON and its output.
fn short(arguments: &[&str]) -> (Value, String) {
    let (written, printed) = compare(&[&SHORT[..], arguments].concat());
    let rows = written["rows"].as_array().unwrap();
    assert_eq!((rows.len(), &written["checks"]["mismatches"]), (2 * 4, &0.into()));
    assert!(rows.iter().all(|row| row["errors"] == 0 && row["ops"].as_u64() > Some(0)), "{rows:?}");
    (written, printed)
}

#[test]
fn bad_conditions_are_named_in_one_line() {
    for (arguments, named) in [
        (&["--runtime", "threads"][..], &["--runtime", "idle-polling, current-thread, multi-thread"][..]),
        (&["--runtime", "multi-thread:0"], &["\"0\"", "1 to 256"]),
        (&["--pin", "maybe"], &["--pin", "maybe", "yes, no"]),
        (&["--allocator", "jemalloc"], &["jemalloc", "system", "mimalloc"]),
        (&["--at-least", "half"], &["--at-least", "half", "0.01 to 1000"]),
        (&["--at-least", "0.5", "--modes", "grpc-rdma"], &["--at-least 0.5", "grpc-tcp"]),
        (&["--at-least", "0.5", "--modes", "grpc-tcp,grpc-uds"], &["--at-least 0.5", "uses RDMA"]),
        (
            &["--runtime", "multi-thread:2", "--modes", "grpc-tcp,grpc-tcp-busy"],
            &["grpc-tcp-busy", "current-thread"],
        ),
        (&["--defaults", "--modes", "grpc-tcp-busy"], &["grpc-tcp-busy", "current-thread"]),
        (&["--at-least", "0.5", "--rate", "100"], &["--at-least 0.5", "--rate"]),
    ] {
        refused(&run(&[&["compare"], arguments].concat()), 2, named);
    }
}

#[test]
fn every_runtime_is_compared_and_named_in_closed_and_open_loops() {
    for (runtime, pinned) in [("idle-polling", true), ("current-thread", true), ("multi-thread:2", false)] {
        for rate in [&["--inflight", "1"][..], &["--inflight", "3"], &["--rate", "100"]] {
            let (written, printed) = short(&[&["--runtime", runtime][..], rate].concat());
            assert_eq!((&written["runtime"], &written["pin"]), (&runtime.into(), &true.into()));
            // Nothing is pinned on a machine with one core.
            assert!(pinned || written["cores"].is_null(), "{written}");
            assert!(printed.contains(runtime), "{printed}");
        }
    }
}

#[test]
fn defaults_have_cells_with_and_without_a_rate() {
    for runtime in ["multi-thread", "idle-polling"] {
        let more = ["--runtime", runtime, "--modes", "grpc-tcp,grpc-native", "--duration", "0.05"];
        let (written, printed) = compare(&[&["--defaults", "--quick"], &more[..]].concat());
        let rows = written["rows"].as_array().unwrap();
        let rates: Vec<_> = rows.iter().map(|row| row["rate"].as_f64()).collect();
        assert_eq!(rates, [&[None; 5 * 2][..], &[Some(1000.0); 2]].concat());
        assert!(rows.iter().all(|row| row["errors"] == 0 && row["ops"].as_u64() > Some(0)), "{rows:?}");
        assert_eq!(written["checks"]["mismatches"], 0);
        assert!(printed.contains("offered/s") && printed.contains("open loop"), "{printed}");
    }
}

#[test]
fn runs_give_medians_with_their_spread() {
    for arguments in [&["--inflight", "1"][..], &["--rate", "100"]] {
        let (one, printed) = short(arguments);
        assert_eq!(one["rounds"], 1);
        assert!(!printed.contains("runs") && !one.to_string().contains("range"), "{printed}");
        assert!(!one.to_string().contains("_runs"), "{one}");
        let (three, printed) = short(&[arguments, &["--runs", "3"]].concat());
        assert_eq!(three["rounds"], 3);
        assert!(printed.contains("in each of 3 runs") && printed.contains("p50 in all runs"), "{printed}");
        for row in three["rows"].as_array().unwrap() {
            let runs: Vec<_> = row["p50_us_runs"].as_array().unwrap().iter().map(Value::as_f64).collect();
            let spread = ["p50_us_min", "p50_us", "p50_us_max"].map(|name| row[name].as_f64());
            assert_eq!(
                (runs.len(), spread.is_sorted(), row["ops_per_s_runs"].is_array()),
                (3, true, true),
                "{row}"
            );
            assert!(spread.iter().all(|value| runs.contains(value)), "{row}");
            let Some(range) = row["latency_ratio_range"].as_array() else {
                // A rate that most runs could not keep has no ratio, on a slow machine in all modes.
                assert!(row["latency_ratio"].is_null() && row["rate"].is_f64(), "{row}");
                continue;
            };
            let ratios = [range[0].as_f64(), row["latency_ratio"].as_f64(), range[1].as_f64()];
            assert!(ratios[0] > Some(0.0) && ratios.is_sorted(), "{row}");
        }
    }
    // The medians of both kinds of cells, as many rows as one run has. The option has a former name.
    let more = ["--rounds", "2", "--modes", "grpc-tcp,grpc-native", "--duration", "0.05"];
    let (written, _) = compare(&[&["--defaults", "--quick"], &more[..]].concat());
    assert_eq!(written["rows"].as_array().unwrap().len(), 6 * 2);
}

#[test]
fn a_comparison_runs_under_half_a_cpu() {
    let under = Path::new(env!("CARGO_MANIFEST_DIR")).join("../benches/under");
    let start = |condition: &str, arguments: &[&str]| {
        let program = tonic_rdma(&[]).get_program().to_owned();
        Command::new(&under).arg(condition).arg(program).args(arguments).output().unwrap()
    };
    refused(
        &start("half-a-core", &[]),
        2,
        &["'half-a-core'", "half-a-cpu, half-a-cpu-each, busy-neighbours"],
    );
    let compare = [&["compare"], &SHORT[..]].concat();
    // Loops that never sleep would only delay the other tests.
    for (condition, arguments) in
        [("half-a-cpu", &compare[..]), ("half-a-cpu-each", &compare), ("busy-neighbours", &["--version"])]
    {
        let output = start(condition, arguments);
        let said = String::from_utf8_lossy(&output.stderr);
        match output.status.code() {
            Some(77) => println!("{}", said.trim().trim_start_matches("under: ")),
            status => {
                assert_eq!(status, Some(0), "{condition}: {said}");
                let printed = String::from_utf8_lossy(&output.stdout);
                let is_limited = arguments.len() > 1;
                assert_eq!(printed.contains(", limited to 0.50 CPUs"), is_limited, "{condition}: {printed}");
                // Client and server take turns, so that half a CPU for both is too little, unless others leave less.
                let warns = |of| printed.contains(&format!("warning: {of}"));
                let is_stopped = warns("the CPU limit of this control group stopped threads for ");
                assert!(
                    is_stopped || warns("other processes used ") || condition != "half-a-cpu",
                    "{condition}: {printed}"
                );
            }
        }
    }
}

#[test]
fn pin_no_leaves_processes_on_all_cores() {
    for runtime in ["idle-polling", "current-thread", "multi-thread"] {
        let (written, printed) = short(&["--pin", "no", "--runtime", runtime]);
        assert_eq!((&written["pin"], &written["cores"]), (&false.into(), &Value::Null));
        assert!(printed.contains("not pinned (--pin no)"), "{printed}");
    }
}

#[test]
fn both_processes_have_the_chosen_allocator() {
    for allocator in ["system", "mimalloc"] {
        // The client sends the name of its allocator, and a server with another allocator refuses to serve.
        let (written, printed) = short(&["--allocator", allocator]);
        assert_eq!(written["allocator"], allocator);
        assert!(printed.contains(&format!("allocator: {allocator} in both processes")), "{printed}");
    }
    assert_eq!(short(&[]).0["allocator"], "mimalloc");
}

#[test]
fn the_allocator_option_overrides_the_environment() {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("rows.json");
    let arguments = [&["compare", "--json", json.to_str().unwrap()][..], &SHORT].concat();
    for (value, allocator) in [("system", "mimalloc"), ("mimalloc", "system"), ("jemalloc", "system")] {
        let mut command = tonic_rdma(&arguments);
        let output = command.args(["--allocator", allocator]).env("TONIC_RDMA_ALLOCATOR", value).output();
        assert!(output.unwrap().status.success());
        let written: Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
        assert_eq!(written["allocator"], allocator);
    }
}

#[test]
fn a_server_with_another_allocator_than_the_client_refuses_to_serve() {
    let options = r#"{"direction":"up","provider":"soft","http2":["default"],"encode":"copy","consume":"auto","allocator":"system",
        "container":false,"with_metrics":false,"defaults":false,"quick":false}"#;
    let job = format!(r#"{{"options":{options},"rdma":false,"longest_payload":0,"http2":["default"]}}"#);
    let mut command = tonic_rdma(&["compare-server", &job]);
    command.env_remove("TONIC_RDMA_ALLOCATOR").stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut server = command.spawn().unwrap();
    // The server ends when its stdin closes.
    let stdin = server.stdin.take();
    let said: Value = serde_json::from_reader(server.stdout.take().unwrap()).unwrap();
    drop(stdin);
    server.wait().unwrap();
    let reason = said["failed"]["reason"].as_str().unwrap();
    assert!(reason.contains("mimalloc and not system"), "{reason}");
}

#[test]
fn defaults_sets_the_conditions_of_a_default_tokio_program() {
    let (written, printed) = short(&["--defaults"]);
    assert_eq!((&written["defaults"], &written["pin"]), (&true.into(), &false.into()));
    assert_eq!((&written["allocator"], &written["cores"]), (&"system".into(), &Value::Null));
    assert!(written["runtime"].as_str().unwrap().starts_with("multi-thread:"));
    assert!(printed.contains("defaults: yes"), "{printed}");

    let (written, _) = short(&["--defaults", "--runtime", "current-thread", "--allocator", "mimalloc"]);
    assert_eq!((&written["defaults"], &written["pin"]), (&true.into(), &false.into()));
    assert_eq!((&written["allocator"], &written["runtime"]), (&"mimalloc".into(), &"current-thread".into()));
}

#[test]
fn the_server_runs_in_a_container_of_its_own() {
    let arguments =
        ["compare", "--container", "--modes", "grpc-tcp,grpc-uds,grpc-rdma,grpc-native,rdma-zerocp"];
    let more = ["--sizes", "64,4MiB", "--inflight", "1", "--duration", "0.05"];
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("rows.json");
    let output = run(&[&arguments[..], &more, &["--json", json.to_str().unwrap()]].concat());
    let said = String::from_utf8_lossy(&output.stderr);
    if said.contains("unshare makes no namespaces") {
        println!("skipped: a new user namespace is not permitted here");
        return;
    }
    assert!(output.status.success(), "{said}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("the server is in a container of its own"));
    let written: Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    assert_eq!((&written["container"], &written["provider"]), (&true.into(), &"soft".into()));
    let rows = written["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 10);
    assert!(rows.iter().all(|row| row["errors"] == 0 && row["ops"].as_u64().unwrap() > 0), "{written}");
}

#[test]
fn a_mode_below_the_ratio_is_named_and_the_command_fails() {
    // No mode of gRPC is a thousand times as fast as another.
    let arguments = ["compare", "--modes", "grpc-tcp,grpc-rdma", "--sizes", "64,1MiB", "--duration", "0.05"];
    let output = run(&[&arguments[..], &["--at-least", "1000"]].concat());
    refused(&output, 1, &["1000 times", "grpc-tcp", "grpc-rdma at 64 B × 1: ", "grpc-rdma at 1 MiB × 1: "]);
    assert!(String::from_utf8_lossy(&output.stdout).contains("throughput ×"), "the table is missing");
}

#[test]
fn a_tcp_client_uses_the_port_that_also_offers_rdma() {
    let arguments = ["--modes", "grpc-tcp,grpc-tcp-shared", "--sizes", "64,1MiB", "--inflight", "1,8"];
    // The mode counts as one that uses RDMA, so that its ratio is checked. It is not a thousand times as
    // fast.
    for (ratio, status) in [(&[][..], Some(0)), (&["--at-least", "1000"], Some(1))] {
        let arguments = [&["compare"][..], &arguments, &["--duration", "0.05"], ratio].concat();
        let output = run(&arguments);
        let (said, printed) = (&output.stderr, String::from_utf8_lossy(&output.stdout));
        assert_eq!(output.status.code(), status, "{}", String::from_utf8_lossy(said));
        assert!(printed.contains("grpc-tcp-shared: grpc-tcp to the port") && printed.contains("all as sent"));
    }
}

#[test]
fn the_cost_of_wake_ups_is_shown() {
    let (written, printed) = short(&[]);
    assert!(written["round_trips"]["wake_us"].as_f64().unwrap() > 0.0, "{written}");
    assert!(printed.contains("this machine: a round trip between two threads takes"), "{printed}");
}
