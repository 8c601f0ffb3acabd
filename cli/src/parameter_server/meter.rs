//! Measures each cell by short trials of all modes, round after round, so that drift affects all modes alike.
//! Starts and ends the processes of the cell.

use std::ops::Range;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use indicatif::ProgressBar;
use tokio::time::Instant;
use tonic_rdma_commands::ends::{own_arguments, parse_arguments};
use tonic_rdma_commands::remote::{Host, Request};
use tonic_rdma_commands::{Context as _, Failure, cores};

use crate::compare::modes::mode::{Contender, Mode};
use crate::compare::server::Addresses;
use crate::measure::machine::{available, lacking};
use crate::measure::process::{self, Children};
use crate::measure::transport::{LOCALHOST, RESTED};
use crate::parameter_server::children::{ChildCommand, Report, TrialRequest};
use crate::parameter_server::options::{
    Load, MAX_SERVERS, MAX_STEPS, MAX_WORKERS, ParameterServerOptions, ProcessJob, ServerRequest,
    TrainingCell,
};
use crate::parameter_server::show::{TrainingRow, TrainingTally, medians};

/// Measures cell after cell.
#[derive(Debug)]
pub(crate) struct TrainingMeter<'a> {
    options: &'a ParameterServerOptions,
    /// The host of the servers, if it is another one.
    host: Option<&'a Arc<Host>>,
    cores: Vec<usize>,
    progress: ProgressBar,
    /// The RDMA provider in use, if a mode needs one.
    pub(crate) provider: Option<String>,
    /// Whether all processes were pinned to the cores that they were given.
    pub(crate) pinned: bool,
    /// Number of tensors whose every byte was checked, and of tensors whose stamps were checked.
    pub(crate) every_byte: u64,
    pub(crate) stamps: u64,
    /// The number of the run, from 0 on.
    run: u32,
    /// Mini-batches of a trial, which the first run has found.
    steps: Vec<((Contender, TrainingCell, Load), u32)>,
}

impl<'a> TrainingMeter<'a> {
    pub(crate) fn new(
        options: &'a ParameterServerOptions,
        host: Option<&'a Arc<Host>>,
        progress: ProgressBar,
    ) -> Self {
        Self {
            options,
            host,
            cores: cores::allowed(),
            progress,
            provider: None,
            pinned: true,
            every_byte: 0,
            stamps: 0,
            run: 0,
            steps: Vec::new(),
        }
    }

    /// Measures every cell that has the memory for it, in each run, and returns the medians: a row for each mode.
    pub(crate) async fn measure(&mut self, planned: &[PlannedCell]) -> Result<Vec<TrainingRow>, Failure> {
        let measured = planned.iter().filter(|it| it.skipped.is_none());
        let trials: u64 =
            measured.map(|it| u64::from(self.options.trials()) * it.loads.len() as u64 + 2).sum();
        let contenders = self.options.contenders().len() as u64;
        self.progress.set_length(trials * contenders * u64::from(self.options.runs));
        let mut runs = Vec::new();
        for run in 0..self.options.runs {
            self.run = run;
            runs.push(self.measure_once(planned).await?);
        }
        Ok(medians(&runs))
    }

    async fn measure_once(&mut self, planned: &[PlannedCell]) -> Result<Vec<TrainingRow>, Failure> {
        let mut rows = Vec::new();
        for PlannedCell { cell, loads, skipped } in planned {
            match skipped {
                Some(reason) => {
                    for load in loads {
                        let each = self.options.contenders().into_iter();
                        rows.extend(
                            each.map(|contender| TrainingRow::skipped(contender, *cell, *load, reason)),
                        );
                    }
                }
                None => rows.extend(self.cell(*cell, loads).await?),
            }
        }
        Ok(rows)
    }

    /// Measures a cell with each of its loads, in the same processes.
    async fn cell(&mut self, cell: TrainingCell, loads: &[Load]) -> Result<Vec<TrainingRow>, Failure> {
        self.progress.set_message(format!("{}  starting", cell.label()));
        let mut session = Session::start(cell, self.options, self.host, &self.cores).await?;
        self.pinned &= session.pinned;
        self.provider = self.provider.take().or(session.provider.take());
        let contenders = self.options.contenders();
        for contender in &contenders {
            self.check_every_byte(&mut session, *contender, cell).await?;
        }
        let mut rows = Vec::new();
        for load in loads {
            rows.extend(self.load(&mut session, cell, *load).await?);
        }
        for contender in &contenders {
            self.check_every_byte(&mut session, *contender, cell).await?;
        }
        Ok(rows)
    }

