//! What `compare` and `parameter-server` share.
//!
//! ```text
//!  consume           what receivers do with a payload: the setting `--consume`
//!  transport, http2  connections over RDMA, listeners, HTTP/2 settings, encoding
//!  child, process    child processes; allocator, container and limits of a process
//!  machine           description, free memory and costs of the machine
//!  report            table, JSON, progress bar
//! ```
//!
//! This module never imports a command. The payloads themselves are the package `tonic-rdma-payload`.

pub(crate) mod child;
pub(crate) mod consume;
pub(crate) mod settings;
pub(crate) mod machine;
pub(crate) mod process;
pub(crate) mod report;
pub(crate) mod transport;
