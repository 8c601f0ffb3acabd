//! The software RDMA device: reliable connected queue pairs between processes of one host, without a NIC.
//!
//! Owns the provider `soft` of [`verbs`](super): everything here is reached through the traits, from [`open`] on.
//! Never trusts what a peer wrote to shared memory: every index, length and address that comes from there is checked
//! against what this process knows itself. Never copies through a buffer of its own: a message goes straight from
//! where it lies to where it shall be, on the initiator's CPU, inside `post_send`.
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
//! | file | what |
//! |---|---|
//! | `device`, `domain`, `completion_queue`, `queue_pair` | the objects behind the traits |
//! | `send`, `transfer`, `task`, `place`, `receive` | a queue pair's two queues, and the copying |
//! | `stores` | whether copies go through the cache or past it: whichever is faster |
//! | `link`, `table`, `bell`, `mapping` | what is in shared memory, and how it is read without trust |
//! | `service`, `peer`, `message`, `address` | how descriptors get from one process to another |
//!
//! # Shared memory
//! - One **link** segment per queue pair, mapped by its owner and its peer: see `link`.
//! - One **page** per completion queue, mapped by the peers of all its queue pairs: see `bell`.
//! - One **region table** per device, which peers map for reading alone: see `table`.
//! - The **memfd of each registered [`HostMemory::shared`](super::HostMemory::shared)**, mapped by a peer with its first operation on
//!   it, and only through a queue pair of a protection domain that it is registered in.
//!
//! All of them are mapped once per process, and no descriptor stays open for it. A connection costs two mappings and
//! no descriptor; a pair of processes two sockets.
//!
//! # Taking memory back
//! An initiator touches its peer's memory within a *section*: it makes the section word of its link odd, checks the
//! keys and the peer's state, copies at most 1 MiB, and makes the word even. Whoever takes a key or a queue pair away
//! does so first and then waits for the peer's section to end, or for the peer's death. A peer that stops in the middle
//! of a section (it was stopped by a debugger, or is hostile) is waited for no longer than a second; the memory that it
//! may still be using is then never freed.
//!
//! # Order of placement
//! [`places_in_order`](super::QueuePair::places_in_order) is true. What a request places is stored after all that the
//! requests before it on the queue pair placed. And where the destination of a WRITE, or the last segment of a READ, is at
//! least 8 bytes long and ends at an address that is a multiple of 8, its last 8 bytes are stored after all others, at once:
//! a single 64-bit store with release semantics, so that whoever loads them with acquire semantics
//! ([`HostMemory::load_u64`](super::HostMemory::load_u64)) and finds the new value sees everything else. The other bytes come in
//! any order, and a destination that is shorter, or ends elsewhere, promises nothing about its own. A WRITE to memory that the
//! peer can't map has its last 8 bytes stored by a system call of their own: later than the others, but perhaps not at
//! once, so compare with the value that is expected, not with the one before.
//!
//! # Differences from hardware
//! - A completed operation is complete at both ends; there is no wire to be lost on.
//! - Receive completions wait in the queue pair's link until they are polled, so they cannot overrun a completion
//!   queue; send completions can.
//! - Both processes must belong to one user, and see one another's network and pid namespace. Such a peer could always
//!   trace this process: the checks guard against faults and confusion, and against crashing on a hostile peer's word,
//!   not against a debugger.

mod completion_queue;
mod context;
mod device;
mod domain;
mod limits;
mod peers;
mod protection_domain;
mod queue_pair;
mod region;
mod shared;
mod system;

#[cfg(test)]
mod tests;

pub use context::open;
pub use limits::{NAME, attributes};
