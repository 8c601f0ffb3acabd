//! gRPC calls between RDMA peers without HTTP/2.
#![forbid(unsafe_code)]

mod calls;
mod server;

pub use calls::CallConfig;
pub use server::{RdmaServer, ServeError};
