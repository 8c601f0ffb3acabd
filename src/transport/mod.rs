//! tonic's transport: a connector for clients, an incoming stream for servers.
//!
//! This floor has the connector and the listener that tonic takes, a channel over several endpoints ([`balance`]), and the codec that sends
//! large fields without a copy ([`gather`]). It does not look at the bytes that the [`endpoint`](crate::endpoint)'s streams carry.

pub(crate) mod balance;
mod connector;
pub mod gather;
mod incoming;
pub(crate) mod request;

pub use connector::RdmaConnector;
pub(crate) use connector::{host_and_port, is_tls};
pub use incoming::RdmaIncoming;
pub use request::{RdmaRequestExt, RemoteAddresses, remote_addresses};
