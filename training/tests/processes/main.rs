//! Runs the program with several ranks as processes, on made-up samples.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod graph;
mod program;

use std::process::Command;

use serde_json::Value;

use program::{program, text, write_samples};

#[test]
fn three_ranks_train_as_one_does() {
    let folder = tempfile::tempdir().unwrap();
    write_samples(folder.path());
    let (json, plot) = (folder.path().join("results.json"), folder.path().join("loss.svg"));
    let data = folder.path().to_string_lossy();
    // Three ranks have shares of 6, 5 and 5 samples.
    let output = program(&[
        "--check",
        "--ranks",
        "3",
        "--model",
        "mlp",
        "--batch",
        "16",
        "--data",
        &data,
        "--json",
        &json.to_string_lossy(),
        "--plot",
        &plot.to_string_lossy(),
    ]);
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    let results: Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    let [one, several] = [&results["one"], &results["several"]];
    assert_eq!((&one["ranks"], &several["ranks"]), (&Value::from(1), &Value::from(3)));
    assert_eq!(several["losses"].as_array().unwrap().len(), 6, "96 samples are 6 batches");
    let loss = |training: &Value, step: usize| training["losses"][step].as_f64().unwrap();
    assert!(loss(several, 5) < loss(several, 0) / 2.0, "the training does not learn: {several}");
    assert!(several["epochs"][0]["accuracy"].as_f64().unwrap() > 0.5);
    assert!(std::fs::read_to_string(&plot).unwrap().contains("3 ranks"));
    assert!(text(&output.stdout).contains("The losses of 1 rank and of 3 differ by"));
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