    async fn load(
        &mut self,
        session: &mut Session,
        cell: TrainingCell,
        load: Load,
    ) -> Result<Vec<TrainingRow>, Failure> {
        let mut tallies = Vec::new();
        for contender in self.options.contenders() {
            let steps = self.steps(session, contender, cell, load).await?;
            tallies.push((TrainingTally::new(contender, cell, load, steps), Instant::now()));
        }
        let (modes, first) = (tallies.len(), self.run as usize);
        for round in first..first + self.options.trials() as usize {
            for trial in 0..modes {
                // Each round begins with another mode.
                let (tally, last) = &mut tallies[(trial + round) % modes];
                self.announce(tally.contender, cell, load);
                if last.elapsed() > RESTED {
                    session.trial(tally.contender, 1, false, load).await?;
                }
                let outcome = session.trial(tally.contender, tally.steps, false, load).await?;
                self.stamps += outcome.checked;
                tally.add(outcome);
                *last = Instant::now();
            }
        }
        Ok(tallies.into_iter().map(|(tally, _)| tally.row()).collect())
    }

    fn announce(&self, contender: Contender, cell: TrainingCell, load: Load) {
        let load = load.label().map(|load| format!(", {load}")).unwrap_or_default();
        self.progress.set_message(format!("{}{load}  {contender}", cell.label()));
        self.progress.inc(1);
    }

    /// Makes a mini-batch outside the measured time. Receivers check every byte of it. It also warms the
    /// memory.
    async fn check_every_byte(
        &mut self,
        session: &mut Session,
        contender: Contender,
        cell: TrainingCell,
    ) -> Result<(), Failure> {
        self.announce(contender, cell, Load::NONE);
        self.every_byte += session.trial(contender, 1, true, Load::NONE).await?.checked;
        Ok(())
    }

    /// Returns the number of mini-batches of a trial: the number of the command line, or as many as fit into
    /// the time. All runs have that of the first.
    async fn steps(
        &mut self,
        session: &mut Session,
        contender: Contender,
        cell: TrainingCell,
        load: Load,
    ) -> Result<u32, Failure> {
        let of = (contender, cell, load);
        let known = self.steps.iter().find(|(other, _)| *other == of).map(|(_, steps)| *steps);
        if let Some(steps) = self.options.steps.or(known) {
            return Ok(steps);
        }
        // Variants of the content alternate. Two mini-batches warm two of them, and the measured one is not
        // the first.
        let outcome = session.trial(contender, 2, false, load).await?;
        self.stamps += outcome.checked;
        let longest = outcome.times.iter().filter_map(|times| times.last()).max().copied();
        let longest = longest.unwrap_or_default().max(Duration::from_nanos(1));
        let trial = self.options.duration / self.options.trials();
        let steps = ((trial.as_secs_f64() / longest.as_secs_f64()).round() as u32).clamp(1, MAX_STEPS);
        self.steps.push((of, steps));
        Ok(steps)
    }
}

/// A cell of the plan.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PlannedCell {
    pub(crate) cell: TrainingCell,
    /// The loads to measure, in the same processes.
    pub(crate) loads: Vec<Load>,
    /// The reason why the cell can't be measured.
    pub(crate) skipped: Option<String>,
}

/// Returns the cells that `options` ask for. Cells beyond the memory are skipped. It is an error if all cells
/// are.
pub(crate) fn cells(options: &ParameterServerOptions) -> Result<Vec<PlannedCell>, Failure> {
    let mut wanted = Vec::new();
    for model in options.models() {
        for workers in &options.workers.0 {
            let servers = options.servers.beside(*workers) as usize;
            let cell = TrainingCell { model, servers, workers: *workers };
            wanted.push((cell, options.loads(model, *workers)?));
        }
    }
    plan(wanted, &options.modes(), available())
}

