//! Child processes: this program again, each as a part.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};
use tonic_rdma_commands::Failure;

/// The first words of the line in which a part says where it listens.
pub(crate) const LISTENING: &str = "listening on ";
/// The longest time for a process to say where it listens.
const START: Duration = Duration::from_secs(30);
/// The longest first line of a process.
const LONGEST: u64 = 1024;

/// Running parts. The drop of this value kills them. They end by themselves if this process ends.
#[derive(Debug, Default)]
pub(crate) struct Children {
    children: Vec<Child>,
}

impl Children {
    /// Starts a process for each part, and returns the addresses at which they listen. The kernel ends the processes with the thread
    /// that calls this, so this must be the thread that lives as long as this process.
    pub(crate) fn start(parts: usize) -> Result<(Self, Vec<String>), Failure> {
        let program = std::env::current_exe()
            .map_err(|error| Failure::run("can't find the program to start").because(error))?;
        let parent = rustix::process::getpid().as_raw_nonzero().get().to_string();
        let mut children = Self::default();
        let mut lines = Vec::new();
        for part in 0..parts {
            let failed =
                |error| Failure::run(format!("can't start the process of part {part}")).because(error);
            let mut command = Command::new(&program);
            command.args(["serve", "--listen", "127.0.0.1:0", "--parent", &parent]);
            command.stdin(Stdio::null()).stdout(Stdio::piped());
            let mut child = command.spawn().map_err(failed)?;
            let stdout = child.stdout.take();
            children.children.push(child);
            let (sender, line) = mpsc::channel();
            let reader = thread::Builder::new().name(format!("part {part}"));
            reader.spawn(move || sender.send(first_line(stdout))).map_err(failed)?;
            lines.push(line);
        }
        let mut addresses = Vec::new();
        for (part, line) in lines.into_iter().enumerate() {
            let line = line.recv_timeout(START).unwrap_or_default();
            match line.trim_end().strip_prefix(LISTENING) {
                Some(address) => addresses.push(address.to_owned()),
                None => {
                    let state = children.status(part);
                    return Err(Failure::run(format!(
                        "the process of part {part} does not say where it listens; {state}"
                    )));
                }
            }
        }
        Ok((children, addresses))
    }

    /// Returns how the process of a part ended.
    pub(crate) fn status(&mut self, part: usize) -> String {
        let end = Instant::now() + Duration::from_secs(1);
        let Some(child) = self.children.get_mut(part) else {
            return "it is no process of this machine".to_owned();
        };
        loop {
            match child.try_wait() {
                Ok(Some(status)) => return format!("its process ended ({status})"),
                Ok(None) if Instant::now() < end => thread::sleep(Duration::from_millis(2)),
                Ok(None) => return "its process runs on".to_owned(),
                Err(error) => return format!("its process is lost: {error}"),
            }
        }
    }

    /// Returns whether this machine has a process for the part.
    pub(crate) fn has(&self, part: usize) -> bool {
        part < self.children.len()
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        for child in &mut self.children {
            // Killing fails only if the process has already ended.
            let _ = child.kill();
        }
        for child in &mut self.children {
            let _ = child.wait();
        }
    }
}

/// Makes this process end with `parent`, which started it.
pub(crate) fn end_with(parent: i32) -> Result<(), Failure> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|error| Failure::run("can't ask for the signal of the parent's end").because(error))?;
    // The parent may have ended before the call.
    if rustix::process::getppid().map(Pid::as_raw_pid) != Some(parent) {
        return Err(Failure::run("the process that started this part has ended"));
    }
    Ok(())
}

fn first_line(stdout: Option<ChildStdout>) -> String {
    let mut line = String::new();
    if let Some(stdout) = stdout {
        // A line that can't be read is no line with an address.
        let _ = BufReader::new(stdout).take(LONGEST).read_line(&mut line);
    }
    line
}
