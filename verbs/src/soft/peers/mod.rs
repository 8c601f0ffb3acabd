//! The exchange of descriptors between processes, and the detection of dead peers.

mod asking;
pub(super) mod clients;
pub(super) mod level;
pub(crate) mod message;
pub(super) mod peer;
pub(crate) mod ping;
pub(super) mod received;
pub(super) mod segments;
pub(super) mod service;
pub(super) mod sockets;