fn plan(
    wanted: Vec<(TrainingCell, Vec<Load>)>,
    modes: &[Mode],
    available: Option<u64>,
) -> Result<Vec<PlannedCell>, Failure> {
    let planned: Vec<PlannedCell> = wanted
        .into_iter()
        .map(|(cell, loads)| {
            let available = available.filter(|available| needed(cell, modes) > *available);
            let skipped =
                available.map(|available| format!("it {}", lacking(needed(cell, modes), available)));
            PlannedCell { cell, loads, skipped }
        })
        .collect();
    let fits = planned.iter().any(|it| it.skipped.is_none());
    match planned.first().filter(|_| !fits) {
        Some(PlannedCell { cell, skipped: Some(reason), .. }) => {
            Err(Failure::usage(format!("{}: {reason}: take fewer workers or a smaller model", cell.label())))
        }
        _ => Ok(planned),
    }
}

/// Returns the memory that all processes of a cell need together at most. Workers hold their own tensors, and
/// servers hold the variables once. Slots exist twice, one set for each direction. The mode that needs most
/// memory for messages in flight adds to this, in one direction at a time.
fn needed(cell: TrainingCell, modes: &[Mode]) -> u64 {
    let (bytes, workers) = (cell.bytes(), cell.workers as u64);
    let held = bytes * (1 + workers);
    let slots = if modes.iter().any(|mode| mode.carries_tensors()) { 2 * bytes * workers } else { 0 };
    let in_flight = |mode: &Mode| match mode {
        Mode::RdmaZerocp => 0,
        // Copies at the server and at the worker, which are kept for the next mini-batch.
        Mode::RdmaCp => 2 * bytes * workers,
        // The encoded message, and the receiver's buffer, which may have to grow.
        _ => 3 * bytes * workers,
    };
    held + slots + modes.iter().map(in_flight).max().unwrap_or(0)
}

/// Longest time until processes are ready, in addition to the times of their memory and of their connections.
const START: Duration = Duration::from_secs(30);
/// Longest time to make one connection, on average: on a busy machine, in a debug build.
const CONNECT: Duration = Duration::from_millis(250);
/// Longest time of a trial, in addition to the time of its bytes at [`SLOWEST`] (bytes a second).
const TIMEOUT: Duration = Duration::from_secs(30);
const SLOWEST: f64 = 20e6;
/// Time to wait for the end of another process after a failure. When a process ends, its peers may report
/// their own failures before the end of this process is seen.
const EXPLANATION: Duration = Duration::from_millis(500);

/// The subcommand that runs a server process.
const SERVER: &str = "parameter-server-server";

/// Makes the job of a caller's server process. `options` are those of the listening end.
pub(crate) fn admit(
    request: &Request,
    options: &ParameterServerOptions,
) -> Result<(String, Command), Failure> {
    let ServerRequest { arguments, cell, number } = request.job()?;
    let asked: ParameterServerOptions = parse_arguments(&arguments)?;
    let is_known = (1..=MAX_SERVERS as usize).contains(&cell.servers)
        && (1..=MAX_WORKERS as usize).contains(&cell.workers)
        && number < cell.servers;
    if !is_known {
        return Err(Failure::usage(format!("server {number} of {cell:?} is not started here")));
    }
    let (needs, limit) = (needed(cell, &asked.modes()), options.limit);
    if needs > limit {
        let lacking = lacking(needs, limit);
        return Err(Failure::usage(format!("--limit of the listening end: {} {lacking}", cell.label())));
    }
    let job = ProcessJob {
        options: ParameterServerOptions { provider: options.provider.clone(), ..asked },
        cell,
        number,
        core: core(&cores::allowed(), cell.servers, number),
        servers: Vec::new(),
        ip: request.ip,
        memory: Some(limit),
    };
    Ok((cell.label(), process::command(SERVER, &job)?))
}

/// The servers and workers of a cell: servers come first.
#[derive(Debug)]
pub(crate) struct Session {
    children: Children<Report>,
    cell: TrainingCell,
    /// The number of the next mini-batch.
    next: u64,
    /// Whether each process is pinned to the core that it was given.
    pub(crate) pinned: bool,
    /// The provider in use, if a mode needs one.
    pub(crate) provider: Option<String>,
}

/// The outcome of a trial of all workers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outcome {
    /// Times of the mini-batches, one list for each worker.
    pub(crate) times: Vec<Vec<Duration>>,
    /// CPU time that all processes used.
    pub(crate) cpu: Duration,
    pub(crate) checked: u64,
}

