//! Memory of its own mapping, for tensors: in the hands of one owner, lent to a device, or granted to a peer.
//!
//! ```text
//!                 move into a transfer                     share
//!   InFlight ◀────────────────────────── MemRegion ────────────────▶ SharedRegion ── grant ──▶ Grant
//!            ──────────────────────────▶  &mut [u8]  ◀────────────────              (a peer's right, to the byte)
//!                 with its completion                  try_into_region,
//!                                                      when no grant is left
//! ```
//!
//! The device writes to a region only while a transfer owns it, and peers only while a grant exists; a slice of it is to be
//! had only while neither does. So `&[u8]` is sound here although peers write.

mod grant;
mod owned;
mod shared;

pub use grant::{Grant, RemotePlace};
pub(crate) use owned::Mapped;
pub use owned::MemRegion;
pub use shared::SharedRegion;
