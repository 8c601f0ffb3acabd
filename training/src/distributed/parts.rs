//! The processes of the parts, as the coordinator sees them, and what both say to each other. Each message is
//! a line of JSON. Each command is answered by one report. In between, a process says that it runs.

use std::collections::{BTreeMap, HashMap};
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD as STANDARD;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;
use tonic_rdma_commands::Failure;
use tonic_rdma_commands::process::{Child, Event, end_all, how_ended};

use super::process::ALIVE;
use crate::processes::{Events, TICK, refused};
use crate::step::JobShape;

/// How long a process that leaves may take.
const LEAVE: Duration = Duration::from_secs(5);

/// How long the other parts may take to answer after one has failed or died, beyond the deadline of the job.
const GRACE: Duration = Duration::from_secs(15);

/// How long the end of a process may come after the reports of those that have lost it.
const MOMENT: Duration = Duration::from_secs(1);

/// How long a process may say nothing. It says every [`ALIVE`] that it runs, unless it is stopped.
pub(super) const SILENCE: Duration = Duration::from_secs(12 * ALIVE.as_secs());

/// The processes of all parts. A process whose stdin ends leaves the others in order.
pub(super) struct Parts {
    pub(super) processes: Vec<Child>,
    pub(super) events: Events<Report>,
    pub(super) deadline: Duration,
    pub(super) silence: Duration,
    /// The processes that died, and how.
    pub(super) dead: BTreeMap<usize, String>,
}

/// The process of each command, and what it reported or why it failed. One that died before has no report.
pub(super) type Reports = Vec<(usize, Option<Result<Value, String>>)>;

impl Parts {
    /// Gives each of some processes a command, and waits for their reports. If one of them is dead, none gets a
    /// command. After the first failure or death, the others have the deadline of the job and `GRACE` to answer.
    /// Those that don't are ended, and so is a process that says nothing for too long.
    pub(super) fn ask(&mut self, commands: Vec<(usize, Command)>) -> Result<Reports, Failure> {
        let mut reports: Reports = commands.iter().map(|(process, _)| (*process, None)).collect();
        if reports.iter().any(|(process, _)| self.dead.contains_key(process)) {
            return Ok(reports);
        }
        for (process, command) in commands {
            self.processes.get_mut(process).map_or(Ok(()), |child| child.send(&command))?;
        }
        let mut trouble: Option<Instant> = None;
        // In time that this process waited, so that a pause of the whole job does not count.
        let mut silent: HashMap<usize, Duration> = HashMap::new();
        loop {
            let open = reports.iter().filter(|(_, report)| report.is_none()).map(|(process, _)| *process);
            let waiting: Vec<usize> = open.filter(|process| !self.dead.contains_key(process)).collect();
            if waiting.is_empty() {
                return Ok(reports);
            }
            let failed = |(process, report): &(usize, Option<Result<Value, String>>)| {
                report.as_ref().is_some_and(Result::is_err) || self.dead.contains_key(process)
            };
            if reports.iter().any(failed) {
                trouble.get_or_insert_with(Instant::now);
            }
            let too_long = trouble.is_some_and(|since| since.elapsed() > self.deadline + GRACE);
            let is_silent = |process: &usize| silent.get(process).is_some_and(|since| *since > self.silence);
            if let Some(process) = waiting.iter().copied().find(|process| too_long || is_silent(process)) {
                self.kill(process);
                let how = match too_long {
                    true => "does not answer".to_owned(),
                    false => format!("has said nothing for {} s", self.silence.as_secs()),
                };
                self.dead.insert(process, format!("{how}, and was ended"));
                continue;
            }
            let (process, event) = match self.events.recv_timeout(TICK) {
                Ok(event) => event,
                Err(RecvTimeoutError::Timeout) => {
                    for process in waiting {
                        *silent.entry(process).or_default() += TICK;
                    }
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Failure::run("all processes have ended"));
                }
            };
            // The end of a process that was ended here says no more.
            if self.dead.contains_key(&process) {
                continue;
            }
            silent.remove(&process);
            let report = match event {
                Event::Report(Report::Alive) => continue,
                Event::Report(Report::Done(value)) => Ok(value),
                Event::Report(Report::Failed(reason)) => Err(reason),
                Event::Garbage(line) => Err(format!("it reported {line:?}")),
                Event::Ended(_) | Event::Lost(_) => {
                    self.died(process, event);
                    continue;
                }
                Event::Refused { reason, usage } => {
                    let name = self.processes.get(process).map_or("a process", Child::name);
                    return Err(refused(name, &reason, usage));
                }
            };
            match reports.iter_mut().find(|(asked, _)| *asked == process) {
                Some((_, slot)) if slot.is_none() => *slot = Some(report),
                _ => {
                    return Err(Failure::run(format!(
                        "process {process} reported without a command: {report:?}"
                    )));
                }
            }
        }
    }

    /// Waits a moment for a process to die. Others may report that they have lost it before its own end is known.
    pub(super) fn await_death(&mut self) {
        let (end, before) = (Instant::now() + MOMENT, self.dead.len());
        while self.dead.len() == before
            && let Ok((process, event)) =
                self.events.recv_timeout(end.saturating_duration_since(Instant::now()))
        {
            self.died(process, event);
        }
    }

    /// Notes the death of a process, if the event says so and it is the first that does.
    fn died(&mut self, process: usize, event: Event<Report>) {
        let how = match event {
            Event::Ended(status) => how_ended(status),
            Event::Lost(reason) => format!("is lost: {reason}"),
            _ => return,
        };
        self.kill(process);
        self.dead.entry(process).or_insert(how);
    }

    fn kill(&mut self, process: usize) {
        if let Some(child) = self.processes.get_mut(process) {
            child.kill();
        }
    }
}

