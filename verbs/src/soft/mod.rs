//! The software RDMA device: reliable connected queue pairs between processes of one host, without a NIC.
//!
//! This module is the provider `soft`. Users call [`open`], and use the device through the traits. A process
//! only **reads** the memory of its peers, and **writes** only its own. All memory that two processes share
//! has one writer, its maker; the other process maps it for reading. So no process can change what another
//! one relies on, and no process waits for another.
//!
//! ```text
//!   process A                                              process B
//!  ┌───────────────────────────────┐                      ┌───────────────────────────────┐
//!  │ post_send                     │                      │ poll                          │
//!  │    │ 1 writes a record        │   B maps the end     │    │ 2 reads the next record  │
//!  │    ▼                          │   for reading        │    │ 3 checks key and range   │
//!  │ end of the QP of A: ring ─────┼─────────────────────▶│    │ 4 copies to own memory   │
//!  │                               │   A maps the end     │    ▼                          │
//!  │ poll: the request is done ◀───┼──────────────────────┼─ end of the QP of B: `taken`  │
//!  │                               │   for reading        │                               │
//!  │ application memory ───────────┼─────────────────────▶│ 4 from 8 KiB on (User)        │
//!  │                               │ a message, only if   │                               │
//!  │ event socket of B's CQ ───────┼── B's `attention` ──▶│ epoll: wakes a thread         │
//!  │ device's thread ◀── socket ───┼── asks for it ──────▶│ device's thread               │
//!  └───────────────────────────────┘  descriptors, death  └───────────────────────────────┘
//! ```
//!
//! | file | content |
//! |---|---|
//! | `context`, `device`, `domain` | the objects behind the traits |
//! | `completion_queue`, `events` | completion queues; what wakes a thread that sleeps, here and in the peer's process |
//! | `queue_pair/` | queue pairs: own requests (`send`), the peer's requests (`target`), and copies from memory of the peer (`pulls`) |
//! | `shared/` | the structures in shared memory, and the checks when this process reads them |
//! | `peers/` | other processes: sockets, policy and level, the exchange of descriptors, the device's thread, and the bounds |
//! | `biased_lock` | locks that cost little while one thread alone takes them; the fence by which another thread takes them over |
//! | `reach` | the settings of the device: where it finds peers, and which peers it lets in |
//! | `forked` | the mark of a process that was forked from the one that opened the device |
//! | `closer` | the threads that close what came from peers |
//! | `system` | system calls that have no safe wrapper |
//! | `tests/` | peers that write garbage into their memory and their sockets |
//!
//! # Shared memory
//!
//! | segment | its one writer | its readers |
//! |---|---|---|
//! | **end**: one for each queue pair; its state, its `attention`, the position `taken`, the number of receives posted, and a ring of records (`shared/end`, `shared/ring`) | the owner of the queue pair | the one process that the queue pair is connected to |
//! | **region table**: one for each device; key, rights, address and segment of each region (`shared/table`) | the device | peers of this user |
//! | **memory**: one for each [`HostMemory::shared`](super::HostMemory::shared), whatever is registered in it | its process | peers of this user |
//!
//! Each is a memfd with seals: its length can't change, and no process can make another writable mapping of
//! it. The device checks the kind and the seals of each descriptor of a peer before it maps the descriptor.
//! It loads each value of a peer once, and uses it as an index only after a check. The copies of memory that
//! a peer may be writing are in assembly, because Rust defines no others.
//!
//! A peer of this **user** has the user, the user namespace and the pid namespace of this process, and could
//! trace this process, or the user trusts it. Every other peer is **untrusted** (`peers/level`). An untrusted
//! peer maps no table and no memory, only the end. A connection is as strict as its stricter end.
//!
//! # The way of a request
//! - **Send** and **WRITE**: `post_send` writes a record into the ring of its own end. The peer finds the
//!   record in a poll, checks it, and carries it out: it stores the bytes in its own memory, and moves
//!   `taken` on. From this position the sender knows that the request is done. A record of up to 24 bytes of
//!   payload is one cache line.
//! - **From 8 KiB on**, if the peer has mapped the memory, the record has the addresses of the bytes instead
//!   of the bytes, and the peer copies the bytes from there (`queue_pair/pulls`). Otherwise the bytes go
//!   through the ring, in records of up to 32 KiB.
//! - **READ**: if this process has mapped the memory, it looks up the key in the peer's table, copies the
//!   bytes, and checks again. Otherwise it sends a record with the request, and the peer sends the bytes
//!   through its own ring.
//! - A request waits in the send queue while the ring is full, while the peer has no receive posted, or until
//!   the peer is connected.
//!
//! Mapping is not a part of any request. The first request that could use a memory sends its descriptor to
//! the peer's device, without a wait. The device's thread there maps the memory within its bounds, and
//! confirms (`peers/segments`). Until then, the bytes go through the ring.
//!
//! # Wake-ups
//! An end shows in its `attention` what its owner wants to be woken for. Only the owner writes this word, so
//! a peer can't switch off the wake-ups of another one. The other side checks the word after it has stored
//! news: at once, but without a fence, and once more, with a fence, in its next poll that finds nothing else
//! to do (its *debt*). So a message costs no fence, and no wake-up is lost.
//!
//! - A thread that sleeps in a completion queue gets a message on a socket. Each peer process has a socket of
//!   its own for each queue.
//! - An end that no thread polls asks for its device's thread, which carries out the records.
//! - The sender's device checks every 4 ms whether the peer takes records. If the peer has taken none since
//!   the last check, the sender asks the peer's device to carry them out. So a record waits 4 to 8 ms at most
//!   for threads that do not poll.
//!
//! # Taking memory back
//! No call waits for a peer, because no peer writes memory of this process.
//!
//! - To take a **region** away, its owner clears the key in the table, and waits for its own threads that
//!   copy (the locks of its own queue pairs). A peer that was copying meanwhile finds that the key is gone,
//!   and discards the bytes. The memory can be used at once.
//! - To take a **queue pair** away, its owner shows the state Ended, with the same effect on peers.
//! - When the **memory** itself is dropped, the device tells the peers that have mapped it. Until a peer has
//!   unmapped it, or has ended, the memory stays charged to the budget.
//!
//! # Order of placement
//! [`places_in_order`](super::QueuePair::places_in_order) is true. The bytes of a request are stored after
//! all bytes of the requests before it on the queue pair. The last 8 bytes of a WRITE's destination, or of
//! the last segment of a READ, are stored after all its other bytes, if the destination is at least 8 bytes
//! long and ends at an address that is a multiple of 8. They are stored at once, by one 64-bit store with
//! release semantics. A thread that loads them with acquire semantics
//! ([`HostMemory::load_u64`](super::HostMemory::load_u64)) and finds the new value sees all the other bytes.
//! The other bytes come in any order. The order within a destination that is shorter, or ends elsewhere, is
//! not defined.
//!
//! # Differences from hardware
//! - The target's CPU carries out a WRITE: in a poll of its completion queue, in
//!   [`LocalQueuePair::progress`](super::LocalQueuePair::progress), or, if no thread does either, in the
//!   device's thread after 4 to 8 ms. A thread that polls a word of its memory, and not the queue, calls
//!   `progress`. A completion of a WRITE means that the bytes are in the target's memory.
//! - A WRITE makes an event at an armed completion queue of the target
//!   ([`need_no_events`](super::LocalQueuePair::need_no_events)).
//! - Receive completions stay in the queue pair until they are polled, so they cannot overrun a completion
//!   queue. Send completions can.
//! - Both processes run on one host. They find one another in their network namespace, or through a directory
//!   that both name (`RDMA_SOFT_DIR`). A device lets in processes of its user, or all that can open its
//!   socket (`RDMA_SOFT_PEERS`).
//!
//! # Trust
//! A peer can end its own connection, and nothing else. Against peers of this user that holds for every
//! fault, against untrusted peers also for malice. The book has the promise, line by line, with the tests and
//! the bounds: `docs/book/src/software-device.md`. The reasons for the design are in
//! `docs/book/src/design/0015-pull.md`.

mod biased_lock;
mod closer;
pub(crate) mod completion_queue;
mod context;
mod device;
mod domain;
mod events;
mod forked;
pub(crate) mod peers;
mod queue_pair;
pub(crate) mod reach;
pub(crate) mod shared;
mod system;
#[cfg(any(test, fuzzing))]
pub(crate) mod tests;

pub use context::open;
pub use device::{NAME, attributes};
