//! A part: it loads its model, connects to the other parts, and runs turns.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tonic_rdma_commands::Failure;
use tonic_rdma_graph::GraphError;
use tonic_rdma_graph::explain::SenderReport;
use tonic_rdma_graph::onnx::{Model, ModelValue};
use tonic_rdma_graph::placement::{Part, Partition, Placements, analyse};
use tonic_rdma_graph::schedule::{self, CrossingCounts, Executor, Stop, Transfers, Work};
use tonic_rdma_graph::session::{self, Listener, Peering, Session};
use tonic_rdma_graph::sites::NodeSites;
use tonic_rdma_graph::transfer::Mode;

use super::checks::Checks;
use super::tally::Tally;
use crate::control::{Described, Differs, Done, Expected, Job, SentCounts, Turn};
use crate::set::{lengths, settings};

/// The largest amount of registered memory for tensors that cross.
const REGISTERED: u64 = 1 << 30;

/// A part that is connected to the other parts.
pub(super) struct Running {
    part: Part,
    placements: Arc<Placements>,
    checks: Checks,
    executor: Executor<ModelValue>,
    /// The transfers of each mode. Those of the mode in use are in the executor.
    transfers: HashMap<Mode, Box<dyn Transfers<ModelValue>>>,
    current: Mode,
    modes: Vec<Mode>,
    sites: Arc<NodeSites>,
    /// How each mode sent tensors in turns that compute.
    tallies: HashMap<Mode, Tally>,
    /// Keeps the connections.
    session: Session,
}

impl Running {
    /// Loads the model of a job, and connects to the other parts. `meet` gets the port at which they find this part, and returns the
    /// addresses at which they listen, or `None` if there is no more to do.
    pub(super) fn start(
        job: Job,
        file: &[u8],
        address: IpAddr,
        meet: impl FnOnce(u16) -> Result<Option<Vec<String>>, Failure>,
    ) -> Result<Option<Self>, Failure> {
        let refused = |error: GraphError| Failure::refused(&error);
        let failed = |error: GraphError| Failure::run("can't connect with the other parts").because(error);
        let model =
            Model::read(Path::new(&job.model), file, &settings(&job.symbols, job.seed)?).map_err(refused)?;
        let graph = Arc::clone(model.topology());
        let parts = job.assignment.iter().map(|part| Part(*part)).collect();
        let partition = Partition::new(&graph, job.parts, parts).map_err(refused)?;
        let placements = Arc::new(analyse(&graph, &partition).map_err(refused)?);
        let part = Part(job.part);
        let kernels = model.kernels(placements.nodes_of(part).iter().copied()).map_err(refused)?;
        let symbols = model.symbols();
        let mut inputs = Vec::new();
        for set in 0..job.sets {
            let all = model.inputs(set, job.seed, &lengths(&symbols, &job.lengths, set)).map_err(refused)?;
            inputs.push(all.into_iter().filter(|(id, _)| partition.part_of(*id) == Some(part)).collect());
        }
        let checks = Checks::new(inputs, graph.results().to_vec());
        let settings = session::Settings::from_env().map_err(refused)?;
        let listener = Listener::bind(&SocketAddr::new(address, 0).to_string(), settings)
            .map_err(|error| Failure::run("can't listen for the other parts").because(error))?;

        let Some(peers) = meet(listener.address().port())? else { return Ok(None) };
        let limit = Duration::from_millis(job.limit_ms);
        let mut peering = Peering::new(part, peers, &graph, &placements);
        peering.modes.clone_from(&job.modes);
        peering.window = job.window;
        peering.timeout = limit;
        let session = listener.connect(peering).map_err(failed)?;
        let mut transfers = HashMap::new();
        for mode in &job.modes {
            transfers.insert(*mode, session.transfers(*mode).map_err(failed)?);
        }
        let first = job.modes.first().and_then(|mode| Some((*mode, transfers.remove(mode)?)));
        let (current, in_use) = first.ok_or_else(|| Failure::usage("no mode was asked for"))?;
        let mut settings = schedule::Settings::default();
        settings.receive = job.receive;
        settings.window = job.window;
        settings.deadline = limit;
        let sites = Arc::new(NodeSites::new(&graph, REGISTERED));
        let (kernels, shared, known) =
            (kernels.into_iter().collect(), Arc::clone(&placements), Arc::clone(&sites));
        let executor = Executor::new(graph, shared, part, kernels, in_use, known, settings)
            .map_err(|error| Failure::run("can't begin").because(error))?;
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

    /// Returns a handle that stops the run from another thread.
    pub(super) fn stop(&self) -> Stop {
        self.executor.stop_handle()
    }

    /// Returns the number of addresses of static slots that this part got from its peers.
    pub(super) fn static_addresses(&self) -> usize {
        self.session.addresses_distributed().learned
    }

    /// Sets what is compared.
    pub(super) fn expect(&mut self, expected: Expected) {
        self.checks.expect(expected);
    }

    /// Runs a turn. Returns the first tensor that differs from the unsplit model too.
    pub(super) fn run(&mut self, turn: &Turn) -> Result<(Done, Option<(Differs, Bytes)>), Failure> {
        let mode = turn.mode;
        self.change(mode)?;
        let end = turn.first + turn.count;
        let work = if turn.replay { Work::Replay } else { Work::ComputeAndKeep };
        let before = self.counts();
        let mut checking = self.checks.begin(turn);
        let report = self
            .executor
            .run(turn.first..end, work, &mut checking)
            .map_err(|error| Failure::run(mode.to_string()).because(error))?;
        let (mut done, difference) = (checking.done, checking.difference);
        done.nanos = report.elapsed.as_nanos().try_into().unwrap_or(u64::MAX);
        if !turn.replay {
            let after = self.counts();
            self.tallies.entry(mode).or_default().add(&before, &after);
        }
        Ok((done, difference))
    }

    /// Returns the counters of each crossing tensor in the current mode.
    fn counts(&self) -> Vec<CrossingCounts> {
        let transfers = self.executor.transfers();
        self.placements.crossings().iter().map(|crossing| transfers.counts(crossing.id)).collect()
    }

    /// Uses the transfers of this mode from now on.
    fn change(&mut self, mode: Mode) -> Result<(), Failure> {
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

    /// Describes the tensors that this part sends.
    pub(super) fn describe(&self) -> Described {
        let mut described = Described::default();
        for mode in &self.modes {
            let mut counts = SentCounts { mode: *mode, sent: 0, copied: 0 };
            for crossing in self.placements.leaving(self.part) {
                let (first, all) =
                    self.tallies.get(mode).map(|tally| tally.of(crossing.id)).unwrap_or_default();
                let report = SenderReport::new(crossing.id, &self.sites, first.into(), all.into());
                counts.sent += all.sent.saturating_sub(first.sent);
                counts.copied += report.later.copied;
                if *mode == Mode::RdmaZerocp {
                    described.tensors.push(report);
                }
            }
            described.modes.push(counts);
        }
        described
    }
}
