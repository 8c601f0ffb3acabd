//! Plans: the steps by which one rank takes part in one operation. A plan does no I/O and knows no time.
//!
//! All ranks make their plans from the same arguments, so each rank knows what every other rank does. Ranges are in elements.
//!
//! ```text
//!   Input    the caller's elements, only read
//!   Work     the result grows here; the same memory as Input for an operation in place
//!   Scratch  memory of this rank alone, for operations that need a third place
//! ```

use std::ops::Range;

/// An algorithm of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Algorithm {
    /// Every rank sends all its elements to every other rank, and reduces what it received in the order of the ranks.
    OneShot,
    /// Recursive halving, then recursive doubling. Binary blocks for a number of ranks that is no power of two.
    HalvingDoubling,
    /// The ring of Baidu's allreduce: scatter-reduce, then all-gather. Each rank sends 2(N−1)/N·K bytes.
    Ring,
}

/// What an operation does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Collective {
    AllReduce,
    /// Rank r gets the r-th part of the reduced elements ([`part`]).
    ReduceScatter,
    /// Rank r contributes the r-th part ([`part`]).
    AllGather,
    Broadcast {
        root: usize,
    },
    Barrier,
}

/// The arguments from which all ranks make their plans.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Arguments {
    pub(crate) collective: Collective,
    pub(crate) algorithm: Algorithm,
    pub(crate) ranks: usize,
    /// The number of elements of the whole: of the result of `AllReduce`, `AllGather` and `Broadcast`, of the input of
    /// `ReduceScatter`.
    pub(crate) elements: usize,
    /// The largest number of elements of one step, so that steps of a long operation overlap (chunks of a pipeline).
    pub(crate) piece: usize,
    /// Whether Input and Work are the same memory.
    pub(crate) in_place: bool,
}

/// Where elements lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Area {
    Input,
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
    /// Earlier steps of this plan that must be done before this one begins. A `Send` is done when the receiver has taken the
    /// message, or, if the engine sent a copy, at once.
    pub(crate) after: Vec<u32>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Sends a message to rank `to`. Messages between two ranks arrive in the order of the steps.
    Send { to: usize, from: Span },
    /// Receives the next message of rank `from`, and puts its elements into `into`. With `reduce`, the value is the reduction
    /// of the elements of `reduce` (which has the length of `into`, and may be the same span) and the received ones.
    Receive { from: usize, into: Span, reduce: Option<Span> },
    /// Copies or reduces within this rank: as `Receive`, with the elements of `with` in place of received ones.
    Local { with: Span, into: Span, reduce: Option<Span> },
    /// Divides the elements by the number of ranks, for a mean. The planner puts it where each element is final, once.
    Finish { span: Span },
}

/// The steps of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) steps: Vec<Step>,
    /// The number of elements of the scratch area.
    pub(crate) scratch: usize,
}
