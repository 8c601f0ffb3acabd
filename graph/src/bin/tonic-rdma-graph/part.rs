//! A process that runs a part of a model: for the command that started it, or for a command on another host.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use std::{io, thread};

use bytes::Bytes;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, mpsc};
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::codegen::BoxStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status, Streaming};

use crate::control::proto::part_server::{self, PartServer};
use crate::control::{
    Checked, Described, Differs, Done, Expected, Job, Order, PartMemory, Report, SentCounts, Trial, content,
    digest, lengths, loader, proto, read, text, within,
};
use crate::options::ServeOptions;
use tonic_rdma::Config;
use tonic_rdma_commands::{Context as _, Failure, process};
use tonic_rdma_graph::GraphError;
use tonic_rdma_graph::dataflow::{KernelError, NodeId, Outlet, Value as _};
use tonic_rdma_graph::explain::SenderReport;
use tonic_rdma_graph::onnx::ModelValue;
use tonic_rdma_graph::placement::{CrossingId, Part, Partition, Placements};
use tonic_rdma_graph::schedule::{CrossingCounts, Direction, Executor, Program, StopHandle, Transfers};
use tonic_rdma_graph::session::{Listener, Peering, Session};
use tonic_rdma_graph::sites::NodeSites;
use tonic_rdma_graph::transfer::TransferMode;

/// The first words of the line in which a part says where it listens.
pub(crate) const LISTENING: &str = "listening on ";
/// The largest message of a coordinator: a chunk of a model, or the digests of all crossing tensors.
const LARGEST: usize = 64 << 20;

