//! Control: the gRPC service by which devices find one another and give one another rights to memory.

pub(crate) mod accept;
pub(crate) mod caller;
pub(crate) mod conversions;
pub(crate) mod offered;
pub(crate) mod open;
pub(crate) mod peer_service;
pub(crate) mod proto;
pub(crate) mod service;