impl Session {
    /// Starts the processes, and waits until they are ready.
    pub(crate) async fn start(
        cell: TrainingCell,
        options: &ParameterServerOptions,
        host: Option<&Arc<Host>>,
        cores: &[usize],
    ) -> Result<Self, Failure> {
        let connections = (cell.workers * cell.servers * options.contenders().len()) as u32;
        let deadline = Instant::now()
            + START
            + CONNECT * connections
            + slowest(cell.bytes() * (cell.workers as u64 + 1));
        let mut session = Self { children: Children::new(), cell, next: 0, pinned: true, provider: None };
        let job = |number, position| ProcessJob {
            options: options.clone(),
            cell,
            number,
            core: core(cores, cell.servers, position),
            servers: Vec::new(),
            ip: host.map_or(LOCALHOST, |host| host.local_ip()),
            memory: None,
        };
        for server in 0..cell.servers {
            let name = match cell.servers {
                1 => "the server process".to_owned(),
                _ => format!("server process {server}"),
            };
            match host {
                Some(host) => {
                    let request = ServerRequest { arguments: own_arguments(2)?, cell, number: server };
                    session.children.start_at(host, &name, &request)?;
                }
                None => session.children.start(&name, process::command(SERVER, &job(server, server))?)?,
            }
        }
        let servers = session.receive_reports(session.servers(), deadline).await?;
        let addresses: Vec<Addresses> =
            servers.iter().filter_map(|server| server.addresses.clone()).collect();
        for worker in 0..cell.workers {
            let job = ProcessJob { servers: addresses.clone(), ..job(worker, cell.servers + worker) };
            let command = process::command("parameter-server-worker", &job)?;
            session.children.start(&format!("worker process {worker}"), command)?;
        }
        let workers = session.receive_reports(session.workers(), deadline).await?;
        session.pinned = servers.iter().chain(&workers).all(|ready| ready.pinned);
        session.provider = workers.iter().find_map(|ready| ready.provider.clone());
        let devices: Vec<String> = workers.into_iter().filter_map(|ready| ready.device).collect();
        if !devices.is_empty() {
            let attach = ChildCommand::Attach { workers: devices };
            session.children.send(session.servers(), &attach)?;
            session.receive_reports(session.servers(), deadline).await?;
        }
        Ok(session)
    }

    fn servers(&self) -> Range<usize> {
        0..self.cell.servers
    }

    fn workers(&self) -> Range<usize> {
        self.cell.servers..self.cell.servers + self.cell.workers
    }

    async fn receive_reports(
        &mut self,
        children: Range<usize>,
        deadline: Instant,
    ) -> Result<Vec<Report>, Failure> {
        self.children.receive_reports(children, deadline, EXPLANATION).await
    }

    /// Makes a trial: all workers make some mini-batches at the same time.
    pub(crate) async fn trial(
        &mut self,
        contender: Contender,
        steps: u32,
        every_byte: bool,
        load: Load,
    ) -> Result<Outcome, Failure> {
        let trial = TrialRequest { contender, first: self.next, steps, every_byte, load };
        self.next += u64::from(steps);
        let bytes = 2 * self.cell.bytes() * self.cell.workers as u64;
        // Workers may share a core.
        let computing = load.time * (1 + self.cell.workers as u32);
        let deadline = Instant::now() + TIMEOUT + (slowest(bytes) + computing) * steps;
        let (servers, workers) = (self.servers(), self.workers());
        self.children.send(0..workers.end, &ChildCommand::Trial(trial))?;
        let workers = self.receive_reports(workers, deadline).await?;
        self.children.send(servers.clone(), &ChildCommand::Collect)?;
        let servers = self.receive_reports(servers, deadline).await?;
        self.check(trial, &servers, &workers)?;
        let all = || workers.iter().chain(&servers);
        Ok(Outcome {
            cpu: all().map(|report| report.cpu).sum(),
            checked: all().map(|report| report.checked).sum(),
            times: workers.into_iter().map(|report| report.times).collect(),
        })
    }

