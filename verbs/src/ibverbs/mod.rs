//! Real RDMA devices, driven through libibverbs: InfiniBand, RoCE and iWARP adapters, and the software
//! devices of the kernel (Soft-RoCE, soft-iWARP).
//!
//! This module is the provider `ibverbs`, in the cargo feature of that name. It loads libibverbs at run time,
//! so a program that was built with the feature also starts on a machine without the library, and [`list`]
//! then says what to install. The module asks the device for its abilities, or tries them out.
//!
//! | file | content |
//! |---|---|
//! | `library` | the functions of libibverbs |
//! | `ticket` | how a completion of the device is traced to its request |
//! | `sleeper` | waking threads that sleep on a completion queue |
//! | `iwarp/` | connecting on iWARP, by librdmacm; completions in the order of posting |
//! | `device/` | devices, ports and addresses: which ones there are, and which ones are taken; asynchronous events |
//! | `domain` | protection domains, and the memory registered in them; memory of GPUs by dmabuf, which no device has been tried with |
//! | `posting/` | the device's queue pairs with their requests |
//! | `completion_queue` | completion queues, and what their completions mean |
//! | `shared_receive_queue` | shared receive queues |
//! | `queue_pair/` | queue pairs: creating and connecting them, their settings and addresses |
//! | `context` | opening a device, and what users create from it and in its protection domains |
//!
//! Each row imports from rows above it only.
//!
//! # Differences from the software device
//! - A peer that dies is noticed only by sending, after [`timeout`](super::PathSettings::timeout) and
//!   retries.
//! - A queue pair that fails reports a failed completion: [`state`](super::QueuePair::state) is Error once
//!   that completion was polled, or after an [asynchronous event](super::Context::handle_events).
//! - Every registered page is locked in memory.
//! - On iWARP a send or write has completed when TCP has taken it. If the peer refuses the request, or has no
//!   receive for it, the connection ends later. Requests that are posted before there is a connection wait
//!   for it, at most 10 s. A peer that ends is noticed at once, even if no thread polls. A peer that knows
//!   the key of memory may write it whenever the device may write it; and soft-iWARP lets peers read all
//!   memory that is registered in a protection domain.
//! - Both sides of a connection take the smaller path MTU: the one that the other's address offers
//!   ([`OpenOptions::mtu`]), or their own. [`PathSettings::mtu`](super::PathSettings::mtu) narrows one side
//!   alone, so both sides must set one value.

mod completion_queue;
mod context;
mod device;
mod domain;
mod iwarp;
mod library;
mod posting;
mod queue_pair;
mod shared_receive_queue;
mod sleeper;
mod ticket;
mod window;

pub use context::open;
pub use device::list::{Gid, GidKind, ListedDevice, Port, PortState, Transport, list};
pub use device::options::OpenOptions;
