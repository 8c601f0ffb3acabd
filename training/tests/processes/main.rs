//! Runs the program with several ranks as processes, on made-up samples.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod graph;
mod hosts;
#[path = "../../../commands/tests/support/listening.rs"]
mod listening;

use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::Value;
use tonic_rdma_commands::process::{self, Finished};

/// Far more than a run takes, and longest wait for a line. Only a test that hangs takes as long.
const LIMIT: Duration = Duration::from_secs(240);

/// Trains with one rank and with `ranks`, with these options, and compares the losses of the first 100 steps.
/// The sums of the gradients have another order with several ranks, so the losses differ by rounding, and
/// more so with each step. Returns both trainings.
fn trains_as_one_does(ranks: usize, options: &[&str]) -> [Value; 2] {
    let folder = tempfile::tempdir().unwrap();
    let [one, several] = [1, ranks].map(|ranks| {
        let (json, plot) = (folder.path().join("results.json"), folder.path().join("loss.svg"));
        let (number, paths) = (ranks.to_string(), [&json, &plot].map(|path| path.to_string_lossy()));
        let ran =
            program(&[&["--ranks", &number, "--json", &paths[0], "--plot", &paths[1]], options].concat());
        assert!(ran.succeeded(), "{}{}", ran.output, ran.errors);
        let results: Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
        let name = if ranks == 1 { "1 rank".to_owned() } else { format!("{ranks} ranks") };
        assert!(std::fs::read_to_string(&plot).unwrap().contains(&name));
        assert!(ran.output.contains(&name));
        assert_eq!(results["train"]["ranks"], ranks);
        results["train"].clone()
    });
    let losses = [&one, &several].map(|training| -> Vec<f64> {
        training["losses"].as_array().unwrap().iter().map(|loss| loss.as_f64().unwrap()).collect()
    });
    assert_eq!(losses[0].len(), losses[1].len());
    for (step, (one, several)) in losses[0].iter().zip(&losses[1]).take(100).enumerate() {
        let difference = (one - several).abs() / one.abs();
        assert!(difference <= 1e-3, "step {step}: the loss is {one} of 1 rank, {several} of {ranks} ranks");
    }
    [one, several]
}

#[test]
fn three_ranks_train_as_one_does() {
    let folder = tempfile::tempdir().unwrap();
    write_samples(folder.path(), 96);
    let data = folder.path().to_string_lossy();
    // Three ranks have shares of 6, 5 and 5 samples.
    let [_, several] = trains_as_one_does(3, &["--model", "mlp", "--batch", "16", "--data", &data]);
    assert_eq!(several["losses"].as_array().unwrap().len(), 6, "96 samples are 6 batches");
    let loss = |step: usize| several["losses"][step].as_f64().unwrap();
    assert!(loss(5) < loss(0) / 2.0, "the training does not learn: {several}");
    assert!(several["epochs"][0]["accuracy"].as_f64().unwrap() > 0.5);
}

#[test]
#[ignore = "needs the pictures that training/prepare installs, and optimization"]
fn two_ranks_train_on_real_pictures_as_one_does() {
    trains_as_one_does(2, &[]);
}

#[test]
fn a_failed_rank_ends_the_program_with_its_reason() {
    let folder = tempfile::tempdir().unwrap();
    let ran = program(&["--ranks", "2", "--data", &folder.path().to_string_lossy()]);
    let errors = &ran.errors;
    assert_eq!(ran.status.unwrap().code(), Some(1), "{errors}");
    assert!(errors.contains("training/prepare installs"), "{errors}");
    assert!(errors.contains("ended (exit status: 1)"), "{errors}");
}

#[test]
fn a_launcher_that_says_too_little_is_an_error() {
    let open_mpi = [("OMPI_COMM_WORLD_RANK", "1")];
    let hydra = [("PMI_RANK", "1"), ("PMI_SIZE", "2")];
    for (variables, lacks) in [(&open_mpi[..], "OMPI_COMM_WORLD_SIZE"), (&hydra, "RDMA_COLLECTIVE_ADDRESS")] {
        let mut command = command(&[]);
        command.envs(variables.iter().copied());
        let ran = run(command);
        assert!(!ran.succeeded());
        assert!(ran.errors.contains(lacks), "{}", ran.errors);
    }
}

/// Writes `samples` to train with, and others to test with, whose class shows in their pixels.
fn write_samples(folder: &Path, samples: u32) {
    for (name, number) in [("train", samples), ("t10k", 20)] {
        let classes: Vec<u8> = (0..number).map(|sample| (sample % 10) as u8).collect();
        let picture = |class: &u8| {
            (0..28 * 28_u32).map(|pixel| if pixel % 10 == u32::from(*class) { 255 } else { 9 }).collect()
        };
        let pixels: Vec<u8> = classes.iter().flat_map(|class| -> Vec<u8> { picture(class) }).collect();
        write(&folder.join(format!("{name}-images-idx3-ubyte.gz")), &[number, 28, 28], &pixels);
        write(&folder.join(format!("{name}-labels-idx1-ubyte.gz")), &[number], &classes);
    }
}

fn write(path: &Path, dimensions: &[u32], elements: &[u8]) {
    let mut file = GzEncoder::new(std::fs::File::create(path).unwrap(), Compression::fast());
    file.write_all(&[0, 0, 8, dimensions.len() as u8]).unwrap();
    for dimension in dimensions {
        file.write_all(&dimension.to_be_bytes()).unwrap();
    }
    file.write_all(elements).unwrap();
    file.finish().unwrap();
}

/// Runs the program without the variables of a launcher that may have started this test.
fn program(arguments: &[&str]) -> Finished {
    run(command(arguments))
}

fn run(command: Command) -> Finished {
    process::run("the program", command, LIMIT).unwrap()
}

/// Makes the command without the variables of a launcher.
fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tonic-rdma-training"));
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if ["RANK", "WORLD_SIZE", "OMPI_", "PMIX_", "SLURM_", "RDMA_"]
            .iter()
            .any(|start| text.starts_with(start))
        {
            command.env_remove(&name);
        }
    }
    // Many processes on a busy machine need longer to connect than peers have by default.
    command.env("RDMA_HANDSHAKE_TIMEOUT", "120s").args(arguments);
    command
}
