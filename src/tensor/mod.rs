//! The tensor channel: a remote machine is a device with memory, and a tensor moves by one one-sided operation, without RPC
//! (Xue et al., *Fast Distributed Deep Learning over RDMA*, EuroSys 2019). gRPC remains for control: over it devices find
//! one another's memory.
//!
//! ```text
//!  RdmaDevice ── listens, owns memory, knows what is offered under which name
//!     │ channel("ps0:50052", 0)
//!     ▼
//!  Channel ──┬─ memcpy, memcpy_batch     any bytes of a region that the peer has exported
//!            ├─ StaticSender             a tensor of known shape, into the buffer that waits for it       (§3.2)
//!            ├─ DynamicSender            a tensor of any shape: its metadata, which the peer then reads by (§3.3)
//!            └─ request(name, step)      whatever a peer offers under a name, by rendezvous
//! ```
//!
//! Which one? A **static slot** is the fastest: one write, seen by the receiver in memory that it polls
//! ([`StaticReceiver::try_recv`]) or sleeps on. A **dynamic slot** costs a READ more and takes any shape. A **rendezvous** has
//! no slot: tensors are offered and asked for by name and step, whichever comes first.
//!
//! # Safety, without `unsafe`
//! Memory that a device may touch moves into the operation ([`MemRegion`]) and comes back with it; dropping the future that
//! waits for it changes nothing about that. What peers may touch ([`SharedRegion`]) is read by copying, or after their right
//! was taken away. A right is exact to the byte and one peer's alone.
#![forbid(unsafe_code)]

mod accept;
mod caller;
mod channel;
pub mod convert;
mod device;
mod error;
mod exchange;
mod landing;
mod link;
mod memcpy;
mod open;
mod payload;
mod placement;
mod proto;
mod reduce;
mod region;
pub mod rendezvous;
mod service;
mod settings;
mod spin;
mod tls;
pub mod types;

use std::sync::{Mutex, MutexGuard, PoisonError};

pub use channel::{Block, Channel, Direction};
pub use device::RdmaDevice;
pub use error::ChannelError;
pub use exchange::{Offer, Request, Requested};
pub use link::Notification;
pub use memcpy::Memcpy;
pub use placement::{Arrived, DynamicReceiver, DynamicSender, StaticReceiver, StaticSender};
pub use reduce::{reduce_max, reduce_max_f32, reduce_max_f64};
pub use region::{ExportedRegion, RemoteRegion, Rights};
pub use settings::Settings;
pub use types::{
    AllocateError, Dtype, Element, Metadata, MetadataLayout, Shape, ShapeError, Strides, Tensor, TensorError,
    TensorMut, TensorSpec, UnknownDtype, deserialize, serialize,
};

pub use crate::memory::{MemRegion, SharedRegion};

/// Locks. State behind our locks is consistent whenever one is released, so a panic elsewhere poisons nothing.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
