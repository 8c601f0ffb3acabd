//! gRPC calls between RDMA peers without HTTP/2.
//!
//! This floor has the channel and the server that generated code takes. A peer that does not know native calls gets HTTP/2, over the
//! same connection.

mod client;

pub use client::{ChannelError, RdmaChannel, RdmaChannelBuilder, RdmaResponseFuture};
