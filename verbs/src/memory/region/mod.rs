//! Regions: memory with its own mapping, for tensors. At any time a region has one owner, or a transfer holds it for the
//! device, or peers have grants to it.
//!
//! ```text
//!                 move into a transfer                     share
//!   InFlight ◀────────────────────────── MemRegion ────────────────▶ SharedRegion ── grant ──▶ Grant
//!            ──────────────────────────▶  &mut [u8]  ◀────────────────              (the right of a peer)
//!                 with its completion                  try_into_region,
//!                                                      after the last grant
//! ```
//!
//! A [`LentRegion`] is different: peers only read it, so its owner keeps the slice while grants exist.
//!
//! The device writes to a region only while a transfer owns the region. A peer writes only while a grant exists. A slice of
//! the region exists only while there is neither a transfer nor a grant to write. For this reason `&[u8]` is sound, although peers
//! write to regions.

mod grant;
mod lent;
mod owned;
mod shared;

pub use grant::{Grant, RemotePlace};
pub use lent::{LentRegion, RegionLoan};
pub(crate) use owned::Mapped;
pub use owned::MemRegion;
pub use shared::SharedRegion;