/// Serves coordinators, one at a time, until the process is ended.
pub(crate) fn serve(options: &ServeOptions) -> Result<(), Failure> {
    if let Some(parent) = options.parent {
        process::end_with(parent)?;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.context("can't start threads")?;
    runtime.block_on(listen(options))
}

async fn listen(options: &ServeOptions) -> Result<(), Failure> {
    let address = options.listen;
    let refused = |error: &io::Error| {
        Failure::usage(format!(
            "--listen {address}: {error}; choose an address of this machine and a free port"
        ))
    };
    let listener = TcpListener::bind(address).await.map_err(|error| refused(&error))?;
    let address = listener.local_addr().map_err(|error| refused(&error))?;
    process::report_line(format!("{LISTENING}{address}"))?;
    let service = PartService { address: address.ip(), free: Arc::new(Semaphore::new(1)) };
    let service = PartServer::new(service).max_decoding_message_size(LARGEST);
    Server::builder()
        .tcp_nodelay(true)
        .add_service(service)
        .serve_with_incoming(TcpListenerStream::new(listener))
        .await
        .context(format!("can't serve at {address}"))
}

/// The number of orders, and of reports, that may wait.
const WAITING: usize = 8;
/// The largest model that is taken.
const LARGEST_MODEL: usize = 4 << 30;

/// The most micro-batches under way: the most buffers of a slot.
const MOST_WINDOW: usize = 1024;
/// The most threads that run nodes.
const MOST_THREADS: usize = 64;

/// The service of a part: it takes the orders of a coordinator, and a thread carries them out.
#[derive(Debug)]
struct PartService {
    /// The address at which other parts find this one.
    address: IpAddr,
    /// A part serves one coordinator at a time, so that times mean something.
    free: Arc<Semaphore>,
}

#[tonic::async_trait]
impl part_server::Part for PartService {
    type WorkStream = BoxStream<proto::Report>;

    async fn work(
        &self,
        request: Request<Streaming<proto::Order>>,
    ) -> Result<Response<Self::WorkStream>, Status> {
        let permit = Arc::clone(&self.free).try_acquire_owned();
        let permit =
            permit.map_err(|_| Status::unavailable("it works for another coordinator; try again later"))?;
        let (sender, orders) = mpsc::channel(WAITING);
        let (reports, answers) = mpsc::channel(WAITING);
        let stop = Arc::new(OnceLock::<StopHandle>::new());
        let worker =
            Worker { address: self.address, orders, reports: reports.clone(), stop: Arc::clone(&stop) };
        // The stop handle ends the run of the worker's thread, also where it waits for other parts.
        tokio::spawn(async move {
            if let Err(failure) = pass(request.into_inner(), &sender).await {
                let _ = reports.send(Err(Status::invalid_argument(failure.with_causes()))).await;
            }
            if let Some(stop) = stop.get() {
                stop.stop();
            }
        });
        let work = move || {
            worker.run();
            drop(permit);
        };
        thread::Builder::new()
            .name("part".to_owned())
            .spawn(work)
            .map_err(|error| Status::resource_exhausted(format!("can't start a thread: {error}")))?;
        Ok(Response::new(Box::pin(ReceiverStream::new(answers))))
    }
}

/// Passes orders on until the stream ends.
async fn pass(
    mut orders: Streaming<proto::Order>,
    sender: &mpsc::Sender<(Order, Bytes)>,
) -> Result<(), Failure> {
    // Whether the coordinator has ended the stream or is gone: there is no more to do.
    while let Ok(Some(order)) = orders.message().await {
        let read = read(&order.json, "the coordinator")?;
        if sender.send((read, order.content)).await.is_err() {
            break;
        }
    }
    Ok(())
}

/// The work of a part for one coordinator, from the model to the last trial.
#[derive(Debug)]
struct Worker {
    address: IpAddr,
    orders: mpsc::Receiver<(Order, Bytes)>,
    reports: mpsc::Sender<Result<proto::Report, Status>>,
    /// Stops the run, once there is one, from another thread.
    stop: Arc<OnceLock<StopHandle>>,
}

impl Worker {
    /// Carries out the orders until they end.
    fn run(mut self) {
        if let Err(failure) = self.work() {
            let usage = failure.is_usage();
            // The coordinator may be gone.
            let _ = self.report(&Report::Failed { reason: failure.with_causes(), usage }, Bytes::new());
        }
    }

    fn work(&mut self) -> Result<(), Failure> {
        let mut model = Vec::new();
        let job = loop {
            match self.orders.blocking_recv() {
                Some((Order::Model, content)) if model.len() + content.len() <= LARGEST_MODEL => {
                    model.extend_from_slice(&content);
                }
                Some((Order::Model, _)) => {
                    return Err(Failure::usage(format!("the model has more than {LARGEST_MODEL} bytes")));
                }
                Some((Order::Load(job), _)) => break job,
                Some((other, _)) => return Err(misplaced("early", &other)),
                None => return Ok(()),
            }
        };
        let running = RunningPart::start(job, &model, self.address, |port| {
            self.report(&Report::Loaded { port }, Bytes::new())?;
            match self.orders.blocking_recv() {
                Some((Order::Connect { peers }, _)) => Ok(Some(peers)),
                Some((other, _)) => Err(misplaced("early", &other)),
                None => Ok(None),
            }
        })?;
        drop(model);
        let Some(mut running) = running else { return Ok(()) };
        let _ = self.stop.set(running.executor.stop_handle());
        let static_addresses = running.session.addresses_distributed().learned;
        self.report(&Report::Connected { static_addresses }, Bytes::new())?;
        while let Some((order, _)) = self.orders.blocking_recv() {
            match order {
                Order::Expect(expected) => {
                    running.checks.expect(expected);
                    self.report(&Report::Ready, Bytes::new())?;
                }
                Order::Run(trial) => {
                    let (done, difference) = running.run(&trial)?;
                    if let Some((differs, content)) = difference {
                        self.report(&Report::Differs(differs), content)?;
                    }
                    self.report(&Report::Done(done), Bytes::new())?;
                }
                Order::Describe => self.report(&Report::Tensors(running.describe()), Bytes::new())?,
                other => return Err(misplaced("late", &other)),
            }
        }
        Ok(())
    }

    fn report(&self, report: &Report, content: Bytes) -> Result<(), Failure> {
        let message = proto::Report { json: text(report)?, content };
        self.reports.blocking_send(Ok(message)).map_err(|_| Failure::run("the coordinator is gone"))
    }
}

fn misplaced(when: &str, order: &Order) -> Failure {
    Failure::run(format!("an order came too {when}: {order:?}"))
}

/// Checks the numbers of a job, before anything takes as much time or memory as they say.
fn check(job: &Job) -> Result<(), Failure> {
    for (what, number, most) in [("window", job.window, MOST_WINDOW), ("threads", job.threads, MOST_THREADS)]
    {
        if !(1..=most).contains(&number) {
            return Err(Failure::usage(format!("{what}: {number}; it takes 1 to {most}")));
        }
    }
    Ok(())
}

/// A part that is connected to the other parts.
struct RunningPart {
    part: Part,
    placements: Arc<Placements>,
    checks: Checks,
    executor: Executor<ModelValue>,
    /// The transfers of each mode. Those of the mode in use are in the executor.
    transfers: HashMap<TransferMode, Transfers<ModelValue>>,
    current: TransferMode,
    modes: Vec<TransferMode>,
    sites: Arc<NodeSites>,
    /// How each mode sent tensors in trials that compute.
    tallies: HashMap<TransferMode, Tally>,
    /// Keeps the connections.
    session: Session,
}

impl RunningPart {
    /// Loads the model of a job, and connects to the other parts. `exchange_addresses` gets the port at which they find
    /// this part, and returns the addresses at which they listen, or `None` if there is no more to do.
    fn start(
        job: Job,
        file: &[u8],
        address: IpAddr,
        exchange_addresses: impl FnOnce(u16) -> Result<Option<Vec<String>>, Failure>,
    ) -> Result<Option<Self>, Failure> {
        check(&job)?;
        let refused = |error: GraphError| Failure::refused(&error);
        let failed = |error: GraphError| Failure::run("can't connect with the other parts").because(error);
        // The name is the caller's choice, and nothing is read there.
        let model = loader(&job.symbols, job.seed)?.read(Path::new(&job.model), file).map_err(refused)?;
        let graph = Arc::clone(model.topology());
        let parts = job.assignment.iter().map(|part| Part(*part)).collect();
        let partition = Partition::new(&graph, job.parts, parts).map_err(refused)?;
        let placements = Placements::new(&graph, &partition);
        let placements = placements.and_then(|it| within(it, job.memory, job.window, &job.modes));
        let placements = Arc::new(placements.map_err(refused)?);
        let part = Part(job.part);
        let kernels = model.kernels(placements.nodes_of(part).iter().copied()).map_err(refused)?;
        let symbols = model.symbols();
        let mut inputs = Vec::new();
        for set in 0..job.sets {
            let all = model.inputs(set, job.seed, &lengths(&symbols, &job.lengths, set)).map_err(refused)?;
            inputs.push(all.into_iter().filter(|(id, _)| partition.part_of(*id) == Some(part)).collect());
        }
        let checks = Checks { inputs, results: graph.results().to_vec(), digests: HashMap::new() };
        let config = Config::from_env().map_err(|error| Failure::refused(&error))?;
        let address = SocketAddr::new(address, 0).to_string();
        let listener = Listener::builder().config(config).bind(&address);
        let listener = listener.context("can't listen for the other parts")?;

        let Some(peers) = exchange_addresses(listener.address().port())? else { return Ok(None) };
        let limit = Duration::from_millis(job.limit_ms);
        let peering = Peering::new(part, peers, &graph, &placements).modes(job.modes.iter().copied());
        let session = listener.connect(peering.window(job.window).timeout(limit)).map_err(failed)?;
        let mut transfers = HashMap::new();
        for mode in &job.modes {
            transfers.insert(*mode, session.transfers(*mode).map_err(failed)?);
        }
        let first = job.modes.first().and_then(|mode| Some((*mode, transfers.remove(mode)?)));
        let (current, in_use) = first.ok_or_else(|| Failure::usage("no mode was asked for"))?;
        let sites = NodeSites::preallocated(&graph, &placements, part, job.window);
        let sites = Arc::new(sites.map_err(|error| Failure::refused(&error))?);
        let executor =
            Executor::new(graph, Arc::clone(&placements), part, kernels, in_use).context("can't begin")?;
        let executor =
            executor.sites(Arc::clone(&sites)).receive(job.receive).window(job.window).deadline(limit);
        let executor = executor.threads(job.threads);
        let (modes, tallies) = (job.modes, HashMap::new());
        Ok(Some(Self {
            part,
            placements,
            checks,
            executor,
            transfers,
            current,
            modes,
            sites,
            tallies,
            session,
        }))
    }

    /// Runs a trial. Returns the first tensor that differs from the unsplit model too.
    fn run(&mut self, trial: &Trial) -> Result<(Done, Option<(Differs, Bytes)>), Failure> {
        let mode = trial.mode;
        self.change(mode)?;
        let end = trial.first + trial.count;
        let before = self.counts();
        let mut program = self.checks.begin(trial);
        let report = match trial.replay {
            true => self.executor.replay(trial.first..end),
            false => self.executor.run_and_keep(trial.first..end, &mut program),
        };
        let report = report.context(mode.to_string())?;
        let (mut done, difference) = (program.done, program.difference);
        done.nanos = report.elapsed.as_nanos().try_into().unwrap_or(u64::MAX);
        if !trial.replay {
            let after = self.counts();
            self.tallies.entry(mode).or_default().add(&before, &after);
        }
        Ok((done, difference))
    }

    /// Returns the counters of each crossing tensor in the current mode.
    fn counts(&self) -> Vec<CrossingCounts> {
        self.placements.crossings().iter().map(|crossing| self.executor.counts(crossing.id)).collect()
    }

    /// Uses the transfers of this mode from now on.
    fn change(&mut self, mode: TransferMode) -> Result<(), Failure> {
        if mode != self.current {
            let transfers = self.transfers.remove(&mode);
            let transfers =
                transfers.ok_or_else(|| Failure::run(format!("this part is not connected for {mode}")))?;
            let former = self.executor.replace_transfers(transfers);
            self.transfers.insert(self.current, former);
            self.current = mode;
        }
        Ok(())
    }

    /// Returns the counts of a crossing tensor in the first trial of a mode, and in all its trials.
    fn tally(&self, mode: TransferMode, crossing: CrossingId) -> (CrossingCounts, CrossingCounts) {
        self.tallies.get(&mode).map(|tally| tally.of(crossing)).unwrap_or_default()
    }

    /// Describes the tensors that this part sends.
    fn describe(&self) -> Described {
        let memory = PartMemory { slots: self.session.memory(), sends: self.sites.memory() };
        let mut described = Described { memory, ..Described::default() };
        let copies_nothing = [TransferMode::RdmaZerocp, TransferMode::RdmaInPlace];
        let explained = copies_nothing.iter().find(|mode| self.modes.contains(mode));
        for mode in &self.modes {
            let mut counts = SentCounts { mode: *mode, sent: 0, copied: 0, received: 0, received_copied: 0 };
            for crossing in self.placements.arriving(self.part) {
                let (first, all) = self.tally(*mode, crossing.id);
                counts.received += all.received.saturating_sub(first.received);
                counts.received_copied += all.received_copied.saturating_sub(first.received_copied);
            }
            for crossing in self.placements.leaving(self.part) {
                let (first, all) = self.tally(*mode, crossing.id);
                let report = SenderReport::new(crossing.id, &self.sites, first.into(), all.into());
                counts.sent += all.sent.saturating_sub(first.sent);
                counts.copied += report.later.copied;
                if Some(mode) == explained {
                    described.tensors.push(report);
                }
            }
            described.modes.push(counts);
        }
        described
    }
}

/// Inputs, and what is compared.
#[derive(Debug)]
struct Checks {
    /// The inputs of this part, for each set.
    inputs: Vec<HashMap<NodeId, ModelValue>>,
    /// The results of the model, in order.
    results: Vec<Outlet>,
    digests: HashMap<Checked, Vec<u64>>,
}

/// The program of a trial: feeds the inputs of this part, and compares what arrives and the results.
#[derive(Debug)]
struct TrialProgram<'a> {
    checks: &'a Checks,
    trial: &'a Trial,
    done: Done,
    /// The first tensor of the trial that differs.
    difference: Option<(Differs, Bytes)>,
}

