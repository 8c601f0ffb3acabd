#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::collections::HashMap;
use std::sync::Arc;
use std::thread;

use bytes::Bytes;
use serde_json::json;
use tonic_rdma_tensor::{Dtype, Tensor, TensorSpec};

use super::*;
use crate::dataflow::{Dim, Fact, Kernel, KernelError, Node, Outlet, Role, Value};
use crate::placement::{CrossingId, Part, Partition, Placements};
use crate::schedule::{Executor, Transfers};
use crate::sites::{CrossingMemory, NodeSites};

const LENGTH: usize = 20_000;

fn node(name: &str, role: Role, input: Option<usize>, dim: Dim) -> Node {
    Node {
        name: name.to_owned(),
        kind: "Test".to_owned(),
        role,
        inputs: input.into_iter().map(|node| Outlet { node: NodeId(node), output: 0 }).collect(),
        outputs: vec![Fact { dtype: Dtype::U8, dims: vec![dim] }],
        work: 1,
        stays: false,
    }
}

/// image ─▶ conv ─┬▶ relu ─▶ head; conv and relu cross to parts 1 and 2.
fn graph(dim: Dim) -> (Topology, Placements) {
    let mut graph = Topology::new();
    graph.add(node("image", Role::Input, None, dim.clone())).unwrap();
    graph.add(node("conv", Role::Compute, Some(0), dim.clone())).unwrap();
    graph.add(node("relu", Role::Compute, Some(1), dim.clone())).unwrap();
    graph.add(node("head", Role::Compute, Some(2), dim)).unwrap();
    graph.result(Outlet { node: NodeId(3), output: 0 }).unwrap();
    let partition = Partition::new(&graph, 3, [0, 0, 1, 2].map(Part).to_vec()).unwrap();
    let placements = Placements::new(&graph, &partition).unwrap();
    (graph, placements)
}

#[test]
fn an_explanation_before_the_first_step_says_what_is_known() {
    let (graph, placements) = graph(Dim::Symbolic("N".into()));
    let explanation = Explanation::new(&graph, &placements, &[]);
    let text = "conv to part 1\n  \
                producer   conv (Test), part 0\n  \
                consumers  relu (Test), part 1\n  \
                shape      uint8[N]\n  \
                placement  dynamic: dimension 0 is N: N is a dimension of the input image\n\n\
                relu to part 2\n  \
                producer   relu (Test), part 1\n  \
                consumers  head (Test), part 2\n  \
                shape      uint8[N]\n  \
                placement  dynamic: dimension 0 is N: N is a dimension of the input image\n";
    assert_eq!(explanation.to_string(), text);
    assert_eq!(Explanation { tensors: vec![] }.to_string(), "no tensor crosses\n");
}

#[test]
fn the_rows_have_what_was_counted() {
    let (graph, placements) = graph(Dim::Known(LENGTH as u64));
    let sites = NodeSites::untraced(&graph);
    let sent = |in_place, copied, inline| Copies { tensors: in_place + copied + inline, copied, inline };
    let mut report = SenderReport::new(CrossingId(1), &sites, sent(0, 1, 0), sent(8, 2, 1));
    report.traced = true;
    let site = Some(AllocationSite { owner: SiteOwner::Receive(0), ordinal: 2 });
    report.seen = CrossingMemory { site, tensors: 11, registered: 8, bytes: LENGTH as u64 };
    // A report crosses to another process.
    let report: SenderReport = serde_json::from_str(&serde_json::to_string(&report).unwrap()).unwrap();
    let explanation = Explanation::new(&graph, &placements, &[report]);
    let row = serde_json::to_value(&explanation).unwrap()["tensors"][1].clone();
    let expected = json!({
        "name": "relu to part 2",
        "producer": "relu (Test)",
        "from": 1,
        "consumers": ["head (Test)"],
        "to": 2,
        "shape": "uint8[20000]",
        "bytes": 20_000,
        "placement": "static",
        "why": "all dimensions are known",
        "site": "allocation 2 of the receive of conv to part 1",
        "first_step": {"tensors": 1, "copied": 1, "inline": 0},
        "later_steps": {"tensors": 10, "copied": 1, "inline": 1},
        "sender_copies": 1,
    });
    assert_eq!(row, expected);
    let text = "  copies     first step: 1 of 1 tensors copied; later steps: 1 of 10 tensors copied, 1 sent inline\n";
    assert!(explanation.to_string().contains(text), "{explanation}");
    let first = &explanation.tensors[0];
    assert_eq!((first.bytes, &first.site, first.sender_copies), (Some(20_000), &None, None), "no report");
}

