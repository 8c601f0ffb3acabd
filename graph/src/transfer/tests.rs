#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]
//! Transfers through slots, in a program whose global allocator traces.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use std::{mem, thread};

use bytes::Bytes;
use tonic_rdma_tensor::{Dtype, Shape, Tensor, TensorSpec};

use crate::dataflow::{Dim, Fact, Kernel, KernelError, Node, NodeId, Outlet, Role, Topology, Value};
use crate::error::{GraphError, Problem};
use crate::placement::{Crossing, Part, Partition, Placements};
use crate::schedule::{CrossingCounts, Executor, ReceiveMode};
use crate::session::{Listener, Peering};
use crate::sites::{AllocationSite, CrossingMemory, NodeSites, SiteOwner};
use crate::transfer::TransferMode;

/// A tensor on the heap, as engines have it.
#[derive(Clone, Debug)]
struct Heap(Arc<(TensorSpec, Vec<u8>)>);

impl AsRef<[u8]> for Heap {
    fn as_ref(&self) -> &[u8] {
        &self.0.1
    }
}

impl Value for Heap {
    fn share(&self) -> Result<Tensor, KernelError> {
        Ok(Tensor::from_bytes(self.0.0, Bytes::from_owner(self.clone()))?)
    }

    fn filled(
        spec: &TensorSpec,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), KernelError>,
    ) -> Result<Self, KernelError> {
        let mut content = vec![0; usize::try_from(spec.bytes().ok_or("too large")?)?];
        fill(&mut content)?;
        Ok(Self(Arc::new((*spec, content))))
    }
}

fn filled_with(byte: u8, dtype: Dtype, dims: &[u64]) -> Result<Heap, KernelError> {
    Heap::filled(&TensorSpec::new(dtype, Shape::new(dims)?)?, &mut |memory| {
        memory.fill(byte);
        Ok(())
    })
}

const LENGTH: u64 = 50_000;

/// Makes a graph of two chains, `fixed` and `free`. Part 0 has the inputs, and each other part passes on what
/// it received.
fn chains(parts: usize) -> (Topology, Arc<Placements>) {
    let mut graph = Topology::new();
    let mut owners = Vec::new();
    for part in 0..parts {
        for (chain, dim) in [("fixed", Dim::Known(LENGTH)), ("free", Dim::Symbolic("N".into()))] {
            let before = graph.len().checked_sub(2).filter(|_| part > 0);
            graph
                .add(Node {
                    name: format!("{chain}{part}"),
                    kind: "Test".to_owned(),
                    role: if part == 0 { Role::Input } else { Role::Compute },
                    inputs: before.map(|node| Outlet { node: NodeId(node), output: 0 }).into_iter().collect(),
                    outputs: vec![Fact { dtype: Dtype::U8, dims: vec![dim, Dim::Known(2)] }],
                    work: 1,
                    stays: false,
                })
                .unwrap();
            owners.push(Part(part));
        }
    }
    let partition = Partition::new(&graph, parts, owners).unwrap();
    let placements = Arc::new(Placements::new(&graph, &partition).unwrap());
    (graph, placements)
}

/// The counts of a part's sends at each end.
type Counted = Vec<Vec<(Crossing, CrossingCounts, CrossingMemory)>>;

/// Runs all parts up to each of the steps `ends`, one run after the other. Returns the counts of each part,
/// or its error.
fn run(
    parts: usize,
    mode: TransferMode,
    receive: ReceiveMode,
    ends: &[u64],
    feed: impl Fn(u64, NodeId) -> Result<Heap, KernelError> + Sync,
) -> Vec<Result<Counted, GraphError>> {
    run_from(&vec![0; parts], mode, receive, ends, feed)
}

