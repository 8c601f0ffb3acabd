#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use proptest::prelude::*;
use tonic_rdma_tensor::Dtype;

use super::{search, *};
use crate::dataflow::{Fact, Node, NodeId, Outlet, Role, Topology};
use crate::placement::{Part, Partition, Placements};

/// A node of a random graph: role, inputs (by a number that is taken modulo the nodes before), length of the
/// output, work, stays.
type Drawn = (u8, Vec<usize>, u64, u64, bool);

fn graph(drawn: &[Drawn]) -> Topology {
    let mut graph = Topology::new();
    for (index, (role, inputs, length, work, stays)) in drawn.iter().enumerate() {
        let role = match role {
            0 => Role::Input,
            1 => Role::Constant,
            _ => Role::Compute,
        };
        let inputs = match role {
            Role::Compute => inputs.iter().filter(|_| index > 0).map(|input| input % index).collect(),
            _ => Vec::new(),
        };
        let added = graph.add(Node {
            name: format!("n{index}"),
            kind: "Test".to_owned(),
            role,
            inputs: inputs.into_iter().map(|node| Outlet { node: NodeId(node), output: 0 }).collect(),
            outputs: vec![Fact::known(Dtype::U8, &[*length])],
            work: *work,
            stays: *stays,
        });
        added.unwrap();
    }
    graph
}

/// A chain of an input and nodes with these lengths of outputs and works.
fn chain(nodes: &[(u64, u64)]) -> Topology {
    let mut drawn: Vec<Drawn> = vec![(0, vec![], 1, 0, false)];
    drawn.extend(
        nodes.iter().enumerate().map(|(index, (length, work))| (2, vec![index], *length, *work, false)),
    );
    graph(&drawn)
}

fn parts(partition: &Partition) -> Vec<usize> {
    partition.parts().iter().map(|part| part.0).collect()
}

/// Bytes that cross, by the analysis.
fn bytes(graph: &Topology, partition: &Partition) -> u64 {
    let placements = Placements::new(graph, partition).unwrap();
    placements.crossings().iter().map(|crossing| graph.fact(crossing.outlet).unwrap().bytes(1)).sum()
}

/// Work of each part.
fn works(graph: &Topology, partition: &Partition) -> Vec<u64> {
    let mut works = vec![0; partition.count()];
    for (id, node) in graph.nodes().filter(|(_, node)| node.role == Role::Compute) {
        works[partition.part_of(id).unwrap().0] += node.work.max(1);
    }
    works
}

/// All partitions of a graph into a pipeline in which each part computes something.
fn all(graph: &Topology, count: usize) -> Vec<Partition> {
    let mut found = Vec::new();
    for number in 0..count.pow(graph.len() as u32) {
        let of = |node: usize| Part(number / count.pow(node as u32) % count);
        let Ok(partition) = Partition::new(graph, count, (0..graph.len()).map(of).collect()) else {
            continue;
        };
        let pipeline = partition.check_pipeline(graph).is_ok();
        if pipeline && works(graph, &partition).iter().all(|work| *work > 0) {
            found.push(partition);
        }
    }
    found
}

#[test]
fn the_cut_is_where_few_bytes_cross() {
    let narrow = chain(&[(50, 1), (50, 1), (2, 1), (50, 1), (50, 1), (50, 1)]);
    assert_eq!(parts(&Partition::balanced_within(&narrow, 2, 0).unwrap()), [0, 0, 0, 0, 1, 1, 1]);
    let narrow = chain(&[(50, 10), (2, 10), (50, 10), (50, 10), (50, 10)]);
    assert_eq!(
        parts(&Partition::balanced_within(&narrow, 2, 0).unwrap()),
        [0, 0, 0, 1, 1, 1],
        "as balanced as possible"
    );
    let far = chain(&[(2, 10), (50, 10), (50, 10), (50, 10)]);
    assert_eq!(parts(&Partition::balanced_within(&far, 2, 0).unwrap()), [0, 0, 0, 1, 1]);
    assert_eq!(
        parts(&Partition::balanced_within(&far, 2, 50).unwrap()),
        [0, 0, 1, 1, 1],
        "30 instead of 20 is allowed"
    );
}

