//! The structures in memory that processes share. Each segment has one writer, its maker; its one peer maps the segment only for
//! reading. This process checks every value that a peer can write.

pub(super) mod attention;
pub(super) mod end;
pub(super) mod mapping;
pub(super) mod platform;
pub(super) mod ring;
pub(super) mod table;
