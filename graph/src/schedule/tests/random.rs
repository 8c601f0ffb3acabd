//! Random graphs, split at random: each step gives what the graph gives unsplit, in every mode, with one
//! thread for each part and with several.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use tonic_rdma_tensor::Dtype;

use super::support::{HANG, Kernels, Numbers, Seen, Split, fed, run_all};
use crate::dataflow::{Dim, Fact, Kernel, KernelError, Node, NodeId, Outlet, Role, Topology};
use crate::placement::{CrossingId, Part, Partition, Placements};
use crate::schedule::executor::ExecutorSettings;
use crate::schedule::{ReceiveMode, Transfers};

/// A node of a random graph.
#[derive(Clone, Debug)]
struct Drawn {
    /// 0: an input; 1: a constant; otherwise it computes.
    role: u8,
    outputs: usize,
    /// Which earlier outputs are the inputs.
    inputs: Vec<prop::sample::Index>,
    part: usize,
    is_result: bool,
    /// Whether the output depends on earlier steps, so that their order shows.
    remembers: bool,
}

#[derive(Clone, Debug)]
struct Case {
    nodes: Vec<Drawn>,
    parts: usize,
    window: usize,
    depth: usize,
    steps: u64,
    mode: ReceiveMode,
    threads: usize,
    /// Delays in microseconds, which crossing tensors take in turn.
    delays: Vec<u64>,
}

fn case() -> impl Strategy<Value = Case> {
    let node = (0..8_u8, 1..3_usize, prop::collection::vec(any::<prop::sample::Index>(), 0..4));
    let node = (node, 0..4_usize, any::<bool>(), any::<bool>());
    let node = node.prop_map(|((role, outputs, inputs), part, is_result, remembers)| Drawn {
        role,
        outputs,
        inputs,
        part,
        is_result,
        remembers,
    });
    let sizes = (1..5_usize, 1..5_usize, 1..4_usize, 1..6_u64);
    let mode = (prop::sample::select(ReceiveMode::ALL.to_vec()), 1..4_usize);
    let delays = prop::collection::vec(0..400_u64, 0..5);
    (prop::collection::vec(node, 1..24), sizes, mode, delays).prop_map(
        |(nodes, (parts, window, depth, steps), (mode, threads), delays)| Case {
            nodes,
            parts,
            window,
            depth,
            steps,
            mode,
            threads,
            delays,
        },
    )
}

/// A kernel whose outputs show its node, its inputs in order, and, if it remembers, all earlier steps in
/// order.
struct Mixer {
    node: u64,
    outputs: usize,
    remembers: bool,
    state: u64,
    next: u64,
}

impl Kernel<Numbers> for Mixer {
    fn run(&mut self, step: u64, inputs: Vec<Numbers>) -> Result<Vec<Numbers>, KernelError> {
        if step < self.next {
            return Err(format!("step {step} came after step {}", self.next).into());
        }
        self.next = step + 1;
        let mut hash = self.node;
        for number in inputs.iter().flat_map(|input| input.0.iter()) {
            hash = hash.rotate_left(9).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ number;
        }
        if self.remembers {
            self.state = self.state.wrapping_mul(31).wrapping_add(hash);
            hash ^= self.state;
        }
        let first = inputs.into_iter().next();
        let mut outputs = Vec::new();
        for output in 0..self.outputs as u64 {
            let length = (hash % 4) as usize;
            outputs.push(Numbers(Arc::new(vec![hash.wrapping_add(output); length])));
        }
        // Works in the memory of its first input if no other holds it, as engines do.
        if let Some(Ok(mut numbers)) = first.map(|first| Arc::try_unwrap(first.0)) {
            numbers.clear();
            numbers.extend_from_slice(&outputs[0].0);
            outputs[0] = Numbers(Arc::new(numbers));
        }
        Ok(outputs)
    }
}

fn mixer(id: NodeId, node: &Node, drawn: &Drawn) -> Mixer {
    let outputs = node.outputs.len();
    Mixer { node: id.0 as u64, outputs, remembers: drawn.remembers, state: 0, next: 0 }
}

fn build(case: &Case) -> (Topology, Vec<Part>) {
    let mut graph = Topology::new();
    let mut outlets: Vec<Outlet> = Vec::new();
    for (index, drawn) in case.nodes.iter().enumerate() {
        let role = match drawn.role {
            0 => Role::Input,
            1 => Role::Constant,
            _ => Role::Compute,
        };
        let inputs: Vec<Outlet> = match role {
            Role::Compute if !outlets.is_empty() => drawn.inputs.iter().map(|at| *at.get(&outlets)).collect(),
            _ => Vec::new(),
        };
        let count = if role == Role::Input { 1 } else { drawn.outputs };
        let outputs = vec![Fact { dtype: Dtype::U64, dims: vec![Dim::Symbolic("N".into())] }; count];
        let (name, kind) = (format!("node {index}"), "Mixer".to_owned());
        let node = graph.add(Node { name, kind, role, inputs, outputs, work: 1, stays: false }).unwrap();
        outlets.extend((0..count).map(|output| Outlet { node, output }));
        if drawn.is_result {
            graph.result(Outlet { node, output: count - 1 }).unwrap();
        }
    }
    let parts = case.nodes.iter().map(|drawn| Part(drawn.part % case.parts)).collect();
    (graph, parts)
}

