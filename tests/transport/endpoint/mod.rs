//! The byte stream, its negotiation and its polling, and tonic over it.

mod addresses;
mod blocking;
mod fairness;
mod hang;
mod isolation;
pub(crate) mod logs;
mod negotiation;
mod observability;
mod send_in_place;
mod shared_receive;
mod stream;
mod tonic_over_rdma;
mod tuning;
mod writer_dies;
