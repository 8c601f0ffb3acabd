//! Trainings between two ends, `--listen` and `--server`, which are processes of this host here: the same
//! losses as on one host, what the ends say, and what is refused.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpStream;
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tonic_rdma_commands::process::Child;

use crate::graph::{Training, losses};
use crate::{command, program, text, write_samples};

/// Longest wait for a line or an end. Only a test that hangs takes as long.
const LIMIT: Duration = Duration::from_secs(240);

/// A listening end. The drop of this value kills it.
struct Listening {
    process: Child,
    address: String,
}

impl Listening {
    fn start(arguments: &[&str]) -> Self {
        // Another address than that of the caller, so that a part that is looked for at the wrong end is not found.
        let mut command = command(&[&["--listen", "127.0.0.2:0"], arguments].concat());
        command.stderr(Stdio::piped());
        let (process, line) = Child::ready("the listening end", command, LIMIT).unwrap();
        let address = line.strip_prefix("listening on ").and_then(|rest| rest.split_whitespace().next());
        let address = address.unwrap_or_else(|| panic!("{line}")).to_owned();
        assert!(line.contains("one caller at a time"), "{line}");
        Self { process, address }
    }

    /// Has the samples of `training`.
    fn with_samples(training: &Training) -> Self {
        Self::start(&["--data", &training.folder.path().to_string_lossy()])
    }

    /// Waits for a line that contains `text`.
    fn says(&mut self, text: &str) -> String {
        let end = Instant::now() + LIMIT;
        loop {
            let line = self.process.line(end.saturating_duration_since(Instant::now()));
            let line = line.unwrap_or_else(|error| panic!("it did not say {text:?}: {error}"));
            if line.contains(text) {
                return line;
            }
        }
    }
}

/// Checks that the program ended with `status`, and that the last line on stderr contains each of `named`.
fn refused(output: &std::process::Output, status: i32, named: &[&str]) {
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{said}");
    let last = said.lines().last().unwrap_or_default();
    for name in named {
        assert!(last.contains(name), "{name:?} is missing in {said}");
    }
}

#[test]
fn a_graph_over_two_ends_trains_as_on_one_host_bit_by_bit() {
    let training = Training::with_pictures();
    let mut other = Listening::with_samples(&training);
    for (sync, there) in [("parameter-server", "the parameter server"), ("allreduce", "worker 1")] {
        let options = format!(
            "--sync {sync} --workers 2 --mode grpc-tcp,rdma-zerocp --model mlp --batch 16 --steps 4 --test-every 4"
        );
        let (here, _) = training.run(&options);
        let output = training.command(&format!("{options} --server {}", other.address)).output().unwrap();
        let said = text(&output.stderr);
        assert!(output.status.success(), "{said}");
        let between = training.results();
        for mode in 0..2 {
            let [here, between] = [&here, &between].map(|results| &results["modes"][mode]);
            assert_eq!((losses(here), &here["weights"]), (losses(between), &between["weights"]), "{sync}");
            assert_eq!(losses(between).len(), 4);
            assert_eq!(here["points"][0]["accuracy"], between["points"][0]["accuracy"]);
        }
        for end in ["client", "server"] {
            let end = &between["ends"][end];
            assert_eq!(end["version"], env!("CARGO_PKG_VERSION"));
            assert!(end["devices"][0].as_str().is_some_and(|device| device.contains("soft0")), "{end}");
        }
        assert_eq!(here["ends"], Value::Null);
        let mut first = said.lines();
        for (name, shown) in [
            ("this end: ", "soft0 (soft"),
            ("other end: ", &*other.address),
            ("clocks: ", "the clock of one end"),
        ] {
            let line = first.next().unwrap();
            assert!(line.starts_with(name) && line.contains(shown), "{line}");
        }
        assert!(said.contains(&format!("{there} is a process at {}", other.address)), "{said}");
        assert!(said.contains("worker 0 is process "), "{said}");
        other.says(" calls: tonic-rdma-training ");
        other.says(&format!("starts {there}: one of "));
        other.says(" has left after ");
    }
}

