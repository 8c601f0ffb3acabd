//! The command as a process of its own.

use std::process::{Command, Output};

use serde_json::Value;

pub(crate) fn tonic_rdma(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tonic-rdma"));
    command.args(arguments);
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("RDMA_")) {
        command.env_remove(name);
    }
    // The user's cache is none of a test's business.
    command.env("RDMA_TUNE_CACHE", "off");
    command
}

pub(crate) fn run(arguments: &[&str]) -> Output {
    tonic_rdma(arguments).output().unwrap()
}

pub(crate) fn refused(output: &Output, status: i32, named: &[&str]) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{said}");
    assert_eq!(said.trim_end().lines().count(), 1, "one line, not {said}");
    for name in named {
        assert!(said.contains(name), "{name:?} is not named in {said}");
    }
}

/// The JSON of a comparison that must succeed, and what it printed.
pub(crate) fn compare(arguments: &[&str]) -> (Value, String) {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("rows.json");
    let output = run(&[&["compare", "--json", json.to_str().unwrap()], arguments].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let written = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    (written, String::from_utf8_lossy(&output.stdout).into_owned())
}
