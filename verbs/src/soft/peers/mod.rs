//! The exchange of descriptors between processes, and the detection of dead peers.

pub(super) mod address;
mod asking;
pub(super) mod clients;
pub(super) mod level;
pub(super) mod local;
pub(super) mod message;
pub(super) mod offers;
pub(super) mod peer;
pub(crate) mod ping;
pub(super) mod policy;
pub(super) mod received;
pub(super) mod segments;
pub(super) mod service;
pub(super) mod sockets;