impl Drop for Parts {
    fn drop(&mut self) {
        end_all(&mut self.processes, LEAVE);
    }
}

/// What the coordinator tells a part, and what the part's report has then: a value for each mode, if the
/// command names none. Modes are called by their indices in the options.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Command {
    /// Read the samples, and listen for the other parts of the next connection. Report: the address, and the hash
    /// of the samples.
    Listen,
    /// Connect to the other parts, and make the trainers of all modes. The variables that this process has go
    /// on with `version`. If it has none yet, they are new, and of this version.
    Connect { shape: JobShape, part: usize, peers: Vec<String>, version: u64 },
    /// Run these steps in a mode. Report: [`StepsReport`].
    Run { mode: usize, from: u64, to: u64 },
    /// Drop the connection and the graphs. Report: the number of steps that are complete in all modes.
    Complete,
    /// Report the hash of the weights.
    Hash,
    /// Report the values of a variable in the first mode, and its velocities too: one or two [`Floats`].
    Read { name: String, velocities: bool },
    /// Change elements of a variable in all modes, from one on: its velocities, or its values.
    Write { name: String, velocities: bool, from: usize, elements: Floats },
    /// Report how each crossing tensor of this part was sent: many [`SentTensor`].
    Sent,
}

/// The most elements of a [`Command::Write`], so that the command fits into a message to another host.
pub(super) const MOST_WRITTEN: usize = 16 << 10;

/// Numbers. As JSON, they are the base64 of their bytes.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Floats(pub(crate) Vec<f32>);

impl Serialize for Floats {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&STANDARD.encode(bytemuck::cast_slice::<f32, u8>(&self.0)))
    }
}

impl<'de> Deserialize<'de> for Floats {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let bytes = STANDARD.decode(String::deserialize(from)?).map_err(D::Error::custom)?;
        if !bytes.len().is_multiple_of(size_of::<f32>()) {
            return Err(D::Error::custom(format!("{} bytes are no float32 numbers", bytes.len())));
        }
        Ok(Self(bytemuck::pod_collect_to_vec(&bytes)))
    }
}

/// What a part answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Report {
    /// The command is carried out.
    Done(Value),
    /// The part can't go on with the command.
    Failed(String),
    /// The process runs. It says so now and then, also while it carries out a command. This answers no
    /// command.
    Alive,
}

/// What a part did in a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct StepsReport {
    /// This worker's part of the loss of each step. A parameter server has none.
    pub(crate) losses: Vec<f32>,
    /// The duration of each step, in seconds.
    pub(crate) steps: Vec<f64>,
    /// The duration of the run, in seconds.
    pub(crate) elapsed: f64,
    pub(crate) sent: Sent,
}

/// How tensors were sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Sent {
    pub(crate) tensors: u64,
    pub(crate) bytes: u64,
    /// Tensors that the sender copied.
    pub(crate) copied: u64,
    /// Tensors so small that they went in the request itself.
    pub(crate) inline: u64,
}

