//! The tuner: chooses the algorithm and the length of a piece for each size, and says why. It does no I/O and reads no clock.
//!
//! ```text
//!   Tuner ── Trial: "all-reduce 64 KiB by ring, in pieces of 256 KiB, 20 times" ──► the caller measures
//!     ▲                                                                                    │
//!     └────────────────────────────── the time of one operation ──────────────────────────-┘
//!     │
//!     └─► PlanTable: ranges of sizes, each with an algorithm, a piece and a reason
//! ```
//!
//! Trials go in these phases, until the time is used up:
//!
//! 1. a coarse grid of sizes, the smallest first. Sizes for which no time is left are judged by the largest measured ones;
//! 2. times that do not fit those of the sizes around them, again;
//! 3. two rounds of all candidates that are not far from the best at their size, again;
//! 4. the sizes between two neighbours that have different best algorithms;
//! 5. two more rounds.
//!
//! A time is the median of all measured operations of its rounds. Each round comes some time after the one before, because what disturbs a trial lasts: other
//! work, or the cores on which the system has put the ranks.
//!
//! One rank decides on the trials, and tells the others ([`Trial::pack`]). Its table becomes
//! that of all ranks ([`PlanTable::encode`]).

mod decide;
mod table;
#[cfg(test)]
mod tests;
mod text;
mod times;
mod trials;
mod units;

pub use self::table::{PlanRange, PlanTable};
pub use self::text::PlanTableError;
#[cfg(test)]
pub(crate) use self::trials::tune;
pub(crate) use self::trials::{Trial, Tuner};
