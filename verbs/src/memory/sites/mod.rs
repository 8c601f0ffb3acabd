//! Allocation sites: learns which places of a program make the buffers that are sent, and gives these registered memory.
//!
//! Registered memory is scarce, and a buffer can't move into it once it is filled. So a program would have to say of each
//! buffer, when it allocates it, whether it will be sent. A program that iterates need not say it, because its last
//! iteration has shown it. A [`SiteAllocator`] records which site each buffer came from, the connections tell it what they
//! send, and from the next iteration on the sites whose buffers were sent get their memory from a
//! [`Pool`](super::Pool). All other buffers stay on the heap. This is the dynamic analysis of Xue et al., *Fast Distributed
//! Deep Learning over RDMA* (EuroSys 2019), section 3.4, for any program.
//!
//! ```text
//!  program                              SiteAllocator                      connection
//!  allocate(length) ──── its line ────▶ site ─▶ placement: heap or pool
//!     │ SiteBuf: fill, freeze             ▲
//!     ▼                                   │ the buffer's site, once
//!   Bytes ────────── by address ──────▶ unsent ◀──────────── sent(slice) ── write
//!
//!  next_iteration() ───────────────────▶ sites that sent: pool. Sites that have long sent nothing: heap.
//! ```
//!
//! # When to use it
//!
//! Use it in a loop, such as a training loop, that allocates its buffers anew in each turn, sends some of them as large
//! `bytes` fields, and runs on a device that needs registered memory (a network card). Where you know which buffers are
//! sent, allocate these from [`Pool::for_sending`](super::Pool::for_sending) and you need no sites. The software device
//! sends from any memory without a copy: there it gains nothing.
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
//!     sent(&gradients.freeze()); // stands for a call: an RDMA connection says so itself
//!     sites.next_iteration();
//! }
//! println!("{}", sites.report());
//! ```
//!
//! A site is a line of the source. Where one line allocates for many, as in an interpreter of graphs, the program gives
//! names instead ([`SiteAllocator::allocate_named`]). A function that allocates for its callers passes their lines on with
//! `#[track_caller]`.
//!
//! # What counts as sent
//!
//! Slices of a frozen buffer, of [`SHORTEST`] bytes or more, that a byte stream over RDMA has accepted. Streams that fell
//! back to TCP report nothing, since registered memory would gain them nothing. Bytes that were copied on the way are not
//! the buffer's any more: tonic's own codec copies each message, so use [`gather`](crate::gather). A transport of your own
//! calls [`sent`].
//!
//! # What it costs
//!
//! An allocation takes a lock while it looks its site up, some 120 ns more than the memory itself. A slice that is
//! written costs one atomic load while no frozen buffer is unsent, and otherwise a look-up by address of some 15 ns. (Measured
//! with `cargo bench --bench memory_pool -- sites`.)
//!
//! # Limits
//!
//! - A buffer never moves. Parameters that are allocated once and sent in each step stay where they were: allocate them
//!   again after the first iteration, or from the pool itself.
//! - [`SiteAllocator::allocate`] promises no content. A debug build fills heap memory with `0xa5`, so that a program that
//!   relies on zeros fails in its first iteration.
//! - Sites are limited ([`SiteSettings::sites`]). Buffers of further sites are on the heap; the report counts them.
//! - Lack of registered memory is no error: the buffer is on the heap then, and the report says how often that was so.
//! - This module sends nothing and never decides what is sent.

mod allocator;
mod buffer;
mod record;
mod report;
mod table;
#[cfg(test)]
mod tests;
mod unsent;

pub use allocator::{SiteAllocator, SiteSettings};
pub use buffer::SiteBuf;
pub use report::{PlacementReason, Site, SitePlacement, SiteReport, SiteStatus};
#[doc(hidden)]
pub use unsent::sent_slices;
pub use unsent::{SHORTEST, sent};
