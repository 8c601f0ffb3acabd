//! What the child processes of a cell do. Servers hold variables and take gradients. Workers pull the
//! variables, compute if asked, and push gradients, mini-batch after mini-batch. `meter` starts the
//! processes, and `measure::process` finds out which of them failed first.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::JoinSet;
use tonic_rdma_commands::payload::content::{Content, VARIANTS};
use tonic_rdma_commands::payload::reduce::reduce;
use tonic_rdma_commands::payload::seeded::mix;
use tonic_rdma_commands::{Context as _, Failure, Flavour, cores, ends};
use tonic_rdma_proto::transfer::Check;
use tonic_rdma_tensor::{Channel, RdmaDevice};

use crate::compare::modes::call_error::CallError;
use crate::compare::modes::grpc::client::{self, CallSettings, GrpcCaller, run_set};
use crate::compare::modes::grpc::service::{Source, TransferService};
use crate::compare::modes::mode::{Contender, Mode};
use crate::compare::modes::placement::geometry::Record;
use crate::compare::modes::placement::receiver::Sink;
use crate::compare::modes::placement::sender::TensorSender;
use crate::compare::operations::{CallPayload, Operations};
use crate::compare::plan::Direction;
use crate::compare::server::{Addresses, Servers, Services, tensor_device};
use crate::measure::process;
use crate::parameter_server::options::{Load, ProcessJob};
use crate::workload::{Shard, Workload};

/// A command to a child. Each has one report as its answer; a server answers a trial when it is asked for the
/// result.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ChildCommand {
    /// To a server: attach to the slots of the workers' devices, which listen at these addresses.
    Attach { workers: Vec<String> },
    /// Carry out a trial.
    Trial(TrialRequest),
    /// To a server: the workers have ended the trial; report its result.
    Collect,
}

/// A trial: some mini-batches in one mode.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct TrialRequest {
    pub(crate) contender: Contender,
    /// The number of the first mini-batch.
    pub(crate) first: u64,
    /// The number of mini-batches.
    pub(crate) steps: u32,
    /// Whether receivers check every byte.
    pub(crate) every_byte: bool,
    /// What workers do between pull and push.
    pub(crate) load: Load,
}

impl TrialRequest {
    /// Returns the indices of the trial's operations.
    fn indices(&self) -> std::ops::Range<usize> {
        let first = self.first as usize;
        first..first + self.steps as usize
    }

    fn check(&self) -> Check {
        if self.every_byte { Check::All } else { Check::Stamps }
    }
}

/// The report of a child: after its start, or after a command.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Report {
    /// Addresses of a server that has started.
    pub(crate) addresses: Option<Addresses>,
    /// Address of the tensor device.
    pub(crate) device: Option<String>,
    /// The provider that a worker uses, such as `soft`.
    pub(crate) provider: Option<String>,
    /// Whether the process is pinned to the core that it was given.
    pub(crate) pinned: bool,
    /// Time of each mini-batch of a trial, at a worker.
    pub(crate) times: Vec<Duration>,
    /// User and system time that the process used in a trial.
    pub(crate) cpu: Duration,
    /// Number of tensors that were checked in a trial.
    pub(crate) checked: u64,
    /// What was sent and what has arrived in a trial by slots: from a worker for each server, from a server
    /// for each worker.
    pub(crate) sent: Vec<Record>,
    pub(crate) received: Vec<Record>,
}

/// The process that tensors come from. The contents of any two processes differ.
#[derive(Clone, Copy, Debug)]
enum Origin {
    /// A server, with its variables.
    Server,
    /// This worker, with its gradients.
    Worker(usize),
}

impl Origin {
    /// Returns the seed of the tensors that belong to `shard`.
    fn seed(self, shard: Shard) -> u64 {
        let number = match self {
            Self::Server => 0,
            Self::Worker(worker) => worker as u64 + 1,
        };
        let number = number | (shard.server as u64) << 32;
        shard.model.name().bytes().fold(number, |seed, byte| mix(seed ^ u64::from(byte)))
    }

    /// Returns the names of the slots of these tensors. A worker has slots from each server.
    fn slots(self, server: usize, worker: usize) -> String {
        match self {
            Self::Server => format!("server {server} to worker {worker}: variable"),
            Self::Worker(_) => format!("worker {worker} to server {server}: gradient"),
        }
    }
}

