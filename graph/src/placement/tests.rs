#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use tonic_rdma_tensor::Dtype;

use super::*;
use crate::dataflow::{Dim, Fact, Node, Role, Topology};

fn outlet(node: usize, output: usize) -> Outlet {
    Outlet { node: NodeId(node), output }
}

fn node(name: &str, role: Role, inputs: &[Outlet], outputs: Vec<Fact>) -> Node {
    let (name, kind) = (name.to_owned(), "Test".to_owned());
    Node { name, kind, role, inputs: inputs.to_vec(), outputs, work: 1, stays: false }
}

fn symbolic(dims: &[Dim]) -> Fact {
    Fact { dtype: Dtype::F32, dims: dims.to_vec() }
}

/// tokens ─▶ embed ─▶ cell (2 outputs) ─▶ head, with a constant that embed and head use.
fn example() -> Topology {
    let mut graph = Topology::new();
    let n = Dim::Symbolic("N".into());
    let fixed = || Fact::known(Dtype::F32, &[8]);
    graph.add(node("tokens", Role::Input, &[], vec![symbolic(std::slice::from_ref(&n))])).unwrap();
    graph.add(node("weights", Role::Constant, &[], vec![fixed()])).unwrap();
    let embedded = vec![symbolic(&[n, Dim::Known(8)])];
    graph.add(node("embed", Role::Compute, &[outlet(0, 0), outlet(1, 0)], embedded)).unwrap();
    let twice = symbolic(&[Dim::Known(3), Dim::Symbolic("2*N+K".into())]);
    graph.add(node("cell", Role::Compute, &[outlet(2, 0)], vec![fixed(), twice])).unwrap();
    let inputs = [outlet(3, 0), outlet(3, 1), outlet(3, 1), outlet(1, 0), outlet(0, 0)];
    graph.add(node("head", Role::Compute, &inputs, vec![fixed()])).unwrap();
    graph.result(outlet(4, 0)).unwrap();
    graph
}

fn split(graph: &Topology, parts: [usize; 5]) -> Placements {
    Placements::new(graph, &Partition::new(graph, 3, parts.map(Part).to_vec()).unwrap()).unwrap()
}

#[test]
fn each_crossing_tensor_has_a_placement_and_a_reason() {
    let graph = example();
    let placements = split(&graph, [0, 0, 0, 0, 1]);
    let found: Vec<_> =
        placements.crossings().iter().map(|crossing| (crossing.name.as_str(), &crossing.placement)).collect();
    let spec = Fact::known(Dtype::F32, &[8]).spec().unwrap();
    let crossings = placements.crossings();
    let dynamic = |crossing: usize, why: &str| Placement::Dynamic {
        fact: graph.fact(crossings[crossing].outlet).unwrap().clone(),
        why: why.to_owned(),
    };
    let expected = [
        ("tokens to part 1", &dynamic(0, "dimension 0 is N: N is a dimension of the input tokens")),
        ("cell.0 to part 1", &Placement::Static(spec)),
        (
            "cell.1 to part 1",
            &dynamic(
                2,
                "dimension 1 is 2*N+K: N is a dimension of the input tokens, K comes from node cell (Test)",
            ),
        ),
    ];
    assert_eq!(found, expected);
    for (index, crossing) in placements.crossings().iter().enumerate() {
        assert_eq!(crossing.id, CrossingId(index));
        assert_eq!((crossing.from, crossing.to), (Part(0), Part(1)));
        assert_eq!(crossing.consumers, [NodeId(4)], "once, though the node uses it twice");
    }
}

#[test]
fn a_tensor_crosses_once_to_each_part() {
    let graph = example();
    // Backward and forward, in any direction.
    let placements = split(&graph, [1, 0, 2, 0, 2]);
    let names: Vec<_> = placements.crossings().iter().map(|crossing| crossing.name.as_str()).collect();
    assert_eq!(names, ["tokens to part 2", "embed to part 0", "cell.0 to part 2", "cell.1 to part 2"]);
    assert_eq!(placements.crossings()[0].consumers, [NodeId(2), NodeId(4)]);
    assert_eq!(placements.leaving(Part(0)).count(), 2);
    assert_eq!(placements.arriving(Part(2)).count(), 3);
    assert_eq!(placements.arriving(Part(1)).count(), 0);
}

#[test]
fn a_constant_is_in_each_part_that_uses_it() {
    let graph = example();
    let placements = split(&graph, [1, 0, 2, 0, 2]);
    assert_eq!(placements.nodes_of(Part(0)), [NodeId(1), NodeId(3)]);
    assert_eq!(placements.nodes_of(Part(1)), [NodeId(0)]);
    assert_eq!(placements.nodes_of(Part(2)), [NodeId(1), NodeId(2), NodeId(4)]);
    assert_eq!(placements.nodes_of(Part(3)), []);
}

#[test]
fn strings_are_dynamic_because_their_size_differs() {
    let mut graph = Topology::new();
    let words = || vec![Fact::known(Dtype::String, &[2])];
    graph.add(node("words", Role::Input, &[], words())).unwrap();
    graph.add(node("join", Role::Compute, &[outlet(0, 0)], words())).unwrap();
    let partition = Partition::new(&graph, 2, vec![Part(0), Part(1)]).unwrap();
    let placements = Placements::new(&graph, &partition).unwrap();
    let Placement::Dynamic { why, .. } = &placements.crossings()[0].placement else { panic!("static") };
    assert_eq!(why, "elements of type string have no fixed size");
}

#[test]
fn names_of_crossing_tensors_differ() {
    let mut graph = Topology::new();
    let fact = || Fact::known(Dtype::U8, &[1]);
    graph.add(node("a", Role::Input, &[], vec![fact(), fact()])).unwrap();
    graph.add(node("a.1", Role::Input, &[], vec![fact()])).unwrap();
    graph.add(node("b", Role::Compute, &[outlet(0, 1), outlet(1, 0)], vec![fact()])).unwrap();
    let partition = Partition::new(&graph, 2, vec![Part(0), Part(0), Part(1)]).unwrap();
    let placements = Placements::new(&graph, &partition).unwrap();
    assert_eq!(placements.crossings()[0].name, "a.1 to part 1");
    assert_eq!(placements.crossings()[1].name, "a.1 to part 1 (1)");
}

#[test]
fn a_partition_of_another_graph_is_refused() {
    let graph = example();
    let message = |parts: Vec<Part>| Partition::new(&graph, 2, parts).unwrap_err().to_string();
    assert_eq!(message(vec![Part(0); 4]), "the partition is wrong: it has 4 nodes, and the graph has 5");
    assert_eq!(
        message(vec![Part(0), Part(0), Part(2), Part(0), Part(0)]),
        "the partition is wrong: node embed is in part 2, and there are 2 parts"
    );
    let backward = Partition::new(&graph, 2, [0, 0, 1, 0, 1].map(Part).to_vec()).unwrap();
    let error = backward.check_pipeline(&graph).unwrap_err();
    assert!(matches!(error.problem(), Problem::Backward { from: 1, to: 0, .. }));
    assert!(Placements::new(&Topology::new(), &backward).is_err());
}
