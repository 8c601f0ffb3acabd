//! How descriptors get from one process to another, and how a process learns that a peer died.

pub(super) mod address;
pub(super) mod local;
pub(super) mod message;
pub(super) mod peer;
pub(super) mod service;
