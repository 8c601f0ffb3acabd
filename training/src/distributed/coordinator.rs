//! Drives a job: all modes in turn, a few steps each, and compares them.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::de::DeserializeOwned;
use tonic_rdma_commands::process::Child;
use tonic_rdma_commands::remote::Host;
use tonic_rdma_commands::{Context as _, Failure};

use super::outcome::{Comparison, Death, ModeResult, Point};
use super::parts::{Command, Parts, Reports, SILENCE, Sent, SentTensor, StepsReport};
use crate::data::SAME_SAMPLES;
use crate::options::{OnDeath, Options, cores};
use crate::processes::{say, start};
use crate::step::{JobShape, Synchrony};

/// A job under way.
struct Coordinator<'a> {
    job: &'a Options,
    /// The shape with all workers, and that with those that are left.
    first: JobShape,
    shape: JobShape,
    parts: Parts,
    /// The process of each part.
    members: Vec<usize>,
    results: Vec<ModeResult>,
    deaths: Vec<Death>,
    /// The next step.
    step: u64,
    /// In what the latest deaths were seen, for people to read.
    within: String,
}

/// Carries out a job whose graph has this shape, with a part of the processes at `host` if there is one.
pub(crate) fn run(job: &Options, shape: JobShape, host: Option<&Arc<Host>>) -> Result<Comparison, Failure> {
    // Data that is missing is found before any process starts.
    let samples = job.samples()?.train.len();
    if job.batch < shape.workers || job.batch > samples {
        return Err(Failure::usage(format!(
            "--batch is {}, and has to be at least the number of workers ({}) and at most the number of samples ({samples})",
            job.batch, shape.workers
        )));
    }
    let steps = (samples / job.batch).saturating_mul(job.epochs).min(job.steps.unwrap_or(usize::MAX)) as u64;
    let mut coordinator = Coordinator::start(job, shape, host)?;
    coordinator.connect(0)?;
    loop {
        let done = coordinator.go_on(steps);
        if done.is_err() && coordinator.lost().is_empty() {
            coordinator.parts.await_death();
        }
        if !coordinator.lost().is_empty() {
            coordinator.go_on_without()?;
        } else if let Some(sent) = done? {
            return Ok(coordinator.finish(sent));
        }
    }
}

