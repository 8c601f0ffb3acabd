//! The modes: how each carries the payloads of a cell.

pub(crate) mod call_error;
pub(crate) mod caller;
pub(crate) mod grpc;
mod memcpy;
pub(crate) mod mode;
pub(crate) mod placement;
