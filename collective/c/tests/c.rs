//! C programs, compiled by gcc, that use the library by its header; and the header itself.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests")]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs, io, thread};

use support::free_address;
use tempfile::TempDir;
use tonic_rdma_collective::{Communicator, Launch, Reduction};

/// Long enough for a busy machine, and for valgrind; only a hang takes so long.
const LIMIT: Duration = Duration::from_secs(300);
/// What runs the programs, such as valgrind with its options. Default: nothing.
const RUNNER: &str = "C_PROGRAM_RUNNER";

fn here(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// After an intended change: `UPDATE_HEADER=1 cargo test -p tonic-rdma-collective-c header`.
#[test]
fn the_header_is_that_of_the_code() {
    let config = cbindgen::Config::from_file(here("cbindgen.toml")).unwrap();
    let bindings = cbindgen::Builder::new().with_config(config).with_src(here("src/boundary.rs")).generate();
    let mut made = Vec::new();
    bindings.unwrap().write(&mut made);
    let (header, made) = (here("include/tonic_rdma_collective.h"), String::from_utf8(made).unwrap());
    if env::var_os("UPDATE_HEADER").is_some() {
        fs::write(&header, &made).unwrap();
    }
    let text = fs::read_to_string(&header).unwrap_or_default();
    assert!(
        text == made,
        "{} is not what cbindgen makes of src/boundary.rs. If the change is meant: \
         UPDATE_HEADER=1 cargo test -p tonic-rdma-collective-c header",
        header.display()
    );
}

#[test]
fn results_are_exact() {
    let program = Program::compiled("gcc", &["-std=c11"], &here("tests/c/results.c"));
    for ranks in [2, 4] {
        program.is_right(ranks, &["SECOND"], "every result is right");
    }
}

#[test]
fn the_header_and_a_program_are_cpp_too() {
    if let Err(error) = Command::new("g++").arg("--version").output() {
        assert_eq!(error.kind(), io::ErrorKind::NotFound, "{error}");
        return println!("skipped: there is no g++");
    }
    let program = Program::compiled("g++", &["-std=c++17", "-x", "c++"], &here("tests/c/results.c"));
    program.is_right(2, &["SECOND"], "every result is right");
}

#[test]
fn every_failure_has_its_status() {
    let program = Program::compiled("gcc", &["-std=c11"], &here("tests/c/failures.c"));
    program.is_right(2, &["LATE", "UNLIKE", "FREED", "LOST"], "every failure has its status");
}

#[test]
fn the_program_of_the_page_runs() {
    let folder = TempDir::new().unwrap();
    let program = Program::compiled("gcc", &["-std=c11"], &page_program(folder.path()));
    program.is_right(2, &[], "the mean of 2 ranks is 0.5");
    program.is_right(4, &[], "the mean of 4 ranks is 1.5");
}

#[test]
fn a_rank_in_rust_and_one_in_c_are_a_group() {
    let folder = TempDir::new().unwrap();
    let program = Program::compiled("gcc", &["-std=c11"], &page_program(folder.path()));
    let address = free_address();
    let variables = [("RDMA_COLLECTIVE_SIZE", "2".to_owned()), ("RDMA_COLLECTIVE_ADDRESS", address.clone())];
    let child = program.rank(0, &variables);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let group = runtime.block_on(Communicator::connect(Launch::new(1, 2, address))).unwrap();
    let (mut means, mut worst) = (vec![1.0_f32; 1_000_000], [0.75_f64]);
    group.all_reduce(&mut means[..], Reduction::Mean).wait().unwrap();
    group.all_reduce(&mut worst[..], Reduction::Max).wait().unwrap();
    group.barrier().wait().unwrap();
    assert!(means.iter().all(|mean| *mean == 0.5) && worst == [0.75]);
    let output = ended(vec![child]).remove(0);
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.contains("the mean of 2 ranks is 0.5, and the worst loss 0.75"), "{said}");
}

/// Writes the program of the book's page into a folder.
fn page_program(folder: &Path) -> PathBuf {
    let page = fs::read_to_string(here("../../docs/book/src/collectives-c.md")).unwrap();
    // It is the first block. The others are excerpts.
    let block = page.split("```c\n").nth(1).unwrap().split("```").next().unwrap();
    let source = folder.join("mean.c");
    fs::write(&source, block).unwrap();
    source
}

/// A program that is linked to the library.
struct Program {
    folder: TempDir,
}

impl Program {
    fn compiled(compiler: &str, options: &[&str], source: &Path) -> Self {
        let folder = TempDir::new().unwrap();
        // Cargo puts the shared library next to this test.
        let test = env::current_exe().unwrap();
        let libraries = test.parent().unwrap();
        assert!(
            libraries.join("libtonic_rdma_collective_c.so").exists(),
            "no library in {}",
            libraries.display()
        );
        let mut command = Command::new(compiler);
        command.args(options).args(["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-O1", "-g"]).arg(source);
        command.arg("-o").arg(folder.path().join("program")).arg("-I").arg(here("include"));
        command.args(["-x", "none", "-pthread", "-L"]).arg(libraries).arg("-ltonic_rdma_collective_c");
        let compiled = command.arg(format!("-Wl,-rpath,{}", libraries.display())).output().unwrap();
        assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
        Self { folder }
    }

    fn rank(&self, rank: usize, variables: &[(&str, String)]) -> Child {
        let mut words =
            env::var(RUNNER).unwrap_or_default().split_whitespace().map(String::from).collect::<Vec<_>>();
        words.push(self.folder.path().join("program").into_os_string().into_string().unwrap());
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).env("RDMA_COLLECTIVE_RANK", rank.to_string());
        command.envs(variables.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// Runs the program as each of `ranks` ranks. Rank 0 prints `line`, and all end well.
    fn is_right(&self, ranks: usize, groups: &[&str], line: &str) {
        let mut variables = vec![("RDMA_COLLECTIVE_SIZE", ranks.to_string())];
        variables
            .extend(groups.iter().chain(&["RDMA_COLLECTIVE_ADDRESS"]).map(|name| (*name, free_address())));
        let children: Vec<Child> = (0..ranks).map(|rank| self.rank(rank, &variables)).collect();
        let outputs: Vec<Output> = ended(children);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let all: String = outputs.iter().map(|output| text(&output.stdout) + &text(&output.stderr)).collect();
        assert!(outputs.iter().all(|output| output.status.success()), "{ranks} ranks: {outputs:?}\n{all}");
        assert!(text(&outputs[0].stdout).contains(line), "rank 0 of {ranks} does not say {line:?}: {all}");
    }
}

/// Waits for the end of all processes. After the limit, kills them.
fn ended(mut children: Vec<Child>) -> Vec<Output> {
    let start = Instant::now();
    while children.iter_mut().any(|child| child.try_wait().unwrap().is_none()) {
        if start.elapsed() > LIMIT {
            for child in &mut children {
                let _ = child.kill();
            }
        }
        thread::sleep(Duration::from_millis(5));
    }
    children.into_iter().map(|child| child.wait_with_output().unwrap()).collect()
}
