//! Real RDMA devices, by way of libibverbs: InfiniBand, RoCE and iWARP adapters, and the kernel's software ones
//! (Soft-RoCE, soft-iWARP).
//!
//! Owns the provider `ibverbs` of [`verbs`](super), in the cargo feature of that name. libibverbs is looked for at run
//! time, so a program that was built with the feature starts on a machine without it, and [`list`] says what to
//! install. Never assumes what a device can do: it is asked, or tried.
//!
//! | file | what |
//! |---|---|
//! | `library` | the functions of libibverbs |
//! | `port`, `gid` | what devices, ports and addresses there are |
//! | `device`, `protection_domain`, `memory_region`, `completion_queue`, `queue_pair`, `shared_receive_queue` | the objects behind the traits |
//! | `device_memory` | memory of GPUs and the like, by dmabuf; tried on no device that has it |
//! | `core` | a queue pair's state and outstanding requests, as polling sees them |
//! | `post`, `post_receive`, `path`, `address` | requests, settings and addresses as the device takes them |
//! | `connection_manager`, `connection_id`, `connection_library`, `network` | connecting on iWARP, by librdmacm |
//! | `soft_iwarp` | what that driver needs |
//! | `order` | completions in the order of posting, on a device that does not keep it |
//! | `wake` | sleeping for more than a completion channel |
//! | `async_events` | port down, queue pair failed, device removed |
//!
//! # Differences from the software device
//! - A peer that dies is noticed by sending alone, after [`timeout`](super::PathSettings::timeout) and retries.
//! - A queue pair that fails says so with a completion: [`state`](super::QueuePair::state) is Error as soon as that was
//!   polled, or with an [asynchronous event](super::Context::handle_events).
//! - Every registered page is locked in memory.
//! - On iWARP a send or write has completed when TCP has it; what the peer refuses ends the connection later. A send that
//!   finds no receive does so, too. Requests that are posted before there is a connection wait for it, at most 10 s. In
//!   turn a peer that ends is noticed at once, whoever polls. Memory that the device may write, peers may write that know
//!   its key; and soft-iWARP has them read all that is registered in a protection domain.
//! - Both ends of a connection take the path MTU that is smaller: the one that the other's address offers
//!   ([`OpenOptions::mtu`]), or their own. [`PathSettings::mtu`](super::PathSettings::mtu) narrows one end alone, so it
//!   has to be the same at both.

mod completion_queue;
mod context;
mod device;
mod domain;
mod iwarp;
mod library;
mod queue_pair;
mod shared_receive_queue;

use std::any::Any;

pub use context::open;
pub use device::gid::{Gid, GidKind};
pub use device::list::{ListedDevice, Transport, list};
pub use device::options::OpenOptions;
pub use device::port::{Port, PortState};
pub use queue_pair::path::QueuePairAttributes;

use super::{QueuePair, VerbsError};

/// What the device says a queue pair is set to.
///
/// # Errors
/// - [`Foreign`](VerbsError::Foreign) if it is not of this provider.
/// - [`Os`](VerbsError::Os) if the device does not answer.
pub fn query(queue_pair: &dyn QueuePair) -> Result<QueuePairAttributes, VerbsError> {
    let pair = (queue_pair as &dyn Any).downcast_ref::<queue_pair::Pair>();
    pair.ok_or(VerbsError::Foreign("queue pair"))?.query()
}
