//! The processes of a cell: servers and workers, from their start to their end.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::time::Instant;
use tonic_rdma_commands::Failure;

use super::child::{Child, ChildEvent, ProcessName};
use super::control::{ChildCommand, Done, Ready, Report, Sent, TurnRequest};
use crate::measure::consume::Consume;
use crate::parameter_server::cells::TrainingCell;
use crate::parameter_server::load::Computing;
use crate::parameter_server::mode::TransferMode;
use crate::parameter_server::options::ParameterServerOptions;
use crate::parameter_server::transfer::shard::Shard;
use crate::parameter_server::transfer::variables::variant;

/// Longest time until processes are ready, in addition to the time of their memory.
const START: Duration = Duration::from_secs(30);
/// Longest time of a turn, in addition to the time of its bytes at [`SLOWEST`] (bytes a second).
const PATIENCE: Duration = Duration::from_secs(30);
const SLOWEST: f64 = 20e6;
/// Time to wait for the end of another process after a failure. When a process ends, its peers may report their own
/// failures before the end of this process is seen.
const EXPLANATION: Duration = Duration::from_millis(500);

/// The servers and workers of a cell.
#[derive(Debug)]
pub(crate) struct Session {
    servers: Vec<Child>,
    workers: Vec<Child>,
    events: UnboundedReceiver<(ProcessName, ChildEvent)>,
    cell: TrainingCell,
    /// The reports of the processes when they were ready.
    servers_ready: Vec<Ready>,
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
        let reduces = options.consume == Consume::ReduceMax;
        let (servers, workers, servers_ready, workers_ready) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let mut session =
            Self { servers, workers, events, cell, servers_ready, workers_ready, next: 0, reduces };
        for number in 0..cell.servers {
            let mut arguments = common("parameter-server-server", number);
            arguments.extend(["--workers".to_owned(), cell.workers.to_string()]);
            arguments.extend(["--server".to_owned(), number.to_string()]);
            let name = ProcessName::Server { number, of: cell.servers };
            session.servers.push(Child::start(name, &arguments, sender.clone())?);
        }
        session.servers_ready = session.hear_servers(deadline, Report::ready).await?;
        for number in 0..cell.workers {
            let mut arguments = common("parameter-server-worker", cell.servers + number);
            arguments.extend(["--worker".to_owned(), number.to_string()]);
            arguments.extend(addresses(&session.servers_ready));
            session.workers.push(Child::start(ProcessName::Worker(number), &arguments, sender.clone())?);
        }
        drop(sender);
        session.connect(deadline).await?;
        Ok(session)
    }

    /// Waits until the workers are ready, and sends their addresses to the server.
    async fn connect(&mut self, deadline: Instant) -> Result<(), Failure> {
        self.workers_ready = self.hear_workers(deadline, Report::ready).await?;
        let workers: Vec<String> =
            self.workers_ready.iter().filter_map(|ready| ready.device.clone()).collect();
        if workers.is_empty() {
            return Ok(());
        }
        self.tell_servers(&ChildCommand::Attach { workers }).await?;
        self.hear_servers(deadline, Report::attached).await.map(drop)
    }

    /// Sends a command to every server.
    async fn tell_servers(&mut self, command: &ChildCommand) -> Result<(), Failure> {
        for server in &mut self.servers {
            server.send(command).await?;
        }
        Ok(())
    }

    /// Waits for a report of every server, and returns the part that `take` finds in each.
    async fn hear_servers<T: Clone>(
        &mut self,
        deadline: Instant,
        take: fn(Report) -> Result<T, Box<Report>>,
    ) -> Result<Vec<T>, Failure> {
        let of = self.cell.servers;
        self.hear_all(deadline, of, |number| ProcessName::Server { number, of }, take).await
    }

    /// Waits for a report of every worker, and returns the part that `take` finds in each.
    async fn hear_workers<T: Clone>(
        &mut self,
        deadline: Instant,
        take: fn(Report) -> Result<T, Box<Report>>,
    ) -> Result<Vec<T>, Failure> {
        self.hear_all(deadline, self.cell.workers, ProcessName::Worker, take).await
    }

    async fn hear_all<T: Clone>(
        &mut self,
        deadline: Instant,
        count: usize,
        name: impl Fn(usize) -> ProcessName,
        take: fn(Report) -> Result<T, Box<Report>>,
    ) -> Result<Vec<T>, Failure> {
        let mut found = vec![None; count];
        while let Some(missing) = found.iter().position(Option::is_none) {
            let (from, report) = self.next_report(deadline, name(missing)).await?;
            let Some(number) = (0..count).find(|number| name(*number) == from) else {
                return Err(unexpected(from, &report));
            };
            found[number] = Some(take(report).map_err(|report| unexpected(from, &report))?);
        }
        Ok(found.into_iter().flatten().collect())
    }

    /// Returns the provider in use, if a mode needs one.
    pub(crate) fn provider(&self) -> Option<&str> {
        self.workers_ready.iter().find_map(|ready| ready.provider.as_deref())
    }

    /// Returns whether each process is pinned to the core that it was given.
    pub(crate) fn is_pinned(&self) -> bool {
        self.servers_ready.iter().chain(&self.workers_ready).all(|ready| ready.pinned)
    }

    /// Makes a turn: all workers make some mini-batches at the same time.
    pub(crate) async fn turn(
        &mut self,
        mode: TransferMode,
        steps: u32,
        every_byte: bool,
        computing: Computing,
    ) -> Result<Outcome, Failure> {
        let turn = TurnRequest { mode, first: self.next, steps, every_byte, computing };
        self.next += u64::from(steps);
        let bytes = 2 * self.cell.bytes() * self.cell.workers as u64;
        // Workers may share a core.
        let computing = Duration::from_nanos(computing.nanos) * (1 + self.cell.workers as u32);
        let patience = PATIENCE + (slowest(bytes) + computing) * steps;
        let deadline = Instant::now() + patience;
        let command = ChildCommand::Turn(turn);
        self.tell_servers(&command).await?;
        for worker in &mut self.workers {
            worker.send(&command).await?;
        }
        let workers = self.hear_workers(deadline, Report::done).await?;
        self.tell_servers(&ChildCommand::Collect).await?;
        let servers = self.hear_servers(deadline, Report::done).await?;
        self.check(turn, &servers, &workers)?;
        let all = || workers.iter().chain(&servers);
        Ok(Outcome {
            cpu: Duration::from_nanos(all().map(|done| done.cpu_nanos).sum()),
            checked: all().map(|done| done.checked).sum(),
            nanos: workers.into_iter().map(|done| done.nanos).collect(),
        })
    }

    /// Checks that every process received every tensor, and that the results of consuming equal the results of the
    /// senders.
    fn check(&self, turn: TurnRequest, servers: &[Done], workers: &[Done]) -> Result<(), Failure> {
        let variables = self.cell.model.variables().len();
        let found = |senders: &[&Sent]| {
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
        let mut expected = Vec::new();
        for ((number, done), shard) in servers.iter().enumerate().zip(Shard::all(self.cell.servers)) {
            let name = ProcessName::Server { number, of: self.cell.servers };
            let sent: Vec<&Sent> =
                self.workers_ready.iter().filter_map(|ready| ready.sent.get(number)).collect();
            let tensors = shard.indices(variables).count() * workers.len();
            expected.push((name, done, tensors as u64 * u64::from(turn.steps), found(&sent)));
        }
        let sent: Vec<&Sent> = self.servers_ready.iter().flat_map(|ready| &ready.sent).collect();
        for (number, done) in workers.iter().enumerate() {
            let tensors = variables as u64 * u64::from(turn.steps);
            expected.push((ProcessName::Worker(number), done, tensors, found(&sent)));
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
        ("--servers", cell.servers.to_string()),
        ("--modes", modes.join(",")),
        ("--inflight", options.inflight.to_string()),
        ("--consume", options.consume.to_string()),
        ("--http2", options.http2.name()),
        ("--provider", options.provider.clone()),
    ] {
        arguments.extend([flag.to_owned(), value]);
    }
    if let Some(core) = core(cores, cell.servers, position) {
        arguments.extend(["--core".to_owned(), core.to_string()]);
    }
    arguments
}

/// Returns the arguments that give a worker the addresses of all servers.
fn addresses(servers: &[Ready]) -> Vec<String> {
    let texts = |address: fn(&Ready) -> Option<SocketAddr>| {
        servers.iter().filter_map(address).map(|at| at.to_string()).collect::<Vec<_>>()
    };
    let lists = [
        ("--tcp", texts(|ready| ready.tcp)),
        ("--rdma", texts(|ready| ready.rdma)),
        ("--rdma-gather", texts(|ready| ready.rdma_gather)),
        ("--native", texts(|ready| ready.native)),
        ("--native-gather", texts(|ready| ready.native_gather)),
        ("--device", servers.iter().filter_map(|ready| ready.device.clone()).collect()),
    ];
    let given = lists.into_iter().filter(|(_, list)| !list.is_empty());
    given.flat_map(|(flag, list)| [flag.to_owned(), list.join(",")]).collect()
}

/// Returns the core of a process. Servers come first. A single server has the first core to itself, and workers share
/// the others. Several servers share half of the cores, and workers share the other half.
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
