//! The machine that a run is made on: its name, its free memory, and the costs of its basic operations.

pub(crate) mod costs;
pub(crate) mod description;
pub(crate) mod memory;
