//! Plans: the steps by which one rank takes part in one operation, and the table of algorithms by length. A
//! plan does no I/O and reads no clock.
//!
//! All ranks make their plans from the same arguments, so each rank knows what every other rank does. Ranges
//! are in elements.
//!
//! ```text
//!   Work     what the rank gives, and then the result
//!   Scratch  memory of this rank alone, for operations that need more
//! ```
//!
//! | operation | one-shot | halving-doubling | ring | hierarchical |
//! |---|---|---|---|---|
//! | all-reduce | [`one_shot`] | [`halving_doubling`] | [`ring`] | [`hierarchical`] |
//! | reduce-scatter, all-gather | [`one_shot`] | [`circulant`] | [`ring`] | [`hierarchical`] |
//! | broadcast | the root sends to every rank | binomial tree | chain | tree or chain of hosts |
//! | barrier | direct, or dissemination | the same | the same | the same |
//!
//! There is [`naive`] too, for comparisons. Operations other than all-reduce have none, and use one-shot.
//!
//! Each element is reduced in one order, which depends on the arguments alone. So all ranks get the same
//! bits, whatever the timing.

mod builder;
mod circulant;
mod halving_doubling;
mod hierarchical;
mod naive;
mod one_shot;
mod ring;
mod step;
mod table;
#[cfg(test)]
mod tests;

use self::builder::Builder;

pub use self::step::Algorithm;
pub use self::table::{PlanRange, PlanTable};

pub(crate) use self::builder::writes;
pub(crate) use self::step::{Action, Area, Arguments, Collective, Hosts, Plan, Span, Step, part};

impl Plan {
    /// Makes the plan of rank `rank`. The rank, and the root of a broadcast, must be smaller than the number
    /// of ranks.
    ///
    /// The time is proportional to the number of steps, times its logarithm.
    pub(crate) fn new(arguments: &Arguments, rank: usize) -> Self {
        debug_assert!(rank < arguments.ranks, "rank {rank} of {}", arguments.ranks);
        let mut builder = Builder::new(arguments, rank);
        match (arguments.collective, arguments.algorithm) {
            (Collective::Barrier, _) => barrier(&mut builder),
            (Collective::Broadcast { root }, algorithm) => broadcast(&mut builder, root, algorithm),
            _ if arguments.ranks == 1 => builder.alone(),
            (Collective::AllReduce, Algorithm::OneShot) => one_shot::all_reduce(&mut builder),
            (Collective::AllReduce, Algorithm::Naive) => naive::all_reduce(&mut builder),
            (Collective::ReduceScatter, Algorithm::OneShot | Algorithm::Naive) => {
                one_shot::reduce_scatter(&mut builder)
            }
            (Collective::AllGather, Algorithm::OneShot | Algorithm::Naive) => {
                one_shot::all_gather(&mut builder)
            }
            (Collective::AllReduce, Algorithm::HalvingDoubling) => halving_doubling::all_reduce(&mut builder),
            (Collective::ReduceScatter, Algorithm::HalvingDoubling) => {
                circulant::reduce_scatter(&mut builder)
            }
            (Collective::AllGather, Algorithm::HalvingDoubling) => circulant::all_gather(&mut builder),
            (Collective::AllReduce, Algorithm::Ring) => ring::all_reduce(&mut builder),
            (Collective::ReduceScatter, Algorithm::Ring) => ring::reduce_scatter(&mut builder),
            (Collective::AllGather, Algorithm::Ring) => ring::all_gather(&mut builder),
            (Collective::AllReduce, Algorithm::Hierarchical) => hierarchical::all_reduce(&mut builder),
            (Collective::ReduceScatter, Algorithm::Hierarchical) => {
                hierarchical::reduce_scatter(&mut builder)
            }
            (Collective::AllGather, Algorithm::Hierarchical) => hierarchical::all_gather(&mut builder),
        }
        builder.plan()
    }
}

/// The largest number of ranks whose barrier sends from each rank to each.
const DIRECT_BARRIER: usize = 8;