/// How a crossing tensor was sent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct SentTensor {
    pub(crate) name: String,
    /// `static` or `dynamic`.
    pub(crate) placement: String,
    /// What allocated the latest tensor: the node or the receive, and the number of allocations that it had
    /// made before.
    pub(crate) site: Option<(String, u32)>,
    pub(crate) sent: Sent,
}

impl Sent {
    /// Combines each count with that of `other`.
    pub(crate) fn combined(self, other: Self, combine: fn(u64, u64) -> u64) -> Self {
        Self {
            tensors: combine(self.tensors, other.tensors),
            bytes: combine(self.bytes, other.bytes),
            copied: combine(self.copied, other.copied),
            inline: combine(self.inline, other.inline),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::thread;

    use super::*;

    /// Starts processes that do nothing.
    fn sleeping(number: usize, events: Events<Report>, silence: Duration) -> Parts {
        let start = |number| {
            let mut command = std::process::Command::new("sleep");
            command.arg("600");
            Child::start(format!("process {number}"), command, |_| true).unwrap()
        };
        let processes = (0..number).map(start).collect();
        Parts { processes, events, deadline: Duration::from_secs(600), silence, dead: BTreeMap::new() }
    }

    #[test]
    fn processes_that_say_nothing_are_ended_and_named() {
        let (sender, events) = channel();
        let mut parts = sleeping(2, events, Duration::from_secs(1));
        assert_eq!(
            parts.ask(vec![(0, Command::Listen), (1, Command::Listen)]).unwrap(),
            [(0, None), (1, None)]
        );
        let how = "has said nothing for 1 s, and was ended".to_owned();
        assert_eq!(parts.dead, BTreeMap::from([(0, how.clone()), (1, how)]));
        drop(sender);
    }

    #[test]
    fn numbers_travel_bit_by_bit_and_the_longest_command_fits_into_a_message() {
        let elements = Floats([0.1, -0.0, f32::MIN_POSITIVE, f32::NAN, 1e30].repeat(MOST_WRITTEN / 5));
        let bits = |floats: &Floats| floats.0.iter().map(|number| number.to_bits()).collect::<Vec<_>>();
        let expected = bits(&elements);
        let name = "lstm.state-bias".to_owned();
        let command = Command::Write { name, velocities: true, from: usize::MAX, elements };
        let line = serde_json::to_string(&command).unwrap();
        assert!(line.len() < 100 << 10, "{}", line.len());
        let Command::Write { elements, .. } = serde_json::from_str(&line).unwrap() else { panic!("{line}") };
        assert_eq!(bits(&elements), expected);
        for (text, reason) in [("\"AAAA\"", "3 bytes are no float32"), ("\"?\"", "Invalid symbol")] {
            let error = serde_json::from_str::<Floats>(text).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
    }

    #[test]
    fn a_death_counts_once_and_fails_no_command_of_another_process() {
        let (sender, events) = channel();
        let mut parts = sleeping(3, events, Duration::from_secs(600));
        parts.dead.insert(2, "was ended".to_owned());
        let done = || Event::Report(Report::Done(1.into()));
        let happened =
            [(2, Event::Ended(None)), (2, done()), (1, Event::Lost("gone".to_owned())), (0, done())];
        happened.into_iter().for_each(|event| sender.send(event).unwrap());
        assert_eq!(parts.ask(vec![(0, Command::Hash)]).unwrap(), [(0, Some(Ok(1.into())))]);
        let dead = [(1, "is lost: gone".to_owned()), (2, "was ended".to_owned())];
        assert_eq!(parts.dead, BTreeMap::from(dead));
        // The next command of all does not wait for one that is known to be dead.
        assert_eq!(parts.ask(vec![(0, Command::Hash), (1, Command::Hash)]).unwrap(), [(0, None), (1, None)]);
    }

    #[test]
    fn a_process_that_says_that_it_runs_is_waited_for() {
        let (sender, events) = channel();
        // The process is silent for longer than this in all, and never for as long at a time, also on a slow
        // machine.
        let mut parts = sleeping(1, events, Duration::from_secs(4));
        let speaking = thread::spawn(move || {
            let say = |report| sender.send((0, Event::Report(report))).unwrap();
            for _ in 0..14 {
                say(Report::Alive);
                thread::sleep(Duration::from_millis(500));
            }
            say(Report::Done("there".into()));
        });
        assert_eq!(parts.ask(vec![(0, Command::Listen)]).unwrap(), [(0, Some(Ok("there".into())))]);
        assert!(parts.dead.is_empty());
        speaking.join().unwrap();
    }
}
