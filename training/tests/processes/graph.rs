//! Trainings through a graph, with real processes, and what happens when processes are killed.

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Instant;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{LIMIT, command, program, run, write_samples};

/// A training in a folder of its own.
pub(crate) struct Training {
    pub(crate) folder: TempDir,
}

impl Training {
    /// Has made-up pictures to train with.
    pub(crate) fn with_pictures() -> Self {
        let training = Self { folder: tempfile::tempdir().unwrap() };
        write_samples(training.folder.path(), 96);
        training
    }

    /// Has these texts to train with.
    pub(crate) fn with_texts(texts: impl Iterator<Item = String>) -> Self {
        let training = Self { folder: tempfile::tempdir().unwrap() };
        let file: String = texts.map(|text| format!("{text}\n%\n")).collect();
        std::fs::write(training.path("sayings"), file).unwrap();
        training
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Makes the command with these options, separated by spaces, and the data and the results of this
    /// folder.
    pub(crate) fn command(&self, options: &str) -> Command {
        let mut command = command(&options.split_whitespace().collect::<Vec<_>>());
        for (option, path) in [
            ("--data", self.folder.path()),
            ("--texts", self.folder.path()),
            ("--json", &self.path("results.json")),
        ] {
            command.arg(option).arg(path);
        }
        command
    }

    /// Trains with these options. Returns the results and what the terminal shows.
    pub(crate) fn run(&self, options: &str) -> (Value, String) {
        let ran = run(self.command(options));
        assert!(ran.succeeded(), "{}{}", ran.output, ran.errors);
        (self.results(), ran.output)
    }

    /// Trains with these options, and hands each line of stderr to `each`, which may end the process.
    pub(crate) fn watched(&self, options: &str, mut each: impl FnMut(&mut Child, &str)) -> Watched {
        let mut process = self.command(options).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let stderr = BufReader::new(process.stderr.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            stderr.lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
        let (end, mut errors) = (Instant::now() + LIMIT, String::new());
        loop {
            match lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(line) => {
                    errors += &format!("{line}\n");
                    each(&mut process, &line);
                }
                // The process has ended, and so have its children.
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    process.kill().unwrap();
                    panic!("the training hangs: {errors}");
                }
            }
        }
        Watched { code: process.wait().unwrap().code(), errors }
    }

    pub(crate) fn results(&self) -> Value {
        serde_json::from_slice(&std::fs::read(self.path("results.json")).unwrap()).unwrap()
    }
}

pub(crate) fn losses(mode: &Value) -> Vec<f64> {
    mode["losses"].as_array().unwrap().iter().map(|loss| loss.as_f64().unwrap_or(f64::NAN)).collect()
}

