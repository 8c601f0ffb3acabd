//! Processes of parts that are killed or stay alone, and how the run ends then.

use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use crate::{TIMEOUT, command, file, onnx, run, stderr};

/// Waits until the command has this many parts, and returns their processes.
fn parts(parent: &Child, count: usize) -> Vec<u32> {
    let (parent, end) = (parent.id(), Instant::now() + TIMEOUT);
    loop {
        let path = format!("/proc/{parent}/task/{parent}/children");
        let children = std::fs::read_to_string(path).unwrap_or_default();
        let children: Vec<u32> = children.split_whitespace().map(|pid| pid.parse().unwrap()).collect();
        if children.len() == count {
            return children;
        }
        assert!(Instant::now() < end, "the parts did not start");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub(crate) fn kill(pid: u32) {
    assert!(Command::new("kill").args(["-KILL", &pid.to_string()]).status().unwrap().success());
}

/// Returns whether a process runs. An ended process may stay as a zombie until the init process takes it.
fn runs(pid: &u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    !status.is_empty() && !status.contains(") Z ")
}

#[test]
fn a_killed_part_ends_the_run_with_an_error_that_names_it() {
    let (_folder, path) = file(&onnx::convolutions());
    // One that dies at the start, and one that dies in the middle of the run.
    for pause in [0, 3000] {
        let arguments = [path.to_str().unwrap(), "--parts", "3", "--steps", "1000000"];
        let mut parent = command(&arguments).spawn().unwrap();
        let processes = parts(&parent, 3);
        std::thread::sleep(Duration::from_millis(pause));
        kill(processes[1]);
        let end = Instant::now() + TIMEOUT;
        while parent.try_wait().unwrap().is_none() {
            assert!(Instant::now() < end, "the command goes on without part 1");
            std::thread::sleep(Duration::from_millis(5));
        }
        let output = parent.wait_with_output().unwrap();
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(text.contains("part 1") && text.contains("signal: 9"), "{text}");
        assert!(processes.iter().all(|pid| !Path::new(&format!("/proc/{pid}")).exists()));
    }
}

#[test]
fn parts_end_with_the_command() {
    let (_folder, path) = file(&onnx::convolutions());
    let mut parent = command(&[path.to_str().unwrap(), "--steps", "1000000"]).spawn().unwrap();
    let processes = parts(&parent, 2);
    std::thread::sleep(Duration::from_millis(500));
    kill(parent.id());
    parent.wait().unwrap();
    let end = Instant::now() + TIMEOUT;
    while processes.iter().any(runs) {
        assert!(Instant::now() < end, "a part has outlived the command");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_host_that_is_not_there_is_named() {
    let (_folder, path) = file(&onnx::convolutions());
    // Port 1 belongs to a service that no machine has any more.
    let output = run(&[path.to_str().unwrap(), "--hosts", "127.0.0.1:1,127.0.0.1:2"]);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("127.0.0.1:1") && text.contains("serve --listen"), "{text}");
}
