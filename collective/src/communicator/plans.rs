//! Which algorithm an operation takes.

use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

use crate::error::CollectiveError;
use crate::plan::{Algorithm, Collective};
use crate::tuner::{PlanTable, PlanTableError};

/// The variable that sets the plans of communicators for which the program sets none.
pub(super) const VARIABLE: &str = "RDMA_COLLECTIVE_PLANS";

/// How a group chooses the plans of its operations. All ranks set the same; otherwise
/// [`connect`](crate::CommunicatorBuilder::connect) fails, and the error names a rank that set something else.
///
/// Results have the same bits on all ranks always, and the same bits from run to run if the runs have the same plans. Two runs may
/// measure different plans. To get equal bits from run to run, pin the plans of one run for the others:
///
/// ```
/// use tonic_rdma_collective::{Communicator, PlanChoice};
///
/// // This text is what `communicator.plans().pinned()` returned in the first run.
/// let text = "one-shot:..16KiB,halving-doubling:..1MiB,ring:..";
/// let builder = Communicator::builder().plans(PlanChoice::Pinned(text.parse()?));
/// # Ok::<(), tonic_rdma_collective::PlanTableError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum PlanChoice {
    /// The ranks measure the algorithms when they connect, which takes some 0.5 seconds, and at most some 1.5 seconds
    /// where many ranks share a core. Rank 0 decides, and all ranks use its table.
    ///
    /// A group that [`shrink`](crate::Communicator::shrink) makes has other plans, because the best algorithms depend on the number
    /// of ranks: those of [`Default`](Self::Default), so that the survivors go on at once.
    #[default]
    Measured,
    /// [`PlanTable::unmeasured`]: by the number of bytes and of ranks alone.
    Default,
    /// One algorithm for all lengths, in messages of at most so many bytes.
    Fixed {
        /// The algorithm.
        algorithm: Algorithm,
        /// The largest length of a message in bytes.
        piece_bytes: usize,
    },
    /// This table.
    Pinned(PlanTable),
}

impl FromStr for PlanChoice {
    type Err = PlanTableError;

    /// Parses `measured`, `default`, or the text form of a [`PlanTable`].
    ///
    /// ```
    /// use tonic_rdma_collective::PlanChoice;
    ///
    /// assert_eq!("measured".parse(), Ok(PlanChoice::Measured));
    /// assert_eq!("ring/64KiB".parse(), "ring/64KiB".parse().map(PlanChoice::Pinned));
    /// ```
    ///
    /// # Errors
    /// The text has another form. The error names the part at fault.
    fn from_str(text: &str) -> Result<Self, PlanTableError> {
        match text.trim() {
            "measured" => Ok(Self::Measured),
            "default" => Ok(Self::Default),
            text => Ok(Self::Pinned(text.parse()?)),
        }
    }
}

/// The text that [`FromStr`] parses.
impl fmt::Display for PlanChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Measured => f.write_str("measured"),
            Self::Default => f.write_str("default"),
            Self::Fixed { algorithm, piece_bytes } => {
                f.write_str(&PlanTable::fixed(*algorithm, *piece_bytes, String::new()).pinned())
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
            let what = format!("{VARIABLE}={text:?}: takes measured, default or a table of plans; {error}");
            CollectiveError::Setup(what.into())
        })
    }

    /// Returns the table of a group of this many ranks; `None` if it is to be measured.
    pub(super) fn table(&self, ranks: usize) -> Option<PlanTable> {
        if ranks == 1 {
            return Some(PlanTable::alone());
        }
        match self {
            Self::Measured => None,
            Self::Default => Some(PlanTable::unmeasured(ranks)),
            Self::Fixed { algorithm, piece_bytes } => {
                Some(PlanTable::fixed(*algorithm, (*piece_bytes).max(1), "the program set it".into()))
            }
            Self::Pinned(table) => Some(table.clone()),
        }
    }

    /// Returns the table of the survivors of a group.
    pub(super) fn table_of_survivors(&self, ranks: usize) -> PlanTable {
        self.table(ranks).unwrap_or_else(|| PlanTable::unmeasured(ranks))
    }
}

/// The plans of a group. They are set once, when the ranks have agreed on them.
#[derive(Debug)]
pub(crate) struct Plans {
    ranks: usize,
    /// The plans until then.
    first: PlanTable,
    agreed: OnceLock<PlanTable>,
}

impl Plans {
    pub(super) fn new(ranks: usize) -> Self {
        Self { ranks, first: PlanTable::unmeasured(ranks), agreed: OnceLock::new() }
    }

    /// Sets the plans, if they are not set.
    pub(super) fn set(&self, table: PlanTable) {
        let _first_counts = self.agreed.set(table);
    }

    pub(super) fn table(&self) -> &PlanTable {
        self.agreed.get().unwrap_or(&self.first)
    }

    /// Returns the algorithm and the bytes of a piece.
    #[inline]
    pub(crate) fn choose(&self, collective: Collective, bytes: usize) -> (Algorithm, usize) {
        self.table().choose_for(collective, self.ranks, bytes)
    }
}
