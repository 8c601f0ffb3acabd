//! tonic's transport: a connector for clients, an incoming stream for servers.
//!
//! Owns the fit between the [`endpoint`](crate::endpoint)'s byte streams and tonic, [`balance`], a channel over several
//! endpoints, and [`gather`], which spares tonic a copy of what is sent. Never looks at the bytes that the streams carry.
#![forbid(unsafe_code)]

pub(crate) mod balance;
mod connector;
pub mod gather;
mod incoming;
mod request;

pub use connector::RdmaConnector;
pub use incoming::RdmaIncoming;
pub use request::{RdmaRequestExt, RemoteAddresses, remote_addresses};
