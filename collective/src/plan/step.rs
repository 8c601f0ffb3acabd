//! What a plan is made of: arguments, steps, and where elements lie.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// An algorithm of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Algorithm {
    /// Every rank sends all its elements to every other rank, and reduces what it received in the order of
    /// the ranks.
    OneShot,
    /// Recursive halving, then recursive doubling. Binary blocks for a number of ranks that is no power of
    /// two.
    HalvingDoubling,
    /// The ring of Baidu's allreduce: scatter-reduce, then all-gather. Each rank sends 2(N−1)/N·K bytes.
    Ring,
    /// Within each host first, then across hosts, then within each host again. For ranks of several hosts: H
    /// hosts of the same number of ranks send 2(H−1)/H·K bytes each to the others.
    Hierarchical,
    /// All ranks send to rank 0, which reduces and sends the result back. What the others are compared with.
    Naive,
}

impl Algorithm {
    /// All algorithms.
    pub const ALL: [Self; 5] =
        [Self::OneShot, Self::HalvingDoubling, Self::Ring, Self::Hierarchical, Self::Naive];

    /// The names of all algorithms, for messages.
    pub(super) const NAMES: &str = "one-shot, halving-doubling, ring, hierarchical and naive";

    /// Returns the algorithm with this name, in capital or small letters; `None` if there is none.
    ///
    /// ```
    /// use tonic_rdma_collective::Algorithm;
    ///
    /// assert_eq!(Algorithm::from_name("ring"), Some(Algorithm::Ring));
    /// assert_eq!(Algorithm::from_name("star"), None);
    /// ```
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|algorithm| algorithm.name().eq_ignore_ascii_case(name))
    }

    /// Returns the name: `one-shot`, `halving-doubling`, `ring`, `hierarchical` or `naive`.
    pub fn name(self) -> &'static str {
        match self {
            Self::OneShot => "one-shot",
            Self::HalvingDoubling => "halving-doubling",
            Self::Ring => "ring",
            Self::Hierarchical => "hierarchical",
            Self::Naive => "naive",
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What an operation does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Collective {
    AllReduce,
    /// Rank r gets the r-th part of the reduced elements ([`part`]), where it lies in the whole. The other
    /// elements are undefined afterwards.
    ReduceScatter,
    /// Rank r contributes the r-th part ([`part`]), where it lies in the whole.
    AllGather,
    Broadcast {
        root: usize,
    },
    Barrier,
}

/// The arguments from which all ranks make their plans. Plans are those of an operation in place. They serve
/// operations out of place too, so that all ranks have the same messages, whichever form each uses.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Arguments {
    pub(crate) collective: Collective,
    pub(crate) algorithm: Algorithm,
    pub(crate) ranks: usize,
    /// The number of elements of the whole.
    pub(crate) elements: usize,
    /// The largest number of elements of one step, so that steps of a long operation overlap (chunks of a
    /// pipeline). At least one, and at least a 4096th of `elements`; smaller values count as these.
    pub(crate) chunk: usize,
    /// The largest number of elements of a message that the links send as a copy. Such a `Send` is done at
    /// once. Only one-shot all-reduces need it: for longer messages they use scratch memory, because each
    /// rank waits until its elements have been taken. 0 is always right. The ranks need not agree on it.
    pub(crate) inline: usize,
    pub(crate) hosts: Hosts,
}

/// The host of each rank. Hosts have numbers from 0. Without entries, all ranks are on one host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Hosts(Arc<[usize]>);

impl FromIterator<usize> for Hosts {
    fn from_iter<I: IntoIterator<Item = usize>>(hosts: I) -> Self {
        Self(hosts.into_iter().collect())
    }
}

impl Hosts {
    /// Returns the host of a rank.
    pub(crate) fn of(&self, rank: usize) -> usize {
        self.0.get(rank).copied().unwrap_or(0)
    }

    /// Returns the ranks of each host, in order, without hosts that have none.
    pub(crate) fn members(&self, ranks: usize) -> Vec<Vec<usize>> {
        let mut members: Vec<Vec<usize>> = Vec::new();
        for rank in 0..ranks {
            let host = self.of(rank);
            members.resize_with(members.len().max(host + 1), Vec::new);
            members[host].push(rank);
        }
        members.retain(|ranks| !ranks.is_empty());
        members
    }
}

/// Returns the part of a rank, of `elements` elements that are divided among `ranks` ranks. The first parts
/// are one element longer if the division leaves a remainder.
pub(crate) fn part(elements: usize, ranks: usize, rank: usize) -> Range<usize> {
    let (each, rest) = (elements / ranks, elements % ranks);
    let start = |rank: usize| each * rank + rank.min(rest);
    start(rank)..start(rank + 1)
}

/// Where elements lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Area {
    Work,
    Scratch,
}

/// Elements of one area.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Span {
    pub(crate) area: Area,
    pub(crate) range: Range<usize>,
}

/// One step of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) action: Action,
    /// Earlier steps of this plan that must be done before this one begins. A `Send` is done when the
    /// receiver has taken the message, or, if the engine sent a copy, at once.
    pub(crate) after: Vec<u32>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Sends a message to rank `to`. Messages between two ranks arrive in the order of the steps.
    Send { to: usize, from: Span },
    /// Receives the next message of rank `from`, and puts its elements into `into`. With `reduce`, the value
    /// is the reduction of the elements of `reduce` (which has the length of `into`, and may be the same
    /// span) and the received ones.
    Receive { from: usize, into: Span, reduce: Option<Span> },
    /// Reduces within this rank: as `Receive`, with the elements of `with` in place of received ones.
    Local { with: Span, into: Span, reduce: Span },
    /// Divides the elements by the number of ranks, for a mean. The planner puts it where each element is
    /// final, once.
    Finish { span: Span },
}

/// The steps of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) steps: Vec<Step>,
    /// The number of elements of the scratch area.
    pub(crate) scratch: usize,
}
