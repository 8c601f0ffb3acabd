//! A small engine, graphs by hand, and runs of all parts.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use tonic_rdma_tensor::{Dtype, Shape, Tensor, TensorSpec};

use crate::GraphError;
use crate::dataflow::{Dim, Fact, Kernel, KernelError, Node, NodeId, Outlet, Role, Topology, Value};
use crate::placement::{CrossingId, Part, Partition, Placements};
use crate::schedule::executor::ExecutorSettings;
use crate::schedule::{Direction, Executor, Program, RunReport, Transfers};

/// A bound that only a test that hangs exceeds.
pub(super) const HANG: Duration = Duration::from_secs(120);

/// A tensor of numbers in one dimension.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Numbers(pub(super) Arc<Vec<u64>>);

/// The first number of a tensor that the engine does not take.
pub(super) const PANICS: u64 = 0xdead;

impl Numbers {
    pub(super) fn of(numbers: &[u64]) -> Self {
        Self(Arc::new(numbers.to_vec()))
    }
}

impl Value for Numbers {
    fn share(&self) -> Result<Tensor, KernelError> {
        let spec = TensorSpec::new(Dtype::U64, Shape::new(&[self.0.len() as u64])?)?;
        let bytes: Vec<u8> = self.0.iter().flat_map(|number| number.to_ne_bytes()).collect();
        Ok(Tensor::copy_from(spec, &bytes)?)
    }

    fn filled(
        spec: &TensorSpec,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), KernelError>,
    ) -> Result<Self, KernelError> {
        let mut bytes = vec![0; usize::try_from(spec.bytes().ok_or("too large")?)?];
        fill(&mut bytes)?;
        assert!(!bytes.starts_with(&PANICS.to_ne_bytes()), "an engine that fails (a test expects it)");
        let words = bytes.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap()));
        Ok(Self(Arc::new(words.collect())))
    }
}

pub(super) type Kernels = HashMap<NodeId, Box<dyn Kernel<Numbers>>>;

/// A graph by hand. Each node has one output.
#[derive(Default)]
pub(super) struct Graph {
    topology: Topology,
    parts: Vec<Part>,
    kernels: Kernels,
}

impl Graph {
    pub(super) fn input(&mut self, name: &str, part: usize) -> Outlet {
        self.node(name, part, Role::Input, &[])
    }

    /// Adds a node that computes.
    pub(super) fn node_with(
        &mut self,
        name: &str,
        part: usize,
        inputs: &[Outlet],
        kernel: impl Kernel<Numbers> + 'static,
    ) -> Outlet {
        let outlet = self.node(name, part, Role::Compute, inputs);
        self.kernels.insert(outlet.node, Box::new(kernel));
        outlet
    }

    /// Adds a node whose output is the sum of its inputs, and of the step if it has none.
    pub(super) fn sum(&mut self, name: &str, part: usize, inputs: &[Outlet]) -> Outlet {
        self.node_with(name, part, inputs, sum)
    }

    pub(super) fn result(&mut self, outlet: Outlet) {
        self.topology.result(outlet).unwrap();
    }

    fn node(&mut self, name: &str, part: usize, role: Role, inputs: &[Outlet]) -> Outlet {
        let outputs = vec![Fact { dtype: Dtype::U64, dims: vec![Dim::Symbolic("N".into())] }];
        let (name, kind, inputs) = (name.to_owned(), "Test".to_owned(), inputs.to_vec());
        let node = Node { name, kind, role, inputs, outputs, work: 1, stays: false };
        self.parts.push(Part(part));
        Outlet { node: self.topology.add(node).unwrap(), output: 0 }
    }

    /// Splits the graph. Each part gets the kernels of its nodes.
    pub(super) fn split(mut self) -> Split {
        let parts = self.parts.iter().map(|part| part.0 + 1).max().unwrap_or(1);
        let partition = Partition::new(&self.topology, parts, self.parts).unwrap();
        let placements = Arc::new(Placements::new(&self.topology, &partition).unwrap());
        let mut kernels: Vec<Kernels> = (0..parts).map(|_| Kernels::new()).collect();
        for (id, kernel) in self.kernels.drain() {
            kernels[partition.part_of(id).unwrap().0].insert(id, kernel);
        }
        Split { graph: Arc::new(self.topology), placements, kernels }
    }
}

