//! Why a pool has no memory to give.

use super::settings::Quota;
use crate::VerbsError;

/// Why a pool has no memory to give.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// The quota is used up for now: try again after something was given back.
    #[error("{quota} quota exhausted: asked for {asked} bytes, {leased} of {limit} are leased")]
    QuotaExhausted {
        /// Which one.
        quota: Quota,
        /// Bytes asked for, rounded up to a size class or to pages.
        asked: u64,
        /// Bytes leased.
        leased: u64,
        /// The quota.
        limit: u64,
    },
    /// More than the quota has when nothing is leased: it can never be met.
    #[error("{asked} bytes are more than the {quota} quota of {limit} bytes")]
    TooLarge {
        /// Which quota.
        quota: Quota,
        /// Bytes asked for.
        asked: u64,
        /// The quota.
        limit: u64,
    },
    /// The process has no pinned memory left for another slab.
    #[error("pinned memory: asked for {asked} bytes, {used} of {limit} are in use; {hint}")]
    Budget {
        /// Bytes asked for.
        asked: u64,
        /// Bytes pinned by all pools that share the budget.
        used: u64,
        /// The budget.
        limit: u64,
        /// How to raise it.
        hint: &'static str,
    },
    /// The slab could not be made or registered.
    #[error("a slab of {bytes} bytes could not be registered: {source}")]
    Verbs {
        /// Length of the slab.
        bytes: u64,
        /// What the device or the system said.
        source: VerbsError,
    },
}
