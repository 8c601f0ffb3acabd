//! The processes of a cell: servers and workers, from their start to their end.

use std::ops::Range;
use std::time::Duration;

use tokio::time::Instant;
use tonic_rdma_commands::{Context as _, Failure};

use crate::compare::modes::mode::Mode;
use crate::compare::server::Addresses;
use crate::measure::child::{self, Children};
use crate::parameter_server::children::{ChildCommand, Report, TurnRequest};
use crate::parameter_server::load::Load;
use crate::parameter_server::meter::TrainingCell;
use crate::parameter_server::options::{ParameterServerOptions, ProcessJob};

/// Longest time until processes are ready, in addition to the time of their memory.
const START: Duration = Duration::from_secs(30);
/// Longest time of a turn, in addition to the time of its bytes at [`SLOWEST`] (bytes a second).
const PATIENCE: Duration = Duration::from_secs(30);
const SLOWEST: f64 = 20e6;
/// Time to wait for the end of another process after a failure. When a process ends, its peers may report their own
/// failures before the end of this process is seen.
const EXPLANATION: Duration = Duration::from_millis(500);

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

/// The outcome of a turn of all workers.
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
        cores: &[usize],
    ) -> Result<Self, Failure> {
        let deadline = Instant::now() + START + slowest(cell.bytes() * (cell.workers as u64 + 1));
        let mut session = Self { children: Children::new(), cell, next: 0, pinned: true, provider: None };
        let job = |number, position| ProcessJob {
            options: options.clone(),
            cell,
            number,
            core: core(cores, cell.servers, position),
            servers: Vec::new(),
        };
        for server in 0..cell.servers {
            let command = child::command("parameter-server-server", &job(server, server))?;
            let name = match cell.servers {
                1 => "the server process".to_owned(),
                _ => format!("server process {server}"),
            };
            session.children.start(&name, command)?;
        }
        let servers = session.hear(session.servers(), deadline).await?;
        let addresses: Vec<Addresses> =
            servers.iter().filter_map(|server| server.addresses.clone()).collect();
        for worker in 0..cell.workers {
            let job = ProcessJob { servers: addresses.clone(), ..job(worker, cell.servers + worker) };
            let command = child::command("parameter-server-worker", &job)?;
            session.children.start(&format!("worker process {worker}"), command)?;
        }
        let workers = session.hear(session.workers(), deadline).await?;
        session.pinned = servers.iter().chain(&workers).all(|ready| ready.pinned);
        session.provider = workers.iter().find_map(|ready| ready.provider.clone());
        let devices: Vec<String> = workers.into_iter().filter_map(|ready| ready.device).collect();
        if !devices.is_empty() {
            let attach = ChildCommand::Attach { workers: devices };
            session.children.send(session.servers(), &attach)?;
            session.hear(session.servers(), deadline).await?;
        }
        Ok(session)
    }

    fn servers(&self) -> Range<usize> {
        0..self.cell.servers
    }

    fn workers(&self) -> Range<usize> {
        self.cell.servers..self.cell.servers + self.cell.workers
    }

    async fn hear(&mut self, children: Range<usize>, deadline: Instant) -> Result<Vec<Report>, Failure> {
        self.children.hear(children, deadline, EXPLANATION).await
    }

    /// Makes a turn: all workers make some mini-batches at the same time.
    pub(crate) async fn turn(
        &mut self,
        mode: Mode,
        steps: u32,
        every_byte: bool,
        load: Load,
    ) -> Result<Outcome, Failure> {
        let turn = TurnRequest { mode, first: self.next, steps, every_byte, load };
        self.next += u64::from(steps);
        let bytes = 2 * self.cell.bytes() * self.cell.workers as u64;
        // Workers may share a core.
        let computing = load.time * (1 + self.cell.workers as u32);
        let deadline = Instant::now() + PATIENCE + (slowest(bytes) + computing) * steps;
        let (servers, workers) = (self.servers(), self.workers());
        self.children.send(0..workers.end, &ChildCommand::Turn(turn))?;
        let workers = self.hear(workers, deadline).await?;
        self.children.send(servers.clone(), &ChildCommand::Collect)?;
        let servers = self.hear(servers, deadline).await?;
        self.check(turn, &servers, &workers)?;
        let all = || workers.iter().chain(&servers);
        Ok(Outcome {
            cpu: all().map(|report| report.cpu).sum(),
            checked: all().map(|report| report.checked).sum(),
            times: workers.into_iter().map(|report| report.times).collect(),
        })
    }

    /// Checks that every process received through slots what was sent, and that all tensors were checked. Workers check
    /// every answer of their calls themselves.
    fn check(&self, turn: TurnRequest, servers: &[Report], workers: &[Report]) -> Result<(), Failure> {
        for (server, of_server) in servers.iter().enumerate() {
            for (worker, of_worker) in workers.iter().enumerate() {
                for (to, sent, received) in [
                    (server, of_worker.sent.get(server), of_server.received.get(worker)),
                    (self.cell.servers + worker, of_server.sent.get(worker), of_worker.received.get(server)),
                ] {
                    let (Some(sent), Some(received)) = (sent, received) else { continue };
                    let name = self.children.name(to);
                    if let Some((variable, offset)) = received.mismatch() {
                        let text = format!(
                            "{name}: byte {offset} of tensor {variable} arrived wrong in {}",
                            turn.mode
                        );
                        return Err(Failure::run(text));
                    }
                    sent.compare(received).context(format!("{name}, {}", turn.mode))?;
                }
            }
        }
        let tensors = self.cell.model.variables().len() * workers.len() * 2;
        let expected = tensors as u64 * u64::from(turn.steps);
        let checked: u64 = servers.iter().chain(workers).map(|report| report.checked).sum();
        if checked != expected {
            let text = format!("{checked} tensors and not {expected} were received in {}", turn.mode);
            return Err(Failure::run(text));
        }
        Ok(())
    }
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
