//! Which algorithm an operation takes, and how the ranks make sure that they agree on it.

use std::fmt;
use std::str::FromStr;

use crate::error::{CollectiveError, setting};
use crate::group::hash_of;
use crate::group::proto::Member;
use crate::plan::{Algorithm, PlanTable};

/// The variable that sets the plans of communicators for which the program sets none.
const VARIABLE: &str = "RDMA_COLLECTIVE_PLANS";
/// The largest length of a choice that goes to the other ranks as it is, in bytes.
const SHOWN: usize = 160;

/// How a group chooses the plans of its operations. All ranks set the same; otherwise
/// [`connect`](crate::CommunicatorBuilder::connect) fails, and the error names a rank that set something
/// else.
///
/// Results have the same bits on all ranks, and from run to run where the runs have the same plans and
/// numbers of ranks. `tonic-rdma-allreduce --tuner-check` shows how long each algorithm takes on a machine.
/// To set the plans by such a measurement:
///
/// ```
/// use tonic_rdma_collective::{Communicator, PlanChoice};
///
/// let text = "one-shot:..16KiB,halving-doubling:..1MiB,ring:..";
/// let builder = Communicator::builder().plans(PlanChoice::Pinned(text.parse()?));
/// # Ok::<(), tonic_rdma_collective::CollectiveError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum PlanChoice {
    /// [`PlanTable::for_ranks`]: by the number of bytes and of ranks alone.
    #[default]
    Default,
    /// One algorithm for all lengths, in messages of at most `chunk_bytes`.
    Fixed {
        /// The algorithm.
        algorithm: Algorithm,
        /// The largest length of a message in bytes.
        chunk_bytes: usize,
    },
    /// This table.
    Pinned(PlanTable),
}

impl FromStr for PlanChoice {
    type Err = CollectiveError;

    /// Parses `default`, or the text form of a [`PlanTable`].
    ///
    /// ```
    /// use tonic_rdma_collective::PlanChoice;
    ///
    /// assert_eq!("default".parse::<PlanChoice>()?, PlanChoice::Default);
    /// assert_eq!("ring/64KiB".parse::<PlanChoice>()?, PlanChoice::Pinned("ring/64KiB".parse()?));
    /// # Ok::<(), tonic_rdma_collective::CollectiveError>(())
    /// ```
    ///
    /// # Errors
    /// The text has another form. The error names the part at fault.
    fn from_str(text: &str) -> Result<Self, CollectiveError> {
        match text.trim() {
            "default" => Ok(Self::Default),
            text => Ok(Self::Pinned(text.parse()?)),
        }
    }
}

/// The text that [`FromStr`] parses.
impl fmt::Display for PlanChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::Fixed { algorithm, chunk_bytes } => {
                f.write_str(&PlanTable::fixed(*algorithm, *chunk_bytes).pinned())
            }
            Self::Pinned(table) => f.write_str(&table.pinned()),
        }
    }
}

impl PlanChoice {
    /// Returns the choice of the environment; the default if it has none.
    ///
    /// # Errors
    /// The variable has another form.
    pub(super) fn from_env() -> Result<Self, CollectiveError> {
        let Some(value) = std::env::var_os("RDMA_COLLECTIVE_PLANS") else { return Ok(Self::default()) };
        let text = value.to_string_lossy();
        text.parse().map_err(|error| {
            setting(format!("{VARIABLE}={text:?}: takes default or a table of plans; {error}"))
        })
    }

    /// Returns the table of a group of this many ranks.
    pub(super) fn table(&self, ranks: usize) -> PlanTable {
        match self {
            Self::Default => PlanTable::for_ranks(ranks),
            Self::Fixed { algorithm, chunk_bytes } => PlanTable::fixed(*algorithm, (*chunk_bytes).max(1)),
            Self::Pinned(table) => table.clone(),
        }
    }

    /// Returns the text that the ranks compare. That of the default has its table too, because another version
    /// of this library may have another one.
    pub(super) fn compared(&self, ranks: usize) -> String {
        let table = self.table(ranks).pinned();
        let text = if *self == Self::Default { format!("default: {table}") } else { table };
        match text.get(..SHOWN) {
            Some(begin) if begin != text => format!("{begin}…, hash {:016x}", hash_of(&text)),
            _ => text,
        }
    }
}

/// Makes sure that all ranks have the same choice.
pub(super) fn check(members: &[Member]) -> Result<(), CollectiveError> {
    let plans: Vec<&str> = members.iter().map(|member| &*member.plans).collect();
    match plans.iter().position(|other| *other != plans[0]) {
        None => Ok(()),
        Some(rank) => Err(setting(format!(
            "rank {rank} has the plans {:?}, and rank 0 has {:?}; all ranks need the same: set them in the program or with {VARIABLE}",
            plans[rank], plans[0],
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::{PlanChoice, check};
    use crate::group::proto::Member;

    #[test]
    fn long_tables_that_differ_at_their_ends_are_told_apart() {
        let pinned = |end: &str| {
            let rows: String = (1..30).map(|kibibytes| format!("one-shot:..{kibibytes}KiB,")).collect();
            PlanChoice::Pinned(format!("{rows}{end}").parse().unwrap())
        };
        let member = |choice: PlanChoice| Member { plans: choice.compared(2), ..Member::default() };
        let (ring, halving) = (member(pinned("ring:..")), member(pinned("halving-doubling:..")));
        // A rank describes itself in at most 256 bytes.
        assert!(ring.plans.len() < 200, "{}", ring.plans);
        check(&[ring.clone(), ring.clone()]).unwrap();
        let error = check(&[ring.clone(), ring, halving]).unwrap_err().to_string();
        assert!(error.starts_with(r#"rank 2 has the plans "one-shot:..1KiB,"#), "{error}");
    }
}