/// One end of the slots between a server and a worker, in both directions: one for each variable and each
/// gradient.
#[derive(Debug)]
struct Link {
    server: usize,
    worker: usize,
    /// The tensors that go from here.
    operations: Operations,
    /// Known once the peer has slots to attach to. The channel must live as long as the sender.
    sender: Option<(TensorSender, Channel)>,
    sink: Sink,
    /// The tensors that were sent in this trial.
    sent: Record,
    reduces: bool,
}

impl Link {
    /// Makes the slots for the tensors that `from` sends.
    fn new(
        device: &RdmaDevice,
        job: &ProcessJob,
        (server, worker): (usize, usize),
        from: Origin,
        operations: Operations,
    ) -> Result<Self, Failure> {
        let shard = job.shard(server);
        let (name, seed) = (from.slots(server, worker), from.seed(shard));
        let reduces = job.reduces();
        let load = Workload::Shard(shard);
        let sink = Sink::new(device, &name, (load, seed), 1, reduces).map_err(slot_failed)?;
        Ok(Self { server, worker, operations, sender: None, sink, sent: Record::default(), reduces })
    }

    /// Attaches to the slots of the peer at `endpoint` for the tensors of `origin`, which is this process.
    /// Returns the provider.
    async fn attach(
        &mut self,
        device: &RdmaDevice,
        endpoint: &str,
        origin: Origin,
    ) -> Result<String, Failure> {
        let channel = device.channel(endpoint, 0).await.map_err(slot_failed)?;
        let name = origin.slots(self.server, self.worker);
        let sender = TensorSender::new(Mode::RdmaZerocp, &name, (device, &channel), &self.operations, 1);
        let provider = channel.device().0.to_owned();
        self.sender = Some((sender.await.map_err(slot_failed)?, channel));
        Ok(provider)
    }

    /// Begins a trial.
    fn begin(&mut self, trial: &TrialRequest) {
        self.sent = Record::default();
        self.sink.begin(trial.every_byte);
        if let Some((sender, _)) = &mut self.sender {
            sender.in_place = trial.contender.mode.sends_in_place();
        }
    }

    /// Sends each tensor of a mini-batch. Tensors may still be in flight afterwards.
    async fn send(&mut self, index: usize) -> Result<(), Failure> {
        let operation = self.operations.take(index);
        let (sender, _) = self.sender.as_mut().ok_or_else(|| Failure::run("its slots are not known"))?;
        sender.ready().await.map_err(slot_failed)?;
        sender.start(&operation).map_err(slot_failed)?;
        self.sent.add(sender.identity(&operation), operation.reduced().filter(|_| self.reduces));
        Ok(())
    }

    /// Receives each tensor of a mini-batch, and consumes it in the slot.
    async fn receive(&mut self) -> Result<(), Failure> {
        self.sink.recv_operation().await.map_err(slot_failed)
    }

    /// Waits until the peer has consumed all tensors.
    async fn flush(&mut self) -> Result<(), Failure> {
        match &mut self.sender {
            Some((sender, _)) => sender.flush().await.map_err(slot_failed),
            None => Ok(()),
        }
    }
}

fn slot_failed(error: impl std::error::Error + Send + Sync + 'static) -> Failure {
    Failure::run("a static slot failed").because(error)
}

/// Returns the report of a trial by slots.
fn report_of(links: &[Link]) -> Report {
    let records = links.iter().map(|link| (link.sent, link.sink.record, link.operations.take(0).messages()));
    let mut report = Report::default();
    for (sent, received, tensors) in records {
        report.sent.push(sent);
        report.received.push(received);
        report.checked += received.operations * tensors;
    }
    report
}