/// Runs as [`run`] does, but each part begins at its own step of `firsts`, which is added to all `ends`.
fn run_from(
    firsts: &[u64],
    mode: TransferMode,
    receive: ReceiveMode,
    ends: &[u64],
    feed: impl Fn(u64, NodeId) -> Result<Heap, KernelError> + Sync,
) -> Vec<Result<Counted, GraphError>> {
    let parts = firsts.len();
    let (graph, placements) = chains(parts);
    let bind = |_| Listener::builder().threads(2).bind("127.0.0.1:0").unwrap();
    let listeners: Vec<Listener> = (0..parts).map(bind).collect();
    let peers: Vec<String> = listeners.iter().map(|listener| listener.address().to_string()).collect();
    let part = |part: usize, listener: Listener| {
        let peering = Peering::new(Part(part), peers.clone(), &graph, &placements);
        let session = listener.connect(peering.modes([mode])).unwrap();
        let mut kernels: HashMap<NodeId, Box<dyn Kernel<Heap>>> = HashMap::new();
        for node in (0..graph.len()).map(NodeId).filter(|node| node.0 >= 2) {
            kernels.insert(node, Box::new(|_, inputs: Vec<Heap>| Ok(inputs)));
        }
        let sites = Arc::new(NodeSites::new(&graph, 64 << 20));
        let transfers = session.transfers(mode).unwrap();
        let graph = Arc::new(graph.clone());
        let executor = Executor::new(graph, Arc::clone(&placements), Part(part), kernels, transfers).unwrap();
        let mut executor = executor.sites(Arc::clone(&sites)).receive(receive).spin(Duration::ZERO);
        let mut counted = Vec::new();
        let mut outcome = Ok(());
        let mut first = firsts[part];
        for end in ends.iter().map(|end| end + firsts[part]) {
            let steps = mem::replace(&mut first, end)..end;
            outcome = executor.run(steps, &mut |step, node| feed(step, node)).map(drop);
            if outcome.is_err() {
                break;
            }
            let leaving = placements
                .leaving(Part(part))
                .map(|crossing| (crossing.clone(), executor.counts(crossing.id), sites.seen(crossing.id)));
            counted.push(leaving.collect());
        }
        // Kept until all parts have ended, because a part that leaves ends its connections.
        (outcome.map(|()| counted), executor, session)
    };
    thread::scope(|scope| {
        let part = &part;
        let start = |(number, listener)| scope.spawn(move || part(number, listener));
        let threads: Vec<_> = listeners.into_iter().enumerate().map(start).collect();
        let parts: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        parts.into_iter().map(|(outcome, ..)| outcome).collect()
    })
}

/// Part 1 answers in each step, so it has read the tensor when the step ends.
#[test]
fn a_buffer_that_the_receiver_has_read_is_there_for_the_next_step() {
    let mut graph = Topology::new();
    for (number, name) in ["input", "answer", "result"].into_iter().enumerate() {
        let before = number.checked_sub(1).map(|node| Outlet { node: NodeId(node), output: 0 });
        graph
            .add(Node {
                name: name.to_owned(),
                kind: "Test".to_owned(),
                role: if before.is_none() { Role::Input } else { Role::Compute },
                inputs: before.into_iter().collect(),
                outputs: vec![Fact::known(Dtype::U8, &[LENGTH])],
                work: 1,
                stays: false,
            })
            .unwrap();
    }
    let partition = Partition::new(&graph, 2, vec![Part(0), Part(1), Part(0)]).unwrap();
    let placements = Arc::new(Placements::new(&graph, &partition).unwrap());
    let listeners = [(); 2].map(|()| Listener::builder().threads(2).bind("127.0.0.1:0").unwrap());
    let peers = listeners.each_ref().map(|listener| listener.address().to_string());
    let part = |part: usize, listener: Listener| {
        let peering = Peering::new(Part(part), peers.to_vec(), &graph, &placements);
        let session = listener.connect(peering.modes([TransferMode::RdmaInPlace])).unwrap();
        let kernel: Box<dyn Kernel<Heap>> = Box::new(|_, inputs: Vec<Heap>| Ok(inputs));
        let kernels = HashMap::from([(NodeId(2 - part), kernel)]);
        let sites = NodeSites::preallocated(&graph, &placements, Part(part), 1).unwrap();
        let sites = Arc::new(sites);
        let transfers = session.transfers(TransferMode::RdmaInPlace).unwrap();
        let (own, all) = (Arc::new(graph.clone()), Arc::clone(&placements));
        let executor = Executor::new(own, all, Part(part), kernels, transfers).unwrap();
        let mut executor = executor.sites(Arc::clone(&sites));
        for steps in [0..1, 1..30] {
            executor.run(steps, &mut |step, _| filled_with(step as u8, Dtype::U8, &[LENGTH])).unwrap();
        }
        // Kept until both parts have ended.
        (sites.memory(), executor, session)
    };
    let sends = thread::scope(|scope| {
        let part = &part;
        let mut threads = Vec::new();
        for (number, listener) in listeners.into_iter().enumerate() {
            threads.push(scope.spawn(move || part(number, listener)));
        }
        let parts: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        parts[0].0
    });
    assert!(sends.used > 0 && sends.used == sends.preallocated, "{sends:?}");
    assert_eq!((sends.beyond, sends.refused), (0, 0), "{sends:?}");
}

