//! The processes of a cell: a server and its workers, from their start to their end.

use std::time::Duration;

use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::time::Instant;

use super::child::{Child, ChildEvent, ProcessName};
use super::control::{ChildCommand, Done, Ready, Report, TurnRequest};
use crate::failure::Failure;
use crate::measure::consume::Consume;
use crate::parameter_server::cells::TrainingCell;
use crate::parameter_server::mode::TransferMode;
use crate::parameter_server::options::ParameterServerOptions;
use crate::parameter_server::transfer::variables::variant;

/// Longest time until processes are ready, in addition to the time of their memory.
const START: Duration = Duration::from_secs(30);
/// Longest time of a turn, in addition to the time of its bytes at [`SLOWEST`] (bytes a second).
const PATIENCE: Duration = Duration::from_secs(30);
const SLOWEST: f64 = 20e6;
/// Time to wait for the end of another process after a failure. When a process ends, its peers may report their own
/// failures before the end of this process is seen.
const EXPLANATION: Duration = Duration::from_millis(500);

/// A server and its workers.
#[derive(Debug)]
pub(crate) struct Session {
    server: Child,
    workers: Vec<Child>,
    events: UnboundedReceiver<(ProcessName, ChildEvent)>,
    cell: TrainingCell,
    /// The reports of the processes when they were ready.
    server_ready: Ready,
    workers_ready: Vec<Ready>,
    /// The number of the next mini-batch.
    next: u64,
    /// Whether receivers look for the largest element.
    reduces: bool,
}

/// The outcome of a turn of all workers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outcome {
    /// Times of the mini-batches, one list for each worker.
    pub(crate) nanos: Vec<Vec<u64>>,
    /// CPU time that all processes used.
    pub(crate) cpu: Duration,
    pub(crate) checked: u64,
}

impl Session {
    /// Starts the processes, and waits until they are ready.
    pub(crate) async fn start(
        cell: TrainingCell,
        options: &ParameterServerOptions,
        cores: &[usize],
    ) -> Result<Self, Failure> {
        let deadline = Instant::now() + START + slowest(cell.bytes() * (cell.workers as u64 + 1));
        let (sender, events) = unbounded_channel();
        let common = |kind: &str, position: usize| common(kind, cell, options, cores, position);
        let mut arguments = common("parameter-server-server", 0);
        arguments.extend(["--workers".to_owned(), cell.workers.to_string()]);
        let server = Child::start(ProcessName::Server, &arguments, sender.clone())?;
        let reduces = options.consume == Consume::ReduceMax;
        let (workers, server_ready, workers_ready) = (Vec::new(), Ready::default(), Vec::new());
        let mut session =
            Self { server, workers, events, cell, server_ready, workers_ready, next: 0, reduces };
        session.server_ready = match session.next_report(deadline, ProcessName::Server).await? {
            (ProcessName::Server, Report::Ready(ready)) => ready,
            (name, report) => return Err(unexpected(name, &report)),
        };
        for number in 0..cell.workers {
            let mut arguments = common("parameter-server-worker", number + 1);
            arguments.extend(["--worker".to_owned(), number.to_string()]);
            let ready = &session.server_ready;
            let addresses = [
                ("--tcp", ready.tcp),
                ("--rdma", ready.rdma),
                ("--rdma-gather", ready.rdma_gather),
                ("--native", ready.native),
                ("--native-gather", ready.native_gather),
            ];
            for (flag, address) in addresses {
                arguments.extend(address.iter().flat_map(|at| [flag.to_owned(), at.to_string()]));
            }
            arguments.extend(ready.device.iter().flat_map(|at| ["--device".to_owned(), at.clone()]));
            session.workers.push(Child::start(ProcessName::Worker(number), &arguments, sender.clone())?);
        }
        drop(sender);
        session.connect(deadline).await?;
        Ok(session)
    }

