//! Plans: the steps by which one rank takes part in one operation, and the table of algorithms by length. A plan does no I/O and
//! knows no time.
//!
//! All ranks make their plans from the same arguments, so each rank knows what every other rank does. Ranges are in elements.
//!
//! ```text
//!   Input    the caller's elements, only read
//!   Work     the result grows here; the same memory as Input for an operation in place
//!   Scratch  memory of this rank alone, for operations that need a third place
//! ```
//!
//! | operation | one-shot | halving-doubling | ring |
//! |---|---|---|---|
//! | all-reduce | [`one_shot`] | [`halving_doubling`] | [`ring`] |
//! | reduce-scatter, all-gather | [`one_shot`] | [`circulant`] | [`ring`] |
//! | broadcast | the root sends to every rank | binomial tree | chain |
//! | barrier | direct, or dissemination | the same | the same |
//!
//! Each element is reduced in one order, which depends on the arguments alone. So all ranks get the same bits, whatever the timing.

mod barrier;
mod broadcast;
mod builder;
mod circulant;
mod dependencies;
mod halving_doubling;
mod one_shot;
mod ring;
mod step;
mod table;
#[cfg(test)]
mod tests;
mod text;

pub use self::step::Algorithm;
pub(crate) use self::step::{Action, Area, Arguments, Collective, Plan, Span, Step, part};
pub use self::table::{PlanRange, PlanTable};
pub use self::text::PlanTableError;

use self::builder::Builder;

impl Plan {
    /// Makes the plan of rank `rank`. The rank, and the root of a broadcast, must be smaller than the number of ranks.
    ///
    /// The time is proportional to the number of steps, times its logarithm.
    pub(crate) fn new(arguments: &Arguments, rank: usize) -> Self {
        debug_assert!(rank < arguments.ranks, "rank {rank} of {}", arguments.ranks);
        let mut builder = Builder::new(arguments, rank);
        match (arguments.collective, arguments.algorithm) {
            (Collective::Barrier, _) => barrier::plan(&mut builder),
            (Collective::Broadcast { root }, algorithm) => broadcast::plan(&mut builder, root, algorithm),
            _ if arguments.ranks == 1 => builder.alone(),
            (Collective::AllReduce, Algorithm::OneShot) => one_shot::all_reduce(&mut builder),
            (Collective::ReduceScatter, Algorithm::OneShot) => one_shot::reduce_scatter(&mut builder),
            (Collective::AllGather, Algorithm::OneShot) => one_shot::all_gather(&mut builder),
            (Collective::AllReduce, Algorithm::HalvingDoubling) => halving_doubling::all_reduce(&mut builder),
            (Collective::ReduceScatter, Algorithm::HalvingDoubling) => {
                circulant::reduce_scatter(&mut builder)
            }
            (Collective::AllGather, Algorithm::HalvingDoubling) => circulant::all_gather(&mut builder),
            (Collective::AllReduce, Algorithm::Ring) => ring::all_reduce(&mut builder),
            (Collective::ReduceScatter, Algorithm::Ring) => ring::reduce_scatter(&mut builder),
            (Collective::AllGather, Algorithm::Ring) => ring::all_gather(&mut builder),
        }
        builder.plan()
    }
}
