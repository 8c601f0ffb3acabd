//! Negotiation: from a TCP connection to a byte stream over RDMA or over TCP. See
//! [`wire::hello`](crate::wire::hello) for the messages.
//!
//! This module dials, listens, and lets both sides agree on a device. It does not move the connection's data.
//! Each side can decide on TCP: the client in `dial.rs`, the server in `listen.rs`. The reason is an
//! [`RdmaUnavailable`](super::RdmaUnavailable).

mod calibrate;
mod client_slots;
mod control_stream;
mod dial;
mod listen;
mod local_side;
mod reach;
#[cfg(test)]
#[path = "recorded_tests.rs"]
mod recorded;

pub use calibrate::calibrate;
pub use client_slots::{ClientSlot, ClientSlots, SlotLost, Source, TooManyWaiters};
pub use dial::{Dialer, connect_tcp};
pub use listen::Listener;
pub use reach::Devices;