#[test]
fn an_input_is_fed_to_the_first_part_that_needs_it() {
    let graph = graph(&[
        (0, vec![], 9, 0, false),
        (1, vec![], 9, 0, false),
        (2, vec![0], 5, 1, false),
        (2, vec![2, 1], 5, 1, false),
        (0, vec![], 9, 0, false),
        (2, vec![3, 4], 5, 1, false),
    ]);
    assert_eq!(parts(&Partition::balanced(&graph, 3).unwrap()), [0, 1, 0, 1, 2, 2]);
}

#[test]
fn too_many_parts_are_refused() {
    let graph = chain(&[(1, 1), (1, 1)]);
    assert!(Partition::balanced(&graph, 2).is_ok());
    for count in [0, 3, usize::MAX] {
        let error = Partition::balanced(&graph, count).unwrap_err();
        assert!(matches!(error.problem(), Problem::Parts { parts, most: 2 } if *parts == count), "{error}");
    }
}

#[test]
fn nodes_that_are_tied_by_others_stay_together() {
    // Node 1 ties 3 to itself, and 2 is between them.
    let graph = graph(&[
        (0, vec![], 1, 0, false),
        (2, vec![0], 1, 1, true),
        (2, vec![1], 1, 1, false),
        (2, vec![1, 2], 1, 1, false),
        (2, vec![3], 1, 1, false),
    ]);
    assert_eq!(parts(&Partition::balanced(&graph, 2).unwrap()), [0, 0, 0, 0, 1]);
    let error = Partition::balanced(&graph, 3).unwrap_err();
    assert!(matches!(error.problem(), Problem::Parts { most: 2, .. }), "{error}");
}

#[test]
fn a_long_graph_with_many_branches_is_split() {
    let mut drawn: Vec<Drawn> = vec![(0, vec![], 1, 0, false)];
    for block in 0..200 {
        let start = block * 5;
        drawn.extend([1, 2, 3, 4].map(|branch| (2, vec![start], 10 * branch, 5, false)));
        drawn.push((2, vec![start + 1, start + 2, start + 3, start + 4], 7, 5, false));
    }
    let graph = graph(&drawn);
    let partition = Partition::balanced(&graph, 4).unwrap();
    partition.check_pipeline(&graph).unwrap();
    assert_eq!(bytes(&graph, &partition), 3 * 7, "the cuts are between blocks");
    let works = works(&graph, &partition);
    assert!(works.iter().all(|work| *work <= 1250 * 11 / 10), "{works:?}");
}

#[test]
fn cuts_are_made_after_the_named_nodes() {
    let graph = chain(&[(1, 1), (1, 1), (1, 1)]);
    assert_eq!(parts(&Partition::at_cuts(&graph, &["n1", "n2"]).unwrap()), [0, 0, 1, 2]);
    assert_eq!(parts(&Partition::at_cuts(&graph, &[]).unwrap()), [0, 0, 0, 0]);
    let message = |cuts: &[&str]| Partition::at_cuts(&graph, cuts).unwrap_err().to_string();
    assert_eq!(message(&["N2x"]), "the graph has no node N2x; a node with a similar name: n2");
    assert!(message(&["n2", "n1"]).contains("the cut after node n1 adds nothing"));
    assert!(message(&["n0"]).contains("the cut after node n0 adds nothing"));
    assert!(message(&["n3"]).contains("nothing is left after the cut at node n3"));
}

#[test]
fn a_cut_takes_along_what_its_node_needs() {
    // 1 and 2 are branches; 4 is a constant of 5, and 6 an input of 7.
    let graph = graph(&[
        (0, vec![], 1, 0, false),
        (2, vec![0], 1, 1, false),
        (2, vec![0], 1, 1, false),
        (2, vec![1, 2], 1, 1, false),
        (1, vec![], 1, 0, false),
        (2, vec![3, 4], 1, 1, false),
        (0, vec![], 1, 0, false),
        (2, vec![5, 6], 1, 1, false),
    ]);
    assert_eq!(parts(&Partition::at_cuts(&graph, &["n2", "n5"]).unwrap()), [0, 1, 0, 1, 1, 1, 2, 2]);
}

