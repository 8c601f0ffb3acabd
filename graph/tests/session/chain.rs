//! A graph whose results depend on each byte of each crossing tensor.

use std::collections::HashMap;
use std::error::Error;
use std::sync::{Arc, LazyLock, Mutex};
use std::thread;
use std::time::Duration;

use tonic_rdma::memory::Pool;
use tonic_rdma::{Config, EagerThreshold};
use tonic_rdma_graph::GraphError;
use tonic_rdma_graph::dataflow::{
    Dim, Fact, Kernel, KernelError, Node, NodeId, Outlet, Role, Topology, Value,
};
use tonic_rdma_graph::placement::{Part, Partition, Placements};
use tonic_rdma_graph::schedule::{Executor, Program, ReceiveMode, RunReport, Transfers};
use tonic_rdma_graph::session::{Listener, Peering, Session};
use tonic_rdma_graph::transfer::TransferMode;
use tonic_rdma_tensor::{Dtype, Shape, Tensor, TensorMut, TensorSpec};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Registered memory for the values of all parts of this process.
static POOL: LazyLock<Pool> = LazyLock::new(|| Pool::for_sending(256 << 20));

/// A value in registered memory.
#[derive(Clone, Debug)]
pub(crate) struct Registered(pub(crate) Tensor);

impl Value for Registered {
    fn share(&self) -> Result<Tensor, KernelError> {
        Ok(self.0.clone())
    }

    fn filled(
        spec: &TensorSpec,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), KernelError>,
    ) -> Result<Self, KernelError> {
        let mut tensor = TensorMut::in_pool(*spec, &POOL)?;
        fill(tensor.bytes_mut())?;
        Ok(Self(tensor.freeze()))
    }
}

/// The nodes of a chain: a node for each entry, in parts 0, 1, … and again from 0. Nodes with `None` have a
/// length that differs from step to step. The last node also takes the output of the first one.
pub(crate) struct Chain {
    pub(crate) graph: Topology,
    pub(crate) placements: Arc<Placements>,
    lengths: Vec<Option<u64>>,
}

/// Lengths in bytes, in registered memory: inline, short, odd, and with several requests.
pub(crate) const LENGTHS: [Option<u64>; 9] =
    [Some(16), Some(5000), None, Some(200_001), None, Some(1 << 20), Some(1), None, Some(40_000)];

impl Chain {
    pub(crate) fn new(parts: usize) -> Self {
        let mut graph = Topology::new();
        let mut owners = Vec::new();
        let last = LENGTHS.len() - 1;
        for (index, length) in LENGTHS.iter().enumerate() {
            let dims = match length {
                Some(length) => vec![Dim::Known(*length)],
                None => vec![Dim::Symbolic(format!("N{index}").into())],
            };
            let outlet = |node| Outlet { node: NodeId(node), output: 0 };
            let inputs = match index {
                0 => vec![],
                _ if index == last => vec![outlet(index - 1), outlet(0)],
                _ => vec![outlet(index - 1)],
            };
            let node = Node {
                name: format!("node{index}"),
                kind: "Mix".to_owned(),
                role: if index == 0 { Role::Input } else { Role::Compute },
                inputs,
                outputs: vec![Fact { dtype: Dtype::U8, dims }],
                work: 1,
                stays: false,
            };
            graph.add(node).unwrap();
            owners.push(Part(index % parts));
        }
        graph.result(Outlet { node: NodeId(last), output: 0 }).unwrap();
        let partition = Partition::new(&graph, parts, owners).unwrap();
        let placements = Arc::new(Placements::new(&graph, &partition).unwrap());
        Self { graph, placements, lengths: LENGTHS.to_vec() }
    }

    pub(crate) fn parts(&self) -> usize {
        self.placements.partition().count()
    }

    /// Returns the content of a node's output, which depends on each byte of its inputs.
    fn content(&self, node: usize, step: u64, inputs: &[&[u8]]) -> Vec<u8> {
        let mut seed = (node as u64) << 32 | step;
        for input in inputs {
            seed = xxh3_64_with_seed(input, seed);
        }
        let length = self.lengths[node].unwrap_or(1 + (seed >> 8) % 70_000);
        let mut random = fastrand::Rng::with_seed(seed);
        (0..length).map(|_| random.u8(..)).collect()
    }

    /// Returns the result of a step of the unsplit graph.
    pub(crate) fn expected(&self, step: u64) -> Vec<u8> {
        let first = self.content(0, step, &[]);
        let mut last = first.clone();
        for node in 1..self.lengths.len() {
            let inputs: &[&[u8]] = if node + 1 == self.lengths.len() { &[&last, &first] } else { &[&last] };
            last = self.content(node, step, inputs);
        }
        last
    }

    fn value(&self, node: usize, step: u64, inputs: &[Registered]) -> Result<Registered, KernelError> {
        let inputs: Vec<&[u8]> = inputs.iter().map(|input| input.0.bytes()).collect::<Result<_, _>>()?;
        let content = self.content(node, step, &inputs);
        let spec = TensorSpec::new(Dtype::U8, Shape::new(&[content.len() as u64])?)?;
        Registered::filled(&spec, &mut |memory| {
            memory.copy_from_slice(&content);
            Ok(())
        })
    }

