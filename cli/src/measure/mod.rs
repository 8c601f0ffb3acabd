//! The kit that `compare` and `parameter-server` share.
//!
//! ```text
//!  payload    content that can be checked, and the reduction that receivers compute
//!  transport  connections over RDMA, listeners, HTTP/2 settings, encoding
//!  process    allocator, cores and runtime of a process
//!  machine    description, free memory and costs of the machine
//!  output     bars, HTML page, table, JSON, progress bar
//! ```
//!
//! The kit never imports a command.

pub(crate) mod machine;
pub(crate) mod output;
pub(crate) mod payload;
pub(crate) mod process;
pub(crate) mod transport;
