//! Trainings over several hosts, `--listen` and `--hosts`, which are processes of this host here: the same losses
//! as on one host, what the ends say, what is refused, and what becomes of a host that leaves.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{Shutdown, TcpStream};
use std::process::Stdio;
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};
use tonic_rdma_commands::process::Finished;

use crate::graph::{Training, Watched, losses};
use crate::listening::Listening;
use crate::{LIMIT, command, program, run, write_samples};

impl Listening {
    fn start(arguments: &[&str]) -> Self {
        // Another address than that of the caller, so that a part that is looked for at the wrong end is not found.
        Self::start_at("127.0.0.2:0", arguments)
    }

    fn start_at(address: &str, arguments: &[&str]) -> Self {
        let mut command = command(&[&["--listen", address], arguments].concat());
        command.stderr(Stdio::piped());
        Self::ready(command)
    }

    /// Has the samples of `training`.
    fn with_samples(address: &str, training: &Training) -> Self {
        Self::start_at(address, &["--data", &training.folder.path().to_string_lossy()])
    }
}

/// Checks that the program ended with `status`, and that the last line on stderr contains each of `named`.
fn refused(ran: &Finished, status: i32, named: &[&str]) {
    let said = &ran.errors;
    assert_eq!(ran.status.unwrap().code(), Some(status), "{said}");
    let last = said.lines().last().unwrap_or_default();
    for name in named {
        assert!(last.contains(name), "{name:?} is missing in {said}");
    }
}

#[test]
fn a_graph_over_three_hosts_trains_as_on_one_host_bit_by_bit() {
    let training = Training::with_pictures();
    let mut others =
        ["127.0.0.2:0", "127.0.0.3:0"].map(|address| Listening::with_samples(address, &training));
    // As in the paper, each host has a worker and a parameter server.
    let options = "--sync parameter-server --workers 3 --servers 3 --mode grpc-tcp,rdma-zerocp --model mlp --batch 16 --steps 4 --test-every 4";
    let (here, _) = training.run(options);
    let [second, third] = others.each_ref().map(|other| other.address.clone());
    let ran = run(training.command(&format!("{options} --hosts {second},{third}")));
    let (said, between) = (&ran.errors, training.results());
    assert!(ran.succeeded(), "{said}");
    for mode in 0..2 {
        let [here, between] = [&here, &between].map(|results| &results["modes"][mode]);
        assert_eq!((losses(here), &here["weights"]), (losses(between), &between["weights"]));
        assert_eq!(losses(between).len(), 4);
        assert_eq!(here["points"][0]["accuracy"], between["points"][0]["accuracy"]);
    }
    assert_eq!((between["ends"].as_array().unwrap().len(), &here["ends"]), (2, &Value::Null));
    for (host, end) in [(0, "client"), (0, "server"), (1, "server")] {
        let end = &between["ends"][host][end];
        assert_eq!(end["version"], env!("CARGO_PKG_VERSION"));
        assert!(end["devices"][0].as_str().is_some_and(|device| device.contains("soft0")), "{end}");
    }
    let mut first = ran.output.lines();
    for (name, shown) in [
        ("this end: ", "soft0 (soft"),
        ("other end: ", &*second),
        ("clocks: ", "the clock of one end"),
        ("other end: ", &*third),
        ("clocks: ", "the clock of one end"),
    ] {
        let line = first.next().unwrap();
        assert!(line.starts_with(name) && line.contains(shown), "{line}");
    }
    assert!(
        said.contains("worker 0 is process ") && said.contains("parameter server 0 is process "),
        "{said}"
    );
    for (number, other) in others.iter_mut().enumerate() {
        let (number, address) = (number + 1, other.address.clone());
        other.says(" calls: tonic-rdma-training ");
        for there in [format!("worker {number}"), format!("parameter server {number}")] {
            assert!(said.contains(&format!("{there} is a process at {address}")), "{said}");
            other.says(&format!("starts {there}: one of 6 processes, Mlp, parameter servers"));
        }
        other.says(" has left after ");
    }
}

