//! Allocation sites: which places of a program make the buffers that are sent, so that these get registered memory.
//!
//! Registered memory is scarce, and a buffer can't move into it once it is filled. So it has to be known when a buffer
//! is allocated whether it will be sent, and nobody knows that better than the iteration before. A [`SiteAllocator`]
//! records which site every buffer came from, the connections say what they send, and from the next iteration on the
//! sites whose buffers were sent are placed in a [`Pool`](super::Pool); the others stay on the heap. This is the dynamic
//! analysis of Xue et al., "Fast Distributed Deep Learning over RDMA" (EuroSys'19), section 3.4, for any program.
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
//! ```
//! use tonic_rdma::memory::sites::{Placement, SiteAllocator, SiteSettings, sent};
//! use tonic_rdma::memory::Pool;
//!
//! let sites = SiteAllocator::new(Pool::for_sending(1 << 30), SiteSettings::default());
//! for iteration in 1..=3 {
//!     let gradients = sites.allocate(1 << 20);
//!     let activations = sites.allocate(1 << 20);
//!     assert_eq!(gradients.placement(), if iteration == 1 { Placement::Heap } else { Placement::Registered });
//!     assert_eq!(activations.placement(), Placement::Heap);
//!     sent(&gradients.freeze()); // an RDMA connection says so itself
//!     sites.next_iteration();
//! }
//! println!("{}", sites.report());
//! ```
//!
//! What counts as sent: slices of a frozen buffer, of [`SHORTEST`] bytes or more, that a byte stream over RDMA has
//! accepted. Streams that fell back to TCP say nothing, since registered memory would gain them nothing. The same holds
//! for bytes that were copied on the way, as tonic's own codec does with all of a message and [`gather`](crate::gather)
//! with fields that are short.
//!
//! Never: sends anything, moves a buffer, or fails for lack of registered memory. Where there is none left a buffer is on
//! the heap, which the report counts.

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
pub use report::{Placement, Site, SiteReport, SiteStatus, Why};
pub(crate) use unsent::sent_slices;
pub use unsent::{SHORTEST, sent};