/// Barrier. A few ranks each send an empty message to each other one: one round, so that each rank waits
/// once. Where ranks share cores, a wait is a change to another process, which takes longer than some
/// messages.
///
/// More ranks use dissemination: ⌈log2 N⌉ rounds. In round k, rank r sends an empty message to rank r +
/// 2^k, and waits for one of rank r − 2^k (Hensgen, Finkel, Manber: "Two algorithms for barrier
/// synchronization", 1988).
fn barrier(builder: &mut Builder) {
    let nothing = Span::work(0..0);
    if builder.ranks <= DIRECT_BARRIER {
        for distance in 1..builder.ranks {
            let to = builder.ahead(distance);
            builder.push(Action::Send { to, from: nothing.clone() }, &[]);
        }
        for distance in 1..builder.ranks {
            let from = builder.behind(distance);
            builder.push(Action::Receive { from, into: nothing.clone(), reduce: None }, &[]);
        }
        return;
    }
    let mut received = Vec::new();
    let mut distance = 1;
    while distance < builder.ranks {
        let to = builder.ahead(distance);
        // The message says that all ranks up to `distance` positions behind this rank have come.
        builder.push(Action::Send { to, from: nothing.clone() }, &received);
        let from = builder.behind(distance);
        // Each round after the one before, so that the last step ends the barrier.
        let receive = Action::Receive { from, into: nothing.clone(), reduce: None };
        received = vec![builder.push(receive, &received)];
        distance *= 2;
    }
}

/// Broadcast: from the root to every rank directly, along a binomial tree, or along a chain. Chunks follow
/// one another, so a long broadcast along a chain takes little longer than one transfer. A hierarchical one
/// goes from host to host first.
///
/// ```text
///   one-shot   0 → 1, 0 → 2, … 0 → 7
///   tree       0 → 4, 0 → 2, 0 → 1, 4 → 6, 4 → 5, 2 → 3, 6 → 7     (positions, counted from the root)
///   chain      0 → 1 → 2 → … → 7
/// ```
fn broadcast(builder: &mut Builder, root: usize, algorithm: Algorithm) {
    let ranks = builder.ranks;
    let position = (builder.rank + ranks - root % ranks) % ranks;
    let rank = |position: usize| (position + root) % ranks;
    let of_positions =
        |(parent, children): (usize, Vec<usize>)| (rank(parent), children.into_iter().map(rank).collect());
    let (parent, children): (usize, Vec<usize>) = match algorithm {
        Algorithm::OneShot | Algorithm::Naive => {
            of_positions((0, if position == 0 { (1..ranks).collect() } else { Vec::new() }))
        }
        Algorithm::HalvingDoubling => of_positions(tree(position, ranks)),
        Algorithm::Ring => of_positions(chain(position, ranks)),
        Algorithm::Hierarchical => hierarchical::broadcast(builder, root),
    };
    for chunk in builder.chunks(0..builder.elements) {
        if position > 0 {
            builder.receive(parent, Span::work(chunk.clone()), None);
        }
        for child in &children {
            builder.send(*child, Span::work(chunk.clone()));
        }
    }
}

/// Returns the parent and the children of a position in a chain.
fn chain(position: usize, ranks: usize) -> (usize, Vec<usize>) {
    (position.saturating_sub(1), (position + 1..ranks).take(1).collect())
}

/// Returns the parent and the children of a position in the binomial tree. The parent of a position is the
/// position without its lowest bit. The child with the most descendants comes first.
fn tree(position: usize, ranks: usize) -> (usize, Vec<usize>) {
    let lowest = if position == 0 { ranks.next_power_of_two() } else { 1 << position.trailing_zeros() };
    let distances = std::iter::successors(Some(lowest / 2), |distance| Some(distance / 2));
    let children = distances.take_while(|distance| *distance > 0).map(|distance| position + distance);
    (position & position.wrapping_sub(1), children.filter(|child| *child < ranks).collect())
}