#[test]
fn ranks_at_two_hosts_given_by_name_train_as_on_one() {
    let training = Training::with_pictures();
    let mut other = Listening::with_samples("localhost:0", &training);
    let (_, port) = other.address.rsplit_once(':').unwrap();
    let options = "--sync allreduce --workers 3 --model mlp --batch 16 --steps 4";
    let (here, _) = training.run(options);
    let (between, _) = training.run(&format!("{options} --hosts localhost:{port}"));
    other.says("starts rank 2: one of 3 processes, Mlp, tonic-rdma-collective");
    assert_eq!(between["ends"][0]["server"]["version"], env!("CARGO_PKG_VERSION"));
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
    // Three processes are at the other end. Ranks have one reason, which is said once.
    for (way, reasons) in [("parameter-server", 3), ("allreduce", 1)] {
        let run = |at: &Listening| {
            let options = format!("--sync {way} --workers 4 --model mlp --batch 16 --hosts {}", at.address);
            run(training.command(&options))
        };
        let file = empty.path().join("train-images-idx3-ubyte.gz");
        let ran = run(&missing);
        refused(&ran, 1, &[&file.to_string_lossy()]);
        assert_eq!(ran.errors.matches("is missing").count(), reasons, "{}", ran.errors);
        refused(&run(&differing), 1, &["has other samples than", "--data"]);
    }
}

#[test]
fn a_host_that_leaves_in_the_middle_is_gone_on_without_or_the_training_is_resumed_without_it() {
    let training = Training::with_pictures();
    let saved = training.path("saved");
    let options = format!(
        "--sync parameter-server --workers 3 --model mlp --batch 12 --epochs 1000000 --test-every 5 --checkpoint {} --checkpoint-every 5",
        saved.display()
    );
    // Worker 1 is at the second host, worker 2 and the parameter server at the third.
    for (on_death, leaving, part) in [("continue", 0, "worker 1"), ("restart", 1, "worker 2")] {
        let mut others =
            ["127.0.0.2:0", "127.0.0.3:0"].map(|address| Some(Listening::with_samples(address, &training)));
        let [second, third] = others.each_ref().map(|other| other.as_ref().unwrap().address.clone());
        let mut goes_on = false;
        let hosts = format!("{options} --on-death {on_death} --hosts {second},{third}");
        let Watched { code, errors } = training.watched(&hosts, |process, line| {
            goes_on |= line.contains("; 2 workers go on from step ");
            if line.starts_with("step ") {
                drop(others[leaving].take());
                if goes_on {
                    process.kill().unwrap();
                }
            }
        });
        let address = if leaving == 0 { &second } else { &third };
        let lost = format!("{part} (a process at {address}) is lost: the connection to {address}");
        assert!(errors.contains(&lost), "{errors}");
        if on_death == "continue" {
            assert_eq!((code, goes_on), (None, true), "{errors}");
            std::fs::remove_dir_all(&saved).unwrap();
            continue;
        }
        // A host that is gone starts nothing. The others, and this one, go on without it.
        assert_eq!(code, Some(1), "{errors}");
        assert!(
            errors.lines().last().unwrap().contains(&format!("can't start worker 2 at {third}")),
            "{errors}"
        );
        let files =
            std::fs::read_dir(&saved).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let newest = files.max().unwrap();
        let steps = newest[5..15].parse::<usize>().unwrap() + 3;
        let (resumed, _) = training.run(&format!("{options} --steps {steps} --resume --hosts {second}"));
        let undisturbed = options.split(" --checkpoint").next().unwrap();
        let (undisturbed, _) = training.run(&format!("{undisturbed} --steps {steps}"));
        let [one, other] = [&undisturbed, &resumed].map(|results| &results["modes"][0]);
        assert_eq!(
            (losses(one).len(), losses(one), &one["weights"]),
            (steps, losses(other), &other["weights"])
        );
    }
}

