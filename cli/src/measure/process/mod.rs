//! The processes of a run: allocator, container, cores, limits and runtime.

pub(crate) mod allocator;
pub(crate) mod container;
pub(crate) mod cores;
pub(crate) mod limits;
pub(crate) mod runtime;