/// Runs a child until stdin ends. The end of the parent closes stdin in every case.
pub(crate) fn run(job: &ProcessJob, is_server: bool) -> Result<(), Failure> {
    let pinned = job.core.is_some_and(|core| cores::pin(core).is_ok());
    if let Some(bytes) = job.memory {
        ends::limit_memory(bytes)?;
    }
    let mut commands = process::commands()?;
    let runtime = Flavour::IdlePolling.build().context("can't start a runtime")?;
    process::report_failure(runtime.block_on(async {
        if is_server {
            let (mut server, ready) = Server::start(job).await?;
            process::report(&Report { pinned, ..ready })?;
            server.run_commands(&mut commands).await
        } else {
            let (mut worker, ready) = Worker::start(job).await?;
            process::report(&Report { pinned, ..ready })?;
            worker.run_commands(&mut commands).await
        }
    }))
}

struct Server {
    _servers: Servers,
    device: Option<RdmaDevice>,
    /// The slots of each worker. They are absent during a trial by slots.
    links: Vec<Link>,
    /// The parts of a running trial by slots.
    trial: JoinSet<Result<Link, Failure>>,
}

impl Server {
    async fn start(job: &ProcessJob) -> Result<(Self, Report), Failure> {
        let shard = job.shard(job.number);
        let (load, reduces) = (Workload::Shard(shard), job.reduces());
        let variables = Operations::in_registered_memory(load, Origin::Server.seed(shard), reduces)?;
        let source = Source::over(variables.content.clone());
        let services = Services {
            service: TransferService::reducing(reduces).with(source.clone()),
            registering: source,
            http2: job.options.http2.0.clone(),
            gathers: false,
            direction: Direction::Down,
            ip: job.ip,
        };
        let rdma = job.rdma()?;
        let (addresses, servers) = services.listen(rdma.as_ref(), None).await?;
        let (mut device, mut links) = (None, Vec::new());
        if let Some(rdma) = rdma.filter(|_| job.uses_slots()) {
            let made = tensor_device(&rdma, job.ip).await?;
            for worker in 0..job.cell.workers {
                let ends = (job.number, worker);
                links.push(Link::new(&made, job, ends, Origin::Worker(worker), variables.clone())?);
            }
            device = Some(made);
        }
        let tensors = device.as_ref().map(RdmaDevice::endpoint);
        let addresses = Addresses { tensors, ..addresses };
        let ready = Report { addresses: Some(addresses), ..Report::default() };
        Ok((Self { _servers: servers, device, links, trial: JoinSet::new() }, ready))
    }

    async fn run_commands(&mut self, commands: &mut UnboundedReceiver<ChildCommand>) -> Result<(), Failure> {
        while let Some(command) = commands.recv().await {
            match command {
                ChildCommand::Attach { workers } => {
                    for (link, endpoint) in self.links.iter_mut().zip(&workers) {
                        if let Some(device) = &self.device {
                            link.attach(device, endpoint, Origin::Server).await?;
                        }
                    }
                    process::report(&Report::default())?;
                }
                ChildCommand::Trial(trial) => {
                    let cpu = cores::cpu_time();
                    self.begin(trial);
                    self.watch(commands).await?;
                    while let Some(served) = self.trial.join_next().await {
                        self.served(served)?;
                    }
                    self.links.sort_by_key(|link| link.worker);
                    let by_calls = trial.contender.mode.is_grpc();
                    let report = if by_calls { Report::default() } else { report_of(&self.links) };
                    process::report(&Report { cpu: cores::cpu_time().saturating_sub(cpu), ..report })?;
                }
                ChildCommand::Collect => {
                    return Err(Failure::run("got the command to collect without a trial"));
                }
            }
        }
        Ok(())
    }

    /// Begins a trial. Calls need no begin. Through slots, a worker's variables are sent as soon as its last
    /// gradients have arrived.
    fn begin(&mut self, trial: TrialRequest) {
        if trial.contender.mode.is_grpc() {
            return;
        }
        for mut link in self.links.drain(..) {
            self.trial.spawn(async move {
                let worker = link.worker;
                let served = async {
                    link.begin(&trial);
                    for index in trial.indices() {
                        link.send(index).await?;
                        link.receive().await?;
                    }
                    Ok(link)
                };
                let served: Result<Link, Failure> = served.await;
                served.context(format!("worker {worker}"))
            });
        }
    }

