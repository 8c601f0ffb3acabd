//! Drives a job: all modes in turn, a few steps each, and compares them.

use std::io::Write as _;

use super::children::{Answers, Children};
use super::messages::{Command, Job, Ran, Report, Sent, SentTensor};
use super::outcome::{Comparison, Death, ModeResult, Point};
use super::samples::Dataset;
use crate::failure::Failure;
use crate::processes::cores;
use crate::step::{Model, Shape, Synchrony};

/// What is to be done.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Plan {
    pub(crate) job: Job,
    pub(crate) shape: Shape,
    pub(crate) epochs: u64,
    /// The largest number of steps.
    pub(crate) steps: Option<u64>,
    /// Steps between two tests. In between, the modes take turns.
    pub(crate) test_every: u64,
    /// The training ends when this share of the tested samples is right.
    pub(crate) target: Option<f64>,
    /// Whether the training goes on without a worker that dies.
    pub(crate) goes_on: bool,
}

/// A job under way.
struct Coordinator<'a> {
    plan: &'a Plan,
    shape: Shape,
    children: Children,
    /// The child of each part.
    members: Vec<usize>,
    parameters: usize,
    results: Vec<ModeResult>,
    deaths: Vec<Death>,
    /// The next step.
    step: u64,
}

/// Carries out a plan.
pub(crate) fn run(plan: &Plan) -> Result<Comparison, Failure> {
    // Data that is missing is found before any process starts.
    let dataset = Dataset::read(&plan.shape.model, &plan.job.data, plan.job.length)?;
    let (samples, batch) = (dataset.len(), plan.shape.batch);
    drop(dataset);
    if batch < plan.shape.workers || batch > samples {
        return Err(Failure::usage(format!(
            "--batch is {batch}, and has to be at least the number of workers ({}) and at most the number of samples ({samples})",
            plan.shape.workers
        )));
    }
    let of_epoch = (samples / batch) as u64;
    let steps = of_epoch.saturating_mul(plan.epochs).min(plan.steps.unwrap_or(u64::MAX));
    let mut coordinator = Coordinator::start(plan)?;
    coordinator.connect(0)?;
    while coordinator.step < steps && !coordinator.reached() {
        coordinator.go_on(steps)?;
    }
    coordinator.finish()
}

impl<'a> Coordinator<'a> {
    fn start(plan: &'a Plan) -> Result<Self, Failure> {
        let parts = plan.shape.parts();
        let children = Children::start(parts, &plan.job)?;
        for part in 0..parts {
            say(&format!("{} is process {}", plan.shape.name(part), children.process(part)));
        }
        let results = plan.job.modes.iter().map(|mode| ModeResult::new(mode)).collect();
        Ok(Self {
            plan,
            shape: plan.shape.clone(),
            children,
            members: (0..parts).collect(),
            parameters: 0,
            results,
            deaths: Vec::new(),
            step: 0,
        })
    }

    /// Connects all parts. Their variables go on with `version`.
    fn connect(&mut self, version: u64) -> Result<(), Failure> {
        let mut peers = Vec::new();
        for report in self.all(|_| Command::Listen)? {
            match report {
                Report::Listening { address } => peers.push(address),
                other => return Err(unexpected(&other)),
            }
        }
        let shape = self.shape.clone();
        let connect = |part| Command::Connect { shape: shape.clone(), part, peers: peers.clone(), version };
        for report in self.all(connect)? {
            match report {
                Report::Connected { parameters } => self.parameters = parameters,
                other => return Err(unexpected(&other)),
            }
        }
        Ok(())
    }

    /// Runs the steps until the next test in all modes, compares them, and tests.
    fn go_on(&mut self, last: u64) -> Result<(), Failure> {
        // The first step is counted for itself, because its tensors are not in registered memory yet.
        let every = self.plan.test_every.max(1);
        let to = if self.step == 0 { 1 } else { (self.step / every + 1) * every }.min(last);
        for mode in 0..self.results.len() {
            let from = self.step;
            let answers = self.ask(|_| Command::Run { mode, from, to })?;
            if !answers.died.is_empty() {
                return self.go_on_without(answers, mode);
            }
            let ran = self.reports(answers)?.into_iter().map(|report| match report {
                Report::Ran(ran) => Ok(ran),
                other => Err(unexpected(&other)),
            });
            let ran = ran.collect::<Result<Vec<Ran>, Failure>>()?;
            let (chief, workers) = (self.shape.chief(), self.shape.workers);
            if let Some(result) = self.results.get_mut(mode) {
                result.add(&ran, chief, workers, from);
            }
        }
        self.step = to;
        self.compare_losses(to)?;
        if to > 1 && (to % every == 0 || to == last) {
            self.test()?;
        }
        Ok(())
    }

