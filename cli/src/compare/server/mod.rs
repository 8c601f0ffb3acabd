//! The server process: how the client starts it, and what it serves.

pub(crate) mod process;
pub(crate) mod serve;
pub(crate) mod start_report;