#[test]
fn a_missing_site_has_a_reason() {
    let (graph, placements) = graph(Dim::Known(1));
    let site = |traced, tensors, registered| {
        let mut report = SenderReport::new(
            CrossingId(0),
            &NodeSites::untraced(&graph),
            Copies::default(),
            Copies::default(),
        );
        report.traced = traced;
        report.seen = CrossingMemory { site: None, tensors, registered, bytes: 1 };
        Explanation::new(&graph, &placements, &[report]).tensors[0].site.clone().unwrap()
    };
    assert!(site(false, 1, 0).contains("the global allocator of the program does not trace"));
    assert!(site(true, 0, 0).contains("no tensor was sent"));
    assert!(site(true, 2, 2).contains("the program allocated registered memory"));
    assert!(site(true, 2, 0).contains("allocated before the first step, or by a thread"));
}

/// A tensor of bytes.
#[derive(Clone, Debug)]
struct Data(Bytes);

impl Value for Data {
    fn share(&self) -> Result<Tensor, KernelError> {
        let fact = Fact::known(Dtype::U8, &[self.0.len() as u64]);
        Ok(Tensor::from_bytes(fact.spec().ok_or("a shape")?, self.0.clone())?)
    }

    fn filled(
        spec: &TensorSpec,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), KernelError>,
    ) -> Result<Self, KernelError> {
        let mut content = vec![0; spec.bytes().ok_or("a size")? as usize];
        fill(&mut content)?;
        Ok(Self(content.into()))
    }
}

/// Runs three steps in three threads, with kernels that pass their input on, and explains. The fed tensors
/// come from `feed`.
fn run(feed: fn(u64) -> Data) -> Explanation {
    let (graph, placements) = graph(Dim::Known(LENGTH as u64));
    let (graph, placements) = (Arc::new(graph), Arc::new(placements));
    let transfers = Transfers::in_memory(&placements, 1).unwrap();
    let parts = transfers.into_iter().enumerate().map(|(part, transfers)| {
        let (graph, placements, part) = (Arc::clone(&graph), Arc::clone(&placements), Part(part));
        thread::spawn(move || {
            let sites = Arc::new(NodeSites::new(&graph, 1 << 20));
            let mut kernels: HashMap<NodeId, Box<dyn Kernel<Data>>> = HashMap::new();
            for id in placements.nodes_of(part) {
                kernels.insert(*id, Box::new(|_, inputs: Vec<Data>| Ok(inputs)));
            }
            let leaving: Vec<CrossingId> = placements.leaving(part).map(|crossing| crossing.id).collect();
            let executor = Executor::new(graph, placements, part, kernels, transfers).unwrap();
            executor.sites(Arc::clone(&sites)).run(0..3, &mut |step, _| Ok(feed(step))).unwrap();
            let report = |id| SenderReport::new(id, &sites, Copies::default(), Copies::default());
            leaving.into_iter().map(report).collect::<Vec<_>>()
        })
    });
    let parts: Vec<_> = parts.collect();
    let reports: Vec<SenderReport> = parts.into_iter().flat_map(|part| part.join().unwrap()).collect();
    for report in &reports {
        assert_eq!((report.seen.tensors, report.traced), (3, true));
    }
    Explanation::new(&graph, &placements, &reports)
}

#[test]
fn a_run_finds_the_sites_of_tensors_that_are_passed_on() {
    let explanation = run(|step| Data(vec![step as u8; LENGTH].into()));
    let sites: Vec<_> = explanation.tensors.iter().map(|tensor| tensor.site.clone().unwrap()).collect();
    // `relu` passes on what part 1 received.
    assert_eq!(sites, ["allocation 0 of node image (Test)", "allocation 0 of the receive of conv to part 1"]);
}

#[test]
fn a_run_says_that_no_node_allocated_an_input_of_static_memory() {
    static CONTENT: [u8; LENGTH] = [1; LENGTH];
    let explanation = run(|_| Data(Bytes::from_static(&CONTENT)));
    assert!(explanation.tensors[0].site.as_ref().unwrap().starts_with("no node: "), "{explanation}");
}