#[test]
fn ranks_at_two_ends_train_as_on_one_host() {
    let training = Training::with_pictures();
    let mut other = Listening::with_samples(&training);
    let options = "--sync collective --workers 3 --model mlp --batch 16 --steps 4";
    let (here, _) = training.run(options);
    let (between, _) = training.run(&format!("{options} --server {}", other.address));
    other.says("starts rank 2: one of 3 processes, Mlp, tonic-rdma-collective");
    assert_eq!(between["ends"]["server"]["version"], env!("CARGO_PKG_VERSION"));
    let (here, between) = (losses(&here["train"]), losses(&between["train"]));
    assert_eq!((here.len(), between.len()), (4, 4));
    for (one, other) in here.iter().zip(&between) {
        assert!((one - other).abs() <= 1e-3 * one.abs(), "{here:?} here, {between:?} at two ends");
    }
}

#[test]
fn the_other_end_has_samples_of_its_own_and_the_caller_learns_what_is_wrong_with_them() {
    let training = Training::with_pictures();
    let (empty, others) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_samples(others.path(), 80);
    let with = |folder: &tempfile::TempDir| Listening::start(&["--data", &folder.path().to_string_lossy()]);
    let (missing, differing) = (with(&empty), with(&others));
    for way in ["--sync parameter-server", "--sync collective"] {
        let run = |at: &Listening| {
            let options = format!("{way} --model mlp --batch 16 --server {}", at.address);
            training.command(&options).output().unwrap()
        };
        let file = empty.path().join("train-images-idx3-ubyte.gz");
        refused(&run(&missing), 1, &[&file.to_string_lossy(), "is missing"]);
        let output = run(&differing);
        refused(&output, 1, &[]);
        let said = text(&output.stderr);
        assert!(said.contains("has other samples than") && said.contains("--data"), "{said}");
    }
}

#[test]
fn an_end_that_leaves_in_the_middle_is_named_or_gone_on_without() {
    for (on_death, success) in [("fail", false), ("continue", true)] {
        let training = Training::with_pictures();
        let other = Listening::with_samples(&training);
        let steps = if success { 300 } else { 6000 };
        let mut command = training.command(&format!(
            "--sync allreduce --workers 2 --model mlp --batch 12 --epochs 1000 --steps {steps} --test-every 5 --on-death {on_death} --server {}",
            other.address
        ));
        let mut process = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(process.stderr.take().unwrap()).lines().map(Result::unwrap);
        assert!(lines.any(|line| line.starts_with("step ")));
        drop(other);
        let rest: Vec<String> = lines.collect();
        assert_eq!(process.wait().unwrap().success(), success, "{rest:?}");
        let lost = rest.iter().find(|line| line.contains("worker 1 (a process at 127.0.0.2:")).unwrap();
        assert!(lost.contains("is lost: the connection to 127.0.0.2:"), "{rest:?}");
        if success {
            let results = training.results();
            assert_eq!(results["deaths"][0]["workers"], json!([1]));
            assert_eq!(losses(&results["modes"][0]).len(), 300);
        }
    }
}

