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

/// Three tensors of 4 000, 40 000 and 400 000 bytes go from part 0 to part 1, the middle one to part 2,
/// too, and one of unknown length to part 1.
fn sizes() -> (Topology, Placements) {
    let mut graph = Topology::new();
    let mut outlets = Vec::new();
    for length in [1_000, 10_000, 100_000] {
        let fact = Fact::known(Dtype::F32, &[length]);
        outlets
            .push(outlet(graph.add(node(&length.to_string(), Role::Input, &[], vec![fact])).unwrap().0, 0));
    }
    let free = symbolic(&[Dim::Symbolic("N".into())]);
    outlets.push(outlet(graph.add(node("free", Role::Input, &[], vec![free])).unwrap().0, 0));
    let last = || vec![Fact::known(Dtype::F32, &[1])];
    graph.add(node("one", Role::Compute, &outlets, last())).unwrap();
    graph.add(node("two", Role::Compute, &outlets[1..2], last())).unwrap();
    let parts = [0, 0, 0, 0, 1, 2].map(Part).to_vec();
    let partition = Partition::new(&graph, 3, parts).unwrap();
    let placements = Placements::new(&graph, &partition).unwrap();
    (graph, placements)
}

const TWO: Buffers = Buffers { window: 2, modes: 1, reads: 0 };

/// Returns the names of the static tensors.
fn statics(placements: &Placements) -> Vec<&str> {
    let crossings = placements.crossings().iter().filter(|crossing| crossing.placement.is_static());
    crossings.map(|crossing| crossing.name.as_str()).collect()
}

#[test]
fn the_footprint_is_that_of_slots_and_of_what_is_sent() {
    let (_, placements) = sizes();
    let footprint = |part| placements.footprint(Part(part), TWO);
    // Each buffer is there for each step in flight, on lines of its own, and the middle tensor is sent from
    // one.
    assert_eq!(footprint(0), Footprint { slots: 0, sends: 2 * (4_096 + 40_064 + 400_000) });
    let Footprint { slots, sends } = footprint(1);
    assert!((888_000..890_000).contains(&slots) && sends == 0, "{slots}");
    assert!((80_000..80_300).contains(&footprint(2).slots));
    let twice = placements.footprint(Part(1), Buffers { modes: 2, ..TWO });
    assert_eq!((twice.slots, twice.total()), (2 * slots, 2 * slots));
    // The footprint multiplies by the window. A loop over so many steps would not end.
    let endless = Buffers { window: usize::MAX, modes: usize::MAX, ..TWO };
    assert_eq!(placements.footprint(Part(0), endless).total(), u64::MAX);
    assert!(placements.clone().within(1 << 20, endless).is_err());
    let read = placements.footprint(Part(1), Buffers { modes: 0, reads: 1, ..TWO });
    assert!(read.slots < 4 * 512, "{read:?}");
}

#[test]
fn as_few_tensors_as_possible_become_dynamic_and_they_say_why() {
    let (_, placements) = sizes();
    let within = |limit| placements.clone().within(limit, TWO).unwrap();
    let all = ["1000 to part 1", "10000 to part 1", "10000 to part 2", "100000 to part 1"];
    assert_eq!(statics(&within(u64::MAX)), all);
    assert_eq!(statics(&within(placements.footprint(Part(1), TWO).total())), all);
    // What part 0 sends fits, and the smallest tensor is enough for part 1.
    let less = within(888_400);
    assert_eq!(statics(&less), ["10000 to part 1", "10000 to part 2", "100000 to part 1"]);
    // What the parts really reserve is within the limit.
    for part in 0..3 {
        assert!(less.footprint(Part(part), TWO).total() <= 888_400);
    }
    let Placement::Dynamic { fact, why } = &less.crossings()[0].placement else { panic!("static") };
    assert_eq!(fact.to_string(), "float32[1000]");
    let begin = "all dimensions are known, but part 1 would reserve ";
    assert!(why.starts_with(begin) && why.ends_with("and costs a round trip in each step"), "{why}");
    assert!(less.crossings()[0].placement.check(&Fact::known(Dtype::F32, &[1_000]).spec().unwrap()).is_ok());
}

#[test]
fn a_limit_that_is_too_small_is_an_error_that_names_the_least() {
    let (_, placements) = sizes();
    let error = placements.clone().within(100_000, TWO).unwrap_err().to_string();
    let sends = 2 * (4_096 + 40_064 + 400_000);
    let expected =
        format!("memory: 100000 bytes are too little, {sends} are the least: part 0 sends from {sends}");
    assert_eq!(error, expected);
    // The least works.
    let least = placements.clone().within(sends, TWO).unwrap();
    assert_eq!(statics(&least).len(), 3);
    assert!(placements.within(sends - 1, TWO).is_err());
}
