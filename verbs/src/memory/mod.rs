//! Memory: a pool of registered memory, and what is cut from it.
//!
//! Owns the slabs of a connection or an application ([`Pool`]), the limits on them ([`Budget`] over the process,
//! [`Quota`]s within a pool) and three ways to hold a piece:
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
//! Blocks and buffers never share a slab, not even one after the other. Slabs of buffers are registered without any
//! right to write, so that no device and no peer can change what a `&[u8]` shows; slabs of blocks are never seen
//! through a reference. That makes [`Block::segment`] and [`Lease::segment`] safe to call.
//!
//! A pool belongs to a protection domain, or, if it was made [`for_sending`](Pool::for_sending), to none: its buffers are for
//! the application to fill, and each connection that sends from one registers the slab with its own domain, for the
//! device alone to read (`Registrations`).
//! [`sites`] learns which buffers of a program are sent, and so are worth such memory.
//!
//! Never: posts a request, waits for one, or knows the peer. A region's `rkey` opens all of a slab: where the
//! access rights name peers, a pool serves one peer.

mod budget;
pub mod dlpack;
mod error;
mod gather;
mod in_flight;
mod index;
mod pieces;
mod pool;
mod region;
mod registrations;
mod settings;
pub mod sites;
#[cfg(test)]
mod tests;

pub use budget::Budget;
pub use error::PoolError;
pub use pieces::{Block, Lease, RegisteredBuf};
pub use pool::Pool;
pub use region::{MemRegion, SharedRegion};
pub use settings::{PoolSettings, PoolStatistics, Quota};

/// The machinery below endpoints and tensors, which `internal` exports.
pub(crate) mod machinery {
    pub use super::gather::{GatherBuf, LargePart};
    pub use super::in_flight::{
        CopyRange, CopyRanges, FinishedTransfer, InFlight, LocalMemory, Notice, Transfer, TransferKind,
        TransferLimits,
    };
    pub use super::pool::find_sendable;
    pub use super::region::{Grant, RemotePlace};
    pub use super::registrations::{KeptRegistrations, LocalRegistrations, SlabRegistrations};
}
