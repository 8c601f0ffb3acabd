//! One part of a job: carries out the commands of the coordinator, in one mode of transfer after the other.

use std::collections::HashMap;
use std::io::{self, BufRead as _};
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use serde_json::{Value, to_value};
use tonic_rdma_commands::{Context as _, Failure, process};
use tonic_rdma_graph::GraphError;
use tonic_rdma_graph::dataflow::{KernelError, NodeId, Outlet, Topology};
use tonic_rdma_graph::placement::{Crossing, CrossingId, Part, Placements};
use tonic_rdma_graph::schedule::{Executor, Program, Transfers};
use tonic_rdma_graph::session::{Listener, Peering, Session};
use tonic_rdma_graph::sites::{NodeSites, SiteOwner};

use super::parts::{Command, Floats, Report, Sent, SentTensor, StepsReport};
use crate::array::{Array, Error, failure};
use crate::data::{Data, reorder};
use crate::options::{Job, Options};
use crate::step::{Feed, JobShape, StepGraph};
use crate::variables::Variables;

/// How long the other parts may take to learn that this one leaves.
const LEAVE: Duration = Duration::from_secs(2);

/// How often this process says that it runs.
pub(super) const ALIVE: Duration = Duration::from_secs(10);

/// The process of a part, between two commands.
struct PartProcess {
    job: Options,
    /// The address to listen on.
    ip: IpAddr,
    /// Read at the first command, so that the coordinator learns of a file that is missing.
    data: Option<Arc<Data>>,
    listener: Option<Listener>,
    connection: Option<Connection>,
    /// The variables of each mode.
    variables: Vec<Arc<Variables>>,
}

/// The trainers of all modes. They are dropped before the session.
struct Connection {
    trainers: Vec<PartTrainer>,
    session: Session,
}

/// Carries out commands until stdin ends.
pub(crate) fn serve(job: Job) -> Result<(), Failure> {
    // candle's products of matrices allocate memory once in each thread, which is no part of any node.
    let warm_up =
        || Tensor::ones((256, 256), DType::F32, &Device::Cpu).and_then(|ones| ones.matmul(&ones.t()?));
    warm_up().context("candle can't compute")?;
    let talk = "can't talk with the coordinator";
    say_alive().context(talk)?;
    let Job { options: job, ip, .. } = job;
    let mut part =
        PartProcess { job, ip, data: None, listener: None, connection: None, variables: Vec::new() };
    for line in io::stdin().lock().lines() {
        let command =
            serde_json::from_str(&line.context(talk)?).context("the coordinator sent no command")?;
        let report = match part.carry_out(command) {
            Ok(value) => Report::Done(value),
            Err(error) => Report::Failed(failure(error).with_causes()),
        };
        process::report(&report)?;
    }
    part.disconnect();
    Ok(())
}

/// Says now and then that this process runs, until the coordinator is gone.
fn say_alive() -> io::Result<()> {
    let speak = || {
        while process::report(&Report::Alive).is_ok() {
            thread::sleep(ALIVE);
        }
    };
    thread::Builder::new().name("alive".to_owned()).spawn(speak).map(drop)
}

impl PartProcess {
    fn carry_out(&mut self, command: Command) -> Result<Value, Error> {
        Ok(match command {
            Command::Listen => {
                self.disconnect();
                if self.data.is_none() {
                    self.data = Some(Arc::new(self.job.samples()?));
                }
                let address = SocketAddr::new(self.ip, 0).to_string();
                let listener = Listener::bind(&address).context("can't listen for the other parts")?;
                let address = listener.address().to_string();
                self.listener = Some(listener);
                to_value((address, self.data()?.hash()))?
            }
            Command::Connect { shape, part, peers, version } => {
                self.connect(&shape, part, peers, version)
                    .context(format!("can't connect {} to the other parts", shape.name(part)))?;
                Value::Null
            }
            Command::Run { mode, from, to } => {
                let name = self.job.mode.get(mode).cloned().unwrap_or_default();
                let trainer = self.trainers()?.get_mut(mode).ok_or("there is no such mode")?;
                to_value(trainer.run(from..to).context(format!("steps {from} to {to} in mode {name}"))?)?
            }
            Command::Complete => {
                self.disconnect();
                let complete = self.variables.iter().map(|variables| variables.complete());
                to_value(complete.collect::<Result<Vec<_>, _>>()?.into_iter().min())?
            }
            Command::Hash => {
                let hash = |variables: &Arc<Variables>| Ok(format!("{:016x}", variables.hash()?));
                to_value(self.settled()?.iter().map(hash).collect::<Result<Vec<_>, Error>>()?)?
            }
            Command::Read { name, velocities } => {
                let variable = self.settled()?.first().ok_or("there is no mode")?.get(&name)?;
                let velocities = velocities.then_some(Floats(variable.velocities));
                to_value([Floats(variable.values)].into_iter().chain(velocities).collect::<Vec<_>>())?
            }
            Command::Write { name, velocities, from, elements } => {
                for variables in self.settled()? {
                    variables.set(&name, velocities, from, &elements.0)?;
                }
                Value::Null
            }
            Command::Sent => {
                to_value(self.trainers()?.iter().map(PartTrainer::sent_tensors).collect::<Vec<_>>())?
            }
        })
    }

