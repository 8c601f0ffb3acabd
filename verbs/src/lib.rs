//! Verbs: the nouns of RDMA, and the providers behind them.
//!
//! Owns the provider-neutral traits ([`Context`], [`ProtectionDomain`], [`MemoryRegion`], [`DeviceMemoryRegion`],
//! [`CompletionQueue`], [`QueuePair`], [`SharedReceiveQueue`]) and their software implementation, [`soft`]. Names and meanings follow the InfiniBand
//! Architecture Specification, volume 1 (chapters 10 and 11), and its C rendering, libibverbs.
//!
//! Never: waits, spins, knows a protocol or an executor. Every call here returns at once, but for
//! [`QueuePair::to_rtr`], which may talk to the peer's device for a bounded time.
//!
//! A reliable connected (RC) queue pair goes through these states; posting a receive is allowed from Init on, posting
//! a send in RTS alone. In Error every posted request completes with
//! [`WorkRequestFlushed`](CompletionStatus::WorkRequestFlushed).
//!
//! ```text
//!           to_init          to_rtr(peer)        to_rts
//!  Reset ───────────▶ Init ───────────────▶ Rtr ─────────▶ Rts
//!    │                 │                     │              │
//!    └─────────────────┴──── to_error, or a fatal completion┴──▶ Error
//! ```

mod completion;
mod context;
mod copy;
mod device_memory;
mod discover;
mod error;
mod host_memory;
mod queue_pair;
mod region;
mod shared_receive_queue;
mod telemetry;
mod work;

#[cfg(feature = "allocator")]
#[doc(hidden)]
pub mod allocator;
#[cfg(feature = "ibverbs")]
pub mod ibverbs;
pub mod memory;
pub mod soft;

#[doc(hidden)]
pub mod internal;

pub use completion::{CompletionOpcode, CompletionQueue, CompletionStatus, WorkCompletion};
pub use context::{Context, DeviceAttributes, ProtectionDomain};
pub(crate) use copy::{copy_bytes, copy_past_caches};
pub use device_memory::{DeviceMemoryRegion, DmaBuf};
pub use discover::{FoundDevice, FoundGid, FoundPort, devices, open};
pub use error::{PostError, PostErrorKind, VerbsError};
pub use host_memory::{HostMemory, OutOfBounds, WordError};
pub use queue_pair::{
    PathSettings, Probe, QueuePair, QueuePairAddress, QueuePairCapacity, QueuePairNumber, QueuePairState,
};
pub use region::{Access, Lkey, LocalSegment, MemoryRegion, RemoteSegment, Rkey};
pub use shared_receive_queue::SharedReceiveQueue;
pub use work::{Operation, Payload, ReceiveRequest, SendRequest};
