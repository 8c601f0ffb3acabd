//! The structures in memory that processes share. Each segment has one writer, its maker; its one peer maps
//! the segment only for reading. This process checks every value that a peer can write.

pub(crate) mod attention;
pub(crate) mod bias;
pub(crate) mod end;
pub(super) mod mapping;
pub(crate) mod platform;
pub(crate) mod ring;
pub(crate) mod table;
