//! The modes: how each carries the payloads of a cell.
//!
//! [`caller::Caller`] is the client half of every mode. The server halves are in `grpc` and `placement`; `memcpy` has
//! none. This folder never decides when an operation begins: `turns` does.

pub(crate) mod call_error;
pub(crate) mod caller;
pub(crate) mod grpc;
mod memcpy;
pub(crate) mod mode;
pub(crate) mod placement;
