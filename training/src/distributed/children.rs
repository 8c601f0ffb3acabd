//! The processes of the parts, as the coordinator sees them.

use std::collections::HashMap;
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, Command as Program, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use super::messages::{Command, Job, Report};
use super::process::ALIVE;
use crate::failure::Failure;
use crate::processes::THREADS;

/// How long the other parts may take to answer after one has failed or died, beyond the deadline of the job.
const GRACE: Duration = Duration::from_secs(15);

/// How long a process may say nothing. It says every [`ALIVE`] that it runs, unless it is stopped.
const SILENCE: Duration = Duration::from_secs(12 * ALIVE.as_secs());
/// The longest wait for an event, after which the clocks are looked at.
const TICK: Duration = Duration::from_millis(200);

/// All processes of a job. They end when this is dropped.
pub(super) struct Children {
    children: Vec<Running>,
    events: Receiver<(usize, Event)>,
    deadline: Duration,
    silence: Duration,
}

struct Running {
    process: Child,
    stdin: Option<ChildStdin>,
}

enum Event {
    Report(Report),
    /// stdout has ended.
    Gone,
}

/// What became of a command that some parts got.
pub(super) struct Answers {
    /// The reports, in the order of the commands. A part that died has none.
    pub(super) reports: Vec<Option<Report>>,
    /// The children that died, and how.
    pub(super) died: Vec<(usize, String)>,
}

impl Children {
    /// Starts `number` processes.
    pub(super) fn start(number: usize, job: &Job) -> Result<Self, Failure> {
        let failed = |error: io::Error| Failure::run("can't start the processes").because(error);
        let text = serde_json::to_string(job).map_err(|error| failed(error.into()))?;
        let program = std::env::current_exe().map_err(failed)?;
        let (sender, events) = channel();
        let deadline = Duration::from_secs_f64(job.deadline);
        let mut children = Self { children: Vec::new(), events, deadline, silence: SILENCE };
        for number in 0..number {
            let mut process = Program::new(&program)
                .args(["--parent", &std::process::id().to_string(), "--part", &text])
                .env(THREADS, "1")
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .map_err(failed)?;
            let (stdin, stdout) = (process.stdin.take(), process.stdout.take());
            children.children.push(Running { process, stdin });
            let sender = sender.clone();
            thread::Builder::new()
                .name(format!("reports of {number}"))
                .spawn(move || {
                    let lines = stdout.into_iter().flat_map(|stdout| BufReader::new(stdout).lines());
                    forward(number, lines, &sender);
                })
                .map_err(failed)?;
        }
        Ok(children)
    }

    /// Returns the number of the process of a child.
    pub(super) fn process(&self, child: usize) -> u32 {
        self.children.get(child).map_or(0, |child| child.process.id())
    }

