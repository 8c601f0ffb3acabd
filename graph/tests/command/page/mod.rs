//! The calls of the book's page on graphs, with a model of two parts. The page itself is a doc test of the
//! library.

use std::alloc::System;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::thread;

use tonic_rdma::memory::trace::TracingAllocator;
use tonic_rdma_graph::dataflow::{KernelError, NodeId, Topology, Value};
use tonic_rdma_graph::explain::Explanation;
use tonic_rdma_graph::onnx::{Model, ModelValue};
use tonic_rdma_graph::placement::{Part, Partition, Placements};
use tonic_rdma_graph::schedule::{CrossingCounts, Executor};
use tonic_rdma_graph::session::{Listener, Peering};
use tonic_rdma_graph::sites::NodeSites;
use tonic_rdma_graph::transfer::TransferMode;

use crate::{file, onnx};

#[global_allocator]
static ALLOCATOR: TracingAllocator = TracingAllocator::new(System);

type Failed = Box<dyn Error + Send + Sync>;

/// Runs a part, and returns how it has sent its crossing tensors.
fn run_part(
    path: &Path,
    part: Part,
    own: &str,
    addresses: impl FnOnce(String) -> Vec<String>,
) -> Result<Vec<CrossingCounts>, Failed> {
    let listener = Listener::bind(own)?;
    let addresses = addresses(listener.address().to_string());

    let model = Model::load(path)?; // the same file in all processes
    let graph = Arc::clone(model.topology());
    let partition = Partition::balanced(&graph, addresses.len())?; // or at_cuts, named, Partition::new
    let placements = Arc::new(Placements::new(&graph, &partition)?);
    println!("{}", Explanation::new(&graph, &placements, &[])); // what crosses, and why it is placed so

    let peering = Peering::new(part, addresses, &graph, &placements).modes([TransferMode::RdmaZerocp]);
    let session = listener.connect(peering)?; // each sender has the addresses of its slots

    let crossings = placements.crossings().to_vec();
    let mut feed = feed(&graph, &placements, part);

    let kernels = model.kernels(placements.nodes_of(part).iter().copied())?;
    let transfers = session.transfers(TransferMode::RdmaZerocp)?;
    let sites = Arc::new(NodeSites::preallocated(&graph, &placements, part, 1)?); // as much memory as the analysis says
    let mut executor = Executor::new(graph, placements, part, kernels, transfers)?.sites(sites);
    executor.run(0..1, &mut feed)?; // finds the allocation sites
    executor.run(1..100, &mut feed)?; // sends from where the tensors lie

    let leaving = crossings.iter().filter(|crossing| crossing.from == part);
    Ok(leaving.map(|crossing| executor.counts(crossing.id)).collect())
}

/// Returns what feeds the inputs of a part.
fn feed(
    graph: &Topology,
    placements: &Placements,
    part: Part,
) -> impl FnMut(u64, NodeId) -> Result<ModelValue, KernelError> + use<> {
    let inputs =
        placements.nodes_of(part).iter().filter_map(|id| Some((*id, graph.node(*id)?.outputs[0].spec()?)));
    let specs: std::collections::HashMap<_, _> = inputs.collect();
    move |step, input| {
        let spec = specs.get(&input).ok_or("an input of this part")?;
        ModelValue::filled(spec, &mut |content| {
            content.fill(step as u8);
            Ok(())
        })
    }
}

#[test]
#[allow(clippy::print_stdout, reason = "the page prints")]
fn a_model_runs_in_two_parts() {
    let (_folder, path) = file(&onnx::convolutions());
    let (own, owns) = mpsc::channel();
    let (mut starts, mut parts) = (Vec::new(), Vec::new());
    for part in [Part(0), Part(1)] {
        let (start, all) = mpsc::channel();
        starts.push(start);
        let (own, path): (_, PathBuf) = (own.clone(), path.clone());
        parts.push(thread::spawn(move || {
            run_part(&path, part, "127.0.0.1:0", |address| {
                own.send((part.0, address)).unwrap();
                all.recv().unwrap()
            })
        }));
    }
    let mut addresses = vec![String::new(); 2];
    for (part, address) in owns.iter().take(2) {
        addresses[part] = address;
    }
    for start in starts {
        start.send(addresses.clone()).unwrap();
    }
    let counts: Vec<CrossingCounts> =
        parts.into_iter().flat_map(|part| part.join().unwrap().unwrap()).collect();
    assert!(!counts.is_empty());
    for counts in counts {
        assert_eq!(counts.sent, 100);
        assert!(counts.copied <= 1, "all but the first are sent in place: {counts:?}");
    }
}
