//! RDMA verbs behind traits: real devices, a software device for processes of one host, and a pool of
//! registered memory.
//!
//! An application posts work requests to a *queue pair*, and the device carries them out: it sends messages,
//! and it reads and writes the peer's registered memory without work of the peer's processor. The device
//! reports each finished request to a *completion queue*. Names and meanings follow the InfiniBand
//! Architecture Specification, volume 1 (chapters 10 and 11), and its C form, libibverbs.
//!
//! | provider | devices | needs |
//! |---|---|---|
//! | [`soft`] | `soft0`: queue pairs between processes of one host, over shared memory | Linux |
//! | `ibverbs` | InfiniBand, RoCE and iWARP adapters; Soft-RoCE and soft-iWARP of the kernel | the cargo feature `ibverbs` |
//!
//! Providers open devices by functions, and their calls create objects, because they return trait objects.
//! All other types have `new` or `Default`, and constructors named by what they make.
//!
//! Both providers implement these traits: [`Context`] (an opened device), [`ProtectionDomain`],
//! [`MemoryRegion`], [`MemoryWindow`], [`DeviceMemoryRegion`], [`CompletionQueue`], [`QueuePair`] and
//! [`SharedReceiveQueue`]. [`devices`] lists the devices of this machine, and [`open`] opens one. [`counting`]
//! wraps any of them, and counts registrations, requests and objects.
//!
//! # Example
//! Two queue pairs of the software device, in one process: a receive, and the Send that fills it.
//!
//! ```
//! use std::io::IoSlice;
//! use std::sync::Arc;
//!
//! use tonic_rdma_verbs::{
//!     Access, CompletionStatus, HostMemory, LocalSegment, Operation, PathSettings, Payload, QueuePairCapacity,
//!     ReceiveRequest, SendRequest, WorkCompletion,
//! };
//!
//! let device = tonic_rdma_verbs::open("soft0")?;
//! let domain = device.alloc_protection_domain()?;
//! let completions = device.create_completion_queue(16)?;
//! let capacity = QueuePairCapacity {
//!     send_requests: 4,
//!     receive_requests: 4,
//!     send_segments: 1,
//!     receive_segments: 1,
//!     inline: 64,
//! };
//! let sender = domain.create_queue_pair(&completions, &completions, &capacity)?;
//! let receiver = domain.create_queue_pair(&completions, &completions, &capacity)?;
//!
//! // Two processes exchange these addresses over a connection of their own, such as TCP.
//! let settings = PathSettings::default();
//! sender.to_init(Access::LOCAL_WRITE)?;
//! receiver.to_init(Access::LOCAL_WRITE)?;
//! sender.to_rtr(&receiver.local_address(), &settings)?;
//! receiver.to_rtr(&sender.local_address(), &settings)?;
//! sender.to_rts(&settings)?;
//! receiver.to_rts(&settings)?;
//!
//! // A receive must be posted before a message can arrive.
//! let memory = Arc::new(HostMemory::shared(4096, 4096)?);
//! let region = domain.register(Arc::clone(&memory), Access::LOCAL_WRITE)?;
//! // SAFETY: no reference to the memory exists.
//! let into = [unsafe { LocalSegment::new(&*region, 0..64) }];
//! receiver.post_receive(&[ReceiveRequest { wr_id: 1, into: &into }])?;
//!
//! let message = [IoSlice::new(b"hello")];
//! let operation = Operation::Send { data: Payload::Inline(&message), immediate: None };
//! sender.post_send(&[SendRequest { wr_id: 2, operation, signaled: true }])?;
//!
//! // Both requests complete: the Send, and the receive that it filled.
//! let mut finished = 0;
//! let mut batch = [WorkCompletion::EMPTY; 4];
//! while finished < 2 {
//!     let count = completions.poll(&mut batch);
//!     assert!(batch[..count].iter().all(|completion| completion.status == CompletionStatus::Success));
//!     finished += count;
//! }
//! let mut received = [0; 5];
//! memory.copy_out(0, &mut received)?;
//! assert_eq!(&received, b"hello");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # States of a queue pair
//! A reliable connected (RC) queue pair goes through these states. It takes receives from Init on, and sends
//! only in Rts. In Error every posted request completes with
//! [`WorkRequestFlushed`](CompletionStatus::WorkRequestFlushed).
//!
//! ```text
//!           to_init          to_rtr(peer)        to_rts
//!  Reset ───────────▶ Init ───────────────▶ Rtr ─────────▶ Rts
//!    │                 │                     │              │
//!    └─────────────────┴──── to_error, or a fatal completion┴──▶ Error
//! ```
//!
//! Calls return at once, with one exception: [`QueuePair::to_rtr`] waits for the peer's device, which may
//! take some seconds. No drop waits for a peer. On the software device, dropping a region or a queue pair
//! waits for threads of this process that are copying; this takes microseconds. The crate knows no protocol
//! and no async executor.
//!
//! # Memory
//! A device and its peers may write to registered memory at any time. [`HostMemory`] therefore never lends
//! out its bytes; it copies them in and out. The module [`memory`] has a pool of registered memory, whose
//! buffers are safe to use.
//!
//! # Features
//! - `ibverbs`: the provider for real devices. It loads libibverbs at run time, so the program also starts on
//!   a machine without the library. The build needs, on Debian:
//!   `cmake make python3 pkg-config libclang-dev libnl-3-dev libnl-route-3-dev libibverbs-dev librdmacm-dev`.
//!
//! # Safety
//! [`LocalSegment::new`] is the one unsafe step in posting a request: the caller promises that no reference
//! to the memory exists while the device uses it. Memory that peers and devices change meanwhile is copied in
//! assembly, because a plain read or write of such memory is undefined in Rust; the copy is checked, not the
//! shared memory. The traits of devices are sealed: only this crate implements them, because safe code relies
//! on the keys and ranges that they state.

mod completion;
mod context;
mod copy;
mod discover;
mod error;
mod host_memory;
mod memfd;
mod panics;
mod queue_pair;
mod region;
mod remote_view;
mod sealed;
mod throttle;
mod units;
mod versions;

pub mod counting;
#[cfg(feature = "ibverbs")]
pub mod ibverbs;
pub mod memory;
pub mod soft;
pub mod unstable;

pub use completion::{CompletionOpcode, CompletionQueue, CompletionStatus, WorkCompletion};
pub use context::{Context, DeviceAttributes, ProtectionDomain};
pub(crate) use copy::{copy_bytes, copy_for_peer, copy_past_caches, prefetch};
pub use discover::{FoundDevice, FoundGid, FoundPort, devices, open};
pub use error::{PostError, PostErrorKind, QueuePairState, VerbsError, VerbsErrorKind};
pub use host_memory::HostMemory;
pub use queue_pair::{
    LocalQueuePair, Operation, PathSettings, Payload, Probe, QueuePair, QueuePairAddress, QueuePairCapacity,
    QueuePairNumber, ReceiveRequest, SendRequest, SharedReceiveQueue,
};
pub use region::{
    Access, DeviceMemoryRegion, DmaBuf, Lkey, LocalSegment, MemoryRegion, MemoryWindow, RemoteSegment, Rkey,
};
pub use remote_view::RemoteView;

/// Compiles and runs the example of README.md.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