    /// Waits until the workers have ended the trial. If a part of the trial fails earlier, this failure ends
    /// the wait.
    async fn watch(&mut self, commands: &mut UnboundedReceiver<ChildCommand>) -> Result<(), Failure> {
        loop {
            tokio::select! {
                Some(served) = self.trial.join_next() => self.served(served)?,
                command = commands.recv() => return match command {
                    Some(ChildCommand::Collect) | None => Ok(()),
                    Some(other) => Err(Failure::run(format!("got the command {other:?} in the middle of a trial"))),
                },
            }
        }
    }

    /// Notes that a worker's part of the trial has ended.
    fn served(
        &mut self,
        served: Result<Result<Link, Failure>, tokio::task::JoinError>,
    ) -> Result<(), Failure> {
        self.links.push(served.context("the trial crashed")??);
        Ok(())
    }
}

/// All calls of a mini-batch in one direction, in the order of the model's variables, which the servers hold
/// in turn.
type Calls = Arc<[CallPayload]>;

struct Worker {
    number: usize,
    /// The connections of each gRPC mode, one to each server.
    callers: Vec<(Contender, Vec<GrpcCaller>)>,
    /// The calls of a mini-batch, for each variant of the content.
    pulls: Vec<Calls>,
    pushes: Vec<Calls>,
    /// Largest number of calls in flight.
    inflight: usize,
    /// The slots of each server.
    links: Vec<Link>,
    _device: Option<RdmaDevice>,
}

impl Worker {
    async fn start(job: &ProcessJob) -> Result<(Self, Report), Failure> {
        let (me, mut report) = (Origin::Worker(job.number), Report::default());
        let shards: Vec<Shard> = (0..job.cell.servers).map(|server| job.shard(server)).collect();
        let gradients = shards.iter().map(|shard| {
            let load = Workload::Shard(*shard);
            Operations::in_registered_memory(load, me.seed(*shard), job.reduces())
        });
        let gradients: Vec<Operations> = gradients.collect::<Result<_, Failure>>()?;
        let rdma = job.rdma()?;
        let mut callers = Vec::new();
        for contender in job.options.contenders().into_iter().filter(|it| it.mode.is_grpc()) {
            let mut of_mode = Vec::new();
            for (addresses, shard) in job.servers.iter().zip(&shards) {
                let (channel, verdict) = client::connect(contender, addresses, rdma.as_ref()).await?;
                report.provider = report.provider.or(verdict.map(|verdict| verdict.provider));
                let (reduces, origin) = (job.reduces(), Origin::Server.seed(*shard));
                let settings = CallSettings { reduces, origin, ..CallSettings::default() };
                of_mode.push(GrpcCaller::new(channel, contender.mode, settings));
            }
            callers.push((contender, of_mode));
        }
        let (mut device, mut links) = (None, Vec::new());
        if let Some(rdma) = rdma.filter(|_| job.uses_slots()) {
            let made = tensor_device(&rdma, job.ip).await?;
            for ((server, gradients), addresses) in gradients.iter().enumerate().zip(&job.servers) {
                let ends = (server, job.number);
                let mut link = Link::new(&made, job, ends, Origin::Server, gradients.clone())?;
                let endpoint = addresses.tensors.as_deref().unwrap_or_default();
                report.provider = Some(link.attach(&made, endpoint, me).await?);
                links.push(link);
            }
            report.device = Some(made.endpoint());
            device = Some(made);
        }
        let (mut pulls, mut pushes) = (Vec::new(), Vec::new());
        if !callers.is_empty() {
            let of_servers = shards.iter().map(|shard| pulls_of(*shard, job.reduces()));
            let of_servers: Vec<_> = of_servers.collect::<Result<_, Failure>>()?;
            for variant in 0..VARIANTS {
                pulls.push(in_order(of_servers.iter().map(|of| of[variant].clone()).collect()));
                let of_servers = gradients.iter().map(|of| of.take(variant).calls.to_vec());
                pushes.push(in_order(of_servers.collect()));
            }
        }
        let number = job.number;
        let worker =
            Self { number, callers, pulls, pushes, inflight: job.options.inflight, links, _device: device };
        Ok((worker, report))
    }

