//! Allocation sites: learns which call sites of a program allocate the buffers that are sent, and gives these
//! sites registered memory.
//!
//! Registered memory is scarce, and a filled buffer can't move into it. Therefore a program would have to
//! declare at the allocation of each buffer whether it will send the buffer. A program that iterates need not
//! declare this, because its last iteration has shown which buffers are sent. A [`SiteAllocator`] records the
//! site of each buffer, and the connections report the buffers that they send. From the next iteration on,
//! the sites whose buffers were sent get their memory from a [`Pool`](super::Pool). All other buffers stay on
//! the heap. This is the dynamic analysis of Xue et al., *Fast Distributed Deep Learning over RDMA* (EuroSys
//! 2019), section 3.4, for any program.
//!
//! ```text
//!  program                              SiteAllocator                      connection
//!  allocate(length) ──── its line ────▶ site ─▶ placement: heap or pool
//!     │ SiteBuf: fill, freeze             ▲
//!     ▼                                   │ the buffer's site, once
//!   Bytes ────────── by address ──────▶ unsent ◀──────────── sent(slice) ── write
//!
//!  next_iteration() ───────────────────▶ sites that sent: pool. Sites that sent nothing for long: heap.
//! ```
//!
//! # When to use it
//!
//! Use a [`SiteAllocator`] in a loop, such as a training loop, that allocates its buffers anew in each
//! iteration, sends some of them as large `bytes` fields, and runs on a device that needs registered memory
//! (a network card). If you know which buffers are sent, allocate them from
//! [`Pool::for_sending`](super::Pool::for_sending); then you need no sites. The software device sends from
//! any memory without a copy, so sites gain nothing there.
//!
//! # How to use it
//!
//! ```
//! use tonic_rdma_verbs::memory::Pool;
//! use tonic_rdma_verbs::memory::sites::{SitePlacement, SiteAllocator, SiteSettings, sent};
//!
//! let sites = SiteAllocator::new(Pool::for_sending(1 << 30), SiteSettings::default());
//! for iteration in 1..=3 {
//!     let mut gradients = sites.allocate(1 << 20);
//!     let activations = sites.allocate(1 << 20);
//!     assert_eq!(gradients.placement(), if iteration == 1 { SitePlacement::Heap } else { SitePlacement::Registered });
//!     assert_eq!(activations.placement(), SitePlacement::Heap);
//!     gradients.fill(iteration);
//!     sent(&gradients.freeze()); // stands for a call: an RDMA connection reports this itself
//!     sites.next_iteration();
//! }
//! println!("{}", sites.report());
//! ```
//!
//! A site is a line of the source. If one line allocates for many purposes, as in an interpreter of graphs,
//! the program gives names instead ([`SiteAllocator::allocate_named`]). A function that allocates for its
//! callers passes on their lines with `#[track_caller]`.
//!
//! # Buffers that count as sent
//!
//! A buffer counts as sent if, after it was frozen, a byte stream over RDMA has accepted a slice of it with
//! [`SHORTEST`] bytes or more. Streams that fell back to TCP report nothing, because TCP gains nothing from
//! registered memory. A copy of the bytes does not count. tonic's own codec copies each message, so use the
//! `gather` codec of tonic-rdma. Your own transport calls [`sent`].
//!
//! # Cost
//!
//! An allocation holds a lock while it looks up its site. This costs some 120 ns more than the memory itself.
//! A slice that is written costs one relaxed load while no frozen buffer is unsent, and otherwise a lookup by
//! address of some 15 ns. (Measured with `cargo bench --bench memory_pool -- sites`.)
//!
//! # Limits
//!
//! - A buffer never moves. Parameters that are allocated once and sent in each step stay on the heap.
//!   Allocate them again after the first iteration, or from the pool itself.
//! - [`SiteAllocator::allocate`] promises no content. A debug build fills heap memory with `0xa5`, so that a
//!   program that relies on zeros fails in its first iteration.
//! - The number of sites is limited ([`SiteSettings::sites`]). Buffers of further sites are on the heap, and
//!   the report counts them.
//! - Lack of registered memory is not an error. The buffer is then on the heap, and the report counts such
//!   buffers.
//! - This module does not send, and does not decide which buffers are sent.

pub(super) mod handle;
pub(super) mod live;
pub(super) mod table;
#[cfg(test)]
mod tests;

pub use handle::{Crossed, SiteAllocator, SiteBuf, sent};
pub use live::NodeScope;
pub use table::{
    NodeSite, PlacementReason, SHORTEST, Site, SitePlacement, SiteReport, SiteSettings, SiteStatus,
};