/// Runs the graph node by node, and returns all outputs of all steps.
fn unsplit(case: &Case, graph: &Topology) -> BTreeMap<(u64, Outlet), Numbers> {
    let mut kernels: Vec<Mixer> =
        graph.nodes().zip(&case.nodes).map(|((id, node), drawn)| mixer(id, node, drawn)).collect();
    let mut constants = BTreeMap::new();
    let mut all = BTreeMap::new();
    for step in 0..case.steps {
        for (id, node) in graph.nodes() {
            let input = |outlet: &Outlet| Numbers::clone(&all[&(step, *outlet)]);
            let outputs = match node.role {
                Role::Input => vec![fed(step, id)],
                Role::Constant if step > 0 => Vec::clone(&constants[&id]),
                Role::Constant | Role::Compute => {
                    let inputs = node.inputs.iter().map(input).collect();
                    kernels[id.0].run(step, inputs).unwrap()
                }
            };
            if node.role == Role::Constant {
                constants.insert(id, outputs.clone());
            }
            for (output, value) in outputs.into_iter().enumerate() {
                all.insert((step, Outlet { node: id, output }), value);
            }
        }
    }
    all
}

fn kernels(case: &Case, graph: &Topology, part: Part) -> Kernels {
    let mut kernels = Kernels::new();
    for ((id, node), drawn) in graph.nodes().zip(&case.nodes) {
        let here = Part(drawn.part % case.parts) == part;
        if node.role == Role::Constant || (node.role == Role::Compute && here) {
            kernels.insert(id, Box::new(mixer(id, node, drawn)));
        }
    }
    kernels
}

fn check(case: &Case) {
    let (graph, parts) = build(case);
    let all = unsplit(case, &graph);
    let partition = Partition::new(&graph, case.parts, parts).unwrap();
    let placements = Arc::new(Placements::new(&graph, &partition).unwrap());
    let transfers = if case.delays.is_empty() {
        Transfers::in_memory(&placements, case.depth).unwrap()
    } else {
        let delays = case.delays.clone();
        let delay = move |crossing: CrossingId, step: u64| {
            Duration::from_micros(delays[(crossing.0 + step as usize) % delays.len()])
        };
        Transfers::delayed(&placements, case.depth, delay).unwrap()
    };
    let kernels = (0..case.parts).map(|part| kernels(case, &graph, Part(part))).collect();
    let split = Split { graph: Arc::new(graph), placements: Arc::clone(&placements), kernels };
    let (graph, window) = (Arc::clone(&split.graph), case.window);
    // The mode blocking runs nodes in order.
    let threads = if case.mode == ReceiveMode::Blocking { 1 } else { case.threads };
    let settings = ExecutorSettings { receive: case.mode, window, deadline: HANG, threads };
    let mut executors = split.executors(transfers, &settings);
    for (part, (report, seen)) in run_all(&mut executors, case.steps).into_iter().enumerate() {
        let report = report.unwrap_or_else(|error| panic!("part {part}: {error}"));
        let here = |outlet: &Outlet| partition.part_of(outlet.node) == Some(Part(part));
        let mut expected = Seen::default();
        for step in 0..case.steps {
            for outlet in graph.results().iter().copied().filter(here) {
                expected.results.entry((step, outlet)).or_default().push(all[&(step, outlet)].clone());
            }
            for crossing in placements.crossings() {
                let value = || vec![all[&(step, crossing.outlet)].clone()];
                if crossing.from == Part(part) {
                    expected.sent.insert((crossing.id, step), value());
                }
                if crossing.to == Part(part) {
                    expected.received.insert((crossing.id, step), value());
                }
            }
        }
        assert_eq!(seen, expected, "part {part}");
        let steps: Vec<u64> = report.steps.iter().map(|step| step.step).collect();
        assert_eq!(steps, (0..case.steps).collect::<Vec<_>>());
        assert_eq!(report.received, expected.received.len() as u64);
        assert_eq!(report.late, 0, "a waker was not woken: {report:?}");
        if case.mode == ReceiveMode::Blocking {
            assert_eq!(report.ran_while_outstanding, 0);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn a_split_graph_gives_what_it_gives_unsplit(case in case()) {
        check(&case);
    }
}
