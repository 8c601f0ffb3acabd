//! The processes of local ranks.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tonic_rdma_commands::Failure;

use crate::launch::Place;
use crate::report::Report;

/// The longest report. Longer lines are no reports.
const LONGEST: u64 = 1 << 20;

/// What a rank did.
#[derive(Debug)]
pub(crate) enum Event {
    Report(usize, Report),
    /// The rank wrote something else.
    Garbage(usize, String),
    /// The rank has closed its output.
    End(usize),
}

/// Running ranks. The drop of this value kills them. They end by themselves if this process ends.
#[derive(Debug)]
pub(crate) struct Processes {
    children: Vec<Child>,
    events: Receiver<Event>,
    /// Which ranks have reported their end, well or badly.
    reported: Vec<bool>,
    done: Vec<bool>,
}

impl Processes {
    /// Starts this program again for each place. The kernel ends the ranks with the thread that calls this, so this must be the
    /// thread that lives as long as the process.
    pub(crate) fn start(places: &[Place]) -> Result<Self, Failure> {
        let program = std::env::current_exe()
            .map_err(|error| Failure::run("can't find the program to start").because(error))?;
        let arguments: Vec<_> = std::env::args_os().skip(1).collect();
        let (sender, events) = mpsc::channel();
        let none = vec![false; places.len()];
        let mut processes = Self { children: Vec::new(), events, reported: none.clone(), done: none };
        for place in places {
            let mut command = Command::new(&program);
            command.args(&arguments).arg("--child").arg(place.to_text()?);
            processes.spawn(command, place.rank, &sender)?;
        }
        Ok(processes)
    }

    fn spawn(&mut self, mut command: Command, rank: usize, sender: &Sender<Event>) -> Result<(), Failure> {
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let failure = |error| Failure::run(format!("can't start rank {rank}")).because(error);
        let mut child = command.spawn().map_err(failure)?;
        let stdout = child.stdout.take();
        self.children.push(child);
        let sender = sender.clone();
        let reader = thread::Builder::new().name(format!("rank {rank}"));
        reader.spawn(move || read(rank, stdout, &sender)).map(drop).map_err(failure)
    }

    /// Waits for the next event, at most this long.
    pub(crate) fn next(&mut self, limit: Duration) -> Option<Event> {
        let event = self.events.recv_timeout(limit).ok()?;
        match &event {
            Event::Report(rank, Report::Done { .. }) => {
                self.done[*rank] = true;
                self.reported[*rank] = true;
            }
            Event::Report(rank, Report::Failed { .. }) => self.reported[*rank] = true,
            _ => {}
        }
        Some(event)
    }

    /// Returns whether the rank has reported that its work is done.
    pub(crate) fn is_done(&self, rank: usize) -> bool {
        self.done[rank]
    }

    /// Returns whether the rank has reported that its work is done, or that it failed.
    pub(crate) fn has_reported(&self, rank: usize) -> bool {
        self.reported[rank]
    }

    /// Sends a signal to a rank.
    pub(crate) fn signal(&self, rank: usize, signal: Signal) -> Result<(), Failure> {
        let failure = |error| Failure::run(format!("can't send a signal to rank {rank}")).because(error);
        // The process has not been waited for, so that its number is its own.
        kill_process(Pid::from_child(&self.children[rank]), signal).map_err(failure)
    }

    /// Returns how the process of a rank that closed its output ended.
    pub(crate) fn status(&mut self, rank: usize) -> String {
        match self.end(rank, Instant::now() + Duration::from_secs(1)) {
            Some(status) => status,
            None => "it closed its output, and runs on".to_owned(),
        }
    }

    /// Waits until all processes have ended, and kills those that have not within `limit`. Returns the first of those.
    pub(crate) fn wait(mut self, limit: Duration) -> Result<(), usize> {
        let end = Instant::now() + limit;
        (0..self.children.len()).try_for_each(|rank| self.end(rank, end).map(drop).ok_or(rank))
    }

    fn end(&mut self, rank: usize, end: Instant) -> Option<String> {
        loop {
            match self.children[rank].try_wait() {
                Ok(Some(status)) => return Some(status.to_string()),
                Ok(None) if Instant::now() < end => thread::sleep(Duration::from_millis(2)),
                Ok(None) => return None,
                Err(error) => return Some(error.to_string()),
            }
        }
    }
}

impl Drop for Processes {
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

/// Reads the reports of a rank until it closes its output.
fn read(rank: usize, stdout: Option<ChildStdout>, sender: &Sender<Event>) {
    let Some(stdout) = stdout else { return };
    let mut stdout = BufReader::new(stdout);
    let mut line = Vec::new();
    loop {
        line.clear();
        match stdout.by_ref().take(LONGEST).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => break,
            Ok(_) => {}
        }
        let event = match serde_json::from_slice(&line) {
            Ok(report) => Event::Report(rank, report),
            Err(_) => {
                let text = String::from_utf8_lossy(&line);
                Event::Garbage(rank, text.trim_end().chars().take(200).collect())
            }
        };
        if sender.send(event).is_err() {
            return;
        }
    }
    // The receiver may have ended.
    let _ = sender.send(Event::End(rank));
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    fn shell(scripts: &[&str]) -> Processes {
        let (sender, events) = mpsc::channel();
        let none = vec![false; scripts.len()];
        let mut processes = Processes { children: Vec::new(), events, reported: none.clone(), done: none };
        for (rank, script) in scripts.iter().enumerate() {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            processes.spawn(command, rank, &sender).unwrap();
        }
        processes
    }

    #[test]
    fn reports_arrive_and_then_the_end() {
        let mut processes = shell(&[r#"echo '"Alive"'; echo '{"Done":{"wrong":2}}'"#]);
        assert!(matches!(processes.next(PATIENCE), Some(Event::Report(0, Report::Alive))));
        assert!(!processes.is_done(0));
        assert!(matches!(processes.next(PATIENCE), Some(Event::Report(0, Report::Done { wrong: 2 }))));
        assert!(processes.is_done(0) && processes.has_reported(0));
        assert!(matches!(processes.next(PATIENCE), Some(Event::End(0))));
        processes.wait(PATIENCE).unwrap();
    }

    #[test]
    fn a_killed_rank_is_named_with_its_signal() {
        let mut processes = shell(&["sleep 60", "kill -9 $$"]);
        assert!(matches!(processes.next(PATIENCE), Some(Event::End(1))));
        assert!(!processes.has_reported(1));
        let status = processes.status(1);
        assert!(status.contains("signal: 9"), "{status}");
    }

    #[test]
    fn text_that_is_no_report_is_shown() {
        let mut processes = shell(&["echo hello"]);
        assert!(matches!(processes.next(PATIENCE), Some(Event::Garbage(0, text)) if text == "hello"));
    }

    #[test]
    fn processes_that_do_not_end_are_killed() {
        let processes = shell(&["exec sleep 600"]);
        let pid = processes.children[0].id();
        assert_eq!(processes.wait(Duration::from_millis(10)), Err(0));
        assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
    }
}