    /// Gives each of some children a command, and waits for their reports. After the first failure or death, the others have the deadline
    /// of the job to answer. Those that don't are ended, and so is a child that says nothing for too long.
    pub(super) fn ask(&mut self, commands: Vec<(usize, Command)>) -> Result<Answers, Failure> {
        let mut answers = Answers { reports: commands.iter().map(|_| None).collect(), died: Vec::new() };
        let members: Vec<usize> = commands.iter().map(|(child, _)| *child).collect();
        for (child, command) in commands {
            self.tell(child, &command)?;
        }
        let mut trouble: Option<Instant> = None;
        // In time that this process waited, so that a pause of the whole job does not count.
        let mut silent: HashMap<usize, Duration> = HashMap::new();
        loop {
            let is_dead = |child: usize| answers.died.iter().any(|(dead, _)| *dead == child);
            let waiting: Vec<usize> = members
                .iter()
                .zip(&answers.reports)
                .filter(|(child, report)| report.is_none() && !is_dead(**child))
                .map(|(child, _)| *child)
                .collect();
            if waiting.is_empty() {
                return Ok(answers);
            }
            if trouble.is_some_and(|since| since.elapsed() > self.deadline + GRACE) {
                for child in waiting {
                    self.end(child);
                    answers.died.push((child, "does not answer, and was ended".to_owned()));
                }
                continue;
            }
            let is_silent = |child: &&usize| silent.get(*child).is_some_and(|since| *since > self.silence);
            if let Some(child) = waiting.iter().find(is_silent).copied() {
                trouble.get_or_insert_with(Instant::now);
                self.end(child);
                let seconds = self.silence.as_secs();
                answers.died.push((child, format!("has said nothing for {seconds} s, and was ended")));
                continue;
            }
            match self.events.recv_timeout(TICK) {
                Ok((child, Event::Report(Report::Alive))) => {
                    silent.remove(&child);
                }
                Ok((child, Event::Report(report))) => {
                    silent.remove(&child);
                    if matches!(report, Report::Failed { .. }) {
                        trouble.get_or_insert_with(Instant::now);
                    }
                    let place = members.iter().position(|member| *member == child);
                    match place.and_then(|place| answers.reports.get_mut(place)) {
                        Some(slot) if slot.is_none() => *slot = Some(report),
                        _ => {
                            return Err(Failure::run(format!(
                                "process {child} reported without a command: {report:?}"
                            )));
                        }
                    }
                }
                Ok((child, Event::Gone)) => {
                    trouble.get_or_insert_with(Instant::now);
                    let how = self.end(child);
                    answers.died.push((child, how));
                }
                Err(RecvTimeoutError::Timeout) => {
                    for child in waiting {
                        *silent.entry(child).or_default() += TICK;
                    }
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Failure::run("all processes have ended"));
                }
            }
        }
    }

    /// Writes a command. A child that has ended is found by the end of its stdout.
    fn tell(&mut self, child: usize, command: &Command) -> Result<(), Failure> {
        let text = serde_json::to_string(command)
            .map_err(|error| Failure::run("can't make JSON of a command").because(error))?;
        if let Some(stdin) = self.children.get_mut(child).and_then(|child| child.stdin.as_mut()) {
            let _ = writeln!(stdin, "{text}").and_then(|()| stdin.flush());
        }
        Ok(())
    }

    /// Ends a child if it still runs. Returns how it ended.
    fn end(&mut self, child: usize) -> String {
        let Some(running) = self.children.get_mut(child) else { return "is unknown".to_owned() };
        running.stdin = None;
        // It may be about to end by itself.
        let until = Instant::now() + Duration::from_secs(1);
        loop {
            match running.process.try_wait() {
                Ok(Some(status)) => return format!("has ended: {status}"),
                Ok(None) if Instant::now() < until => thread::sleep(Duration::from_millis(10)),
                Ok(None) => {
                    let _ = running.process.kill();
                    return running
                        .process
                        .wait()
                        .map_or_else(|error| error.to_string(), |status| format!("was ended: {status}"));
                }
                Err(error) => return format!("can't be waited for: {error}"),
            }
        }
    }
}

fn forward(child: usize, lines: impl Iterator<Item = io::Result<String>>, events: &Sender<(usize, Event)>) {
    for line in lines.map_while(Result::ok) {
        let report = serde_json::from_str(&line)
            .unwrap_or_else(|error| Report::Failed { reason: format!("it reported {line:?}: {error}") });
        if events.send((child, Event::Report(report))).is_err() {
            return;
        }
    }
    // The coordinator may have ended before.
    let _ = events.send((child, Event::Gone));
}

impl Drop for Children {
    fn drop(&mut self) {
        // A process whose stdin ends leaves the others in order.
        self.children.iter_mut().for_each(|child| child.stdin = None);
        let until = Instant::now() + Duration::from_secs(5);
        for child in &mut self.children {
            while matches!(child.process.try_wait(), Ok(None)) && Instant::now() < until {
                thread::sleep(Duration::from_millis(10));
            }
            let _ = child.process.kill();
            let _ = child.process.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    fn sleeping() -> Running {
        let mut process = Program::new("sleep").arg("600").stdin(Stdio::piped()).spawn().unwrap();
        let stdin = process.stdin.take();
        Running { process, stdin }
    }

    #[test]
    fn processes_that_say_nothing_are_ended_and_named() {
        let (sender, events) = channel();
        let (deadline, silence) = (Duration::from_secs(600), Duration::from_secs(1));
        let mut children = Children { children: vec![sleeping(), sleeping()], events, deadline, silence };
        let answers = children.ask(vec![(0, Command::Listen), (1, Command::Listen)]).unwrap();
        let mut died = answers.died;
        died.sort();
        let how = "has said nothing for 1 s, and was ended".to_owned();
        assert_eq!(died, [(0, how.clone()), (1, how)]);
        drop(sender);
    }

    #[test]
    fn a_process_that_says_that_it_runs_is_waited_for() {
        let (sender, events) = channel();
        // The process is silent for longer than this in all, and never for as long at a time, also on a slow machine.
        let (deadline, silence) = (Duration::from_secs(600), Duration::from_secs(4));
        let mut children = Children { children: vec![sleeping()], events, deadline, silence };
        let speaking = thread::spawn(move || {
            for _ in 0..14 {
                sender.send((0, Event::Report(Report::Alive))).unwrap();
                thread::sleep(Duration::from_millis(500));
            }
            sender.send((0, Event::Report(Report::Listening { address: "there".to_owned() }))).unwrap();
        });
        let answers = children.ask(vec![(0, Command::Listen)]).unwrap();
        assert_eq!(answers.reports, [Some(Report::Listening { address: "there".to_owned() })]);
        assert_eq!(answers.died, []);
        speaking.join().unwrap();
    }
}
