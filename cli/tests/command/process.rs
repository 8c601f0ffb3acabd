//! Starts the command as a process, and waits for processes.

use std::process::{Command, Output};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Prepares the command with these arguments, without the caller's `RDMA_` variables.
pub(crate) fn tonic_rdma(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tonic-rdma"));
    command.args(arguments);
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("RDMA_")) {
        command.env_remove(name);
    }
    // On a busy machine a negotiation may take longer than the default, and the connection would go over TCP.
    command.env("RDMA_HANDSHAKE_TIMEOUT", "60000");
    command
}

/// Runs the command to its end, which comes within 240 s unless it hangs.
pub(crate) fn run(arguments: &[&str]) -> Output {
    let limit = Duration::from_secs(240);
    let ran = tonic_rdma_commands::process::run("tonic-rdma", tonic_rdma(arguments), limit).unwrap();
    let status = ran.status.unwrap_or_else(|| panic!("{arguments:?} hangs: {}", ran.errors));
    Output { status, stdout: ran.output.into(), stderr: ran.errors.into() }
}

/// Checks that the command ended with `status` and one line on stderr that contains each of `named`.
pub(crate) fn refused(output: &Output, status: i32, named: &[&str]) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{said}");
    assert_eq!(said.trim_end().lines().count(), 1, "one line, not {said}");
    for name in named {
        assert!(said.contains(name), "{name:?} is missing in {said}");
    }
}

/// Runs a comparison that must succeed. Returns its JSON and its output.
pub(crate) fn compare(arguments: &[&str]) -> (Value, String) {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("rows.json");
    let output = run(&[&["compare", "--json", json.to_str().unwrap()], arguments].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let written = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    (written, String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Waits until `find` returns a value.
pub(crate) fn wait_for<T>(missing: &str, mut find: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(found) = find() {
            return found;
        }
        assert!(Instant::now() < deadline, "{missing}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Returns `Some` if the process has ended.
pub(crate) fn is_gone(process: u32) -> Option<()> {
    let state = std::fs::read_to_string(format!("/proc/{process}/stat")).ok();
    state.is_none_or(|state| state.contains(") Z")).then_some(())
}
