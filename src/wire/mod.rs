//! Wire formats: the headers of messages between queue pairs ([`Header`]), and the messages of the negotiation ([`hello`]).
//!
//! Decoding is total: any bytes give a value, or an error that names the fault. Headers are decoded without an allocation. All numbers are
//! little-endian. This floor keeps no state, and does not know what a message means.
//!
//! A message is one Send:
//!
//! ```text
//!  0        1        2        4              8                16               24               32
//!  ├────────┼────────┼────────┼──────────────┼────────────────┼────────────────┼────────────────┼── body ──
//!  │ kind   │ flags  │ zero   │ body length  │ sequence       │ granted        │ reads done     │
//! ```

mod chunk;
mod header;
pub mod hello;

pub use chunk::{Chunk, ChunkError, MAX_CHUNKS};
pub use header::{Header, HeaderError, MessageKind};