#[test]
fn what_a_caller_may_ask_for_has_limits() {
    let training = Training::with_pictures();
    let little = Listening::start(&["--limit", "1MiB"]);
    let run =
        |options: &str| training.command(&format!("{options} --server {}", little.address)).output().unwrap();
    for way in ["--sync parameter-server", "--sync collective"] {
        let refusal = run(&format!("{way} --model mlp --batch 16"));
        refused(&refusal, 2, &["is refused at the other end", "--limit of the listening end", "1.00 MiB"]);
    }
    // A caller that is none of ours. It chooses no file and no program.
    let mut other = Listening::with_samples(&training);
    let mut stream = TcpStream::connect(&other.address).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    let hello =
        json!({ "program": "tonic-rdma-training", "version": env!("CARGO_PKG_VERSION"), "facts": "a test" });
    writeln!(stream, "{hello}").unwrap();
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map(Result::unwrap);
    assert!(lines.next().unwrap().contains("welcome"));
    let mut start = |number: u32, kind: &str, job: &Value| {
        let start = json!({ "start": { "child": number, "name": "x", "kind": kind, "job": job } });
        writeln!(stream, "{start}").unwrap();
    };
    let graph =
        |more: &[&str]| json!({ "arguments": ([&["--sync", "allreduce"], more].concat()), "rank": null });
    let rank = |rank: usize, ranks: usize| {
        let rank = json!({ "rank": rank, "ranks": ranks, "address": "127.0.0.1:1" });
        json!({ "arguments": ["--ranks", "2"], "rank": rank })
    };
    for (kind, job, said) in [
        ("sh", json!({}), "\\\"sh\\\" is not started here"),
        ("training-process", json!([]), "can't be read"),
        ("training-process", graph(&["--workers", "9"]), "bad number"),
        ("training-process", graph(&["--mode", "tcp"]), "is no mode"),
        ("training-process", graph(&["--ranks", "2"]), "cannot be used with"),
        ("training-process", json!({ "arguments": [], "rank": null }), "is no process of this training"),
        ("training-process", rank(2, 2), "is no process of this training"),
        ("training-process", rank(1, 257), "is no process of this training"),
    ] {
        start(1, kind, &job);
        let answer = lines.find(|line| line != r#""alive""#).unwrap();
        assert!(answer.contains("refused") && answer.contains(said), "{answer}");
    }
    // It reads the samples of the listening end, whatever the caller names, and takes only its own job.
    let written = training.path("written");
    let paths = ["--data", "/nowhere", "--texts", "/nowhere", "--json", &*written.to_string_lossy()];
    start(2, "training-process", &graph(&[&paths[..], &["--model", "mlp"]].concat()));
    let shape = |workers: usize, model: &str| {
        json!({ "connect": {
            "shape": { "model": model, "synchrony": "allreduce", "workers": workers, "batch": 128 },
            "part": 0, "peers": [], "version": 0
        } })
    };
    let mut tell = |command: &Value| {
        let told = json!({ "line": { "child": 2, "line": command.to_string() } });
        writeln!(stream, "{told}").unwrap();
        lines.find(|line| line.contains("done") || line.contains("failed") || line.contains("ended")).unwrap()
    };
    let listens = tell(&json!("listen"));
    assert!(listens.contains("done") && listens.contains("127.0.0.2:"), "{listens}");
    for (workers, model) in [(1 << 40, "mlp"), (0, "mlp"), (2, "wide")] {
        let answer = tell(&shape(workers, model));
        assert!(answer.contains("failed") && answer.contains("is none of this job"), "{answer}");
    }
    drop((stream, lines));
    other.says(" has left after ");
    assert!(!written.exists());
}

#[test]
fn bad_ends_are_named() {
    refused(&program(&["--listen", "nowhere"]), 2, &["--listen", "\"nowhere\"", "HOST:PORT"]);
    refused(&program(&["--server", "nowhere"]), 2, &["--server", "\"nowhere\"", "HOST:PORT"]);
    refused(&program(&["--server", "127.0.0.1:1"]), 1, &["can't connect to 127.0.0.1:1"]);
    refused(&program(&["--listen", "127.0.0.1:0", "--limit", "1023KiB"]), 2, &["--limit", "less than 1MiB"]);
    let launched = command(&["--server", "127.0.0.1:1"])
        .envs([
            ("RDMA_COLLECTIVE_RANK", "0"),
            ("RDMA_COLLECTIVE_SIZE", "2"),
            ("RDMA_COLLECTIVE_ADDRESS", "127.0.0.1:1"),
        ])
        .output()
        .unwrap();
    refused(&launched, 2, &["a launcher started this process", "--server"]);
}