impl Checks {
    /// Sets what is compared.
    fn expect(&mut self, expected: Expected) {
        let crossings =
            expected.crossings.into_iter().map(|(number, digests)| (Checked::Crossing(number), digests));
        let results =
            expected.results.into_iter().map(|(position, digests)| (Checked::Result(position), digests));
        self.digests = crossings.chain(results).collect();
    }

    /// Returns the set of inputs of a micro-batch.
    fn set_of(&self, micro_batch: u64) -> u64 {
        micro_batch % (self.inputs.len() as u64).max(1)
    }

    /// Begins a trial.
    fn begin<'a>(&'a self, trial: &'a Trial) -> TrialProgram<'a> {
        TrialProgram { checks: self, trial, done: Done::default(), difference: None }
    }
}

impl TrialProgram<'_> {
    fn compare(&mut self, what: Checked, micro_batch: u64, value: &ModelValue) -> Result<(), KernelError> {
        if !self.trial.check {
            return Ok(());
        }
        let set = self.checks.set_of(micro_batch);
        let expected = self.checks.digests.get(&what).and_then(|digests| digests.get(set as usize));
        let expected = *expected.ok_or_else(|| format!("{what:?}: nothing is known of the unsplit model"))?;
        self.done.checked += 1;
        if digest(value)? != expected {
            self.done.errors += 1;
            if self.difference.is_none() {
                let (mode, spec) = (self.trial.mode, value.spec()?.to_string());
                let differs = Differs { what, mode, micro_batch, set, spec };
                self.difference = Some((differs, content(value)?));
            }
        }
        Ok(())
    }
}