    /// Makes the executor of a part.
    pub(crate) fn executor(
        self: &Arc<Self>,
        part: Part,
        transfers: Transfers<Registered>,
        window: usize,
        receive: ReceiveMode,
    ) -> Executor<Registered> {
        let mut kernels: HashMap<NodeId, Box<dyn Kernel<Registered>>> = HashMap::new();
        for node in 1..self.lengths.len() {
            let chain = Arc::clone(self);
            let kernel = move |step, inputs: Vec<Registered>| Ok(vec![chain.value(node, step, &inputs)?]);
            kernels.insert(NodeId(node), Box::new(kernel));
        }
        let graph = Arc::new(self.graph.clone());
        let executor = Executor::new(graph, Arc::clone(&self.placements), part, kernels, transfers).unwrap();
        executor.window(window).receive(receive)
    }
}

/// Feeds the inputs of a chain, and compares its results.
pub(crate) struct Checks<'a> {
    pub(crate) chain: &'a Chain,
    /// Steps whose result came.
    pub(crate) results: Vec<u64>,
    /// Gets each step whose input is asked for.
    pub(crate) fed: Option<std::sync::mpsc::Sender<u64>>,
}

impl<'a> Checks<'a> {
    pub(crate) fn of(chain: &'a Chain) -> Self {
        Self { chain, results: Vec::new(), fed: None }
    }
}

impl Program<Registered> for Checks<'_> {
    fn feed(&mut self, step: u64, input: NodeId) -> Result<Registered, KernelError> {
        if let Some(fed) = &self.fed {
            fed.send(step)?;
        }
        self.chain.value(input.0, step, &[])
    }

    fn result(&mut self, step: u64, _: Outlet, value: Registered) -> Result<(), KernelError> {
        if value.0.bytes()? != self.chain.expected(step) {
            return Err(format!("the result of step {step} is wrong").into());
        }
        self.results.push(step);
        Ok(())
    }
}

/// The settings of connections whose calls need no calibration.
pub(crate) fn config() -> Config {
    Config::default().eager_threshold(EagerThreshold::Bytes(32 << 10))
}

/// Binds a listener that needs little time on two cores.
pub(crate) fn bind(address: &str, config: Config) -> Result<Listener, GraphError> {
    Listener::builder().config(config).threads(2).bind(address)
}

/// Binds listeners for all parts of this process.
pub(crate) fn listeners(parts: usize) -> (Vec<Listener>, Vec<String>) {
    let bound: Vec<Listener> = (0..parts).map(|_| bind("127.0.0.1:0", config()).unwrap()).collect();
    let addresses = bound.iter().map(|listener| listener.address().to_string()).collect();
    (bound, addresses)
}

pub(crate) fn peering(
    chain: &Chain,
    part: usize,
    peers: &[String],
    modes: &[TransferMode],
    window: usize,
) -> Peering {
    let peering = Peering::new(Part(part), peers.to_vec(), &chain.graph, &chain.placements);
    peering.modes(modes.iter().copied()).window(window)
}

/// Connects all parts, each in a thread, and carries out `work` there.
pub(crate) fn in_threads<T: Send>(
    chain: &Arc<Chain>,
    modes: &[TransferMode],
    window: usize,
    work: impl Fn(Session) -> T + Sync,
) -> Vec<T> {
    after_connects(chain, modes, window, |_, connected| work(connected.unwrap()))
}

/// Lets all parts connect, each in a thread, and calls `work` there with the session or the error.
pub(crate) fn after_connects<T: Send>(
    chain: &Arc<Chain>,
    modes: &[TransferMode],
    window: usize,
    work: impl Fn(Part, Result<Session, GraphError>) -> T + Sync,
) -> Vec<T> {
    let (listeners, addresses) = listeners(chain.parts());
    connect_all(listeners, &addresses, chain, modes, window, work)
}

/// Lets these listeners connect, each in a thread, and calls `work` there with the session or the error.
pub(crate) fn connect_all<T: Send>(
    listeners: Vec<Listener>,
    addresses: &[String],
    chain: &Arc<Chain>,
    modes: &[TransferMode],
    window: usize,
    work: impl Fn(Part, Result<Session, GraphError>) -> T + Sync,
) -> Vec<T> {
    let outcomes = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for (part, listener) in listeners.into_iter().enumerate() {
            let (outcomes, work) = (&outcomes, &work);
            scope.spawn(move || {
                let connected = listener.connect(peering(chain, part, addresses, modes, window));
                let outcome = work(Part(part), connected);
                outcomes.lock().unwrap().push((part, outcome));
            });
        }
    });
    let mut outcomes = outcomes.into_inner().unwrap();
    outcomes.sort_by_key(|(part, _)| *part);
    outcomes.into_iter().map(|(_, outcome)| outcome).collect()
}

/// Runs steps of one part.
pub(crate) fn run(
    executor: &mut Executor<Registered>,
    steps: std::ops::Range<u64>,
    program: &mut Checks<'_>,
) -> Result<RunReport, GraphError> {
    executor.run(steps, program)
}

/// Returns the messages of an error and of its sources.
pub(crate) fn chain_of(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

/// A bound that only a test that hangs exceeds.
pub(crate) const HANGS: Duration = Duration::from_secs(60);
