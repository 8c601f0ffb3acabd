//! Drives a job: all modes in turn, a few steps each, and compares them. Between steps, it reads the variables of
//! the parameter servers, for tests and checkpoints.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::de::DeserializeOwned;
use tonic_rdma_commands::output::note;
use tonic_rdma_commands::process::Child;
use tonic_rdma_commands::remote::Host;
use tonic_rdma_commands::{Context as _, Failure};

use super::outcome::{Comparison, Death, ModeResult, Point};
use super::parts::{Command, Floats, MOST_WRITTEN, Parts, Reports, SILENCE, SentTensor, StepsReport};
use crate::array::{Block, failure};
use crate::checkpoint::{Checkpoint, Folder};
use crate::data::{Data, SAME_SAMPLES};
use crate::network::{Values, Variable};
use crate::options::{OnDeath, Options, cores};
use crate::processes::{Restarts, start};
use crate::step::JobShape;
use crate::variables;

/// A job under way.
struct Coordinator<'a> {
    job: &'a Options,
    hosts: &'a [Arc<Host>],
    data: Data,
    /// The shape with all workers, and that with those that are left.
    first: JobShape,
    shape: JobShape,
    parts: Parts,
    /// The process of each part.
    members: Vec<usize>,
    results: Vec<ModeResult>,
    deaths: Vec<Death>,
    /// Where checkpoints are, the one that the parts begin with, and the step of the latest one.
    folder: Option<Folder>,
    begins: Option<Checkpoint>,
    saved: u64,
    restarts: Restarts,
    /// The next step, and the one with which the parts began; nothing before they are connected.
    step: u64,
    began: Option<u64>,
    /// In what the latest deaths were seen, for people to read.
    within: String,
}

/// Carries out a job whose graph has this shape, with a share of the processes at each of `hosts`.
pub(crate) fn run(job: &Options, shape: JobShape, hosts: &[Arc<Host>]) -> Result<Comparison, Failure> {
    // Data that is missing is found before any process starts, and so is a checkpoint that can't be used.
    let data = job.samples()?;
    let samples = data.train.len();
    if job.batch < shape.workers || job.batch > samples {
        return Err(Failure::usage(format!(
            "--batch is {}, and has to be at least the number of workers ({}) and at most the number of samples ({samples})",
            job.batch, shape.workers
        )));
    }
    let steps = (samples / job.batch).saturating_mul(job.epochs).min(job.steps.unwrap_or(usize::MAX)) as u64;
    let folder = Folder::open(job, shape.workers, data.hash())?;
    let mut coordinator = Coordinator::start(job, shape, hosts, data, folder)?;
    loop {
        let done = coordinator.go_on(steps);
        if done.is_err() && coordinator.began.is_some() && coordinator.lost().is_empty() {
            coordinator.parts.await_death();
        }
        if !coordinator.lost().is_empty() && job.on_death == OnDeath::Restart {
            coordinator.start_again()?;
        } else if !coordinator.lost().is_empty() && coordinator.began.is_some() {
            coordinator.go_on_without()?;
        } else if let Some(sent) = done? {
            return Ok(coordinator.finish(sent));
        }
    }
}

/// Starts the processes of a job.
fn start_parts(job: &Options, shape: &JobShape, hosts: &[Arc<Host>]) -> Result<Parts, Failure> {
    let (processes, events) = start(job, hosts, None)?;
    for (part, process) in processes.iter().enumerate() {
        note(&format!("{} is {}", shape.name(part), process.place()));
    }
    Ok(Parts { processes, events, deadline: job.deadline, silence: SILENCE, dead: BTreeMap::new() })
}

