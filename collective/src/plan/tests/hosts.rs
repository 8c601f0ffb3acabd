//! Ranks of several hosts: every way to spread a few ranks over hosts, and every number of ranks on each host
//! for more of them.

use std::collections::BTreeMap;

use super::checker::{LinkConditions, carry_out};
use super::{Algorithm, Arguments, Collective, Hosts, arguments, plans};
use crate::plan::{Action, PlanTable};

/// Up to this many ranks, all ways to spread them over hosts.
const ALL_WAYS: usize = 6;
/// Up to this many ranks, all numbers of ranks on each host.
const ALL_NUMBERS: usize = 12;
/// A multiple of all numbers of ranks and hosts, and of all parts of a host's part.
const ELEMENTS: usize = 27_720;

/// Returns all ways to spread ranks over hosts. The first rank of each host comes before that of the next.
fn spreads(ranks: usize) -> Vec<Vec<usize>> {
    (0..ranks).fold(vec![Vec::new()], |all, _| {
        let longer = |hosts: Vec<usize>| {
            let known = hosts.iter().max().map_or(0, |most| most + 1);
            (0..=known).map(move |host| [&hosts[..], &[host]].concat())
        };
        all.into_iter().flat_map(longer).collect()
    })
}

/// Returns all numbers of ranks on hosts, at most `most` on one, the largest first.
fn numbers(ranks: usize, most: usize) -> Vec<Vec<usize>> {
    if ranks == 0 {
        return vec![Vec::new()];
    }
    let first = |first: usize| {
        numbers(ranks - first, first).into_iter().map(move |rest| [&[first], &rest[..]].concat())
    };
    (1..=most.min(ranks)).flat_map(first).collect()
}

/// Returns the hosts of the ranks: host by host, and in turn, as launchers number them.
fn in_order_and_in_turn(numbers: &[usize]) -> [Vec<usize>; 2] {
    let of = |host: usize, ranks: usize| (0..ranks).map(move |rank| (rank, host));
    let mut hosts: Vec<_> = numbers.iter().enumerate().flat_map(|(host, ranks)| of(host, *ranks)).collect();
    let in_order = hosts.iter().map(|(_, host)| *host).collect();
    hosts.sort_unstable();
    [in_order, hosts.into_iter().map(|(_, host)| host).collect()]
}

/// Returns the hosts of the ranks of all groups that these tests carry out.
fn groups() -> impl Iterator<Item = Vec<usize>> {
    let few = (2..=ALL_WAYS).flat_map(spreads);
    let more = (ALL_WAYS + 1..=ALL_NUMBERS).flat_map(|ranks| numbers(ranks, ranks));
    few.chain(more.flat_map(|numbers| in_order_and_in_turn(&numbers)))
}

/// Returns the elements that leave each host, and the longest sequence of messages between hosts of which each
/// waits for the one before.
pub(super) fn across(arguments: &Arguments) -> (Vec<usize>, usize) {
    let (plans, hosts) = (plans(arguments), &arguments.hosts);
    let mut sent = vec![0; hosts.members(arguments.ranks).len()];
    // The rounds of each message on its way, by sender and receiver.
    let mut links: BTreeMap<(usize, usize), Vec<usize>> = BTreeMap::new();
    let mut rounds: Vec<Vec<usize>> = vec![Vec::new(); plans.len()];
    let mut taken: BTreeMap<(usize, usize), usize> = BTreeMap::new();
    // Each rank goes through its steps in order, as far as its messages have come.
    while rounds.iter().zip(&plans).any(|(rounds, plan)| rounds.len() < plan.steps.len()) {
        let mut moved = false;
        for (rank, plan) in plans.iter().enumerate() {
            while let Some(step) = plan.steps.get(rounds[rank].len()) {
                let before = step.after.iter().map(|step| rounds[rank][*step as usize]).max().unwrap_or(0);
                let round = match &step.action {
                    Action::Send { to, from } => {
                        let is_across = hosts.of(rank) != hosts.of(*to);
                        sent[hosts.of(rank)] += if is_across { from.range.len() } else { 0 };
                        links.entry((rank, *to)).or_default().push(before + usize::from(is_across));
                        before
                    }
                    Action::Receive { from, .. } => {
                        let next = taken.entry((*from, rank)).or_default();
                        let arrived = links.get(&(*from, rank)).and_then(|link| link.get(*next));
                        let Some(round) = arrived else { break };
                        *next += 1;
                        before.max(*round)
                    }
                    Action::Local { .. } | Action::Finish { .. } => before,
                };
                rounds[rank].push(round);
                moved = true;
            }
        }
        assert!(moved, "the plans wait for one another");
    }
    (sent, rounds.into_iter().flatten().max().unwrap_or(0))
}