impl Program<ModelValue> for TrialProgram<'_> {
    fn feed(&mut self, step: u64, input: NodeId) -> Result<ModelValue, KernelError> {
        let set = self.checks.set_of(step) as usize;
        let value = self.checks.inputs.get(set).and_then(|inputs| inputs.get(&input));
        let value = value.ok_or("no such input in this part")?;
        let spec = value.spec()?;
        if spec.dtype().size().is_none() {
            return Ok(value.clone());
        }
        // A tensor of its own for each micro-batch, as if it were read from a file: its memory may be
        // registered.
        ModelValue::filled(&spec, &mut |bytes| {
            bytes.copy_from_slice(value.bytes());
            Ok(())
        })
    }

    fn result(&mut self, step: u64, outlet: Outlet, value: ModelValue) -> Result<(), KernelError> {
        // A model may name an output twice.
        let positions: Vec<usize> = (0..self.checks.results.len())
            .filter(|position| self.checks.results[*position] == outlet)
            .collect();
        positions.into_iter().try_for_each(|position| self.compare(Checked::Result(position), step, &value))
    }

    fn crossed(
        &mut self,
        direction: Direction,
        crossing: CrossingId,
        step: u64,
        value: &ModelValue,
    ) -> Result<(), KernelError> {
        match direction {
            Direction::Sent => Ok(()),
            Direction::Received => self.compare(Checked::Crossing(crossing.0), step, value),
        }
    }
}