    /// Waits until the workers are ready, and sends their addresses to the server.
    async fn connect(&mut self, deadline: Instant) -> Result<(), Failure> {
        let mut ready = vec![None; self.cell.workers];
        while let Some(missing) = ready.iter().position(Option::is_none) {
            match self.next_report(deadline, ProcessName::Worker(missing)).await? {
                (ProcessName::Worker(number), Report::Ready(it)) if number < ready.len() => {
                    ready[number] = Some(it)
                }
                (name, report) => return Err(unexpected(name, &report)),
            }
        }
        self.workers_ready = ready.into_iter().flatten().collect();
        let workers: Vec<String> =
            self.workers_ready.iter().filter_map(|ready| ready.device.clone()).collect();
        if workers.is_empty() {
            return Ok(());
        }
        self.server.send(&ChildCommand::Attach { workers }).await?;
        match self.next_report(deadline, ProcessName::Server).await? {
            (ProcessName::Server, Report::Attached) => Ok(()),
            (name, report) => Err(unexpected(name, &report)),
        }
    }

    /// Returns the provider in use, if a mode needs one.
    pub(crate) fn provider(&self) -> Option<&str> {
        self.workers_ready.iter().find_map(|ready| ready.provider.as_deref())
    }

    /// Returns whether each process is pinned to the core that it was given.
    pub(crate) fn is_pinned(&self) -> bool {
        self.server_ready.pinned && self.workers_ready.iter().all(|ready| ready.pinned)
    }

    /// Makes a turn: all workers make some mini-batches at the same time.
    pub(crate) async fn turn(
        &mut self,
        mode: TransferMode,
        steps: u32,
        every_byte: bool,
    ) -> Result<Outcome, Failure> {
        let turn = TurnRequest { mode, first: self.next, steps, every_byte };
        self.next += u64::from(steps);
        let bytes = 2 * self.cell.bytes() * self.cell.workers as u64;
        let patience = PATIENCE + slowest(bytes) * steps;
        let deadline = Instant::now() + patience;
        let command = ChildCommand::Turn(turn);
        self.server.send(&command).await?;
        for worker in &mut self.workers {
            worker.send(&command).await?;
        }
        let mut done = vec![None; self.workers.len()];
        while let Some(missing) = done.iter().position(Option::is_none) {
            match self.next_report(deadline, ProcessName::Worker(missing)).await? {
                (ProcessName::Worker(number), Report::Done(it)) if number < done.len() => {
                    done[number] = Some(it)
                }
                (name, report) => return Err(unexpected(name, &report)),
            }
        }
        self.server.send(&ChildCommand::Collect).await?;
        let server = match self.next_report(deadline, ProcessName::Server).await? {
            (ProcessName::Server, Report::Done(it)) => it,
            (name, report) => return Err(unexpected(name, &report)),
        };
        let workers: Vec<Done> = done.into_iter().flatten().collect();
        self.check(turn, &server, &workers)?;
        let all = || workers.iter().chain([&server]);
        Ok(Outcome {
            cpu: Duration::from_nanos(all().map(|done| done.cpu_nanos).sum()),
            checked: all().map(|done| done.checked).sum(),
            nanos: workers.into_iter().map(|done| done.nanos).collect(),
        })
    }

    /// Checks that every process received every tensor, and that the results of consuming equal the results of the
    /// senders.
    fn check(&self, turn: TurnRequest, server: &Done, workers: &[Done]) -> Result<(), Failure> {
        let tensors = self.cell.model.variables().len() as u64 * u64::from(turn.steps);
        let found = |senders: &[&Ready]| {
            let bits = senders.iter().flat_map(|sender| {
                turn.numbers().take(sender.maxima.len()).map(|step| sender.maxima[variant(step)])
            });
            let largest = bits.map(f32::from_bits).fold(f32::NEG_INFINITY, f32::max);
            // The sum is over all mini-batches, and not over one for each variant.
            let all =
                senders.iter().flat_map(|sender| turn.numbers().map(|step| sender.digests[variant(step)]));
            let digest = all.fold(0, u64::wrapping_add);
            (self.reduces.then(|| largest.to_bits()), self.reduces.then_some(digest))
        };
        let sent: Vec<&Ready> = self.workers_ready.iter().collect();
        let mut expected = vec![(ProcessName::Server, server, tensors * workers.len() as u64, found(&sent))];
        for (number, done) in workers.iter().enumerate() {
            expected.push((ProcessName::Worker(number), done, tensors, found(&[&self.server_ready])));
        }
        for (name, done, tensors, (maximum, digest)) in expected {
            if done.checked != tensors {
                let text =
                    format!("{name} received {} tensors and not {tensors} in {}", done.checked, turn.mode);
                return Err(Failure::run(text));
            }
            if done.maximum != maximum {
                let text = format!("{name} found another largest element than was sent in {}", turn.mode);
                return Err(Failure::run(text));
            }
            if done.digest != digest {
                let text = format!("{name} received other bytes than were sent in {}", turn.mode);
                return Err(Failure::run(text));
            }
        }
        Ok(())
    }

