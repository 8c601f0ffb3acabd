//! The processes of the parts, as the coordinator sees them.

use std::collections::HashMap;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::messages::{Command, Report};
use super::process::ALIVE;
use crate::failure::{Context as _, Failure};
use crate::processes::{Processes, TICK};

/// How long the other parts may take to answer after one has failed or died, beyond the deadline of the job.
const GRACE: Duration = Duration::from_secs(15);

/// How long a process may say nothing. It says every [`ALIVE`] that it runs, unless it is stopped.
pub(super) const SILENCE: Duration = Duration::from_secs(12 * ALIVE.as_secs());

/// The processes of all parts.
pub(super) struct Parts {
    pub(super) processes: Processes,
    pub(super) deadline: Duration,
    pub(super) silence: Duration,
}

/// What became of a command that some parts got.
pub(super) struct Answers {
    /// The process of each command, and what it reported or why it failed. One that died has no report.
    pub(super) reports: Vec<(usize, Option<Result<Value, String>>)>,
    /// The processes that died, and how.
    pub(super) died: Vec<(usize, String)>,
}

impl Parts {
    /// Gives each of some processes a command, and waits for their reports. After the first failure or death, the others have the
    /// deadline of the job to answer. Those that don't are ended, and so is a process that says nothing for too long.
    pub(super) fn ask(&mut self, commands: Vec<(usize, Command)>) -> Result<Answers, Failure> {
        let mut answers = Answers { reports: Vec::new(), died: Vec::new() };
        for (process, command) in commands {
            let text = serde_json::to_string(&command).context("can't make JSON of a command")?;
            self.processes.tell(process, &text);
            answers.reports.push((process, None));
        }
        let mut trouble: Option<Instant> = None;
        // In time that this process waited, so that a pause of the whole job does not count.
        let mut silent: HashMap<usize, Duration> = HashMap::new();
        loop {
            let is_dead = |process: usize| answers.died.iter().any(|(dead, _)| *dead == process);
            let open =
                answers.reports.iter().filter(|(process, report)| report.is_none() && !is_dead(*process));
            let waiting: Vec<usize> = open.map(|(process, _)| *process).collect();
            if waiting.is_empty() {
                return Ok(answers);
            }
            let too_long = trouble.is_some_and(|since| since.elapsed() > self.deadline + GRACE);
            let is_silent = |process: &usize| silent.get(process).is_some_and(|since| *since > self.silence);
            if let Some(process) = waiting.iter().copied().find(|process| too_long || is_silent(process)) {
                trouble.get_or_insert_with(Instant::now);
                // How it ends says nothing: it is ended here.
                let _ = self.processes.end(process);
                let how = match too_long {
                    true => "does not answer".to_owned(),
                    false => format!("has said nothing for {} s", self.silence.as_secs()),
                };
                answers.died.push((process, format!("{how}, and was ended")));
                continue;
            }
            match self.processes.lines.recv_timeout(TICK) {
                Ok((process, Some(line))) => {
                    silent.remove(&process);
                    let report = match serde_json::from_str(&line) {
                        Ok(Report::Alive) => continue,
                        Ok(Report::Done(value)) => Ok(value),
                        Ok(Report::Failed(reason)) => Err(reason),
                        Err(error) => Err(format!("it reported {line:?}: {error}")),
                    };
                    if report.is_err() {
                        trouble.get_or_insert_with(Instant::now);
                    }
                    match answers.reports.iter_mut().find(|(asked, _)| *asked == process) {
                        Some((_, slot)) if slot.is_none() => *slot = Some(report),
                        _ => {
                            return Err(Failure::run(format!(
                                "process {process} reported without a command: {line}"
                            )));
                        }
                    }
                }
                Ok((process, None)) => {
                    trouble.get_or_insert_with(Instant::now);
                    let how = match self.processes.end(process) {
                        Ok(status) => format!("has ended: {status}"),
                        Err(error) => format!("can't be waited for: {error}"),
                    };
                    answers.died.push((process, how));
                }
                Err(RecvTimeoutError::Timeout) => {
                    for process in waiting {
                        *silent.entry(process).or_default() += TICK;
                    }
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Failure::run("all processes have ended"));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::thread;

    use super::*;
    use crate::processes::tests::sleeping;

    #[test]
    fn processes_that_say_nothing_are_ended_and_named() {
        let (sender, lines) = channel();
        let (deadline, silence) = (Duration::from_secs(600), Duration::from_secs(1));
        let processes = Processes { all: vec![sleeping(), sleeping()], lines };
        let mut parts = Parts { processes, deadline, silence };
        let answers = parts.ask(vec![(0, Command::Listen), (1, Command::Listen)]).unwrap();
        let mut died = answers.died;
        died.sort();
        let how = "has said nothing for 1 s, and was ended".to_owned();
        assert_eq!(died, [(0, how.clone()), (1, how)]);
        drop(sender);
    }

    #[test]
    fn a_process_that_says_that_it_runs_is_waited_for() {
        let (sender, lines) = channel();
        // The process is silent for longer than this in all, and never for as long at a time, also on a slow machine.
        let (deadline, silence) = (Duration::from_secs(600), Duration::from_secs(4));
        let mut parts = Parts { processes: Processes { all: vec![sleeping()], lines }, deadline, silence };
        let speaking = thread::spawn(move || {
            let say = |report| sender.send((0, Some(serde_json::to_string(&report).unwrap()))).unwrap();
            for _ in 0..14 {
                say(Report::Alive);
                thread::sleep(Duration::from_millis(500));
            }
            say(Report::Done("there".into()));
        });
        let answers = parts.ask(vec![(0, Command::Listen)]).unwrap();
        assert_eq!(answers.reports, [(0, Some(Ok("there".into())))]);
        assert_eq!(answers.died, []);
        speaking.join().unwrap();
    }
}