/// How a mode sent tensors in trials that compute: the counts of each crossing tensor, by number. Replays
/// send the same tensors again, and are not counted.
#[derive(Clone, Debug, Default)]
struct Tally {
    trials: u64,
    first: Vec<CrossingCounts>,
    all: Vec<CrossingCounts>,
}

impl Tally {
    /// Adds a trial that computed, by the counters before and after it.
    fn add(&mut self, before: &[CrossingCounts], after: &[CrossingCounts]) {
        self.all.resize(self.all.len().max(after.len()), CrossingCounts::default());
        for ((all, before), after) in self.all.iter_mut().zip(before).zip(after) {
            all.sent += after.sent.saturating_sub(before.sent);
            all.bytes += after.bytes.saturating_sub(before.bytes);
            all.copied += after.copied.saturating_sub(before.copied);
            all.inline += after.inline.saturating_sub(before.inline);
            all.received += after.received.saturating_sub(before.received);
            all.received_copied += after.received_copied.saturating_sub(before.received_copied);
        }
        if self.trials == 0 {
            self.first.clone_from(&self.all);
        }
        self.trials += 1;
    }

    /// Returns the counts of a crossing tensor in the first trial, and in all trials.
    fn of(&self, crossing: CrossingId) -> (CrossingCounts, CrossingCounts) {
        let of = |counts: &[CrossingCounts]| counts.get(crossing.0).copied().unwrap_or_default();
        (of(&self.first), of(&self.all))
    }
}

