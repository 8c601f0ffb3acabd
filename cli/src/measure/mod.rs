//! The kit that `compare` and `parameter-server` share.

pub(crate) mod machine;
pub(crate) mod output;
pub(crate) mod payload;
pub(crate) mod process;
pub(crate) mod transport;
