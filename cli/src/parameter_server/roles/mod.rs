//! The two roles of a child process: server and worker.

pub(crate) mod server;
pub(crate) mod worker;
