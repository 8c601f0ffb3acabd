//! The transports: HTTP/2 settings, encoding, listeners, and connections over RDMA.

pub(crate) mod encode;
pub(crate) mod http2;
pub(crate) mod listener;
pub(crate) mod rdma;
