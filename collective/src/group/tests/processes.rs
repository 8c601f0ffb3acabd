//! Tests of groups whose ranks are processes: this test's own program, started again.

#![allow(clippy::print_stdout, reason = "the figures and the skipped test are for people")]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use super::{block_on, free_address};
use crate::group::{Group, Launch, Settings};

/// Set in a child process.
const CHILD: &str = "COLLECTIVE_TEST_CHILD";

/// Generous: only a hang takes so long.
const HANG: Duration = Duration::from_secs(60);

/// A rank. Does nothing unless a test below has started this process.
#[test]
fn child() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let launch = Launch::from_env().unwrap();
    let group = block_on(Group::join(launch, Settings::default())).unwrap();
    say(&format!("joined {} {}", group.rank(), group.size()));
    for line in std::io::stdin().lines() {
        match line.unwrap().as_str() {
            "fail" => say(&format!("failed {}", block_on(group.failure().wait()))),
            "culprit" => say(&format!("culprit {}", block_on(group.find_culprit(1)))),
            "shrink" => match block_on(group.survivors()) {
                Ok(survivors) => {
                    let ranks: Vec<_> =
                        (0..survivors.size()).filter_map(|rank| survivors.original(rank)).collect();
                    say(&format!("survivors {ranks:?}"));
                }
                Err(error) => say(&format!("error {error}")),
            },
            _ => break,
        }
    }
}

/// Writes a line that the parent finds among the lines of the test harness.
fn say(text: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "\n> {text}").unwrap();
    out.flush().unwrap();
}

struct Rank {
    child: Child,
    input: ChildStdin,
    lines: Receiver<String>,
}

impl Rank {
    fn start(rank: usize, size: usize, address: &str) -> Self {
        let mut child = command(std::env::current_exe().unwrap())
            .env("RDMA_COLLECTIVE_RANK", rank.to_string())
            .env("RDMA_COLLECTIVE_SIZE", size.to_string())
            .env("RDMA_COLLECTIVE_ADDRESS", address)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if let Some(said) = line.strip_prefix("> ") {
                    let _ = sender.send(said.to_owned());
                }
            }
        });
        Self { child, input, lines }
    }

    fn tell(&mut self, line: &str) {
        writeln!(self.input, "{line}").unwrap();
    }

    fn hear(&self) -> String {
        self.lines.recv_timeout(HANG).expect("a line of the rank")
    }

    fn signal(&self, signal: &str) {
        let status = Command::new("kill").args([signal, &self.child.id().to_string()]).status().unwrap();
        assert!(status.success());
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The arguments that make this test's program a rank.
const AS_CHILD: [&str; 3] = ["--exact", "group::tests::processes::child", "--nocapture"];

fn command(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new(program);
    command.args(AS_CHILD).env(CHILD, "1");
    command
}

fn ranks(size: usize) -> Vec<Rank> {
    let address = free_address();
    let ranks: Vec<Rank> = (0..size).map(|rank| Rank::start(rank, size, &address)).collect();
    for (number, rank) in ranks.iter().enumerate() {
        assert_eq!(rank.hear(), format!("joined {number} {size}"));
    }
    ranks
}

#[test]
fn a_killed_rank_is_named_and_the_others_go_on() {
    let mut ranks = ranks(4);
    for rank in [0, 2, 3] {
        ranks[rank].tell("fail");
    }
    let begun = Instant::now();
    ranks[1].signal("-KILL");
    for rank in [0, 2, 3] {
        let heard = ranks[rank].hear();
        assert!(heard.starts_with("failed rank 1 is lost, noticed at step 0"), "{heard}");
    }
    println!("noticed after {:?}", begun.elapsed());
    let begun = Instant::now();
    for rank in [0, 2, 3] {
        ranks[rank].tell("shrink");
    }
    for rank in [0, 2, 3] {
        assert_eq!(ranks[rank].hear(), "survivors [0, 2, 3]");
    }
    println!("agreed after {:?}", begun.elapsed());
}

#[test]
fn a_stopped_rank_is_the_culprit_is_left_out_and_learns_of_it() {
    for stopped in [0, 1] {
        let mut ranks = ranks(3);
        ranks[stopped].signal("-STOP");
        let others: Vec<usize> = (0..3).filter(|rank| *rank != stopped).collect();
        if stopped == 1 {
            ranks[0].tell("culprit");
            assert_eq!(ranks[0].hear(), "culprit 1");
        }
        let begun = Instant::now();
        for rank in &others {
            ranks[*rank].tell("shrink");
        }
        for rank in &others {
            assert_eq!(ranks[*rank].hear(), format!("survivors {others:?}"));
        }
        println!("agreed without rank {stopped} after {:?}", begun.elapsed());
        ranks[stopped].signal("-CONT");
        ranks[stopped].tell("shrink");
        let heard = ranks[stopped].hear();
        let expected = format!("error the other ranks went on without rank {stopped}, because ");
        assert!(heard.starts_with(&expected), "{heard}");
    }
}

/// Runs only where Open MPI is installed.
#[test]
fn open_mpi_starts_a_group() {
    let mut mpirun = Command::new("mpirun");
    mpirun.args(["--allow-run-as-root", "--oversubscribe", "-n", "4"]).arg(std::env::current_exe().unwrap());
    let output = mpirun.args(AS_CHILD).env(CHILD, "1").stdin(Stdio::null()).output();
    let output = match output {
        Ok(output) => output,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            println!("skipped: there is no mpirun");
            return;
        }
        Err(error) => panic!("mpirun: {error}"),
    };
    let text = String::from_utf8_lossy(&output.stdout);
    let mut joined: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("> joined ")).collect();
    joined.sort_unstable();
    assert_eq!(joined, ["0 4", "1 4", "2 4", "3 4"], "{}\n{text}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success());
}
