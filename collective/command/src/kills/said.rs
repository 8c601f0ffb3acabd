//! What the ranks of a trial say.

use serde::{Deserialize, Serialize};

/// A message of a rank. Times are those of the clock that all processes of this machine share, in nanoseconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Said {
    /// The rank is about to end or to stop itself.
    Gone { trial: u64, at: u64, step: u32 },
    /// An operation failed because a rank is gone.
    Noticed { trial: u64, at: u64, named: bool, error: String },
    /// The rank is in a working group. Without `trial`, the group is fresh.
    Works { trial: Option<u64>, size: usize, first_result: u64, hashes: Vec<u64>, wrong: u64 },
    /// The steps of this rank in the operations of a fresh group, for each combination.
    Steps { rank: usize, steps: Vec<u32> },
    /// A result differs from an earlier one of the same operands in the same group.
    Differs { trial: u64, combination: usize },
    /// A stopped rank has gone on, and learnt how its group ended for it.
    Resumed { trial: u64, excluded: bool, error: String },
}
