//! The software RDMA device: real verbs between processes of one host, without a card.
//!
//! Owns shared memory and the thread that passes it between processes. Never copies twice: the poster's CPU moves the
//! bytes from their source to where they belong, as a card would.
//!
//! ```text
//!   process A                                                   process B
//!   post_send ──▶ which receive is next? ◀── receive ring ───── post_receive
//!                 copy into that buffer ───────────────────────▶ memory (memfd, mapped by A)
//!                 delivery ring ──────────────────────────────▶ poll: completion
//!                 ready bit, and an event if armed ───────────▶ completion queue's page
//!   READ, WRITE ─ key looked up in B's region table, then copied; B's CPU takes no part
//! ```
//!
//! What is shared, each in a memfd of its own, sealed against shrinking: a page for each completion queue (ready bits,
//! armed flag) and for each queue pair (receive and delivery rings), a table of regions for each protection domain,
//! and registered memory made by [`HostMemory::shared`](super::HostMemory::shared). Other registered memory is
//! reached with `process_vm_readv` and `process_vm_writev`.
//!
//! Descriptors are passed over a socket in the abstract namespace, which every network namespace has its own of, to
//! processes of the same user that can name a queue pair's token, which its address carries. The end of that socket is
//! the peer's death.
//!
//! Trust: a peer can write to the pages that it maps whatever it likes. Every number read there is checked against what
//! this side knows itself (its own cursors, the lengths of mappings, the receives it posted); nonsense moves that one
//! queue pair to Error.

mod address;
mod completion;
mod device;
mod domain;
mod layout;
mod link;
mod peer;
mod queue_pair;
mod receive;
mod send;
mod service;
mod shared;
mod transfer;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

pub use device::attributes;

use super::{Context, VerbsError};
use device::{Device, SoftContext};

/// Opens this process's software device. All contexts of a process are one device, which ends with the last thing
/// made from it.
///
/// # Errors
/// The operating system lacks something: memfds, abstract sockets, a thread.
pub fn open() -> Result<Arc<dyn Context>, VerbsError> {
    static DEVICE: Mutex<Weak<Device>> = Mutex::new(Weak::new());
    let mut current = lock(&DEVICE);
    let device = match current.upgrade() {
        Some(device) => device,
        None => {
            let device = Device::open()?;
            *current = Arc::downgrade(&device);
            device
        }
    };
    Ok(Arc::new(SoftContext(device)))
}

/// Locks. State behind our locks is consistent whenever one is released, so a panic elsewhere poisons nothing.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
