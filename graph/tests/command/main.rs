//! Runs the command: its results, its exit status, and what becomes of its parts.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "tests, one of which is an example that prints"
)]

mod bad_input;
mod hosts;
mod light;
#[allow(dead_code, reason = "other tests use the rest")]
#[path = "../onnx/mod.rs"]
mod onnx;
mod page;
mod processes;
mod results;
mod sweep;

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// A bound that only a hang reaches.
const TIMEOUT: Duration = Duration::from_secs(120);

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tonic-rdma-graph"));
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.env_remove("RUST_LOG");
    command
}

fn run(arguments: &[&str]) -> Output {
    let mut child = command(arguments).spawn().unwrap();
    let end = Instant::now() + TIMEOUT;
    // The output of these runs is smaller than a pipe.
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > end {
            child.kill().unwrap();
            panic!("{arguments:?} did not end");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Writes a file into a folder of its own.
fn file(content: &[u8]) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    std::fs::write(&path, content).unwrap();
    (folder, path)
}