#[test]
fn what_a_caller_may_ask_for_has_limits() {
    let training = Training::with_pictures();
    let little = Listening::start(&["--limit", "1MiB"]);
    for way in ["--sync parameter-server", "--sync allreduce"] {
        let options = format!("{way} --model mlp --batch 16 --hosts {}", little.address);
        refused(
            &run(training.command(&options)),
            2,
            &["is refused at the other end", "--limit of the listening end", "1.00 MiB"],
        );
    }
    // A caller that is none of ours. It chooses no file and no program.
    let texts = Training::with_texts((0..60).map(|number| format!("saying {number}")));
    let folders = [&training, &texts].map(|training| training.folder.path().to_string_lossy());
    let mut other = Listening::start(&["--data", &folders[0], "--texts", &folders[1]]);
    let stream = TcpStream::connect(&other.address).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    let send = |message: &Value| (&stream).write_all(format!("{message}\n").as_bytes()).unwrap();
    send(
        &json!({ "program": "tonic-rdma-training", "version": env!("CARGO_PKG_VERSION"), "facts": "a test" }),
    );
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map(Result::unwrap);
    assert!(lines.next().unwrap().contains("welcome"));
    let mut alive = stream.try_clone().unwrap();
    let alive = thread::spawn(move || {
        while alive.write_all(b"\"alive\"\n").is_ok() {
            thread::sleep(Duration::from_secs(1));
        }
    });
    let start = |child: u32, job: &Value| {
        send(&json!({ "start": { "child": child, "name": "x", "job": job } }));
    };
    let graph = |more: &[&str]| json!({ "arguments": ([&["--sync", "parameter-server"], more].concat()), "rank": null });
    let rank = |rank: usize, ranks: usize, address: &str| {
        let rank = json!({ "rank": rank, "ranks": ranks, "address": address });
        json!({ "arguments": ["--ranks", "2"], "rank": rank })
    };
    for (job, said) in [
        (json!([]), "can't be read"),
        (graph(&["--workers", "9"]), "bad number"),
        (graph(&["--mode", "tcp"]), "is no mode"),
        (graph(&["--ranks", "2"]), "cannot be used with"),
        (json!({ "arguments": [], "rank": null }), "does not fit the training"),
        (rank(2, 2, "127.0.0.1:1"), "does not fit the training"),
        (rank(200, 257, "127.0.0.1:1"), "does not fit the training"),
        // Rank 0 would listen where the caller says, and others on another interface.
        (rank(0, 2, "127.0.0.1:1"), "does not fit the training"),
        (rank(1, 2, "127.0.0.9:1"), "does not fit the training"),
    ] {
        start(1, &job);
        let answer = lines.find(|line| line != r#""alive""#).unwrap();
        assert!(answer.contains("refused") && answer.contains(said), "{answer}");
    }
    // It reads the samples of the listening end, whatever the caller names, and takes only its own job.
    let mut tell = |child: u32, command: &Value| {
        send(&json!({ "line": { "child": child, "line": command.to_string() } }));
        lines.find(|line| line.contains("done") || line.contains("failed") || line.contains("ended")).unwrap()
    };
    for (child, model) in [(2, "mlp"), (3, "lstm")] {
        start(child, &graph(&["--data", "/nowhere", "--texts", "/nowhere", "--model", model]));
        let listens = tell(child, &json!("listen"));
        assert!(listens.contains("done") && listens.contains("127.0.0.2:"), "{listens}");
    }
    for (workers, model) in [(1_u64 << 40, "mlp"), (0, "mlp"), (2, "wide")] {
        let answer = tell(
            2,
            &json!({ "connect": {
                "shape": { "model": model, "workers": workers, "servers": 1, "batch": 128 },
                "part": 0, "peers": [], "version": 0
            } }),
        );
        assert!(answer.contains("failed") && answer.contains("this job has no part 0 with"), "{answer}");
    }
    stream.shutdown(Shutdown::Both).unwrap();
    alive.join().unwrap();
    other.says(" has left after ");
}

#[test]
fn bad_ends_are_named() {
    refused(&program(&["--listen", "nowhere"]), 2, &["--listen", "\"nowhere\"", "HOST:PORT"]);
    refused(&program(&["--hosts", "nowhere"]), 2, &["--hosts", "\"nowhere\"", "HOST:PORT"]);
    refused(&program(&["--hosts", "127.0.0.1:1"]), 1, &["can't connect to 127.0.0.1:1"]);
    refused(&program(&["--listen", "127.0.0.1:0", "--limit", "1023KiB"]), 2, &["--limit", "less than 1MiB"]);
    let mut launched = command(&["--hosts", "127.0.0.1:1"]);
    launched.envs([
        ("RDMA_COLLECTIVE_RANK", "0"),
        ("RDMA_COLLECTIVE_SIZE", "2"),
        ("RDMA_COLLECTIVE_ADDRESS", "127.0.0.1:1"),
    ]);
    refused(&run(launched), 2, &["a launcher started this process", "--hosts"]);
}