    async fn run_commands(&mut self, commands: &mut UnboundedReceiver<ChildCommand>) -> Result<(), Failure> {
        while let Some(command) = commands.recv().await {
            let ChildCommand::Trial(trial) = command else {
                return Err(Failure::run(format!("a worker can't {command:?}")));
            };
            let cpu = cores::cpu_time();
            let report = match trial.contender.mode.is_grpc() {
                true => self.trial_by_calls(trial).await?,
                false => self.trial_by_slots(trial).await?,
            };
            process::report(&Report { cpu: cores::cpu_time().saturating_sub(cpu), ..report })?;
        }
        Ok(())
    }

    /// Makes a trial by slots. A server writes the variables without a request, as soon as it has the last
    /// gradients.
    async fn trial_by_slots(&mut self, trial: TrialRequest) -> Result<Report, Failure> {
        let mut times = Vec::with_capacity(trial.steps as usize);
        self.links.iter_mut().for_each(|link| link.begin(&trial));
        for index in trial.indices() {
            let start = Instant::now();
            for server in server_order(self.number, self.links.len()) {
                self.links[server].receive().await?;
            }
            trial.load.run().await?;
            for server in server_order(self.number, self.links.len()) {
                self.links[server].send(index).await?;
            }
            for link in &mut self.links {
                link.flush().await?;
            }
            times.push(start.elapsed());
        }
        Ok(Report { times, ..report_of(&self.links) })
    }

    async fn trial_by_calls(&mut self, trial: TrialRequest) -> Result<Report, Failure> {
        let failed =
            |error: CallError| Failure::run(format!("a call in {} failed", trial.contender)).because(error);
        let missing = || Failure::run(format!("no connection for {}", trial.contender));
        let of_mode = self.callers.iter_mut().find(|(contender, _)| *contender == trial.contender);
        let (_, callers) = of_mode.ok_or_else(missing)?;
        let mut times = Vec::with_capacity(trial.steps as usize);
        let mut checked = 0;
        for index in trial.indices() {
            let (pulls, pushes) = (&self.pulls[index % VARIANTS], &self.pushes[index % VARIANTS]);
            let start = Instant::now();
            run_set(callers, pulls, trial.check(), self.inflight).await.map_err(failed)?;
            trial.load.run().await?;
            run_set(callers, pushes, trial.check(), self.inflight).await.map_err(failed)?;
            times.push(start.elapsed());
            checked += (pulls.len() + pushes.len()) as u64;
        }
        for caller in callers {
            caller.end().await.map_err(failed)?;
        }
        Ok(Report { times, checked, ..Report::default() })
    }
}

/// Returns the order in which a worker calls the servers. Each worker begins with another one, so that not
/// all of them wait for the first server while the others are idle.
fn server_order(worker: usize, servers: usize) -> impl Iterator<Item = usize> {
    (0..servers).map(move |step| (worker + step) % servers)
}

/// Returns the calls that pull the variables of one server, for each variant of their content. The content is
/// made chunk by chunk, because a worker does not hold it.
fn pulls_of(shard: Shard, reduces: bool) -> Result<Vec<Vec<CallPayload>>, Failure> {
    let mut next = Content::follow(Origin::Server.seed(shard));
    let mut variants = vec![Vec::new(); VARIANTS];
    for bytes in shard.lengths() {
        let seed = next(bytes);
        let room = if reduces { bytes as usize } else { 0 };
        let content = Content::new(room, seed).context("no memory for a variable")?;
        for (variant, calls) in variants.iter_mut().enumerate() {
            let mut content = content.variant(variant);
            let seed = content.seed();
            let reduced = reduces.then(|| reduce(&content.cut(bytes as usize)));
            calls.push(CallPayload { seed, buffers: Vec::new(), reduced, pulls: Some(bytes) });
        }
    }
    Ok(variants)
}

/// Returns the calls to all servers in the order of the model's variables, which servers hold in turn.
fn in_order(of_servers: Vec<Vec<CallPayload>>) -> Calls {
    let longest = of_servers.iter().map(Vec::len).max().unwrap_or(0);
    (0..longest)
        .flat_map(|position| of_servers.iter().filter_map(move |of| of.get(position).cloned()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_worker_begins_with_another_server_and_turns_to_all() {
        let orders = [0, 1, 2, 3].map(|worker| server_order(worker, 3).collect::<Vec<_>>());
        assert_eq!(orders, [[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 1, 2]]);
        assert_eq!(server_order(5, 0).count(), 0);
    }
}