impl<'a> Coordinator<'a> {
    fn start(job: &'a Options, shape: JobShape, host: Option<&Arc<Host>>) -> Result<Self, Failure> {
        let (processes, events) = start(job, host, None)?;
        for (part, process) in processes.iter().enumerate() {
            say(&format!("{} is {}", shape.name(part), process.place()));
        }
        let members = (0..shape.parts()).collect();
        let (deadline, dead) = (job.deadline, BTreeMap::new());
        let parts = Parts { processes, events, deadline, silence: SILENCE, dead };
        let result = |mode: &String| ModeResult { mode: mode.clone(), ..ModeResult::default() };
        let results = job.mode.iter().map(result).collect();
        let (first, deaths, within) = (shape.clone(), Vec::new(), String::new());
        Ok(Self { job, first, shape, parts, members, results, deaths, step: 0, within })
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

    /// Tests if a test is due, or runs the steps until the next one in all modes, and compares them. After the
    /// last step, returns how each part sent its tensors in each mode.
    fn go_on(&mut self, last: u64) -> Result<Option<Vec<Vec<Vec<SentTensor>>>>, Failure> {
        let (every, from) = (self.job.test_every as u64, self.step);
        let tested = self.results.first().and_then(|result| result.points.last()).map(|point| point.step);
        if from > 1 && (from % every == 0 || from == last) && tested != Some(from) {
            self.within = format!("in the test after step {from}");
            return self.test().map(|()| None);
        }
        if from >= last || self.reached() {
            self.within = "after the last step".to_owned();
            self.compare_workers()?;
            return self.all(|_| Command::Sent).map(Some);
        }
        // The first step is counted for itself, because its tensors are not in registered memory yet.
        let to = if from == 0 { 1 } else { (from / every + 1) * every }.min(last);
        let (chief, workers) = (self.shape.chief(), self.shape.workers);
        for (mode, name) in self.job.mode.iter().enumerate() {
            self.within = format!("in mode {name}, in a step from {from} on");
            let ran: Vec<StepsReport> = self.all(|_| Command::Run { mode, from, to })?;
            if let Some(result) = self.results.get_mut(mode) {
                result.add(&ran, chief, workers, from);
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

    /// Tests the weights. All modes have the same ones, which is checked, so one of them is tested.
    fn test(&mut self) -> Result<(), Failure> {
        let chief = self.shape.chief();
        let weights: Vec<String> = self.one(chief, Command::Hash)?;
        self.results.iter_mut().zip(weights).for_each(|(result, weights)| result.weights = weights);
        if let Some((first, others)) = self.results.split_first()
            && let Some(other) = others.iter().find(|other| other.weights != first.weights)
        {
            return Err(Failure::run(format!(
                "step {}: the weights in mode {} differ from those in mode {}; the same seed has to give the same bits in all modes",
                self.step, other.mode, first.mode
            )));
        }
        let (loss, accuracy): (f64, f64) = self.one(chief, Command::Test)?;
        for result in &mut self.results {
            result.points.push(Point { step: self.step, seconds: result.seconds, loss, accuracy });
            if self.job.target_accuracy.is_some_and(|target| accuracy >= target) {
                result.time_to_target_s.get_or_insert(result.seconds);
            }
        }
        let times = self.results.iter().map(|result| format!("{} {:.2} s", result.mode, result.seconds));
        let (percent, times) = (accuracy * 100.0, times.collect::<Vec<_>>().join(", "));
        say(&format!("step {}: loss {loss:.4}, accuracy {percent:.2} %; {times}", self.step));
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

    /// Goes on without the workers that died, from the last step that is complete, or ends with an error that
    /// names them.
    fn go_on_without(&mut self) -> Result<(), Failure> {
        // The chief keeps variables that no other process has, unless all workers of a ring keep all of them.
        let alone = self.shape.synchrony == Synchrony::ParameterServer || self.shape.model.reads_texts();
        let mut workers = Vec::new();
        loop {
            let lost = self.lost();
            workers.extend(&lost);
            let died = workers.iter().map(|process| self.how_died(*process)).collect::<Vec<_>>().join("; ");
            let died = format!("{died}, {}", self.within);
            let chief = self.members.get(self.shape.chief());
            let reason = if self.job.on_death == OnDeath::Fail {
                Some("--on-death continue goes on without such a worker")
            } else if alone && chief.is_some_and(|chief| lost.contains(chief)) {
                Some("it kept variables that no other process has, so the training can't go on")
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
                self.results.iter_mut().for_each(|result| result.go_on_from(self.step));
                self.deaths.push(Death { workers, step: self.step, how: died });
                return Ok(());
            }
        }
    }

    /// Connects the members that are left. Returns the number of steps that are complete at all of them.
    fn connect_again(&mut self, died: &str) -> Result<u64, Failure> {
        let complete: Vec<u64> = self.all(|_| Command::Complete)?;
        // Workers of a parameter server keep no variables.
        let of_workers = if self.shape.parts() > self.shape.workers { self.shape.workers } else { 0 };
        let version = complete.into_iter().skip(of_workers).min().unwrap_or(0);
        say(&format!("{died}; {} workers go on from step {version}", self.shape.workers));
        self.connect(version).map(|()| version)
    }

    /// Makes the result. `sent` has the tensors of each part in each mode.
    fn finish(mut self, sent: Vec<Vec<Vec<SentTensor>>>) -> Comparison {
        for part in sent {
            self.results.iter_mut().zip(part).for_each(|(result, tensors)| result.tensors.extend(tensors));
        }
        Comparison {
            synchrony: self.first.synchrony,
            model: self.first.model,
            workers: self.first.workers,
            batch: self.first.batch,
            parameters: self.first.model.parameters(),
            cores: cores(),
            target: self.job.target_accuracy,
            deaths: self.deaths,
            modes: self.results,
        }
    }

    /// Checks that all parts that keep the same variables have the same bits.
    fn compare_workers(&mut self) -> Result<(), Failure> {
        if self.shape.synchrony != Synchrony::Allreduce {
            return Ok(());
        }
        let weights: Vec<Vec<String>> = self.all(|_| Command::Hash)?;
        // Only worker 0 has the table of a recurrent network.
        let first = usize::from(self.shape.model.reads_texts());
        let mut others = weights.iter().enumerate().skip(first);
        match others.find(|(_, other)| weights.get(first) != Some(other)) {
            None => Ok(()),
            Some((part, _)) => {
                let [one, other] = [part, first].map(|part| self.shape.name(part));
                Err(Failure::run(format!("{one} has other weights than {other} after step {}", self.step)))
            }
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

    /// Says how a process died, which it names by its first part.
    fn how_died(&self, process: usize) -> String {
        let place = self.parts.processes.get(process).map_or_else(String::new, Child::place);
        let how = self.parts.dead.get(&process).map_or("", String::as_str);
        format!("{} ({place}) {how}", self.first.name(process))
    }
}

impl ModeResult {
    /// Adds a run from step `from` on, as all parts report it.
    fn add(&mut self, ran: &[StepsReport], chief: usize, workers: usize, from: u64) {
        let steps = ran.first().map_or(0, |first| first.losses.len());
        for step in 0..steps {
            let losses = ran.iter().take(workers).filter_map(|ran| ran.losses.get(step));
            self.losses.push(losses.map(|loss| f64::from(*loss)).sum());
        }
        // A run is over when its slowest part is done.
        self.seconds += ran.iter().map(|ran| ran.elapsed).fold(0.0, f64::max);
        if let Some(chief) = ran.get(chief) {
            self.steps_s.extend(&chief.steps);
        }
        let sent = if from == 0 { &mut self.sent_in_first_step } else { &mut self.sent_later };
        *sent = ran.iter().fold(*sent, |sum, ran| sum.combined(ran.sent, u64::saturating_add));
    }

    fn go_on_from(&mut self, version: u64) {
        self.losses.resize(usize::try_from(version).unwrap_or(usize::MAX), f64::NAN);
        self.steps_s.truncate(self.losses.len());
        self.sent_later = Sent::default();
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
        result.add(&[ran(1.0, 0.5), ran(2.0, 3.0), ran(9.0, 1.0)], 2, 2, 0);
        result.add(&[ran(1.0, 2.0), ran(2.0, 0.25), ran(9.0, 1.0)], 2, 2, 1);
        assert_eq!((result.seconds, &result.losses[..]), (5.0, &[3.0, 3.0][..]));
        // The durations of steps are those of the chief.
        assert_eq!(result.steps_s, [0.5, 0.5]);
    }
}
