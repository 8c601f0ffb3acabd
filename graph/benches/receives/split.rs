//! The split graph that the bench runs.

use std::collections::HashMap;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use tonic_rdma_graph::dataflow::{Fact, Kernel, KernelError, Node, NodeId, Outlet, Role, Topology, Value};
use tonic_rdma_graph::placement::{CrossingId, Part, Partition, analyse};
use tonic_rdma_graph::schedule::{Executor, InMemory, Settings};
use tonic_rdma_graph::sites::NodeSites;
use tonic_rdma_tensor::{Dtype, Tensor, TensorSpec};

/// The bytes of a crossing tensor.
const BYTES: u64 = 256;

/// A tensor of bytes.
#[derive(Clone, Debug)]
pub(crate) struct Content(Tensor);

impl Value for Content {
    fn share(&self) -> Result<Tensor, KernelError> {
        Ok(self.0.clone())
    }

    fn filled(
        spec: &TensorSpec,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), KernelError>,
    ) -> Result<Self, KernelError> {
        let mut bytes = vec![0; usize::try_from(spec.bytes().ok_or("it has no fixed size")?)?];
        fill(&mut bytes)?;
        Ok(Self(Tensor::copy_from(*spec, &bytes)?))
    }
}

type Kernels = HashMap<NodeId, Box<dyn Kernel<Content>>>;

/// The executors of both parts.
pub(crate) struct Bench {
    pub(crate) executors: [Executor<Content>; 2],
    next: u64,
}

impl Bench {
    /// Makes a graph in which `outstanding` tensors go from part 0 to part 1. Each node of part 1 computes, or waits
    /// without a core, for as long as `each`.
    pub(crate) fn new(outstanding: usize, each: Duration, is_wait: bool) -> Self {
        let mut graph = Topology::new();
        let mut kernels = [Kernels::new(), Kernels::new()];
        let mut parts = Vec::new();
        let mut add = |name: String, part: usize, inputs: Vec<Outlet>, work: Duration| {
            let outputs = vec![Fact::known(Dtype::U8, &[BYTES])];
            let kind = "Bench".to_owned();
            let node = Node { name, kind, role: Role::Compute, inputs, outputs, work: 1, stays: false };
            let node = graph.add(node).expect("a node");
            parts.push(Part(part));
            kernels[part].insert(node, Box::new(move |_: u64, _: Vec<Content>| compute(work, is_wait)));
            Outlet { node, output: 0 }
        };
        let sent: Vec<Outlet> =
            (0..outstanding).map(|at| add(format!("sent {at}"), 0, vec![], Duration::ZERO)).collect();
        for (at, outlet) in sent.into_iter().enumerate() {
            add(format!("consumer {at}"), 1, vec![outlet], each);
        }
        for at in 0..outstanding {
            add(format!("other {at}"), 1, vec![], each);
        }
        let partition = Partition::new(&graph, 2, parts).expect("a partition");
        let placements = Arc::new(analyse(&graph, &partition).expect("crossing tensors"));
        // All tensors are sent at once. The network delivers one after the other, in an order of its own.
        let delay = move |crossing: CrossingId, step: u64| {
            let mut order: Vec<usize> = (0..outstanding).collect();
            fastrand::Rng::with_seed(step).shuffle(&mut order);
            each * (1 + order[crossing.0] as u32)
        };
        let transfers = InMemory::delayed(&placements, 1, delay).expect("transfers");
        let graph = Arc::new(graph);
        let sites = Arc::new(NodeSites::untraced(&graph));
        let settings = Settings::default();
        let executors = kernels.into_iter().zip(transfers).enumerate().map(|(part, (kernels, transfers))| {
            let (graph, placements, sites) =
                (Arc::clone(&graph), Arc::clone(&placements), Arc::clone(&sites));
            Executor::new(graph, placements, Part(part), kernels, transfers, sites, settings.clone())
                .expect("an executor")
        });
        let executors = executors.collect::<Vec<_>>().try_into().expect("two parts");
        Self { executors, next: 0 }
    }

    pub(crate) fn next_step(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }
}

fn compute(work: Duration, is_wait: bool) -> Result<Vec<Content>, KernelError> {
    let begin = Instant::now();
    if is_wait && !work.is_zero() {
        thread::sleep(work);
    }
    while begin.elapsed() < work {
        std::hint::spin_loop();
    }
    let spec = Fact::known(Dtype::U8, &[BYTES]).spec().ok_or("a known shape")?;
    Ok(vec![Content(Tensor::copy_from(spec, &[7; BYTES as usize])?)])
}
