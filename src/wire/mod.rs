//! Wire formats: message headers between queue pairs ([`Header`]), the hello that negotiation goes by ([`hello`]), what
//! a tensor is ([`tensor_metadata`]), and the messages beside one-sided operations ([`tensor_frame`]).
//!
//! Decoding is total (any bytes give a value or an error that names the fault) and allocation-free for headers.
//! Everything is little-endian. Never: keeps state, knows what a message means.
//!
//! A message is one Send:
//!
//! ```text
//!  0        1        2        4              8                16               24               32
//!  ├────────┼────────┼────────┼──────────────┼────────────────┼────────────────┼────────────────┼── body ──
//!  │ kind   │ flags  │ zero   │ body length  │ sequence       │ granted        │ reads done     │
//! ```
#![forbid(unsafe_code)]

mod chunk;
mod header;
pub mod hello;

pub use chunk::{Chunk, ChunkError, MAX_CHUNKS};
pub use header::{Header, HeaderError, Kind};
