//! Memory: pools of registered memory, and the extents that are cut from them.
//!
//! This module owns the slabs of a connection or an application ([`Pool`]), the limits on their size (a
//! [`Budget`] for the process, [`Quota`]s within a pool) and three ways to hold an extent of a slab:
//!
//! ```text
//!               lease                                         allocate
//!  Pool ────────────────▶ Block                    Pool ────────────────▶ RegisteredBuf   one owner: &mut [u8]
//!                           │ segment, remote                               │ freeze
//!                           ▼                                               ▼
//!         for the device: sends, receives,                      Bytes ── find(address) ──▶ Lease    many: &[u8]
//!         READ sinks; no &[u8], copies only                                                  │ segment, remote
//!                                                                                            ▼
//!                                                                              for the device: sources only
//! ```
//!
//! A slab serves blocks, buffers, landings or regions, and never changes from one to the other. Slabs of buffers are
//! registered without a right to write, so no device and no peer can change the bytes of a `&[u8]`. Slabs of
//! blocks are never accessed through a reference. For these reasons [`Block::segment`] and [`Lease::segment`]
//! are safe functions. A landing (`Landing`) is memory that READs of this process fill: it gives out no
//! segment, and becomes a `&[u8]` when its READs have completed.
//!
//! A pool belongs to a protection domain. A pool made by [`for_sending`](Pool::for_sending) belongs to none:
//! the application fills its buffers. Each connection that sends such a buffer registers the slab with its
//! own domain, for reading by its own device only (`SlabRegistrations`). [`sites`] learns which buffers of a
//! program are sent and so need such memory.
//!
//! [`MemRegion`] is memory which moves into operations (`in_flight`), with a mapping of its own or from a slab
//! of a `RegionPool`, and [`SharedRegion`] is memory that peers may get rights to. [`dlpack`] exchanges tensors
//! with other libraries of the process.
//!
//! Only `in_flight` and `Landing` post requests. This module does not wait for requests, and does not know
//! the peer. The `rkey` of a block opens its whole slab. A pool whose access rights include peers therefore
//! serves one peer.

pub mod dlpack;
mod extents;
mod gather;
#[cfg(feature = "tract")]
mod hosted;
mod in_flight;
mod index;
mod pool;
mod region;
mod registrations;
mod settings;
pub mod sites;
#[cfg(test)]
mod tests;
pub mod trace;

pub use extents::{Block, Lease, RegisteredBuf};
pub use pool::Pool;
pub use region::{MemRegion, SharedRegion};
pub use settings::{Budget, PoolSettings, PoolStatistics, Quota};

/// The parts that the other crates of this repository use. The module [`unstable`](crate::unstable) exports
/// them.
pub(crate) mod machinery {
    pub use super::extents::{Landed, Landing, LandingPool, free_for_landings};
    pub use super::gather::{GatherBuf, LargePart};
    #[cfg(feature = "tract")]
    pub use super::hosted::HostedTensor;
    pub use super::in_flight::{
        CopyRange, CopyRanges, FinishedTransfer, InFlight, LocalMemory, Notice, RequestPart, Transfer,
        TransferKind, TransferLimits,
    };
    pub use super::pool::find_sendable;
    pub use super::region::{
        Grant, LentRegion, RegionLoan, RegionMapping, RegionPool, RemoteRange, Revocation,
    };
    pub use super::registrations::{LocalRegistrations, SlabRegistrations};
    pub use super::sites::handle::{find_traced, has_unsent, sent_slices};
}
