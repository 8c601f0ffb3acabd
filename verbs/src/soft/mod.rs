//! The software RDMA device: reliable connected queue pairs between processes of one host, without a NIC.
//!
//! This module is the provider `soft`. Users call [`open`], and use the device through the traits. The device checks every
//! index, length and address that a peer wrote to shared memory against the records of this process. It copies a message
//! once, straight from its source to its destination, on the initiator's CPU, inside `post_send`.
//!
//! ```text
//!   process A                                              process B
//!  ┌──────────────────────────────┐                       ┌──────────────────────────────┐
//!  │ post_send ──── copies ───────┼──────────────────────▶│ pool memory (memfd, mapped   │
//!  │    │                         │   or process_vm_*     │ by A), or any other memory   │
//!  │    │ 1 looks up key ─────────┼──────────────────────▶│ region table   (table)       │
//!  │    │ 2 takes a posted receive┼──────────────────────▶│ link of the QP (link)        │
//!  │    │ 3 reports it done ──────┼──────────────────────▶│                              │
//!  │    └ 4 sets a ready bit ─────┼──────────────────────▶│ page of the CQ (bell) ─┐     │
//!  │                              │  eventfd, only if     │                        ▼     │
//!  │ service thread ◀── socket ───┼── the CQ is armed ───▶│ service thread       poll    │
//!  └──────────────────────────────┘   descriptors, death  └──────────────────────────────┘
//! ```
//!
//! | file | content |
//! |---|---|
//! | `context`, `device`, `limits`, `domain_handle`, `domain`, `region`, `completion_queue` | the objects behind the traits |
//! | `queue_pair/` | queue pairs: sends (`send`; those that wait for a receive: `waiting`), receives (`receive`), the check of keys and ranges (`transfer`, `place`), and the copying (`place`) |
//! | `shared/` | the structures in shared memory, and the checks when this process reads them |
//! | `peers/` | the exchange of descriptors between processes |
//! | `reach` | the settings of the device: where it finds peers, and which peers it lets in |
//! | `forked` | the mark of a process that was forked from the one that opened the device |
//! | `system` | system calls that have no safe wrapper |
//!
//! # Shared memory
//! - One **link** segment per queue pair. Its owner and its peer map it: see `shared/link`.
//! - One **page** per completion queue. The peers of all its queue pairs map it: see `shared/bell`.
//! - One **region table** per device. Peers map the table only for reading: see `shared/table`.
//! - The **memfd of each registered [`HostMemory::shared`](super::HostMemory::shared)**. A peer maps it with its
//!   first operation on it, and only through a queue pair of a protection domain that the memory is registered in.
//!
//! A peer maps each of them once, and then closes the descriptor. A connection costs two mappings and no descriptor; a pair
//! of processes costs two sockets.
//!
//! # Taking memory back
//! An initiator touches its peer's memory within a *section*: it makes the section word of its link odd, checks the
//! keys and the peer's state, copies at most 1 MiB, and makes the word even. To take a key or a queue pair away, its
//! owner first invalidates it and then waits until the peer's section ends or the peer dies. The wait ends after one
//! second if the peer stopped in the middle of a section (in a debugger, or because it is hostile). Memory that
//! such a peer may still use is never freed.
//!
//! # Order of placement
//! [`places_in_order`](super::QueuePair::places_in_order) is true. The bytes of a request are stored after all bytes
//! of the requests before it on the queue pair. The last 8 bytes of a WRITE's destination, or of the last segment of
//! a READ, are stored after all its other bytes, if the destination is at least 8 bytes long and ends at an address
//! that is a multiple of 8. They are stored at once, by one 64-bit store with release semantics. A thread that loads
//! them with acquire semantics ([`HostMemory::load_u64`](super::HostMemory::load_u64)) and finds the new value sees
//! all the other bytes. The other bytes come in any order. The order within a destination that is shorter, or ends
//! elsewhere, is not defined. If the initiator can't map the memory, a separate system call stores the last 8 bytes of a
//! WRITE: later than the other bytes, but perhaps not at once. Therefore compare with the expected value, not with the
//! previous value.
//!
//! # Differences from hardware
//! - A completed operation is complete at both ends, because no wire can lose it.
//! - Receive completions wait in the queue pair's link until they are polled, so they cannot overrun a completion
//!   queue. Send completions can.
//! - Both processes run on one host. They find one another in their network namespace, or through a directory that both name
//!   (`RDMA_SOFT_DIR`). A device lets in processes of its user, or all that can open its socket (`RDMA_SOFT_PEERS`).
//!
//! # Trust
//! A peer of this user, user namespace and pid namespace could also attach a debugger to this process. Against such a peer the device
//! protects from faults. Every other peer is a stranger, which maps no application memory (`peers/level`). Descriptors of peers are
//! mapped only if they can't end an access with SIGBUS (`memfd`), and no thread waits for their close (`peers/received`).
//! A forked child can't use or harm the connections of its parent (`forked`).

mod completion_queue;
mod context;
mod device;
mod domain;
mod domain_handle;
mod event_socket;
mod events;
mod forked;
mod limits;
mod peers;
mod queue_pair;
pub(crate) mod reach;
mod region;
pub(crate) mod shared;
mod system;
#[cfg(any(test, fuzzing))]
pub(crate) mod tests;

pub use context::open;
pub use limits::{NAME, attributes};
