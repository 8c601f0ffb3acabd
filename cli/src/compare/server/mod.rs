//! The server process: its start by the client, and its services.

pub(crate) mod process;
pub(crate) mod serve;
pub(crate) mod start_report;
