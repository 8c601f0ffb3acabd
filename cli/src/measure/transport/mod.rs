//! The transports: HTTP/2 settings, encoding, listeners, channels, and connections over RDMA.

pub(crate) mod calls;
pub(crate) mod encode;
pub(crate) mod http2;
pub(crate) mod listener;
pub(crate) mod rdma;