#[test]
fn a_list_names_the_first_nodes_of_the_parts() {
    let graph = chain(&[(1, 1), (1, 1), (1, 1), (1, 1)]);
    assert_eq!(
        parts(&Partition::named(&graph, 2, "# a comment, with = and ,\nn3=1").unwrap()),
        [0, 0, 0, 1, 1]
    );
    assert_eq!(parts(&Partition::named(&graph, 3, "n2 = 2,\n n4=0").unwrap()), [0, 0, 2, 2, 0]);
    assert!(Partition::named(&graph, 3, "n2=2,n4=0").unwrap().check_pipeline(&graph).is_err());
    let message = |list: &str| Partition::named(&graph, 2, list).unwrap_err().to_string();
    assert_eq!(message("n1"), "the partition is wrong: \"n1\": write node=part");
    assert_eq!(message("n1=one"), "the partition is wrong: \"n1=one\": the part is no number");
    assert_eq!(message("n1=2"), "the partition is wrong: \"n1=2\": the parts are 0 to 1");
    assert!(message("n1=0,n1=1").contains("an earlier entry names this node"));
    assert_eq!(message("conv=1"), "the graph has no node conv");
}

#[test]
fn an_output_that_cannot_cross_is_named() {
    let graph = graph(&[(0, vec![], 1, 0, false), (2, vec![0], 1, 1, true), (2, vec![1], 1, 1, false)]);
    let error = Partition::at_cuts(&graph, &["n1"]).unwrap_err();
    assert!(
        error.to_string().starts_with("node n1 is in part 0, and its consumer n2 in part 1: "),
        "{error}"
    );
}

#[test]
fn an_input_that_stays_with_its_consumers_has_no_work() {
    let graph = graph(&[
        (0, vec![], 1, 2, true),
        (2, vec![0], 1, 3, false),
        (2, vec![0], 1, 4, false),
        (2, vec![1], 1, 1, false),
        (2, vec![1, 2], 1, 4, false),
        (2, vec![1], 1, 1, false),
    ]);
    // The first three nodes stay together. The least that the largest part can have is 7, and 45 % more is
    // 10.
    let found = Partition::balanced_within(&graph, 2, 45).unwrap();
    assert_eq!(parts(&found)[4], 1, "{found:?}");
    assert!(works(&graph, &found).iter().all(|work| *work <= 10), "{found:?}");
}

fn drawn(nodes: usize) -> impl Strategy<Value = Vec<Drawn>> {
    let role = prop_oneof![1 => Just(0u8), 1 => Just(1u8), 6 => Just(2u8)];
    let node =
        (role, proptest::collection::vec(0..100usize, 1..4), 1..40u64, 0..6u64, prop::bool::weighted(0.1));
    proptest::collection::vec(node, 1..=nodes)
}

proptest! {
    #[test]
    fn a_small_graph_is_split_as_well_as_possible(drawn in drawn(7), count in 1..4usize, percent in 0..60u32) {
        let graph = graph(&drawn);
        let computes = graph.nodes().filter(|(_, node)| node.role == Role::Compute).count();
        let found = Partition::balanced_within(&graph, count, percent);
        let all = all(&graph, count);
        let most_work = |partition: &Partition| works(&graph, partition).into_iter().max().unwrap();
        let Some(least) = all.iter().map(most_work).min() else {
            let refused = found.as_ref().is_err_and(|error| matches!(error.problem(), Problem::Parts { .. }));
            prop_assert_eq!(refused, count > 1);
            prop_assert!(computes == 0 || count > 1);
            return Ok(());
        };
        let found = found.unwrap();
        let limit = least + least * u64::from(percent) / 100;
        let best = all.iter().filter(|one| most_work(one) <= limit).map(|one| bytes(&graph, one)).min().unwrap();
        prop_assert_eq!(bytes(&graph, &found), best);
        prop_assert!(most_work(&found) <= limit);
        found.check_pipeline(&graph).unwrap();
    }

    #[test]
    fn a_partition_is_a_pipeline_and_the_same_each_time(drawn in drawn(40), count in 1..6usize, few in any::<bool>()) {
        let graph = graph(&drawn);
        let most = if few { 1000 } else { 0 };
        match search(&graph, count, SLACK_PERCENT, most) {
            // `Partition::new` has checked that outputs that can't cross do not.
            Ok(partition) => {
                partition.check_pipeline(&graph).unwrap();
                prop_assert_eq!(partition.parts().len(), graph.len());
                let computes = works(&graph, &partition).iter().all(|work| *work > 0);
                prop_assert!(computes || graph.nodes().all(|(_, node)| node.role != Role::Compute));
                prop_assert_eq!(search(&graph, count, SLACK_PERCENT, most).unwrap(), partition);
            }
            Err(error) => {
                let Problem::Parts { parts, most } = *error.problem() else { panic!("{error}") };
                prop_assert_eq!(parts, count);
                prop_assert!(most < count && Partition::balanced(&graph, most).is_ok());
            }
        }
    }
}
