//! What plans are like: their messages, their memory, and their size.

use super::checker::{LinkConditions, carry_out, in_order_of_ranks};
use super::{ALGORITHMS, Algorithm, Arguments, Collective, Plan, arguments, plans};
use crate::plan::{Action, part};

const COLLECTIVES: [Collective; 5] = [
    Collective::AllReduce,
    Collective::ReduceScatter,
    Collective::AllGather,
    Collective::Broadcast { root: 0 },
    Collective::Barrier,
];

/// Returns the number of elements that a plan sends.
fn sent(plan: &Plan) -> usize {
    let length = |action: &Action| if let Action::Send { from, .. } = action { from.range.len() } else { 0 };
    plan.steps.iter().map(|step| length(&step.action)).sum()
}

/// Returns the number of messages that a plan sends.
fn messages(plan: &Plan) -> usize {
    plan.steps.iter().filter(|step| matches!(step.action, Action::Send { .. })).count()
}

#[test]
fn parts_cover_the_whole_in_order() {
    for (elements, ranks) in [(0, 1), (0, 5), (3, 5), (5, 5), (17, 5), (1 << 40, 128), (1000, 7)] {
        let parts: Vec<_> = (0..ranks).map(|rank| part(elements, ranks, rank)).collect();
        assert_eq!(parts[0].start, 0);
        assert_eq!(parts[ranks - 1].end, elements);
        assert!(
            parts.windows(2).all(|pair| pair[0].end == pair[1].start && pair[0].len() - pair[1].len() <= 1)
        );
    }
}

#[test]
fn all_numbers_of_ranks() {
    for ranks in (1..=17).chain([31, 32, 33, 128]) {
        for (collective, algorithm) in COLLECTIVES.iter().flat_map(|c| ALGORITHMS.map(|a| (*c, a))) {
            // All-reduces of many ranks have so many messages that few elements are enough.
            let is_large = ranks > 40 && collective == Collective::AllReduce;
            let whole = if is_large { 3 } else { ranks + 3 };
            for elements in [whole, whole / 2] {
                let collective = match collective {
                    Collective::Broadcast { .. } => Collective::Broadcast { root: ranks - 1 },
                    other => other,
                };
                let arguments = arguments(collective, algorithm, ranks, elements);
                carry_out(&arguments, &plans(&arguments), LinkConditions::references(ranks), ranks as u64);
            }
        }
    }
}

#[test]
fn a_ring_sends_what_baidu_says() {
    for ranks in 2..=8 {
        for elements in [840, 1003, 5] {
            let arguments =
                Arguments { chunk: 40, ..arguments(Collective::AllReduce, Algorithm::Ring, ranks, elements) };
            let sums: Vec<usize> = plans(&arguments).iter().map(sent).collect();
            for (rank, sum) in sums.iter().enumerate() {
                // All parts but one in each half. Rank r does not send its own part in the first half, nor
                // the next rank's in the second.
                let kept =
                    part(elements, ranks, rank).len() + part(elements, ranks, (rank + 1) % ranks).len();
                assert_eq!(*sum, 2 * elements - kept, "rank {rank} of {ranks}, {elements} elements");
                if elements % ranks == 0 {
                    assert_eq!(sum * ranks, 2 * (ranks - 1) * elements);
                }
            }
            assert_eq!(sums.iter().sum::<usize>(), 2 * (ranks - 1) * elements);
        }
    }
}

#[test]
fn halving_doubling_sends_as_little_as_a_ring_for_powers_of_two() {
    for ranks in [2, 4, 8, 16] {
        let elements = 1 << 16;
        let arguments = arguments(Collective::AllReduce, Algorithm::HalvingDoubling, ranks, elements);
        for plan in plans(&arguments) {
            assert_eq!(sent(&plan) * ranks, 2 * (ranks - 1) * elements);
            assert_eq!(messages(&plan), 2 * ranks.ilog2() as usize);
        }
    }
}

#[test]
fn the_naive_reducer_sends_and_receives_all_at_rank_0() {
    for ranks in 2..=8 {
        let arguments =
            Arguments { chunk: 40, ..arguments(Collective::AllReduce, Algorithm::Naive, ranks, 840) };
        let sums: Vec<usize> = plans(&arguments).iter().map(sent).collect();
        assert_eq!(sums[0], (ranks - 1) * 840);
        assert!(sums[1..].iter().all(|sum| *sum == 840), "{sums:?}");
    }
}

