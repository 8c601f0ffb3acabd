//! The error of pools.

use super::settings::Quota;
use crate::VerbsError;

/// The reason why a pool has no memory for a request.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// The quota is used up for now. Try again after a piece has been given back.
    #[error("{quota} quota exhausted: asked for {asked} bytes, {leased} of {limit} are leased")]
    QuotaExhausted {
        /// The quota that is used up.
        quota: Quota,
        /// Bytes asked for, rounded up to a size class or to pages.
        asked: u64,
        /// Bytes leased.
        leased: u64,
        /// The quota in bytes.
        limit: u64,
    },
    /// The request exceeds the whole quota, so the pool can never serve it.
    #[error("{asked} bytes are more than the {quota} quota of {limit} bytes")]
    TooLarge {
        /// The quota that the request exceeds.
        quota: Quota,
        /// Bytes asked for.
        asked: u64,
        /// The quota in bytes.
        limit: u64,
    },
    /// The process has no pinned memory left for another slab.
    #[error("pinned memory: asked for {asked} bytes, {used} of {limit} are in use; {hint}")]
    Budget {
        /// Bytes asked for.
        asked: u64,
        /// Bytes pinned by all pools that share the budget.
        used: u64,
        /// The budget in bytes.
        limit: u64,
        /// Advice for raising the budget.
        hint: &'static str,
    },
    /// The system could not map the slab, or the device could not register it.
    #[error("a slab of {bytes} bytes could not be registered: {cause}")]
    Verbs {
        /// Length of the slab in bytes.
        bytes: u64,
        /// The error of the device or of the system.
        cause: VerbsError,
    },
}