impl<'a> Coordinator<'a> {
    fn start(
        job: &'a Options,
        shape: JobShape,
        hosts: &'a [Arc<Host>],
        data: Data,
        folder: Option<Folder>,
    ) -> Result<Self, Failure> {
        let begins = folder.as_ref().map_or(Ok(None), |folder| folder.begin(job.resume))?;
        let result = |mode: &String| ModeResult { mode: mode.clone(), ..ModeResult::default() };
        let mut coordinator = Self {
            job,
            hosts,
            data,
            parts: start_parts(job, &shape, hosts)?,
            members: (0..shape.parts()).collect(),
            results: job.mode.iter().map(result).collect(),
            first: shape.clone(),
            shape,
            deaths: Vec::new(),
            folder,
            begins: None,
            saved: 0,
            restarts: Restarts::default(),
            step: 0,
            began: None,
            within: "before the first step".to_owned(),
        };
        coordinator.begin_with(begins);
        Ok(coordinator)
    }

    /// Makes a checkpoint, or the first values, what the parts begin with.
    fn begin_with(&mut self, checkpoint: Option<Checkpoint>) {
        let losses = checkpoint.as_ref().map_or(&[][..], |checkpoint| &checkpoint.losses);
        (self.step, self.began) = (losses.len() as u64, None);
        for result in &mut self.results {
            result.losses = losses.to_vec();
            result.points.retain(|point| point.step <= self.step);
            result.look_for(self.job.target_accuracy);
        }
        (self.saved, self.begins) = (self.step, checkpoint);
    }

    /// Connects all parts, and gives them the variables of the checkpoint.
    fn begin(&mut self) -> Result<(), Failure> {
        self.connect(self.step)?;
        for (index, Variable { name, values, velocities, .. }) in
            self.begins.take().into_iter().flat_map(|checkpoint| checkpoint.variables).enumerate()
        {
            let part = self.shape.keeper(index);
            for (velocities, all) in [(false, values), (true, velocities)] {
                for (chunk, elements) in all.chunks(MOST_WRITTEN).enumerate() {
                    let (name, from, elements) =
                        (name.clone(), chunk * MOST_WRITTEN, Floats(elements.to_vec()));
                    self.one::<()>(part, Command::Write { name, velocities, from, elements })?;
                }
            }
        }
        self.began = Some(self.step);
        Ok(())
    }

    /// Connects all parts. Their variables go on with `version`.
    fn connect(&mut self, version: u64) -> Result<(), Failure> {
        let listening: Vec<(String, u64)> = self.all(|_| Command::Listen)?;
        let (peers, samples): (Vec<String>, Vec<u64>) = listening.into_iter().unzip();
        if let Some(other) = samples.iter().position(|hash| samples.first() != Some(hash)) {
            let [first, other] = [0, other].map(|part| self.shape.name(part));
            return Err(Failure::run(format!("{other} has other samples than {first}: {SAME_SAMPLES}")));
        }
        let shape = self.shape.clone();
        let connect = |part| Command::Connect { shape: shape.clone(), part, peers: peers.clone(), version };
        self.all::<()>(connect).map(drop)
    }

    /// Connects the parts, or does what is due at this step: a checkpoint, a test, or both. Otherwise runs the
    /// steps until the next of them in all modes, and compares them. After the last step, returns how each part
    /// sent its tensors in each mode.
    fn go_on(&mut self, last: u64) -> Result<Option<Vec<Vec<Vec<SentTensor>>>>, Failure> {
        let from = self.step;
        let Some(began) = self.began else { return self.begin().map(|()| None) };
        let [tests, saves] = [self.job.test_every, self.job.checkpoint_every].map(|every| every as u64);
        let tested = self.results.first().and_then(|result| result.points.last()).map(|point| point.step);
        let ends = from >= last || self.reached();
        let test = from > 1 && (from.is_multiple_of(tests) || from >= last) && tested != Some(from);
        let save = self.folder.is_some() && self.saved != from && (from.is_multiple_of(saves) || ends);
        if test || save {
            self.within = format!("in the test or the checkpoint after step {from}");
            return self.look(test, save).map(|()| None);
        }
        if ends {
            self.within = "after the last step".to_owned();
            return self.all(|_| Command::Sent).map(Some);
        }
        // The first step is counted for itself, because its tensors are not in registered memory yet.
        let is_first = from == began;
        let next = |every: u64| (from / every + 1) * every;
        let stop = if self.folder.is_some() { next(tests).min(next(saves)) } else { next(tests) };
        let to = if is_first { from + 1 } else { stop }.min(last);
        let workers = self.shape.workers;
        for (mode, name) in self.job.mode.iter().enumerate() {
            self.within = format!("in mode {name}, in a step from {from} on");
            let ran: Vec<StepsReport> = self.all(|_| Command::Run { mode, from, to })?;
            if let Some(result) = self.results.get_mut(mode) {
                result.add(&ran, workers, is_first);
            }
        }
        self.step = to;
        self.compare_losses(to).map(|()| None)
    }