    fn connect(
        &mut self,
        shape: &JobShape,
        part: usize,
        peers: Vec<String>,
        version: u64,
    ) -> Result<(), Error> {
        // The coordinator may be that of another host.
        let known = self.job.shape().filter(|all| (1..=all.workers).contains(&shape.workers));
        if known.map(|all| JobShape { workers: shape.workers, ..all }).as_ref() != Some(shape)
            || part >= shape.parts()
        {
            return Err(format!("this job has no part {part} with {} workers", shape.workers).into());
        }
        let modes = self.job.modes()?;
        if self.variables.is_empty() {
            for _ in &modes {
                let variables = shape.variables(part, self.job.seed);
                self.variables.push(Variables::new(variables, self.job.rate(), self.job.momentum, version)?);
            }
        } else {
            self.variables.iter().try_for_each(|variables| variables.settle(version))?;
        }
        let graphs = self.variables.iter().map(|variables| shape.build(part, variables));
        let graphs = graphs.collect::<Result<Vec<_>, _>>()?;
        let listener = self.listener.take().ok_or("this part does not listen")?;
        let first = graphs.first().ok_or("there is no mode")?;
        let peering = Peering::new(Part(part), peers, &first.graph, &first.placements);
        let peering = peering.modes(modes.iter().copied()).timeout(self.job.deadline);
        let session = listener.connect(peering)?;
        let (data, mut trainers) = (Arc::clone(self.data()?), Vec::new());
        for (graph, mode) in graphs.into_iter().zip(modes) {
            let transfers = session.transfers(mode)?;
            let feeder = Feeder::new(Arc::clone(&data), shape.clone(), self.job.seed, &graph);
            trainers.push(PartTrainer::new(graph, part, transfers, feeder, self.job.deadline)?);
        }
        self.connection = Some(Connection { trainers, session });
        Ok(())
    }

    fn data(&self) -> Result<&Arc<Data>, Error> {
        self.data.as_ref().ok_or_else(|| "this part has read no samples".into())
    }

    /// Leaves the other parts.
    fn disconnect(&mut self) {
        if let Some(Connection { trainers, session }) = self.connection.take() {
            drop(trainers);
            session.leave(LEAVE);
        }
    }

    fn trainers(&mut self) -> Result<&mut Vec<PartTrainer>, Error> {
        let connection = self.connection.as_mut().ok_or("this part is not connected")?;
        Ok(&mut connection.trainers)
    }

    /// Returns the variables of each mode after the last step.
    fn settled(&self) -> Result<&[Arc<Variables>], Error> {
        self.variables.iter().try_for_each(|variables| variables.settle(variables.complete()?))?;
        Ok(&self.variables)
    }
}

/// One part of a job in one mode of transfer.
pub(crate) struct PartTrainer {
    executor: Executor<Array>,
    feeder: Feeder,
    sites: Arc<NodeSites>,
    graph: Arc<Topology>,
    placements: Arc<Placements>,
    own: Part,
}

/// The program of a part: it feeds the samples of the steps in the order that follows from the seed, and
/// keeps the losses.
#[derive(Debug)]
pub(crate) struct Feeder {
    data: Arc<Data>,
    shape: JobShape,
    seed: u64,
    /// The samples in the order of an epoch. The memory is allocated before the first step: a step that
    /// begins an epoch makes the same allocations as any other step, so that the samples always come from the
    /// same allocation site.
    order: Vec<u32>,
    epoch: Option<usize>,
    /// The targets of the last samples that were fed, with their step.
    targets: Option<(u64, Array)>,
    feeds: HashMap<NodeId, (usize, Feed)>,
    losses: Vec<(u64, f32)>,
}

impl Program<Array> for Feeder {
    fn feed(&mut self, step: u64, input: NodeId) -> Result<Array, KernelError> {
        let (worker, feed) = self.feeds.get(&input).copied().ok_or("the graph has another input")?;
        if let Some((_, targets)) = self.targets.take_if(|(of, _)| feed == Feed::Targets && *of == step) {
            return Ok(targets);
        }
        let (samples, targets) = self.batch(step, worker)?;
        if feed == Feed::Targets {
            return Ok(targets);
        }
        self.targets = Some((step, targets));
        Ok(samples)
    }