#[cfg(test)]
mod job_tests;

#[cfg(test)]
mod checks_tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use tonic_rdma_graph::transfer::TransferMode;
    use tonic_rdma_tensor::{Dtype, Shape, TensorSpec};

    use super::*;

    fn value(first: u8) -> ModelValue {
        let spec = TensorSpec::new(Dtype::U8, Shape::new(&[2]).unwrap()).unwrap();
        let mut fill = |bytes: &mut [u8]| {
            bytes.copy_from_slice(&[first, 7]);
            Ok(())
        };
        ModelValue::filled(&spec, &mut fill).unwrap()
    }

    #[test]
    fn each_micro_batch_is_compared_with_its_own_set_of_inputs() {
        let inputs = vec![HashMap::from([(NodeId(0), value(0))]), HashMap::from([(NodeId(0), value(1))])];
        let mut checks = Checks { inputs, results: Vec::new(), digests: HashMap::new() };
        let digests = vec![digest(&value(0)).unwrap(), digest(&value(1)).unwrap()];
        checks.expect(Expected { crossings: vec![(4, digests)], results: Vec::new() });
        let trial = Trial { mode: TransferMode::RdmaCp, first: 0, count: 4, replay: false, check: true };
        let mut program = checks.begin(&trial);
        assert_eq!(program.feed(3, NodeId(0)).unwrap().bytes(), [1, 7]);
        for (micro_batch, content) in [(0, 0), (1, 1), (2, 0), (3, 0)] {
            program.crossed(Direction::Received, CrossingId(4), micro_batch, &value(content)).unwrap();
        }
        assert_eq!((program.done.checked, program.done.errors), (4, 1));
        let (differs, content) = program.difference.unwrap();
        assert_eq!((differs.micro_batch, differs.set, &content[..]), (3, 1, &[0, 7][..]));
        let mut program = checks.begin(&trial);
        assert!(program.crossed(Direction::Received, CrossingId(5), 4, &value(1)).is_err());

        // A trial that is measured compares nothing.
        let measured = Trial { check: false, ..trial.clone() };
        let mut program = checks.begin(&measured);
        program.crossed(Direction::Received, CrossingId(4), 0, &value(9)).unwrap();
        assert_eq!((program.done.checked, program.done.errors), (0, 0));
    }
}

#[cfg(test)]
mod tally_tests {
    use super::*;

    fn counts(sent: u64, copied: u64) -> [CrossingCounts; 2] {
        [
            CrossingCounts::default(),
            CrossingCounts { sent, bytes: 8 * sent, copied, ..CrossingCounts::default() },
        ]
    }

    #[test]
    fn a_copy_in_a_trial_that_computes_is_counted_and_replays_are_not() {
        let mut tally = Tally::default();
        assert_eq!(tally.of(CrossingId(1)), Default::default());
        tally.add(&counts(0, 0), &counts(1, 1));
        // A replay sends 5000 tensors in between.
        tally.add(&counts(5001, 1), &counts(5004, 2));
        let (first, all) = tally.of(CrossingId(1));
        assert_eq!((first.sent, first.copied), (1, 1));
        assert_eq!((all.sent, all.copied, all.bytes), (4, 2, 32));
        assert_eq!(tally.of(CrossingId(0)), Default::default());
    }
}