    /// Checks that all modes have had the same losses, bit by bit.
    fn compare_losses(&self, to: u64) -> Result<(), Failure> {
        let Some((first, others)) = self.results.split_first() else { return Ok(()) };
        for other in others {
            let mut pairs = first.losses.iter().zip(&other.losses);
            let differs = pairs.position(|(one, two)| one.to_bits() != two.to_bits());
            if first.losses.len() != other.losses.len() || differs.is_some() {
                let step = differs.unwrap_or(to as usize);
                let loss = |result: &ModeResult| result.losses.get(step).copied().unwrap_or(f64::NAN);
                return Err(Failure::run(format!(
                    "step {step}: the loss is {} in mode {}, and {} in mode {}; the same seed has to give the same bits in all modes",
                    loss(first),
                    first.mode,
                    loss(other),
                    other.mode
                )));
            }
        }
        Ok(())
    }

    /// Reads the variables of the first mode, and tests them, or writes a checkpoint of them, or both. All modes
    /// have the same ones, which is checked.
    fn look(&mut self, test: bool, save: bool) -> Result<(), Failure> {
        let hashes: Vec<Vec<String>> = self.all(|_| Command::Hash)?;
        for of_modes in hashes {
            if let Some(other) = of_modes.iter().position(|hash| of_modes.first() != Some(hash)) {
                let [first, other] =
                    [0, other].map(|mode| self.job.mode.get(mode).map_or("", String::as_str));
                return Err(Failure::run(format!(
                    "step {}: the weights in mode {other} differ from those in mode {first}; the same seed has to give the same bits in all modes",
                    self.step
                )));
            }
        }
        let mut variables = Vec::new();
        for (index, (name, dims)) in self.first.model.shapes().into_iter().enumerate() {
            let read = Command::Read { name: name.clone(), velocities: save };
            let mut read =
                self.one::<Vec<Floats>>(self.shape.keeper(index), read)?.into_iter().map(|each| each.0);
            let mut next = || read.next().unwrap_or_default();
            variables.push(Variable { name, dims, values: next(), velocities: next() });
        }
        let losses = self.results.first().map(|result| result.losses.clone()).unwrap_or_default();
        let checkpoint = Checkpoint { losses, variables };
        if let Some(folder) = self.folder.as_ref().filter(|_| save) {
            folder.save(&checkpoint)?;
            self.saved = self.step;
            note(&format!("step {}: a checkpoint is written", self.step));
        }
        let values = |variable: Variable| Ok((variable.name, Block::new(&variable.dims, variable.values)?));
        let values: Values =
            checkpoint.variables.into_iter().map(values).collect::<Result<_, _>>().map_err(failure)?;
        let weights = format!("{:016x}", variables::hash(&values));
        self.results.iter_mut().for_each(|result| result.weights.clone_from(&weights));
        if test { self.test(&values) } else { Ok(()) }
    }

    fn test(&mut self, values: &Values) -> Result<(), Failure> {
        let samples = &self.data.test;
        let which = 0..self.job.test_samples.min(samples.len());
        let [loss, correct, number] = self.first.model.test(values, samples, which).map_err(failure)?;
        let (loss, accuracy) = (loss / number.max(1.0), correct / number.max(1.0));
        for result in &mut self.results {
            result.points.push(Point { step: self.step, seconds: result.seconds, loss, accuracy });
            result.look_for(self.job.target_accuracy);
        }
        let times = self.results.iter().map(|result| format!("{} {:.2} s", result.mode, result.seconds));
        let (percent, times) = (accuracy * 100.0, times.collect::<Vec<_>>().join(", "));
        note(&format!("step {}: loss {loss:.4}, accuracy {percent:.2} %; {times}", self.step));
        Ok(())
    }

