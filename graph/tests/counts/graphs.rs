//! Steps of a graph of two parts, in which a tensor crosses each way.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, mpsc};
use std::thread;

use support::{config, within};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tonic_rdma_graph::dataflow::{
    Dim, Fact, Kernel, KernelError, Node, NodeId, Outlet, Role, Topology, Value,
};
use tonic_rdma_graph::placement::{Part, Partition, Placements};
use tonic_rdma_graph::schedule::Executor;
use tonic_rdma_graph::session::{Listener, Peering, Session};
use tonic_rdma_graph::sites::NodeSites;
use tonic_rdma_graph::transfer::TransferMode;
use tonic_rdma_tensor::{Dtype, Tensor, TensorMut, TensorSpec};

use super::{LARGE, Table, WARM_UP, heap, spec};

const MODE: TransferMode = TransferMode::RdmaZerocp;

/// A value in memory of the heap. From the second step on, the allocator places it in registered memory.
#[derive(Clone, Debug)]
struct Content(Tensor);

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
        Ok(Self(Tensor::from_bytes(*spec, bytes.into())?))
    }
}

/// Makes a tensor, as a node does in each step.
fn content() -> Result<Content, KernelError> {
    Ok(Content(Tensor::from_bytes(spec(LARGE), heap(LARGE))?))
}

pub(super) async fn steps(table: &mut Table) {
    let (known, symbolic) = (Dim::Known(LARGE as u64), Dim::Symbolic("N".into()));
    for (path, dim) in
        [("graph step, static, 1 MiB each way", known), ("graph step, dynamic, 1 MiB each way", symbolic)]
    {
        if !table.is_chosen(path) {
            continue;
        }
        let (begin, begun) = mpsc::channel();
        let (end, mut ended) = unbounded_channel();
        let steps = WARM_UP + table.operations;
        let parts = tokio::task::spawn_blocking(move || run(dim, steps, begun, &end));
        let step = async || {
            begin.send(()).unwrap();
            ended.recv().await.unwrap();
        };
        table.row(path, step).await;
        table.used.push(Box::new(within(parts).await.unwrap()));
    }
}

/// Runs both parts in one run. Each step begins when `begun` says so.
fn run(
    dim: Dim,
    steps: u64,
    begun: mpsc::Receiver<()>,
    end: &UnboundedSender<()>,
) -> Vec<(Session, Executor<Content>)> {
    let (graph, placements) = there_and_back(dim);
    let bind = |_| Listener::builder().config(config()).threads(2).bind("127.0.0.1:0").unwrap();
    let listeners: Vec<Listener> = (0..2).map(bind).collect();
    let addresses: Vec<String> = listeners.iter().map(|listener| listener.address().to_string()).collect();
    let begun = Mutex::new(begun);
    let feed = |_: u64, _: NodeId| {
        begun.lock().unwrap().recv()?;
        Ok(Content(TensorMut::zeroed(spec(LARGE))?.freeze()))
    };
    let part = |part, listener: Listener| {
        let peering = Peering::new(part, addresses.clone(), &graph, &placements).modes([MODE]);
        let session = listener.connect(peering).unwrap();
        let transfers = session.transfers(MODE).unwrap();
        let (topology, crossing) = (Arc::clone(&graph), Arc::clone(&placements));
        let executor = Executor::new(topology, crossing, part, kernels(end), transfers).unwrap();
        let mut executor = executor.sites(Arc::new(NodeSites::new(&graph, 64 << 20)));
        executor.run(0..steps, &mut { feed }).unwrap();
        // Devices without windows copy dynamic tensors to memory of one peer. The software device has windows.
        let has_windows = std::env::var_os("RDMA_DEVICE").is_none();
        let crossings = placements.crossings().iter();
        let crossings = crossings.filter(|crossing| has_windows || crossing.placement.is_static());
        let copied: u64 = crossings.map(|crossing| executor.counts(crossing.id).copied).sum();
        assert!(copied <= 1, "{copied} tensors were copied, also after the first step");
        (session, executor)
    };
    let part = &part;
    thread::scope(|scope| {
        let parts = (0..).map(Part).zip(listeners);
        let parts: Vec<_> =
            parts.map(|(number, listener)| scope.spawn(move || part(number, listener))).collect();
        parts.into_iter().map(|part| part.join().unwrap()).collect()
    })
}

/// The input and the result are in part 0, and the node between them in part 1.
fn there_and_back(dim: Dim) -> (Arc<Topology>, Arc<Placements>) {
    let mut graph = Topology::new();
    let mut before = None;
    for name in ["input", "there", "back"] {
        let node = Node {
            name: name.to_owned(),
            kind: "New".to_owned(),
            role: if before.is_none() { Role::Input } else { Role::Compute },
            inputs: before.into_iter().collect(),
            outputs: vec![Fact { dtype: Dtype::U8, dims: vec![dim.clone()] }],
            work: 1,
            stays: false,
        };
        before = Some(Outlet { node: graph.add(node).unwrap(), output: 0 });
    }
    graph.result(before.unwrap()).unwrap();
    let partition = Partition::new(&graph, 2, vec![Part(0), Part(1), Part(0)]).unwrap();
    let placements = Placements::new(&graph, &partition).unwrap();
    (Arc::new(graph), Arc::new(placements))
}

/// The last node says that the step has ended.
fn kernels(end: &UnboundedSender<()>) -> HashMap<NodeId, Box<dyn Kernel<Content>>> {
    let there = |_: u64, _: Vec<Content>| Ok(vec![content()?]);
    let end = end.clone();
    let back = move |_: u64, inputs: Vec<Content>| {
        end.send(())?;
        Ok(inputs)
    };
    HashMap::from([(NodeId(1), Box::new(there) as Box<dyn Kernel<_>>), (NodeId(2), Box::new(back))])
}