#[test]
fn all_modes_train_alike_and_nothing_is_copied_from_the_second_step_on() {
    let training = Training::with_pictures();
    let plot = training.path("figure.svg");
    let (results, shown) = training.run(&format!(
        "--sync parameter-server --workers 2 --mode grpc-tcp,rdma-zerocp --model mlp --batch 16 --test-every 3 --plot {}",
        plot.display()
    ));
    assert!(shown.contains("All modes had the same losses in all steps"), "{shown}");
    let [tcp, zerocp] = [&results["modes"][0], &results["modes"][1]];
    assert_eq!((&tcp["mode"], &zerocp["mode"]), (&Value::from("grpc-tcp"), &Value::from("rdma-zerocp")));
    let (one, other) = (losses(tcp), losses(zerocp));
    assert_eq!(one, other);
    assert_eq!(one.len(), 6, "96 samples are 6 batches");
    assert!(one[5] < one[0] / 2.0, "the training does not learn: {one:?}");
    assert_eq!(tcp["weights"], zerocp["weights"]);
    assert_eq!(tcp["points"].as_array().unwrap().len(), 2);
    // For each of 6 variables and 2 workers, the values and the gradient: 24 tensors a step.
    for mode in [tcp, zerocp] {
        assert_eq!(mode["sent_in_first_step"]["tensors"], 24);
        assert_eq!(mode["sent_later"]["tensors"], 5 * 24);
    }
    // The first step learns the allocation sites, so each tensor is copied once. A bias may be so small that
    // it goes inline in all steps, which depends on the device; a weight of at least 20 KiB is too large for
    // that.
    let first = &zerocp["sent_in_first_step"];
    assert_eq!(first["copied"].as_u64().unwrap() + first["inline"].as_u64().unwrap(), 24, "{first}");
    let tensors = zerocp["tensors"].as_array().unwrap();
    assert_eq!(tensors.len(), 24);
    let of_weights = |tensor: &&Value| {
        let name = tensor["name"].as_str().unwrap();
        name.starts_with("assign.weight.") || name.contains(".0 to part 2")
    };
    assert_eq!(
        tensors.iter().filter(of_weights).count(),
        12,
        "the weights and their gradients, for two workers"
    );
    for tensor in tensors {
        let counts = (tensor["sent"]["copied"].as_u64().unwrap(), tensor["sent"]["inline"].as_u64().unwrap());
        let inline = !of_weights(&tensor) && counts == (0, 6);
        assert!(inline || counts == (1, 0), "{tensor}");
    }
    assert_eq!(zerocp["sent_later"]["copied"], 0, "{}", zerocp["tensors"]);
    assert_eq!(tcp["sent_later"]["copied"], 5 * 24);
    let svg = std::fs::read_to_string(&plot).unwrap();
    assert!(svg.contains("rdma-zerocp") && svg.contains("Accuracy"), "{svg}");
}

#[test]
fn eight_workers_train_alike_in_all_modes() {
    let training = Training::with_pictures();
    let trained = [1, 4].map(|servers| {
        let (results, shown) = training.run(&format!(
            "--sync parameter-server --workers 8 --servers {servers} --mode grpc-tcp,rdma-zerocp --model mlp --batch 12 --steps 3 --test-every 3"
        ));
        let [tcp, zerocp] = [&results["modes"][0], &results["modes"][1]];
        assert_eq!(losses(tcp), losses(zerocp));
        assert_eq!((losses(tcp).len(), &tcp["weights"]), (3, &zerocp["weights"]));
        assert_eq!(zerocp["sent_in_first_step"]["tensors"], 8 * 2 * 6, "{servers}");
        assert_eq!(zerocp["sent_later"]["copied"], 0, "{}", zerocp["tensors"]);
        assert!(shown.contains(&format!("{servers} parameter server")), "{shown}");
        (losses(tcp), tcp["weights"].clone(), tcp["points"][0]["accuracy"].clone())
    });
    assert_eq!(trained[0], trained[1], "several servers change no bit");
}

#[test]
fn texts_of_varying_length_cross_with_dynamic_shapes_and_ranks_train_on_them_alike() {
    let training = Training::with_texts((0..60).map(|number| "ab ".repeat(3 + number % 5)));
    let options = "--workers 3 --model lstm --length 12 --batch 6 --steps 4";
    let (results, _) = training.run(&format!(
        "--sync parameter-server --servers 2 --mode rdma-cp,rdma-zerocp --test-every 4 {options}"
    ));
    let zerocp = &results["modes"][1];
    assert_eq!(losses(&results["modes"][0]), losses(zerocp));
    let dynamic =
        zerocp["tensors"].as_array().unwrap().iter().filter(|tensor| tensor["placement"] == "dynamic");
    // For each worker: the characters, their rows, and the gradients of the rows.
    let dynamic: Vec<&Value> = dynamic.collect();
    assert_eq!(dynamic.len(), 9, "{dynamic:?}");
    assert!(dynamic.iter().all(|tensor| tensor["sent"]["tensors"] == 4), "{dynamic:?}");
    // The same training, but for the order of sums.
    let (ranks, shown) = training.run(&format!("--sync allreduce {options}"));
    assert!(shown.contains("LSTM"), "{shown}");
    let (servers, ranks) = (losses(zerocp), losses(&ranks["train"]));
    assert_eq!((servers.len(), ranks.len()), (4, 4));
    for (one, other) in servers.iter().zip(&ranks) {
        assert!((one - other).abs() <= 1e-4 * one, "{servers:?} with servers, {ranks:?} with ranks");
    }
}