#[test]
fn rounds_of_the_circulant_graph_are_few() {
    for ranks in 2..=40_usize {
        let elements = ranks * 8;
        let rounds = ranks.next_power_of_two().ilog2() as usize;
        for collective in [Collective::ReduceScatter, Collective::AllGather] {
            let arguments = arguments(collective, Algorithm::HalvingDoubling, ranks, elements);
            for plan in plans(&arguments) {
                assert_eq!(sent(&plan), elements - 8, "{collective:?}, {ranks} ranks");
                // At most one message more in a round where the parts go round the end.
                assert!(messages(&plan) <= 2 * rounds, "{collective:?}, {ranks} ranks: {}", messages(&plan));
            }
        }
    }
}

#[test]
fn one_shot_reduces_in_the_order_of_the_ranks() {
    for (ranks, inline) in [(2, 100), (2, 0), (3, 0), (5, 100), (8, 0)] {
        let arguments =
            Arguments { inline, ..arguments(Collective::AllReduce, Algorithm::OneShot, ranks, 40) };
        let links = LinkConditions { inline: vec![inline; ranks], ..LinkConditions::references(ranks) };
        for result in carry_out(&arguments, &plans(&arguments), links, 1) {
            for (element, value) in result.iter().enumerate() {
                assert_eq!(value.bits(), in_order_of_ranks(ranks, element), "element {element}");
            }
        }
    }
}

#[test]
fn small_one_shots_of_two_ranks_take_three_steps_and_no_scratch() {
    let arguments = Arguments { inline: 256, ..arguments(Collective::AllReduce, Algorithm::OneShot, 2, 256) };
    for plan in plans(&arguments) {
        assert_eq!((plan.steps.len(), plan.scratch), (3, 0), "{plan:#?}");
    }
}

#[test]
fn only_operations_that_need_it_have_scratch() {
    for (ranks, algorithm, collective) in ALGORITHMS
        .iter()
        .flat_map(|a| COLLECTIVES.map(|c| (*a, c)))
        .flat_map(|(a, c)| [2, 3, 5, 8].map(|ranks| (ranks, a, c)))
    {
        let arguments = arguments(collective, algorithm, ranks, 1000);
        let most = match (collective, algorithm) {
            (Collective::AllReduce, Algorithm::OneShot) => 1000,
            (Collective::ReduceScatter, Algorithm::OneShot | Algorithm::Naive) => 1000_usize.div_ceil(ranks),
            _ => 0,
        };
        for plan in plans(&arguments) {
            assert!(plan.scratch <= most, "{arguments:?}: {}", plan.scratch);
        }
    }
}

#[test]
fn messages_are_no_longer_than_a_piece() {
    for (collective, algorithm) in COLLECTIVES.iter().flat_map(|c| ALGORITHMS.map(|a| (*c, a))) {
        for chunk in [0, 1, 9] {
            let arguments = Arguments { chunk, ..arguments(collective, algorithm, 5, 100) };
            for plan in plans(&arguments) {
                for step in &plan.steps {
                    let length = match &step.action {
                        Action::Send { from, .. } => from.range.len(),
                        Action::Receive { into, .. } | Action::Local { into, .. } => into.range.len(),
                        Action::Finish { span } => span.range.len(),
                    };
                    assert!(length <= chunk.max(1));
                    assert!(length > 0 || collective == Collective::Barrier, "{arguments:?}: {step:?}");
                }
            }
        }
    }
}

#[test]
fn long_plans_are_linear_in_the_number_of_pieces() {
    let size = |plan: &Plan| plan.steps.iter().map(|step| 1 + step.after.len()).sum::<usize>();
    for (collective, algorithm) in COLLECTIVES.iter().flat_map(|c| ALGORITHMS.map(|a| (*c, a))) {
        for ranks in [2, 7, 8] {
            let elements = 1 << 24;
            let with = |chunks: usize| {
                let whole = arguments(collective, algorithm, ranks, elements);
                size(&Plan::new(&Arguments { chunk: elements / chunks, ..whole }, ranks - 1))
            };
            let (few, many) = (with(256), with(2048));
            assert!(many <= 8 * few + 64, "{collective:?} {algorithm:?}: {few} and {many}");
            assert!(few <= 256 * 8 * ranks, "{collective:?} {algorithm:?}: {few}");
        }
    }
}

#[test]
fn tiny_pieces_of_a_huge_operation_are_refused() {
    let arguments = Arguments {
        chunk: 1,
        ..arguments(Collective::AllReduce, Algorithm::HalvingDoubling, 2, usize::MAX / 4)
    };
    assert!(Plan::new(&arguments, 0).steps.len() <= 5 << 16);
}

#[test]
fn nothing_is_sent_for_zero_elements() {
    for (collective, algorithm) in COLLECTIVES[..4].iter().flat_map(|c| ALGORITHMS.map(|a| (*c, a))) {
        let arguments = arguments(collective, algorithm, 5, 0);
        assert!(plans(&arguments).iter().all(|plan| plan.steps.is_empty()));
    }
}
