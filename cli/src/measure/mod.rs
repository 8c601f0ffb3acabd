//! What `compare` and `parameter-server` share.
//!
//! ```text
//!  settings   HTTP/2 windows and frames, and what receivers do with a payload
//!  transport  connections over RDMA, listeners, encoding
//!  process    child processes; allocator, container and limits of a process
//!  machine    description, free memory and costs of the machine
//!  recorder   a recorder of metrics
//!  report     table, JSON, progress bar
//! ```
//!
//! This module never imports a command. The payloads themselves are `tonic_rdma_commands::payload`.

pub(crate) mod machine;
pub(crate) mod process;
pub(crate) mod recorder;
pub(crate) mod report;
pub(crate) mod settings;
pub(crate) mod transport;
