//! Memory that a device has registered, that peers may read, and that is used again.
//!
//! ```text
//!   MemoryPool ── take(bytes) ──▶ Memory      bytes, and the number by which peers read them
//!       ▲                           │
//!       └────────── drop ───────────┘         Buffer<T>: a Memory as elements, for users
//! ```
//!
//! A dropped memory stays on offer to the peers, so the next one of its size class needs no registration and no call of a peer.

mod buffer;
mod pool;

pub use buffer::Buffer;
pub(crate) use pool::{Memory, MemoryPool, name_of};