#[test]
fn texts_of_varying_length_are_sent_without_a_copy_from_the_second_step_on() {
    // 57 sayings to train with, all of another length. So the lengths of a worker's batch differ from step to
    // step, and with 9 batches of 6 the steps go on into the second epoch.
    let training = Training::with_texts((0..60).map(|number| "a".repeat(20 + number)));
    let (results, _) = training.run(
        "--sync parameter-server --workers 2 --mode rdma-zerocp --model lstm --length 100 --batch 6 --epochs 2 --steps 12 --test-every 4",
    );
    let zerocp = &results["modes"][0];
    assert_eq!(losses(zerocp).len(), 12);
    let copied: Vec<&Value> = zerocp["tensors"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|tensor| tensor["sent"]["copied"].as_u64().unwrap() > 1)
        .collect();
    assert_eq!(zerocp["sent_later"]["copied"], 0, "{copied:?}");
    let dynamic = zerocp["tensors"].as_array().unwrap().iter();
    assert_eq!(dynamic.filter(|tensor| tensor["placement"] == "dynamic").count(), 6);
}

#[test]
fn a_missing_data_set_names_the_package_and_the_script() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().to_string_lossy();
    for (arguments, package) in [
        (["--model", "mlp", "--data", &*place], "dataset-fashion-mnist"),
        (["--model", "lstm", "--texts", &*place], "fortunes"),
    ] {
        let ran = program(&[&["--sync", "parameter-server"], &arguments[..]].concat());
        let errors = &ran.errors;
        assert_eq!(ran.status.unwrap().code(), Some(1), "{errors}");
        assert!(
            errors.contains(&format!("training/prepare installs Debian's package {package}")),
            "{errors}"
        );
        assert_eq!(errors.lines().count(), 1, "{errors}");
    }
}

/// What a training wrote to stderr, and its exit status, if it was not killed.
pub(crate) struct Watched {
    pub(crate) code: Option<i32>,
    pub(crate) errors: String,
}

impl Training {
    /// Trains with these options. Kills each of `victims` in turn, with the first line that begins so after the
    /// one before was killed.
    fn with_deaths(&self, options: &str, victims: &[(&str, &str)]) -> Watched {
        let (mut processes, mut killed) = (HashMap::new(), 0);
        let watched = self.watched(options, |command, line| {
            if let Some((name, process)) = line.split_once(" is process ") {
                processes.insert(name.to_owned(), process.parse().unwrap());
            }
            let Some((name, at)) = victims.get(killed) else { return };
            if line.starts_with(at) {
                let process = processes.get(*name).copied().unwrap_or(command.id() as i32);
                kill_process(Pid::from_raw(process).unwrap(), Signal::KILL).unwrap();
                killed += 1;
            }
        });
        assert_eq!(killed, victims.len(), "the training ended before its deaths: {}", watched.errors);
        watched
    }
}

#[test]
fn a_process_that_dies_ends_the_training_with_its_name() {
    for (way, victim) in [
        ("--sync parameter-server --test-every 5 --on-death fail", "worker 1"),
        ("--sync parameter-server --test-every 5 --servers 2 --on-death continue", "parameter server 1"),
        ("--sync allreduce --checkpoint-every 5 --checkpoint saved", "rank 1"),
    ] {
        let training = Training::with_pictures();
        let way = way.replace("saved", &training.path("saved").to_string_lossy());
        let options = format!("{way} --model mlp --batch 12 --epochs 1000 --steps 6000");
        let Watched { code, errors } = training.with_deaths(&options, &[(victim, "step 5:")]);
        assert_eq!(code, Some(1), "{errors}");
        let last = errors.lines().last().unwrap();
        assert!(last.contains(victim) && last.contains("signal: 9"), "{errors}");
        assert_eq!(last.contains("--on-death restart"), victim != "rank 1", "{errors}");
    }
}

