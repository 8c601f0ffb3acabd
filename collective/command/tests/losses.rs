//! Ranks that are killed or stopped, and launchers.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests; skips are for people")]

use std::io::ErrorKind;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// A bound that only a hang reaches.
const PATIENCE: Duration = Duration::from_secs(240);
const PROGRAM: &str = env!("CARGO_BIN_EXE_tonic-rdma-allreduce");

/// Runs a command to its end. Returns `None` if there is no such program.
fn run(mut command: Command) -> Option<Output> {
    // The tests may run where a launcher has set variables.
    for variable in ["OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "RDMA_COLLECTIVE_RANK", "RANK", "RUST_LOG"] {
        if !command.get_envs().any(|(name, _)| name == variable) {
            command.env_remove(variable);
        }
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = match command.spawn() {
        Err(error) if error.kind() == ErrorKind::NotFound => return None,
        child => child.unwrap(),
    };
    let end = Instant::now() + PATIENCE;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > end {
            child.kill().unwrap();
            panic!("{command:?} did not end");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Some(child.wait_with_output().unwrap())
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// Returns a file for rows, in a folder of this test.
fn rows(name: &str) -> std::path::PathBuf {
    std::env::temp_dir().join(format!("tonic-rdma-allreduce-{name}-{}.json", std::process::id()))
}

/// Returns the rows of the summary.
fn lose(option: &str, trials: u64, more: &[&str]) -> Vec<Value> {
    let file = rows(&option[2..]);
    let mut command = Command::new(PROGRAM);
    command.args([option, &trials.to_string()]).args(more).arg("--json").arg(&file);
    let output = run(command).unwrap();
    let said = text(&output);
    println!("{said}");
    assert!(output.status.success(), "{said}");
    let summary: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    std::fs::remove_file(file).unwrap();
    assert_eq!(summary[0]["trials"], trials);
    let rows = summary[0]["rows"].as_array().unwrap().clone();
    assert_eq!(rows.iter().map(|row| row["trials"].as_u64().unwrap()).sum::<u64>(), trials);
    // A step counts once, and each of these trials has a step of its own.
    assert!(rows.iter().all(|row| row["steps_reached"] == row["trials"]), "{rows:?}");
    rows
}

#[test]
fn killed_ranks_are_named_and_the_others_have_the_results_of_a_fresh_group() {
    let rows = lose("--kills", 45, &["--ranks", "2,3,4,5,6"]);
    assert_eq!(rows.len(), 15, "three algorithms with five numbers of ranks: {rows:?}");
}

#[test]
fn stopped_ranks_are_named_at_the_deadline_and_excluded() {
    let rows = lose("--stops", 6, &["--ranks", "4,3,2", "--algorithm", "ring,one-shot"]);
    assert_eq!(rows.len(), 6, "two algorithms with three numbers of ranks: {rows:?}");
}

#[test]
fn options_of_losses_are_checked() {
    for (arguments, words) in [
        (&["--kills", "0"][..], "--kills"),
        (&["--kills", "3", "--ranks", "1"], "--ranks"),
        (&["--kills", "some"], "--kills"),
        (&["--kills", "3", "--algorithm", "ring,auto"], "--algorithm auto"),
        (&["--kills", "3", "--types", "f64"], "cannot be used with"),
        (&["--stops", "3", "--quick"], "cannot be used with"),
    ] {
        let mut command = Command::new(PROGRAM);
        command.args(arguments);
        let output = run(command).unwrap();
        assert_eq!(output.status.code(), Some(2));
        assert!(text(&output).contains(words), "{}", text(&output));
    }
}

/// Arguments of a rank that a launcher starts.
const WORK: [&str; 8] = [
    "--sizes",
    "8,40KiB",
    "--iterations",
    "4",
    "--warm-up",
    "1",
    "--algorithm",
    "auto,one-shot,ring,halving-doubling",
];

/// Checks the rows that four ranks wrote.
fn check(output: &Output, file: &std::path::Path) {
    assert!(output.status.success(), "{}", text(output));
    let rows: Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    std::fs::remove_file(file).unwrap();
    let rows = rows["rows"].as_array().cloned().unwrap_or_default();
    assert_eq!(rows.len(), 8, "{rows:?}");
    assert!(rows.iter().all(|row| row["ranks"] == 4 && row["errors"] == 0), "{rows:?}");
}

#[test]
fn open_mpi_starts_ranks() {
    let file = rows("mpirun");
    let mut command = Command::new("mpirun");
    command
        .args(["--allow-run-as-root", "--oversubscribe", "-n", "4", PROGRAM])
        .args(WORK)
        .arg("--json")
        .arg(&file);
    match run(command) {
        Some(output) => check(&output, &file),
        None => println!("skipped: there is no mpirun"),
    }
}

#[test]
fn torchrun_starts_ranks() {
    let file = rows("torchrun");
    let mut command = Command::new("torchrun");
    let logs = file.with_extension("logs");
    // Torch 1.13 with Python 3.11 fails unless the output is redirected (-r) and copied (-t). Torch 2 knows these options too.
    command.args(["--no_python", "--nproc_per_node", "4", "-r", "1", "-t", "1", "--log_dir"]).arg(&logs);
    command.arg(PROGRAM).args(WORK).arg("--json").arg(&file);
    match run(command) {
        Some(output) => {
            check(&output, &file);
            std::fs::remove_dir_all(logs).unwrap();
        }
        None => println!("skipped: there is no torchrun"),
    }
}

/// Its srun sets these variables. `interop/launchers` runs Slurm itself.
#[test]
fn ranks_find_one_another_by_the_variables_of_slurm() {
    let file = rows("slurm");
    let job = std::process::id().to_string();
    let start = |rank: usize| {
        let mut command = Command::new(PROGRAM);
        command.args(WORK).arg("--json").arg(&file);
        command.env("SLURM_PROCID", rank.to_string()).env("SLURM_NTASKS", "4");
        command.env("SLURM_JOB_ID", &job).env("SLURM_STEP_ID", "0");
        command.env("SLURM_NNODES", "1");
        std::thread::spawn(move || run(command).unwrap())
    };
    let ranks: Vec<_> = (0..4).map(start).collect();
    let outputs: Vec<Output> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
    for output in &outputs {
        assert!(output.status.success(), "{}", text(output));
    }
    check(&outputs[0], &file);
}
