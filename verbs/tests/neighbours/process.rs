//! Processes of the test. Each is this binary, started again with [`ROLE`] set. A message between processes
//! is a line that begins with `@@`.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use crate::system;

/// The environment variable with the role of a process.
pub const ROLE: &str = "TONIC_RDMA_NEIGHBOURS_ROLE";
/// The environment variable with the seconds that a scenario may take.
const LIMIT: &str = "TONIC_RDMA_NEIGHBOURS_LIMIT";

/// The message of a process that has done harm.
pub const HARM: &str = "harm";

/// Set if the bad neighbours of a scenario belong to another user.
const STRANGER: &str = "TONIC_RDMA_NEIGHBOURS_STRANGER";

/// A process that takes commands.
#[derive(Debug)]
pub struct Process {
    child: Child,
    lines: BufReader<ChildStdout>,
    /// Messages that nobody has taken yet.
    heard: VecDeque<String>,
    has_harmed: bool,
}

impl Process {
    /// Starts a process that takes commands from this one: of another user if [`STRANGER`] is set.
    pub fn start() -> Self {
        Self::start_as(if are_strangers() { "stranger" } else { "neighbour" })
    }

    /// Starts a process of this user.
    pub fn start_honest() -> Self {
        Self::start_as("neighbour")
    }

    fn start_as(role: &str) -> Self {
        let mut child = command(role).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Self { child, lines, heard: VecDeque::new(), has_harmed: false }
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a line to the process. A process that is gone is no error.
    pub fn tell(&mut self, line: &str) {
        let _ = writeln!(self.child.stdin.as_mut().unwrap(), "{line}");
    }

    /// Waits for the next message of the process. Returns `None` if the process has ended.
    pub fn hear(&mut self) -> Option<String> {
        loop {
            if let Some(message) = self.heard.pop_front() {
                return Some(message);
            }
            self.listen()?;
        }
    }

    /// Waits until the process has done harm. Returns false if it ended, or its role, before.
    pub fn does_harm(&mut self) -> bool {
        while !self.has_harmed && self.heard.back().is_none_or(|message| message != "ended") {
            if self.listen().is_none() {
                break;
            }
        }
        self.has_harmed
    }

    /// Reads the next line of the process.
    fn listen(&mut self) -> Option<()> {
        let mut line = String::new();
        if self.lines.read_line(&mut line).unwrap() == 0 {
            return None;
        }
        match line.split_once("@@").map(|(_, message)| message.trim()) {
            Some(HARM) => self.has_harmed = true,
            Some(message) => self.heard.push_back(message.to_owned()),
            None => {}
        }
        Some(())
    }

    /// Stops the process with all its threads, and returns when all have stopped.
    pub fn stop(&self) {
        system::signal(self.id(), libc::SIGSTOP);
        let tasks = format!("/proc/{}/task", self.id());
        let stopped = |task: std::io::Result<std::fs::DirEntry>| {
            let stat = std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap_or_default();
            stat.rsplit_once(") ").is_none_or(|(_, state)| state.starts_with(['T', 'Z', 'X']))
        };
        while !std::fs::read_dir(&tasks).unwrap().all(stopped) {
            std::thread::yield_now();
        }
    }

    /// Lets a stopped process go on.
    pub fn resume(&self) {
        system::signal(self.id(), libc::SIGCONT);
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns whether the bad neighbours of this scenario belong to another user.
pub fn are_strangers() -> bool {
    std::env::var_os(STRANGER).is_some()
}

/// The owner of the bad neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// The user of the process under test.
    User,
    /// Another user, who is admitted by `RDMA_SOFT_PEERS`.
    Stranger,
}

/// Runs a scenario in a process of its own, because the scenario counts what the process holds, and because
/// the process may hang or crash if the test fails. Kills all its processes after the limit.
pub fn run_scenario(name: &str, level: Level) {
    if level == Level::Stranger && !system::may_change_user() {
        eprintln!("skipped: becoming another user is not permitted here");
        return;
    }
    let limit = std::env::var(LIMIT).map_or(600, |limit| limit.parse().unwrap());
    let deadline = Instant::now() + Duration::from_secs(limit);
    let mut command = command(&format!("scenario:{name}"));
    if level == Level::Stranger {
        command.env(STRANGER, "1").env("RDMA_SOFT_PEERS", "any");
    }
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .unwrap();
    let mut errors = child.stderr.take().unwrap();
    let printed = std::thread::spawn(move || {
        let mut printed = String::new();
        let _ = errors.read_to_string(&mut printed);
        printed
    });
    let leader = child.id();
    let ended = loop {
        match child.try_wait().unwrap() {
            Some(status) => break Some(status),
            None if Instant::now() > deadline => break None,
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    system::kill_group(leader);
    let _ = child.wait();
    eprintln!("{}", printed.join().unwrap());
    match ended {
        None => panic!("{name}: a call did not return; the scenario was ended after {limit} s"),
        Some(status) => assert!(status.success(), "{name}: {status}"),
    }
}

fn command(role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["process_with_a_role", "--exact", "--nocapture", "--test-threads=1"])
        .env(ROLE, role)
        .env("RUST_BACKTRACE", "0");
    command
}

/// Sends a message to the process that started this one.
pub fn report(message: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "\n@@{message}");
    let _ = out.flush();
}

/// Reads the next line from the process that started this one; `None` at the end.
pub fn next_line() -> Option<String> {
    let mut line = String::new();
    match std::io::stdin().read_line(&mut line) {
        Ok(length) if length > 0 => Some(line.trim().to_owned()),
        _ => None,
    }
}