    /// Waits for the next report of any process. The failure or the end of any process is an error. If no report comes
    /// in time, the error names `awaited`.
    async fn next_report(
        &mut self,
        deadline: Instant,
        awaited: ProcessName,
    ) -> Result<(ProcessName, Report), Failure> {
        match tokio::time::timeout_at(deadline, self.events.recv()).await {
            Ok(Some((name, ChildEvent::Report(Report::Failed { reason, usage: true })))) => {
                Err(Failure::usage(format!("{name}: {reason}")))
            }
            Ok(Some((name, ChildEvent::Report(Report::Failed { reason, .. })))) => {
                Err(self.explain(format!("{name}: {reason}")).await)
            }
            Ok(Some((name, ChildEvent::Report(report)))) => Ok((name, report)),
            Ok(Some((name, ChildEvent::Unreadable(line)))) => {
                Err(Failure::run(format!("{name} wrote a line that is no report: {line}")))
            }
            Ok(Some((name, ChildEvent::Ended(status)))) => Err(ended(name, status)),
            Ok(None) => Err(Failure::run("all processes have ended")),
            Err(_) => Err(Failure::run(format!("{awaited} gave no answer in time: it is stuck"))),
        }
    }

    /// Returns the best explanation of a failure. If another process has ended, its end explains the failure better
    /// than `reason`.
    async fn explain(&mut self, reason: String) -> Failure {
        let deadline = Instant::now() + EXPLANATION;
        while let Ok(Some((name, events))) = tokio::time::timeout_at(deadline, self.events.recv()).await {
            if let ChildEvent::Ended(status) = events
                && !status.is_some_and(|status| status.success())
            {
                return ended(name, status);
            }
        }
        Failure::run(reason)
    }
}

/// Returns the arguments that all processes have.
fn common(
    kind: &str,
    cell: TrainingCell,
    options: &ParameterServerOptions,
    cores: &[usize],
    position: usize,
) -> Vec<String> {
    let modes: Vec<&str> = options.modes().iter().map(|mode| mode.name()).collect();
    let mut arguments = vec![kind.to_owned()];
    for (flag, value) in [
        ("--model", cell.model.name().to_owned()),
        ("--modes", modes.join(",")),
        ("--inflight", options.inflight.to_string()),
        ("--consume", options.consume.to_string()),
        ("--http2", options.http2.name()),
        ("--provider", options.provider.clone()),
    ] {
        arguments.extend([flag.to_owned(), value]);
    }
    if let Some(core) = core(cores, position) {
        arguments.extend(["--core".to_owned(), core.to_string()]);
    }
    arguments
}

/// Returns the core of a process. The server has the first core to itself, and workers share the others.
fn core(cores: &[usize], position: usize) -> Option<usize> {
    match (cores, position) {
        ([] | [_], _) => None,
        ([first, ..], 0) => Some(*first),
        ([_, others @ ..], worker) => others.get((worker - 1) % others.len()).copied(),
    }
}

fn slowest(bytes: u64) -> Duration {
    Duration::from_secs_f64(bytes as f64 / SLOWEST)
}

fn ended(name: ProcessName, status: Option<std::process::ExitStatus>) -> Failure {
    let how = status.map_or_else(|| "the exit status is unknown".to_owned(), |status| status.to_string());
    Failure::run(format!("{name} ended in the middle of the run ({how})"))
}

fn unexpected(name: ProcessName, report: &Report) -> Failure {
    Failure::run(format!("{name} sent an unexpected report: {report:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_server_has_a_core_to_itself_where_there_are_two() {
        assert_eq!(core(&[], 0), None);
        assert_eq!(core(&[3], 1), None);
        let of = |cores: &[usize]| (0..5).map(|position| core(cores, position)).collect::<Vec<_>>();
        assert_eq!(of(&[0, 1]), [0, 1, 1, 1, 1].map(Some));
        assert_eq!(of(&[2, 4, 6]), [2, 4, 6, 4, 6].map(Some));
    }
}
