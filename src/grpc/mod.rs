//! gRPC calls between two RDMA peers, without HTTP/2.
//!
//! ```text
//!  client, server   tonic's types: a channel, a server (other files of this module)
//!  session          one connection: its streams, as handles with wakers; the bridge to the endpoint
//!  core             the state machine of all calls of a connection, without IO
//!  frame            the format of frames and of heads
//! ```
#![forbid(unsafe_code)]

mod config;
mod session;

pub use config::CallConfig;