    fn reached(&self) -> bool {
        self.job.target_accuracy.is_some()
            && self.results.iter().all(|result| result.time_to_target_s.is_some())
    }

    /// Returns the members that died.
    fn lost(&self) -> Vec<usize> {
        self.members.iter().copied().filter(|member| self.parts.dead.contains_key(member)).collect()
    }

    /// Starts all processes again, in place of those that died and of those that still run, which go on from the
    /// newest checkpoint.
    fn start_again(&mut self) -> Result<(), Failure> {
        let (lost, died) = (self.lost(), self.how_all_died());
        let newest = self.folder.as_ref().map_or(Ok(None), |folder| folder.begin(true))?;
        self.begin_with(newest);
        self.restarts.count(&died, self.step)?;
        self.parts.processes.iter_mut().for_each(Child::kill);
        self.shape = self.first.clone();
        self.parts = start_parts(self.job, &self.first, self.hosts).context(died.clone())?;
        self.members = (0..self.first.parts()).collect();
        self.deaths.push(Death { processes: lost, step: self.step, how: died });
        Ok(())
    }

    /// Goes on without the workers that died, from the last step that is complete, or ends with an error that
    /// names them.
    fn go_on_without(&mut self) -> Result<(), Failure> {
        let mut processes = Vec::new();
        loop {
            let (lost, died) = (self.lost(), self.how_all_died());
            processes.extend(&lost);
            let reason = if self.job.on_death == OnDeath::Fail {
                Some(
                    "--on-death continue goes on without such a worker, and --on-death restart from a checkpoint",
                )
            } else if lost.iter().any(|process| *process >= self.first.workers) {
                Some(
                    "it kept variables that no other process has, and --on-death restart would go on from a checkpoint",
                )
            } else {
                (lost.len() >= self.shape.workers).then_some("no worker is left")
            };
            if let Some(reason) = reason {
                return Err(Failure::run(format!("{died}; {reason}")));
            }
            self.members.retain(|member| !lost.contains(member));
            self.shape.workers -= lost.len();
            let connected = self.connect_again(&died);
            // Others may have died since.
            if self.lost().is_empty() {
                // Losses of steps that were not complete everywhere are not known; those of complete steps that
                // no report came for neither.
                self.step = connected?;
                self.began = Some(self.step);
                let known = usize::try_from(self.step).unwrap_or(usize::MAX);
                self.results.iter_mut().for_each(|result| result.losses.resize(known, f64::NAN));
                self.deaths.push(Death { processes, step: self.step, how: died });
                return Ok(());
            }
        }
    }

    /// Connects the members that are left. Returns the number of steps that are complete at all of them.
    fn connect_again(&mut self, died: &str) -> Result<u64, Failure> {
        let complete: Vec<u64> = self.all(|_| Command::Complete)?;
        // Workers keep no variables.
        let version = complete.into_iter().skip(self.shape.workers).min().unwrap_or(0);
        note(&format!("{died}; {} workers go on from step {version}", self.shape.workers));
        self.connect(version).map(|()| version)
    }

    /// Makes the result. `sent` has the tensors of each part in each mode.
    fn finish(mut self, sent: Vec<Vec<Vec<SentTensor>>>) -> Comparison {
        for part in sent {
            self.results.iter_mut().zip(part).for_each(|(result, tensors)| result.tensors.extend(tensors));
        }
        Comparison {
            model: self.first.model,
            workers: self.first.workers,
            servers: self.first.servers,
            batch: self.first.batch,
            parameters: self.first.model.parameters(),
            cores: cores(),
            target: self.job.target_accuracy,
            deaths: self.deaths,
            modes: self.results,
        }
    }

