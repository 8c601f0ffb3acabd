//! tonic's transport: a connector for clients, an incoming stream for servers.
//!
//! Owns the connector and the listener that tonic takes, [`balance`], a channel over several endpoints, and [`gather`], which saves tonic
//! a copy of large fields. Never looks at the bytes that the [`endpoint`](crate::endpoint)'s streams carry.

pub(crate) mod balance;
mod connector;
pub mod gather;
mod incoming;
mod request;

pub use connector::RdmaConnector;
pub use incoming::RdmaIncoming;
pub use request::{RdmaRequestExt, RemoteAddresses, remote_addresses};
