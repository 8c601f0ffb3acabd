//! Runs the command: its results, its exit status, what becomes of its ranks, and launchers.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "tests; skips are for people"
)]

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// A bound that only a hang reaches.
const PATIENCE: Duration = Duration::from_secs(240);

const PROGRAM: &str = env!("CARGO_BIN_EXE_tonic-rdma-allreduce");

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(PROGRAM);
    command.args(arguments);
    without_launcher(&mut command);
    command
}

/// The tests may run where a launcher has set variables.
fn without_launcher(command: &mut Command) {
    for variable in
        ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "RDMA_COLLECTIVE_RANK", "RANK", "RUST_LOG"]
    {
        command.env_remove(variable);
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
}

#[test]
fn a_rank_that_mpirun_started_is_one() {
    let open_mpi = [("OMPI_COMM_WORLD_RANK", "1")];
    let hydra = [("PMI_RANK", "1"), ("PMI_SIZE", "2")];
    for (variables, lacks) in [(&open_mpi[..], "OMPI_COMM_WORLD_SIZE"), (&hydra, "RDMA_COLLECTIVE_ADDRESS")] {
        for (arguments, says) in [
            (&[][..], lacks),
            (&["--ranks", "2"], "leave --ranks or mpirun out"),
            (&["--hosts", "1,1"], "RDMA_COLLECTIVE_HOST names the host of a rank"),
        ] {
            let output = end(command(arguments).envs(variables.iter().copied()).spawn().unwrap());
            let errors = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(2), "{variables:?}: {errors}");
            assert!(errors.contains(says), "{variables:?}: {errors}");
        }
    }
}

fn run(arguments: &[&str]) -> Output {
    end(command(arguments).spawn().unwrap())
}

