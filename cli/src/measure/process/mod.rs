//! The processes of a run: allocator, cores, limits and runtime.

pub(crate) mod allocator;
pub(crate) mod cores;
pub(crate) mod limits;
pub(crate) mod runtime;
