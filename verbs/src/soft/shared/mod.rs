//! The structures in memory that processes share. This process checks every value that a peer can write.

pub(super) mod bell;
pub(super) mod link;
pub(super) mod mapping;
pub(super) mod table;
