//! The processes of a run: allocator, cores and runtime.

pub(crate) mod allocator;
pub(crate) mod cores;
pub(crate) mod runtime;
