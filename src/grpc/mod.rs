//! gRPC calls between RDMA peers without HTTP/2.
//!
//! This layer has the channel and the server that generated code takes. A peer that does not know native
//! calls gets HTTP/2, over the same connection.
//!
//! ```text
//!  client, server   tonic's types: a channel, a server
//!  session          the calls of one connection: handles with wakers; the bridge to the endpoint
//!  core             the state machine of these calls, without IO
//!  frame            the format of frames and of headers
//! ```
#![forbid(unsafe_code)]

mod calls;
mod client;
mod core;
mod fault;
mod frame;
mod outgoing;
mod server;
mod session;
pub(crate) mod times;

pub(crate) use crate::transport::gather::landed;
pub use calls::CallConfig;
pub use client::{RdmaChannel, RdmaChannelBuilder, RdmaResponseFuture};
pub use server::{GrpcService, RdmaRoutes, RdmaServer, status_of_http};