    fn result(&mut self, step: u64, _outlet: Outlet, value: Array) -> Result<(), KernelError> {
        let loss = value.as_floats()?.values().first().copied().ok_or("the loss has no value")?;
        self.losses.push((step, loss));
        Ok(())
    }
}

impl PartTrainer {
    /// Makes the part `own` of a graph.
    pub(crate) fn new(
        graph: StepGraph,
        own: usize,
        transfers: Transfers<Array>,
        feeder: Feeder,
        deadline: Duration,
    ) -> Result<Self, GraphError> {
        let StepGraph { graph, placements, kernels, .. } = graph;
        let own = Part(own);
        // A step reads the variables that the step before has changed, so one step is in flight.
        const WINDOW: usize = 1;
        let sites = Arc::new(NodeSites::preallocated(&graph, &placements, own, WINDOW)?);
        let executor = Executor::new(Arc::clone(&graph), Arc::clone(&placements), own, kernels, transfers)?;
        let executor = executor.sites(Arc::clone(&sites)).window(WINDOW).deadline(deadline);
        Ok(Self { executor, feeder, sites, graph, placements, own })
    }

    /// Runs steps. All parts run the same ones.
    pub(crate) fn run(&mut self, steps: Range<u64>) -> Result<StepsReport, GraphError> {
        let before = self.sent();
        self.feeder.losses.clear();
        let report = self.executor.run(steps, &mut self.feeder)?;
        self.feeder.losses.sort_by_key(|(step, _)| *step);
        let mut times = report.steps;
        times.sort_by_key(|time| time.step);
        Ok(StepsReport {
            losses: self.feeder.losses.iter().map(|(_, loss)| *loss).collect(),
            steps: times.iter().map(|time| time.ended.saturating_sub(time.began).as_secs_f64()).collect(),
            elapsed: report.elapsed.as_secs_f64(),
            sent: self.sent().combined(before, u64::saturating_sub),
        })
    }

    fn sent(&self) -> Sent {
        let all = self.sent_tensors().into_iter();
        all.fold(Sent::default(), |sum, tensor| sum.combined(tensor.sent, u64::saturating_add))
    }

    /// Returns how each crossing tensor was sent by this part, in all steps.
    pub(crate) fn sent_tensors(&self) -> Vec<SentTensor> {
        let sent = |crossing: &Crossing| {
            let counts = self.executor.counts(crossing.id);
            let sent = Sent {
                tensors: counts.sent,
                bytes: counts.bytes,
                copied: counts.copied,
                inline: counts.inline,
            };
            SentTensor {
                name: crossing.name.clone(),
                placement: if crossing.placement.is_static() { "static" } else { "dynamic" }.to_owned(),
                site: self.sites.seen(crossing.id).site.map(|site| (self.name(site.owner), site.ordinal)),
                sent,
            }
        };
        self.placements.leaving(self.own).map(sent).collect()
    }

    fn name(&self, owner: SiteOwner) -> String {
        match owner {
            SiteOwner::Node(node) => {
                self.graph.node(NodeId(node)).map_or_else(|| node.to_string(), |node| node.name.clone())
            }
            SiteOwner::Receive(crossing) => {
                let crossing = self.placements.crossing(CrossingId(crossing));
                format!("receive of {}", crossing.map_or("?", |crossing| crossing.name.as_str()))
            }
        }
    }
}

impl Feeder {
    /// Makes the feeder of a graph.
    pub(crate) fn new(data: Arc<Data>, shape: JobShape, seed: u64, graph: &StepGraph) -> Self {
        let order = vec![0; data.train.len()];
        let (feeds, losses) = (graph.feeds.clone(), Vec::new());
        Self { data, shape, seed, order, epoch: None, targets: None, feeds, losses }
    }

    /// Returns the samples of a worker in a step. Samples that fill no batch are left out; each epoch leaves
    /// out others.
    fn batch(&mut self, step: u64, worker: usize) -> Result<(Array, Array), KernelError> {
        let batch = self.shape.batch;
        let steps = self.data.train.len() / batch.max(1);
        if steps == 0 {
            return Err(format!("{} samples don't fill a batch of {batch}", self.data.train.len()).into());
        }
        let (epoch, step) = (step as usize / steps, step as usize % steps);
        if self.epoch != Some(epoch) {
            reorder(&mut self.order, self.seed, epoch);
            self.epoch = Some(epoch);
        }
        let share = self.shape.share(worker);
        let range = step * batch + share.start..step * batch + share.end;
        let which = self.order.get(range).unwrap_or(&[]).iter().map(|sample| *sample as usize);
        self.data.train.batch(which)
    }
}
