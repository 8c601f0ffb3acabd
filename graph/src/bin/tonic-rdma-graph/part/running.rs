//! A part that has its model: it connects to the other parts, and runs turns.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::runtime::Handle;
use tonic_rdma_graph::dataflow::{Kernel, NodeId};
use tonic_rdma_graph::explain::{SenderReport, Sent};
use tonic_rdma_graph::onnx::{Model, ModelValue};
use tonic_rdma_graph::placement::{CrossingId, Part, Partition, Placements, analyse};
use tonic_rdma_graph::schedule::{
    CrossingCounts, Executor, ReceiveMode, Settings, Split, Stop, Transfers, Work,
};
use tonic_rdma_graph::session::{Fingerprint, Listener, Session};
use tonic_rdma_graph::sites::NodeSites;
use tonic_rdma_graph::transfer::Mode;

use super::program::Checks;
use super::tracing::Switch;
use crate::control::messages::{Connected, Described, Differs, Done, Expected, Job, SentCounts, Turn};
use crate::failure::Failure;
use crate::set::{lengths, settings};

/// A part that has loaded its model.
pub(super) struct Loaded {
    job: Job,
    split: Split,
    placements: Placements,
    kernels: HashMap<NodeId, Box<dyn Kernel<ModelValue>>>,
    inputs: Vec<HashMap<NodeId, ModelValue>>,
    modes: Vec<Mode>,
    listener: Listener,
    port: u16,
}

/// A part that is connected to the other parts.
pub(super) struct Running {
    part: Part,
    placements: Placements,
    checks: Checks,
    executor: Executor<ModelValue>,
    /// The transfers of each mode. Those of the mode in use are in the executor.
    transfers: HashMap<Mode, Box<dyn Transfers<ModelValue>>>,
    current: Mode,
    switch: Switch,
    sites: Arc<NodeSites>,
    /// The counters after the first turn of a mode.
    first: HashMap<Mode, Vec<CrossingCounts>>,
    connected: Connected,
    /// The set of inputs of the values that are kept for replays.
    kept: u64,
    sets: u64,
    /// Keeps the connections.
    _session: Session,
}

impl Loaded {
    /// Loads the model of a job, and listens for the other parts.
    pub(super) fn load(job: Job, file: &[u8], address: IpAddr, runtime: &Handle) -> Result<Self, Failure> {
        let refused = |error| Failure::refused(&error);
        let model = Model::read(Path::new(&job.model), file, &settings(&job.symbols, job.seed)?).map_err(refused)?;
        let graph = Arc::clone(model.topology());
        let parts = job.assignment.iter().map(|part| Part(*part)).collect();
        let partition = Partition::new(&graph, job.parts, parts).map_err(refused)?;
        let placements = analyse(&graph, &partition).map_err(refused)?;
        let nodes = placements.nodes_of(Part(job.part)).iter().copied();
        let kernels = model.kernels(nodes).map_err(refused)?.into_iter().collect();
        let symbols = model.symbols();
        let mut inputs = Vec::new();
        for set in 0..job.sets {
            let lengths = lengths(&symbols, &job.lengths, set);
            let all = model.inputs(set, job.seed, &lengths).map_err(refused)?;
            inputs.push(all.into_iter().filter(|(id, _)| partition.part_of(*id) == Some(Part(job.part))).collect());
        }
        let modes = job.modes.iter().map(|mode| mode.parse().map_err(Failure::usage));
        let modes = modes.collect::<Result<Vec<Mode>, _>>()?;
        let split = Split { graph, parts: partition.parts().to_vec(), crossings: placements.crossings().to_vec() };
        let listener = runtime
            .block_on(Listener::bind(SocketAddr::new(address, 0)))
            .map_err(|error| Failure::because("can't listen for the other parts", &error))?;
        let port = listener.address().port();
        Ok(Self { job, split, placements, kernels, inputs, modes, listener, port })
    }
}