    /// Gives all parts a command, and returns their reports.
    fn all<T: DeserializeOwned>(&mut self, command: impl Fn(usize) -> Command) -> Result<Vec<T>, Failure> {
        let commands = self.members.iter().enumerate().map(|(part, process)| (*process, command(part)));
        let reports = self.parts.ask(commands.collect())?;
        self.values(reports)
    }

    fn one<T: DeserializeOwned>(&mut self, part: usize, command: Command) -> Result<T, Failure> {
        let process = self.members.get(part).copied().unwrap_or(part);
        let reports = self.parts.ask(vec![(process, command)])?;
        self.values(reports)?.pop().ok_or_else(|| Failure::run("a part did not report"))
    }

    /// Returns the values of reports, if no part has died or failed.
    fn values<T: DeserializeOwned>(&self, reports: Reports) -> Result<Vec<T>, Failure> {
        let (mut done, mut reasons) = (Vec::new(), Vec::new());
        for (process, report) in reports {
            match report {
                Some(Ok(value)) => done.push(value),
                Some(Err(reason)) => reasons.push(format!("{}: {reason}", self.first.name(process))),
                None if self.parts.dead.contains_key(&process) => reasons.push(self.how_died(process)),
                None => {}
            }
        }
        if !reasons.is_empty() {
            return Err(Failure::run(reasons.join("; ")));
        }
        let values = done.into_iter().map(serde_json::from_value);
        values.collect::<Result<_, _>>().context("a part reported something else than was asked")
    }

    /// Says how the members died that did, and in what.
    fn how_all_died(&self) -> String {
        let died = self.lost().into_iter().map(|process| self.how_died(process));
        format!("{}, {}", died.collect::<Vec<_>>().join("; "), self.within)
    }

    /// Says how a process died, which it names by its first part.
    fn how_died(&self, process: usize) -> String {
        let place = self.parts.processes.get(process).map_or_else(String::new, Child::place);
        let how = self.parts.dead.get(&process).map_or("", String::as_str);
        format!("{} ({place}) {how}", self.first.name(process))
    }
}

impl ModeResult {
    /// Adds a run, as all parts report it: the workers, and then the parameter servers.
    fn add(&mut self, ran: &[StepsReport], workers: usize, is_first: bool) {
        let steps = ran.first().map_or(0, |first| first.losses.len());
        for step in 0..steps {
            let losses = ran.iter().take(workers).filter_map(|ran| ran.losses.get(step));
            self.losses.push(losses.map(|loss| f64::from(*loss)).sum());
        }
        // A run is over when its slowest part is done.
        self.seconds += ran.iter().map(|ran| ran.elapsed).fold(0.0, f64::max);
        if let Some(server) = ran.get(workers) {
            self.steps_s.extend(&server.steps);
        }
        let sent = if is_first { &mut self.sent_in_first_step } else { &mut self.sent_later };
        *sent = ran.iter().fold(*sent, |sum, ran| sum.combined(ran.sent, u64::saturating_add));
    }

    /// Finds the first test that reached the accuracy that the job is for.
    fn look_for(&mut self, target: Option<f64>) {
        let reached = |point: &&Point| target.is_some_and(|target| point.accuracy >= target);
        self.time_to_target_s = self.points.iter().find(reached).map(|point| point.seconds);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_takes_as_long_as_its_slowest_part() {
        let ran = |loss: f32, elapsed: f64| StepsReport {
            losses: vec![loss],
            steps: vec![elapsed / 2.0],
            elapsed,
            ..StepsReport::default()
        };
        let mut result = ModeResult::default();
        result.add(&[ran(1.0, 0.5), ran(2.0, 3.0), ran(9.0, 1.0)], 2, true);
        result.add(&[ran(1.0, 2.0), ran(2.0, 0.25), ran(9.0, 1.0)], 2, false);
        assert_eq!((result.seconds, &result.losses[..]), (5.0, &[3.0, 3.0][..]));
        // The durations of steps are those of the first server.
        assert_eq!(result.steps_s, [0.5, 0.5]);
    }
}