    /// Checks that all modes have had the same losses, bit by bit.
    fn compare_losses(&self, to: u64) -> Result<(), Failure> {
        let Some((first, others)) = self.results.split_first() else { return Ok(()) };
        for other in others {
            let differs =
                first.losses.iter().zip(&other.losses).position(|(one, two)| one.to_bits() != two.to_bits());
            if first.losses.len() != other.losses.len() || differs.is_some() {
                let step = differs.map_or(to, |step| step as u64);
                let loss =
                    |result: &ModeResult| result.losses.get(step as usize).copied().unwrap_or(f64::NAN);
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
        for mode in 0..self.results.len() {
            let weights = self.hash(chief, mode)?;
            if let Some(result) = self.results.get_mut(mode) {
                result.weights = weights;
            }
        }
        if let Some((first, others)) = self.results.split_first()
            && let Some(other) = others.iter().find(|other| other.weights != first.weights)
        {
            return Err(Failure::run(format!(
                "step {}: the weights in mode {} differ from those in mode {}; the same seed has to give the same bits in all modes",
                self.step, other.mode, first.mode
            )));
        }
        let (loss, accuracy) = match self.one(chief, Command::Test { mode: 0 })? {
            Report::Tested { loss, accuracy } => (loss, accuracy),
            other => return Err(unexpected(&other)),
        };
        for result in &mut self.results {
            let point = Point { step: self.step, seconds: result.seconds, loss, accuracy };
            result.points.push(point);
            if self.plan.target.is_some_and(|target| accuracy >= target) {
                result.time_to_target_s.get_or_insert(result.seconds);
            }
        }
        let times = self.results.iter().map(|result| format!("{} {:.2} s", result.mode, result.seconds));
        say(&format!(
            "step {}: loss {loss:.4}, accuracy {:.2} %; {}",
            self.step,
            accuracy * 100.0,
            times.collect::<Vec<_>>().join(", ")
        ));
        Ok(())
    }

    fn reached(&self) -> bool {
        self.plan.target.is_some() && self.results.iter().all(|result| result.time_to_target_s.is_some())
    }

    /// Goes on without the workers that died, from the last step that is complete, or ends with an error that names them.
    fn go_on_without(&mut self, answers: Answers, mode: usize) -> Result<(), Failure> {
        let part_of = |child: usize| self.members.iter().position(|member| *member == child).unwrap_or(child);
        let name = |child: usize| {
            let first = self.plan.shape.name(child);
            format!("{first} (process {})", self.children.process(child))
        };
        let died: Vec<String> =
            answers.died.iter().map(|(child, how)| format!("{} {how}", name(*child))).collect();
        let mode_name = self.results.get(mode).map_or("", |result| result.mode.as_str());
        let died = format!("{}, in mode {mode_name}, in a step from {} on", died.join("; "), self.step);
        if !self.plan.goes_on {
            return Err(Failure::run(format!("{died}; --on-death continue goes on without such a worker")));
        }
        let kept_all = |child: usize| match self.shape.synchrony {
            Synchrony::ParameterServer => part_of(child) == self.shape.workers,
            Synchrony::Allreduce => part_of(child) == 0 && matches!(self.shape.model, Model::Recurrent(_)),
        };
        if answers.died.iter().any(|(child, _)| kept_all(*child)) {
            return Err(Failure::run(format!(
                "{died}; it kept variables that no other process has, so the training can't go on"
            )));
        }
        if answers.died.len() >= self.shape.workers {
            return Err(Failure::run(format!("{died}; no worker is left")));
        }
        let workers = answers.died.iter().map(|(child, _)| *child).collect::<Vec<_>>();
        self.members.retain(|member| !workers.contains(member));
        self.shape.workers -= workers.len();
        let complete = self.all(|_| Command::Complete { mode })?;
        let versions = complete.into_iter().enumerate().map(|(part, report)| match report {
            // Workers of a parameter server keep no variables.
            Report::Complete { .. }
                if self.shape.parts() > self.shape.workers && part < self.shape.workers =>
            {
                Ok(None)
            }
            Report::Complete { version } => Ok(Some(version)),
            other => Err(unexpected(&other)),
        });
        let versions = versions.collect::<Result<Vec<_>, Failure>>()?;
        let version = versions.into_iter().flatten().min().unwrap_or(0);
        say(&format!("{died}; {} workers go on from step {version}", self.shape.workers));
        self.deaths.push(Death { workers, step: version, how: died });
        // Losses of steps that were not complete everywhere are not known; those of complete steps that no report came for neither.
        self.step = version;
        self.results.iter_mut().for_each(|result| result.go_on_from(version));
        self.connect(version)
    }

    fn finish(mut self) -> Result<Comparison, Failure> {
        let mut sent: Vec<Vec<SentTensor>> = Vec::new();
        for mode in 0..self.results.len() {
            self.compare_workers(mode)?;
            let mut of_mode = Vec::new();
            for report in self.all(|_| Command::Sent { mode })? {
                match report {
                    Report::Sent(tensors) => of_mode.extend(tensors),
                    other => return Err(unexpected(&other)),
                }
            }
            sent.push(of_mode);
        }
        for (result, tensors) in self.results.iter_mut().zip(sent) {
            result.tensors = tensors;
        }
        Ok(Comparison {
            synchrony: self.plan.shape.synchrony,
            model: self.plan.shape.model,
            workers: self.plan.shape.workers,
            batch: self.plan.shape.batch,
            parameters: self.parameters,
            cores: cores(),
            target: self.plan.target,
            deaths: std::mem::take(&mut self.deaths),
            modes: std::mem::take(&mut self.results),
        })
    }

    /// Checks that all parts that keep the same variables have the same bits.
    fn compare_workers(&mut self, mode: usize) -> Result<(), Failure> {
        if self.shape.synchrony != Synchrony::Allreduce {
            return Ok(());
        }
        // Only worker 0 has the table of a recurrent network.
        let first = if matches!(self.shape.model, Model::Recurrent(_)) { 1 } else { 0 };
        let mut weights: Option<String> = None;
        for part in first..self.shape.workers {
            let hash = self.hash(part, mode)?;
            if weights.get_or_insert_with(|| hash.clone()) != &hash {
                return Err(Failure::run(format!(
                    "{} has other weights than {} after step {}",
                    self.shape.name(part),
                    self.shape.name(first),
                    self.step
                )));
            }
        }
        Ok(())
    }

    fn hash(&mut self, part: usize, mode: usize) -> Result<String, Failure> {
        match self.one(part, Command::Hash { mode })? {
            Report::Hash { weights } => Ok(weights),
            other => Err(unexpected(&other)),
        }
    }

    /// Gives all parts a command, and returns their reports.
    fn all(&mut self, command: impl Fn(usize) -> Command) -> Result<Vec<Report>, Failure> {
        let answers = self.ask(command)?;
        self.reports(answers)
    }

    fn one(&mut self, part: usize, command: Command) -> Result<Report, Failure> {
        let child = self.members.get(part).copied().unwrap_or(part);
        let answers = self.children.ask(vec![(child, command)])?;
        self.reports(answers)?.pop().ok_or_else(|| Failure::run("a part did not report"))
    }

    fn ask(&mut self, command: impl Fn(usize) -> Command) -> Result<Answers, Failure> {
        let commands = self.members.iter().enumerate().map(|(part, child)| (*child, command(part)));
        self.children.ask(commands.collect())
    }

    /// Returns the reports if no part has died or failed.
    fn reports(&self, answers: Answers) -> Result<Vec<Report>, Failure> {
        if let Some((child, how)) = answers.died.first() {
            return Err(Failure::run(format!(
                "{} (process {}) {how}",
                self.plan.shape.name(*child),
                self.children.process(*child)
            )));
        }
        let reasons: Vec<String> = answers
            .reports
            .iter()
            .zip(&self.members)
            .filter_map(|(report, child)| match report {
                Some(Report::Failed { reason }) => {
                    Some(format!("{}: {reason}", self.plan.shape.name(*child)))
                }
                _ => None,
            })
            .collect();
        if !reasons.is_empty() {
            return Err(Failure::run(reasons.join("; ")));
        }
        Ok(answers.reports.into_iter().flatten().collect())
    }
}

impl ModeResult {
    fn new(mode: &str) -> Self {
        Self { mode: mode.to_owned(), ..Self::default() }
    }

    /// Adds a run from step `from` on, as all parts report it.
    fn add(&mut self, ran: &[Ran], chief: usize, workers: usize, from: u64) {
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
        for ran in ran {
            *sent += ran.sent;
        }
    }

    fn go_on_from(&mut self, version: u64) {
        self.losses.resize(usize::try_from(version).unwrap_or(usize::MAX), f64::NAN);
        self.steps_s.truncate(self.losses.len());
        self.sent_later = Sent::default();
    }
}

fn unexpected(report: &Report) -> Failure {
    match report {
        Report::Failed { reason } => Failure::run(reason.clone()),
        other => Failure::run(format!("a part reported something else than was asked: {other:?}")),
    }
}

/// Writes progress. stderr may be closed; the results have the same values.
fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_takes_as_long_as_its_slowest_part() {
        let ran = |loss: f32, elapsed: f64| Ran {
            losses: vec![loss],
            steps: vec![elapsed / 2.0],
            elapsed,
            ..Ran::default()
        };
        let mut result = ModeResult::new("rdma-cp");
        result.add(&[ran(1.0, 0.5), ran(2.0, 3.0), ran(9.0, 1.0)], 2, 2, 0);
        result.add(&[ran(1.0, 2.0), ran(2.0, 0.25), ran(9.0, 1.0)], 2, 2, 1);
        assert_eq!((result.seconds, &result.losses[..]), (5.0, &[3.0, 3.0][..]));
        // The durations of steps are those of the chief.
        assert_eq!(result.steps_s, [0.5, 0.5]);
    }
}