/// A tensor that arrives while the thread sleeps gets registered memory like any other one.
#[test]
fn what_arrives_and_is_passed_on_is_sent_without_a_copy_from_the_second_step_on() {
    for receive in ReceiveMode::ALL {
        let outcomes = run(3, TransferMode::RdmaZerocp, receive, &[1, 6], |step, _| {
            // Longer than the other parts poll, so that they sleep.
            thread::sleep(Duration::from_millis(3));
            filled_with(step as u8, Dtype::U8, &[LENGTH, 2])
        });
        for (part, counted) in outcomes.into_iter().enumerate() {
            let [first, all] = <[_; 2]>::try_from(counted.unwrap()).unwrap();
            assert_eq!(all.len(), if part == 2 { 0 } else { 2 });
            for ((crossing, first, _), (_, all, seen)) in first.into_iter().zip(all) {
                let name = format!("{receive}: {}", crossing.name);
                assert_eq!((first.sent, all.sent, all.inline), (1, 6, 0), "{name}");
                assert_eq!(all.copied - first.copied, 0, "{name}: {seen:?}");
                if part == 1 {
                    // The crossing tensors of the two inputs have the numbers 0 and 1.
                    let owner = SiteOwner::Receive(crossing.outlet.node.0 - 2);
                    let expected = Some(AllocationSite { owner, ordinal: 0 });
                    assert_eq!(seen.site, expected, "{name}: the first allocation is that of the engine");
                }
            }
        }
    }
}

#[test]
fn a_dynamic_tensor_that_the_graph_does_not_know_is_an_error() {
    let wrong: [(Dtype, &[u64]); 3] = [(Dtype::I8, &[8, 2]), (Dtype::U8, &[8, 2, 1]), (Dtype::U8, &[8, 3])];
    for (mode, (dtype, dims)) in
        [TransferMode::RdmaZerocp, TransferMode::RdmaCp, TransferMode::GrpcTcp].into_iter().zip(wrong)
    {
        let outcomes = run(2, mode, ReceiveMode::PollingAsync, &[1], |_, node| match node.0 {
            0 => filled_with(1, Dtype::U8, &[LENGTH, 2]),
            _ => filled_with(2, dtype, dims),
        });
        let spec = TensorSpec::new(dtype, Shape::new(dims).unwrap()).unwrap();
        let expected = format!("the graph says uint8[N, 2], and {spec} came");
        // The receiver refuses a call, so the sender has the error. With slots the receiver has it.
        let (by, other) = if mode == TransferMode::GrpcTcp { (0, 1) } else { (1, 0) };
        let Problem::Transfer { crossing, step: 0, peer, source } =
            outcomes[by].as_ref().unwrap_err().problem()
        else {
            panic!("{mode}: {:?}", outcomes[by])
        };
        assert_eq!((crossing.as_str(), *peer), ("free0 to part 1", other), "{mode}");
        assert!(source.to_string().contains(&expected), "{mode}: {source}");
        // The sender may have ended its only step before.
        if let Err(told) = &outcomes[other] {
            assert!(
                matches!(told.problem(), Problem::PeerFailed { peer, .. } if *peer == by),
                "{mode}: {told:?}"
            );
        }
    }
}

#[test]
fn parts_that_run_other_steps_learn_so_before_their_run_ends_well() {
    for mode in [TransferMode::RdmaZerocp, TransferMode::RdmaCp] {
        for receive in ReceiveMode::ALL {
            // Part 1 takes the tensors of the steps 0 and 1 for those of the steps 5 and 6.
            let outcomes = run_from(&[0, 5], mode, receive, &[2], |step, _| {
                filled_with(step as u8, Dtype::U8, &[LENGTH, 2])
            });
            let error = outcomes[1].as_ref().unwrap_err();
            let named = match error.problem() {
                Problem::OtherSteps { peer, mode: found, ours, theirs } => {
                    *found == mode.to_string() && (*peer, ours, theirs) == (0, &(5..7), &(0..2))
                }
                // Part 0 may have seen the difference first, and says so.
                Problem::PeerFailed { peer: 0, reason } => {
                    reason.contains("runs the steps 5..7") && reason.contains("this part runs the steps 0..2")
                }
                _ => false,
            };
            assert!(named, "{mode}, {receive}: {error}");
        }
    }
}