fn end(mut child: Child) -> Output {
    let end = Instant::now() + 2 * PATIENCE;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > end {
            child.kill().unwrap();
            panic!("a command did not end");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Waits until the command has this many ranks that measure, and returns their processes.
fn ranks(parent: &Child, count: usize) -> Vec<u32> {
    let (parent, end) = (parent.id(), Instant::now() + PATIENCE);
    loop {
        let children =
            std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).unwrap_or_default();
        let children: Vec<u32> = children.split_whitespace().map(|pid| pid.parse().unwrap()).collect();
        if children.len() == count {
            return children;
        }
        assert!(Instant::now() < end, "the ranks did not start");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn kill(pid: u32) {
    assert!(Command::new("kill").args(["-KILL", &pid.to_string()]).status().unwrap().success());
}

#[test]
fn rows_of_every_cell_are_written_and_right() {
    let directory = std::env::temp_dir().join(format!("tonic-rdma-allreduce-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let [json, csv, markdown, plot] =
        ["rows.json", "rows.csv", "rows.md", "plot.svg"].map(|name| directory.join(name));
    let output = run(&[
        "--ranks",
        "1,2,3",
        "--sizes",
        "0,8,40KiB",
        "--types",
        "f32,i64",
        "--operand",
        "registered,slice",
        "--iterations",
        "4",
        "--warm-up",
        "1",
        "--pin",
        "no",
        "--json",
        json.to_str().unwrap(),
        "--csv",
        csv.to_str().unwrap(),
        "--markdown",
        markdown.to_str().unwrap(),
        "--plot",
        plot.to_str().unwrap(),
    ]);
    assert!(output.status.success(), "{}", stderr(&output));
    let content: Value = serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap();
    let [csv, markdown, svg] = [csv, markdown, plot].map(|file| std::fs::read_to_string(file).unwrap());
    std::fs::remove_dir_all(&directory).unwrap();
    let rows = content["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 3 * 3 * 2 * 2);
    for row in rows {
        assert_eq!(
            (&row["errors"], &row["iterations"], &row["algorithm"]),
            (&0.into(), &4.into(), &"auto".into())
        );
        assert!(row["p50_us"].as_f64().unwrap() > 0.0 && row["p99_us"].as_f64() >= row["p50_us"].as_f64());
    }
    assert_eq!(content["plans"].as_array().unwrap().len(), 3);
    assert!(svg.contains("<svg") && svg.contains("3 ranks, i64, slice"));
    // A line of names, or of headings and a line below them, and the rows. No field has a comma.
    let names: Vec<&str> = csv.lines().next().unwrap().split(',').collect();
    assert!(names.contains(&"p50_us") && names.contains(&"bus_gbytes_per_s"), "{names:?}");
    assert!(csv.lines().all(|line| line.split(',').count() == names.len()), "{csv}");
    assert_eq!(
        (csv.lines().count(), markdown.lines().count()),
        (1 + rows.len(), 2 + rows.len()),
        "{markdown}"
    );
    assert!(String::from_utf8_lossy(&output.stdout).contains("bus GB/s"));
}

#[test]
fn the_ring_moves_the_least_and_copies_nothing() {
    let output = run(&[
        "--ranks",
        "2,3",
        "--sizes",
        "4004,192KiB",
        "--algorithm",
        "ring",
        "--operand",
        "registered,registered-out-of-place",
        "--iterations",
        "3",
        "--counters",
        "--pin",
        "no",
        "--json",
        "-",
    ]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains("bus GB/s"));
    let content: Value = serde_json::from_slice(&output.stdout).expect("nothing but JSON");
    assert_eq!(content["counters"].as_array().unwrap().len(), 2 * 2 * 2);
}

#[test]
fn bytes_of_each_rank_and_across_hosts_are_counted() {
    let output = run(&[
        "--hosts",
        "2,1",
        "--sizes",
        "4004,192KiB",
        "--algorithm",
        "auto,hierarchical,naive",
        "--iterations",
        "3",
        "--counters",
        "--pin",
        "no",
        "--json",
        "-",
    ]);
    assert!(output.status.success(), "{}", stderr(&output));
    let content: Value = serde_json::from_slice(&output.stdout).expect("nothing but JSON");
    let plans = content["plans"][0]["text"].as_str().unwrap();
    assert!(plans.contains("hierarchical in chunks of 256 KiB"), "{plans}");
    let counters = content["counters"].as_array().unwrap();
    assert_eq!(counters.len(), 2 * 3);
    for counted in counters {
        let bytes = counted["bytes"].as_f64().unwrap();
        let of = |key: &str| -> Vec<f64> {
            counted[key].as_array().unwrap().iter().map(|bytes| bytes.as_f64().unwrap()).collect()
        };
        assert_eq!(counted["hosts"], serde_json::json!([2, 1]));
        match counted["algorithm"].as_str().unwrap() {
            "naive" => {
                assert_eq!(of("sent_bytes"), [2.0 * bytes, bytes, bytes]);
                assert_eq!(of("received_bytes"), [2.0 * bytes, bytes, bytes]);
                assert_eq!(of("across_bytes"), [bytes, 0.0, bytes]);
            }
            "hierarchical" => {
                let across = of("across_bytes");
                assert_eq!((across[0] + across[1], across[2]), (bytes, bytes));
            }
            _ => {}
        }
    }
}

#[test]
fn bad_input_ends_with_status_2_and_names_the_option() {
    for (arguments, option) in [
        (&["--hosts", "2,2", "--ranks", "2"][..], "--hosts"),
        (&["--ranks", "none"], "--ranks"),
        (&["--sizes", "10", "--types", "f64"], "--sizes"),
        (&["--ranks", "64", "--types", "i8"], "--types"),
        (&["--ranks", "2", "--quick", "--json", "/no/such/folder/x.json"], "--json"),
        (&["--ranks", "2", "--quick", "--plot", "-"], "--plot"),
        (&["--unknown"], "--unknown"),
        (&["--size", "64"], "did you mean --sizes?"),
    ] {
        let output = run(arguments);
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.starts_with("tonic-rdma-allreduce: ") && text.contains(option), "{text}");
        assert_eq!(text.trim_end().lines().count(), 1, "{text}");
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn a_killed_rank_ends_the_run_with_an_error_that_names_it() {
    let parent =
        command(&["--ranks", "3", "--sizes", "8", "--duration", "600", "--pin", "no"]).spawn().unwrap();
    let processes = ranks(&parent, 3);
    std::thread::sleep(Duration::from_millis(500));
    kill(processes[1]);
    let begin = Instant::now();
    let output = parent.wait_with_output().unwrap();
    assert!(begin.elapsed() < PATIENCE);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("rank 1") && text.contains("signal: 9"), "{text}");
    assert!(processes.iter().all(|pid| !Path::new(&format!("/proc/{pid}")).exists()));
}

#[test]
fn ranks_end_with_the_command() {
    let mut parent =
        command(&["--ranks", "2", "--sizes", "8", "--duration", "600", "--pin", "no"]).spawn().unwrap();
    let processes = ranks(&parent, 2);
    kill(parent.id());
    parent.wait().unwrap();
    let end = Instant::now() + PATIENCE;
    // An ended process may stay as a zombie until the init process takes it.
    let runs = |pid: &u32| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        !status.is_empty() && !status.contains(") Z ")
    };
    while processes.iter().any(runs) {
        assert!(Instant::now() < end, "a rank has outlived the command");
        std::thread::sleep(Duration::from_millis(5));
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
    "auto,one-shot,ring,halving-doubling,hierarchical",
];

/// Returns a file for rows.
fn rows(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("tonic-rdma-allreduce-{name}-{}.json", std::process::id()))
}

/// Runs a launcher to its end. Returns `None` if there is no such program.
fn launched(mut command: Command) -> Option<Output> {
    without_launcher(&mut command);
    match command.spawn() {
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        child => Some(end(child.unwrap())),
    }
}

/// Checks the rows that four ranks wrote.
fn check(output: &Output, file: &Path) {
    assert!(output.status.success(), "{}{}", String::from_utf8_lossy(&output.stdout), stderr(output));
    let rows: Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    std::fs::remove_file(file).unwrap();
    let rows = rows["rows"].as_array().cloned().unwrap_or_default();
    assert_eq!(rows.len(), 10, "{rows:?}");
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
    match launched(command) {
        Some(output) => check(&output, &file),
        None => println!("skipped: there is no mpirun"),
    }
}

#[test]
fn torchrun_starts_ranks() {
    let file = rows("torchrun");
    let mut command = Command::new("torchrun");
    let logs = file.with_extension("logs");
    // Torch 1.13 with Python 3.11 fails unless the output is redirected (-r) and copied (-t). Torch 2 knows
    // these options too.
    command.args(["--no_python", "--nproc_per_node", "4", "-r", "1", "-t", "1", "--log_dir"]).arg(&logs);
    command.arg(PROGRAM).args(WORK).arg("--json").arg(&file);
    match launched(command) {
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
        let mut command = command(&WORK);
        command.arg("--json").arg(&file).env("SLURM_PROCID", rank.to_string()).env("SLURM_NTASKS", "4");
        command.env("SLURM_JOB_ID", &job).env("SLURM_STEP_ID", "0");
        command.env("SLURM_NNODES", "1").env("RDMA_COLLECTIVE_HOST", ["a", "b"][rank / 2]);
        command.spawn().unwrap()
    };
    let ranks: Vec<Child> = (0..4).map(start).collect();
    let outputs: Vec<Output> = ranks.into_iter().map(end).collect();
    for output in &outputs {
        assert!(output.status.success(), "{}", stderr(output));
    }
    let shown = String::from_utf8_lossy(&outputs[0].stdout);
    assert!(shown.contains(": hierarchical in chunks"), "the plans are those of two hosts: {shown}");
    check(&outputs[0], &file);
}
