//! Runs the program with several ranks as processes, on made-up samples.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod graph;
mod program;

use std::process::Command;

use serde_json::Value;

use program::{program, text, write_samples};

/// Trains with one rank and with `ranks`, with these options, and compares the losses of the first 100 steps. The sums of the gradients
/// have another order with several ranks, so the losses differ by rounding, and more so with each step. Returns both trainings.
fn trains_as_one_does(ranks: usize, options: &[&str]) -> [Value; 2] {
    let folder = tempfile::tempdir().unwrap();
    let [one, several] = [1, ranks].map(|ranks| {
        let (json, plot) = (folder.path().join("results.json"), folder.path().join("loss.svg"));
        let (number, paths) = (ranks.to_string(), [&json, &plot].map(|path| path.to_string_lossy()));
        let output =
            program(&[&["--ranks", &number, "--json", &paths[0], "--plot", &paths[1]], options].concat());
        assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
        let results: Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
        let name = if ranks == 1 { "1 rank".to_owned() } else { format!("{ranks} ranks") };
        assert!(std::fs::read_to_string(&plot).unwrap().contains(&name));
        assert!(text(&output.stdout).contains(&name));
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
    write_samples(folder.path());
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
    let output = program(&["--ranks", "2", "--data", &folder.path().to_string_lossy()]);
    let errors = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(errors.contains("training/prepare installs"), "{errors}");
    assert!(errors.contains("ended (exit status: 1)"), "{errors}");
}

#[test]
fn a_launcher_that_says_too_little_is_an_error() {
    let output = Command::new(env!("CARGO_BIN_EXE_tonic-rdma-training"))
        .env("OMPI_COMM_WORLD_RANK", "1")
        .env_remove("OMPI_COMM_WORLD_SIZE")
        .output()
        .unwrap();
    let errors = text(&output.stderr);
    assert!(!output.status.success());
    assert!(errors.contains("OMPI_COMM_WORLD_SIZE"), "{errors}");
}
