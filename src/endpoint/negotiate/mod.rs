//! Negotiation: from a TCP connection to a byte stream over RDMA or over TCP. See [`wire::hello`](crate::wire::hello) for
//! the messages.
//!
//! This module dials, listens, and lets both ends agree on a device. It does not move the connection's data. Each end can decide on
//! TCP: the client in `dial.rs` and `client.rs`, the server in `server.rs`. The reason is an
//! [`RdmaUnavailable`](super::RdmaUnavailable).

mod blocking;
mod client;
mod control_stream;
mod device;
mod dial;
mod established;
mod identity;
mod listen;
mod places;
mod prepared;
mod server;
mod sniff;
mod tcp;

pub use device::Devices;
pub use dial::Dialer;
pub use listen::Listener;
pub use places::{Lost, Place, Places, Source, TooManyWait};
pub use tcp::connect_tcp;