pub(super) fn sum(step: u64, inputs: Vec<Numbers>) -> Result<Vec<Numbers>, KernelError> {
    let numbers = inputs.iter().flat_map(|input| input.0.iter().copied());
    let start = if inputs.is_empty() { step } else { 0 };
    Ok(vec![Numbers::of(&[numbers.fold(start, u64::wrapping_add)])])
}

/// A split graph, and the kernels of each part.
pub(super) struct Split {
    pub(super) graph: Arc<Topology>,
    pub(super) placements: Arc<Placements>,
    pub(super) kernels: Vec<Kernels>,
}

impl Split {
    /// Makes the executors.
    pub(super) fn executors(
        self,
        transfers: Vec<Transfers<Numbers>>,
        settings: &ExecutorSettings,
    ) -> Vec<Executor<Numbers>> {
        let parts = self.kernels.into_iter().zip(transfers).enumerate();
        let executor = |(part, (kernels, transfers)): (usize, _)| {
            let (graph, placements) = (Arc::clone(&self.graph), Arc::clone(&self.placements));
            let mut executor = Executor::new(graph, placements, Part(part), kernels, transfers).unwrap();
            executor.settings = settings.clone();
            executor
        };
        parts.map(executor).collect()
    }
}

/// What a part saw in a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Seen {
    pub(super) results: BTreeMap<(u64, Outlet), Vec<Numbers>>,
    pub(super) sent: BTreeMap<(CrossingId, u64), Vec<Numbers>>,
    pub(super) received: BTreeMap<(CrossingId, u64), Vec<Numbers>>,
}

/// Feeds each input with numbers that depend on the step and the node, as many as the step says, and keeps
/// what it sees.
impl Program<Numbers> for Seen {
    fn feed(&mut self, step: u64, input: NodeId) -> Result<Numbers, KernelError> {
        Ok(fed(step, input))
    }

    fn result(&mut self, step: u64, outlet: Outlet, value: Numbers) -> Result<(), KernelError> {
        self.results.entry((step, outlet)).or_default().push(value);
        Ok(())
    }

    fn crossed(
        &mut self,
        direction: Direction,
        crossing: CrossingId,
        step: u64,
        value: &Numbers,
    ) -> Result<(), KernelError> {
        let seen = match direction {
            Direction::Sent => &mut self.sent,
            Direction::Received => &mut self.received,
        };
        seen.entry((crossing, step)).or_default().push(value.clone());
        Ok(())
    }
}

pub(super) fn fed(step: u64, input: NodeId) -> Numbers {
    let numbers: Vec<u64> = (0..=step % 3).map(|at| at * 7 + step * 100 + input.0 as u64).collect();
    Numbers::of(&numbers)
}

/// Runs all parts, each in a thread. A part that has ended keeps its transfers until all have ended.
pub(super) fn run_all(
    executors: &mut [Executor<Numbers>],
    steps: u64,
) -> Vec<(Result<RunReport, GraphError>, Seen)> {
    let run = |executor: &mut Executor<Numbers>| {
        let mut seen = Seen::default();
        (executor.run(0..steps, &mut seen), seen)
    };
    thread::scope(|scope| {
        let threads: Vec<_> =
            executors.iter_mut().map(|executor| scope.spawn(move || run(executor))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// A count that other threads wait for.
#[derive(Clone, Debug, Default)]
pub(super) struct Count(Arc<AtomicU64>);

impl Count {
    pub(super) fn add(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }

    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }

    /// Waits until the count is at least `least`.
    pub(super) fn wait_for(&self, least: u64) -> Result<(), KernelError> {
        let begin = Instant::now();
        while self.get() < least {
            if begin.elapsed() > HANG {
                return Err(format!("the count is {} and not {least} after {HANG:?}", self.get()).into());
            }
            thread::sleep(Duration::from_micros(50));
        }
        Ok(())
    }
}

/// A list that several threads append to.
#[derive(Clone, Debug, Default)]
pub(super) struct Log(Arc<Mutex<Vec<String>>>);

impl Log {
    pub(super) fn add(&self, line: impl Into<String>) {
        self.0.lock().unwrap().push(line.into());
    }

    pub(super) fn lines(&self) -> Vec<String> {
        self.0.lock().unwrap().clone()
    }
}
