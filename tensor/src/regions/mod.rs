//! Regions: memory that peers may read or write at any offset.

pub(crate) mod exported;
pub(crate) mod published;
pub(crate) mod remote;
pub(crate) mod rights;
