//! gRPC calls between RDMA peers without HTTP/2.
//!
//! This floor has the channel and the server that generated code takes. A peer that does not know native calls gets HTTP/2, over the
//! same connection.
#![forbid(unsafe_code)]

mod calls;
mod client;
pub(crate) mod landed;
mod server;

pub use calls::CallConfig;
pub use client::{ChannelError, RdmaChannel, RdmaChannelBuilder, RdmaResponseFuture};
pub use server::{RdmaServer, ServeError};