    /// Checks that every process received through slots what was sent, and that all tensors were checked.
    /// Workers check every answer of their calls themselves.
    fn check(&self, trial: TrialRequest, servers: &[Report], workers: &[Report]) -> Result<(), Failure> {
        for (server, of_server) in servers.iter().enumerate() {
            for (worker, of_worker) in workers.iter().enumerate() {
                for (to, sent, received) in [
                    (server, of_worker.sent.get(server), of_server.received.get(worker)),
                    (self.cell.servers + worker, of_server.sent.get(worker), of_worker.received.get(server)),
                ] {
                    let (Some(sent), Some(received)) = (sent, received) else { continue };
                    let name = self.children.name(to);
                    if let Some((variable, offset)) = received.mismatch {
                        let text = format!(
                            "{name}: byte {offset} of tensor {variable} arrived wrong in {}",
                            trial.contender
                        );
                        return Err(Failure::run(text));
                    }
                    sent.compare(received).context(format!("{name}, {}", trial.contender))?;
                }
            }
        }
        let tensors = self.cell.model.variables().len() * workers.len() * 2;
        let expected = tensors as u64 * u64::from(trial.steps);
        let checked: u64 = servers.iter().chain(workers).map(|report| report.checked).sum();
        if checked != expected {
            let text = format!("{checked} tensors and not {expected} were received in {}", trial.contender);
            return Err(Failure::run(text));
        }
        Ok(())
    }
}

/// Returns the core of a process. Servers come first. A single server has the first core to itself, and
/// workers share the others. Several servers share half of the cores, and workers share the other half.
fn core(cores: &[usize], servers: usize, position: usize) -> Option<usize> {
    let (for_servers, for_workers) = cores.split_at(servers.min(cores.len() / 2));
    match position.checked_sub(servers) {
        _ if for_servers.is_empty() => None,
        None => for_servers.get(position % for_servers.len()).copied(),
        Some(worker) => for_workers.get(worker % for_workers.len()).copied(),
    }
}

fn slowest(bytes: u64) -> Duration {
    Duration::from_secs_f64(bytes as f64 / SLOWEST)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;
    use crate::workload::Model;

    const GIB: u64 = 1 << 30;

    #[test]
    fn cells_beyond_the_memory_are_skipped_with_both_figures() {
        let plan = |workers: &[usize], modes: &[Mode], available| {
            let cell = |workers: &usize| TrainingCell { model: Model::Vgg16, servers: 1, workers: *workers };
            plan(workers.iter().map(|workers| (cell(workers), vec![Load::NONE])).collect(), modes, available)
        };
        let planned = plan(&[1, 8], &Mode::TRAINING, Some(8 * GIB)).unwrap();
        assert_eq!((planned.len(), &planned[0].skipped), (2, &None));
        let reason = planned[1].skipped.as_deref().unwrap();
        assert!(reason.contains("24.5 GiB") && reason.contains("8.00 GiB are available"), "{reason}");
        let refusal = plan(&[8], &Mode::TRAINING, Some(8 * GIB)).unwrap_err().to_string();
        assert!(refusal.contains("vgg16, 8 workers: it needs") && refusal.contains("fewer"), "{refusal}");
        plan(&[8], &Mode::TRAINING, None).unwrap();
        let lean = plan(&[8], &[Mode::RdmaZerocp], Some(13 * GIB)).unwrap();
        assert_eq!(lean[0].skipped, None);
    }
}

#[cfg(test)]
mod session_tests {
    use super::*;

    #[test]
    fn the_server_has_a_core_to_itself_where_there_are_two() {
        assert_eq!(core(&[], 1, 0), None);
        assert_eq!(core(&[3], 1, 1), None);
        let of = |cores: &[usize], servers| {
            (0..5).map(|position| core(cores, servers, position)).collect::<Vec<_>>()
        };
        assert_eq!(of(&[0, 1], 1), [0, 1, 1, 1, 1].map(Some));
        assert_eq!(of(&[2, 4, 6], 1), [2, 4, 6, 4, 6].map(Some));
        assert_eq!(of(&[0, 1], 3), [0, 0, 0, 1, 1].map(Some));
        assert_eq!(of(&[0, 1, 2, 3], 3), [0, 1, 0, 2, 3].map(Some));
        assert_eq!(of(&[0, 1, 2, 3, 4, 5], 2), [0, 1, 2, 3, 4].map(Some));
    }
}