#[test]
fn a_training_goes_on_without_a_worker_that_dies_and_its_model_is_not_spoiled() {
    const STEPS: usize = 100;
    let training = Training::with_pictures();
    let options = format!(
        "--sync parameter-server --workers 2 --servers 2 --steps {STEPS} --on-death continue --model mlp --batch 12 --epochs 1000 --test-every 20"
    );
    let Watched { code, errors } = training.with_deaths(&options, &[("worker 1", "step 20:")]);
    assert_eq!(code, Some(0), "{errors}");
    assert!(errors.contains("1 workers go on from step"), "{errors}");
    let results = training.results();
    assert_eq!(results["deaths"][0]["processes"], json!([1]), "{errors}");
    let step = results["deaths"][0]["step"].as_u64().unwrap() as usize;
    assert!((20..STEPS).contains(&step), "{errors}");
    let losses = losses(&results["modes"][0]);
    assert_eq!(losses.len(), STEPS);
    assert!(losses[step..].iter().all(|loss| loss.is_finite()), "{losses:?}");
    assert!(losses[STEPS - 1] < losses[0] / 10.0, "{losses:?}");
    let points = results["modes"][0]["points"].as_array().unwrap();
    assert!(points.last().unwrap()["accuracy"].as_f64().unwrap() > 0.9, "{points:?}");
}

/// A long training on made-up pictures, of [`STEPS`] steps: most of them follow the last death.
const LONG: &str = "--model mlp --batch 12 --epochs 1000 --steps 80";
const STEPS: usize = 80;

#[test]
fn killed_servers_and_workers_are_started_again_and_the_losses_are_those_of_an_undisturbed_training() {
    let training = Training::with_pictures();
    let options =
        format!("--sync parameter-server --servers 2 --mode rdma-cp,rdma-zerocp --test-every 16 {LONG}");
    let (undisturbed, _) = training.run(&options);
    let saved = training.path("saved");
    let options =
        format!("{options} --checkpoint {} --checkpoint-every 4 --on-death restart", saved.display());
    let victims = [("parameter server 1", "step 8: a checkpoint"), ("worker 0", "step 16: loss")];
    let Watched { code, errors } = training.with_deaths(&options, &victims);
    assert_eq!(code, Some(0), "{errors}");
    let results = training.results();
    for (index, (process, least)) in [(3, 8), (0, 16)].into_iter().enumerate() {
        let death = &results["deaths"][index];
        assert_eq!(death["processes"], json!([process]), "{errors}");
        let step = death["step"].as_u64().unwrap();
        assert!((least..STEPS as u64).contains(&step) && step.is_multiple_of(4), "{errors}");
        assert!(errors.contains(&format!("all processes start again from step {step}")), "{errors}");
    }
    for mode in 0..2 {
        let [one, other] = [&undisturbed, &results].map(|results| &results["modes"][mode]);
        assert_eq!(losses(one).len(), STEPS);
        assert_eq!((losses(one), &one["weights"]), (losses(other), &other["weights"]));
        let tested = |mode: &Value| -> Vec<[Value; 3]> {
            let points = mode["points"].as_array().unwrap().iter();
            points.map(|point| ["step", "loss", "accuracy"].map(|field| point[field].clone())).collect()
        };
        assert_eq!(tested(one), tested(other));
    }
    let files =
        std::fs::read_dir(saved).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut files: Vec<String> = files.collect();
    files.sort();
    assert_eq!(files, [STEPS - 8, STEPS - 4, STEPS].map(|step| format!("step-{step:010}.safetensors")));
}

