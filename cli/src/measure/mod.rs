//! The kit that `compare` and `parameter-server` share.
//!
//! ```text
//!  consume    what receivers do with a payload: the setting `--consume`
//!  transport  connections over RDMA, listeners, HTTP/2 settings, encoding
//!  process    allocator, cores and runtime of a process
//!  machine    description, free memory and costs of the machine
//!  output     bars, HTML page, table, JSON, progress bar
//! ```
//!
//! The kit never imports a command. The payloads themselves are the package `tonic-rdma-payload`.

pub(crate) mod consume;
pub(crate) mod machine;
pub(crate) mod output;
pub(crate) mod process;
pub(crate) mod transport;
