//! Trainings through a graph, with real processes.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Instant;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
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
    for (sync, tensors) in [("parameter-server", 8 * 2 * 6), ("allreduce", 6 * (2 * 7 + 7 * 7))] {
        let (results, _) = training.run(&format!(
            "--sync {sync} --workers 8 --mode grpc-tcp,rdma-zerocp --model mlp --batch 12 --steps 3 --test-every 3"
        ));
        let [tcp, zerocp] = [&results["modes"][0], &results["modes"][1]];
        assert_eq!(losses(tcp), losses(zerocp));
        assert_eq!((losses(tcp).len(), &tcp["weights"]), (3, &zerocp["weights"]));
        assert_eq!(zerocp["sent_in_first_step"]["tensors"], tensors, "{sync}");
        assert_eq!(zerocp["sent_later"]["copied"], 0, "{}", zerocp["tensors"]);
    }
}

#[test]
fn texts_of_varying_length_cross_with_dynamic_shapes_in_a_ring() {
    let training = Training::with_texts((0..60).map(|number| "ab ".repeat(3 + number % 5)));
    let (results, _) = training.run(
        "--sync allreduce --workers 3 --mode rdma-cp,rdma-zerocp --model lstm --length 12 --batch 6 --steps 4 --test-every 4",
    );
    let zerocp = &results["modes"][1];
    assert_eq!(losses(&results["modes"][0]), losses(zerocp));
    let dynamic =
        zerocp["tensors"].as_array().unwrap().iter().filter(|tensor| tensor["placement"] == "dynamic");
    // For workers 1 and 2: the characters, their rows, and the gradients of the rows.
    let dynamic: Vec<&Value> = dynamic.collect();
    assert_eq!(dynamic.len(), 6, "{dynamic:?}");
    assert!(dynamic.iter().all(|tensor| tensor["sent"]["tensors"] == 4), "{dynamic:?}");
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

/// Kills worker 1 of a training after the first test.
fn kill_worker_1(training: &Training, options: &str) -> Watched {
    let options = format!("{options} --model mlp --batch 12 --epochs 1000 --test-every 5");
    let mut worker = None;
    let watched = training.watched(&options, |_, line| {
        if let Some(process) = line.strip_prefix("worker 1 is process ") {
            worker = Pid::from_raw(process.parse().unwrap());
        }
        if line.starts_with("step ")
            && let Some(worker) = worker.take()
        {
            kill_process(worker, Signal::KILL).unwrap();
        }
    });
    assert_eq!(worker, None, "the training ended before the test: {}", watched.errors);
    watched
}

#[test]
fn a_worker_that_dies_ends_the_training_with_its_name() {
    for sync in ["parameter-server", "allreduce"] {
        let options = format!("--sync {sync} --workers 2 --steps 6000 --on-death fail");
        let Watched { code, errors } = kill_worker_1(&Training::with_pictures(), &options);
        assert_eq!(code, Some(1), "{errors}");
        let last = errors.lines().last().unwrap();
        for part in ["worker 1 (process ", "signal: 9", "--on-death continue"] {
            assert!(last.contains(part), "{part}: {errors}");
        }
    }
}

#[test]
fn a_training_goes_on_without_a_worker_that_dies_and_its_model_is_not_spoiled() {
    const STEPS: usize = 300;
    for (sync, workers, left) in [("parameter-server", 2, 1), ("allreduce", 3, 2)] {
        let training = Training::with_pictures();
        let options = format!("--sync {sync} --workers {workers} --steps {STEPS} --on-death continue");
        let Watched { code, errors } = kill_worker_1(&training, &options);
        assert_eq!(code, Some(0), "{errors}");
        assert!(errors.contains(&format!("{left} workers go on from step")), "{errors}");
        let results = training.results();
        assert_eq!(results["deaths"][0]["workers"], serde_json::json!([1]), "{errors}");
        let step = results["deaths"][0]["step"].as_u64().unwrap() as usize;
        assert!((5..STEPS).contains(&step), "{errors}");
        let losses = losses(&results["modes"][0]);
        assert_eq!(losses.len(), STEPS);
        assert!(losses[step..].iter().all(|loss| loss.is_finite()), "{losses:?}");
        assert!(losses[STEPS - 1] < losses[0] / 10.0, "{losses:?}");
        let points = results["modes"][0]["points"].as_array().unwrap();
        assert!(points.last().unwrap()["accuracy"].as_f64().unwrap() > 0.9, "{points:?}");
    }
}