#[test]
fn hierarchical_plans_are_right_on_all_hosts() {
    let mut count = 0;
    for hosts in groups() {
        let ranks = hosts.len();
        let root = Collective::Broadcast { root: ranks / 2 };
        for collective in [Collective::AllReduce, Collective::ReduceScatter, Collective::AllGather, root] {
            for (elements, chunk) in [(2 * ranks + 3, 3), (ranks / 2, 1)] {
                let arguments = Arguments {
                    hosts: hosts.iter().copied().collect(),
                    chunk,
                    ..arguments(collective, Algorithm::Hierarchical, ranks, elements)
                };
                carry_out(&arguments, &plans(&arguments), LinkConditions::references(ranks), count);
                count += 1;
            }
        }
    }
    assert!(count > 5000, "{count}");
}

/// Of the algorithms with several rounds across hosts, the hierarchical one has the fewest rounds, and sends
/// the least from the busiest host. So the table of several hosts need not ask which of them to take.
#[test]
fn no_algorithm_sends_less_across_hosts_in_as_many_rounds() {
    for hosts in groups() {
        let (ranks, count) = (hosts.len(), 1 + hosts.iter().max().unwrap());
        let of = |algorithm| {
            across(&Arguments {
                hosts: hosts.iter().copied().collect(),
                ..arguments(Collective::AllReduce, algorithm, ranks, ELEMENTS)
            })
        };
        let (sent, rounds) = of(Algorithm::Hierarchical);
        assert_eq!(rounds, if count == 1 { 0 } else { 2 }, "{hosts:?}");
        // The same from each host, however many ranks it has.
        assert_eq!(sent, vec![2 * (count - 1) * ELEMENTS / count; count], "{hosts:?}");
        for other in [Algorithm::HalvingDoubling, Algorithm::Ring, Algorithm::Naive] {
            let (theirs, their_rounds) = of(other);
            assert!(theirs.iter().max() >= sent.iter().max(), "{other}: {hosts:?}: {theirs:?} and {sent:?}");
            assert!(their_rounds >= rounds, "{other}: {hosts:?}");
        }
    }
}

/// In reduce-scatter and all-gather, each part that another host needs crosses once.
#[test]
fn each_part_goes_to_each_host_once() {
    for hosts in groups() {
        let (ranks, members) = (hosts.len(), hosts.iter().copied().collect::<Hosts>().members(hosts.len()));
        for collective in [Collective::ReduceScatter, Collective::AllGather] {
            let (sent, rounds) = across(&Arguments {
                hosts: hosts.iter().copied().collect(),
                ..arguments(collective, Algorithm::Hierarchical, ranks, ELEMENTS)
            });
            assert_eq!(rounds, usize::from(members.len() > 1), "{hosts:?}");
            for (sent, own) in sent.iter().zip(&members) {
                // A host sends a sum of each foreign part, and each own part to each other host.
                let parts = match collective {
                    Collective::ReduceScatter => ranks - own.len(),
                    _ => own.len() * (members.len() - 1),
                };
                assert_eq!(*sent, parts * ELEMENTS / ranks, "{collective:?}: {hosts:?}");
            }
        }
    }
}

#[test]
fn ranks_of_several_hosts_take_one_shots_and_hierarchical_plans() {
    for (hosts, pinned) in [
        (&[4][..], "one-shot:..16KiB,halving-doubling:..1MiB,ring/1MiB:.."),
        (&[1, 1, 1, 1], "one-shot:..16KiB,halving-doubling:..1MiB,ring/1MiB:.."),
        (&[2, 1], "one-shot:..16385B,hierarchical:.."),
        (&[2, 2], "one-shot:..16KiB,hierarchical:.."),
        (&[4, 4], "one-shot:..4KiB,hierarchical:.."),
        (&[8, 8], "one-shot:..1KiB,hierarchical:.."),
        (&[8; 64], "one-shot:..64B,hierarchical:.."),
    ] {
        assert_eq!(PlanTable::for_hosts(hosts).pinned(), pinned, "{hosts:?}");
    }
    assert_eq!(PlanTable::for_hosts(&[]), PlanTable::for_ranks(0));
}
