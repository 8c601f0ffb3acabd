//! What lies in memory that processes share, and how this process reads it without trust.

pub(super) mod bell;
pub(super) mod link;
pub(super) mod mapping;
pub(super) mod table;
