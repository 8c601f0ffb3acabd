//! The child processes of a cell, and the messages between them and this process.

pub(crate) mod child;
pub(crate) mod control;
pub(crate) mod session;