#[test]
fn a_killed_rank_is_started_again_and_the_losses_are_those_of_an_undisturbed_training() {
    let training = Training::with_pictures();
    let options = format!("--ranks 3 {LONG}");
    let (undisturbed, _) = training.run(&options);
    let saved = training.path("saved");
    let options =
        format!("{options} --checkpoint {} --checkpoint-every 5 --on-death restart", saved.display());
    // An epoch has 8 steps. Rank 0 is the one that writes checkpoints.
    let victims = [("rank 1", "step 10: a checkpoint"), ("rank 0", "step 15: a checkpoint")];
    let Watched { code, errors } = training.with_deaths(&options, &victims);
    assert_eq!(code, Some(0), "{errors}");
    for (rank, least) in [(1, 10), (0, 15)] {
        let said = errors.lines().find(|line| line.starts_with(&format!("rank {rank} ended (signal: 9")));
        let from = said.and_then(|line| line.rsplit_once("all processes start again from step "));
        assert!(from.is_some_and(|(_, step)| step.parse::<u64>().unwrap() >= least), "{errors}");
    }
    let [one, other] = [undisturbed, training.results()].map(|results| results["train"].clone());
    assert_eq!(losses(&one).len(), STEPS);
    assert_eq!((losses(&one), &one["weights"]), (losses(&other), &other["weights"]));
    let last = |training: &Value| {
        let epoch = training["epochs"].as_array().unwrap().last().unwrap();
        ["steps", "loss", "accuracy"].map(|field| epoch[field].clone())
    };
    assert_eq!(last(&one), last(&other));
}

#[test]
fn a_killed_job_is_resumed_and_ends_as_an_undisturbed_one() {
    for (way, result) in [("--sync parameter-server --servers 2", "/modes/0"), ("--ranks 2", "/train")] {
        let training = Training::with_pictures();
        let (undisturbed, _) = training.run(&format!("{way} {LONG}"));
        let saved = training.path("saved");
        let options = format!("{way} {LONG} --checkpoint {} --checkpoint-every 15 --resume", saved.display());
        let Watched { code, errors } =
            training.with_deaths(&options, &[("the command", "step 15: a checkpoint")]);
        assert_eq!(code, None, "{errors}");
        // With other servers, and in another mode: this changes no bit.
        let options = options.replace("--servers 2", "--servers 1 --mode rdma-cp");
        let (resumed, _) = training.run(&options);
        let [one, other] = [&undisturbed, &resumed].map(|results| results.pointer(result).unwrap());
        assert_eq!((losses(one), &one["weights"]), (losses(other), &other["weights"]), "{way}");
        // There is nothing left to do.
        let (again, _) = training.run(&options);
        assert_eq!(losses(again.pointer(result).unwrap()), losses(one));
        // What can't be gone on from is named before any process starts.
        let last = saved.join(format!("step-{STEPS:010}.safetensors"));
        for (options, named) in [
            (options.replace("--resume", ""), "is there already; --resume goes on from it"),
            (options.replace("--batch 12", "--batch 16"), "is of another training: batch 12 there, 16 here"),
        ] {
            let ran = run(training.command(&options));
            let said = &ran.errors;
            assert!(!ran.succeeded() && said.lines().count() == 1, "{said}");
            assert!(said.contains(&*last.to_string_lossy()) && said.contains(named), "{said}");
        }
        std::fs::write(&last, "not whole").unwrap();
        let ran = run(training.command(&options));
        let named = format!("step-{STEPS:010}.safetensors is no whole checkpoint");
        assert!(ran.errors.contains(&named), "{}", ran.errors);
        assert_eq!((ran.errors.lines().count(), ran.status.unwrap().code()), (1, Some(1)), "{}", ran.errors);
    }
}
