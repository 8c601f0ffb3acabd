//! The calls of one connection as a state machine without IO: no clock, no verbs, no executor.
//!
//! The owner of a [`Core`] reports what happened ([`receive`](Core::receive), [`landed`](Core::landed), …), gives commands of streams
//! (`open`, `send_data`, …), takes what arrived (`take_head`, `take_part`), and lets it [`transmit`](Core::transmit) over a [`Wire`].
//!
//! A call has two halves, one for each direction:
//!
//! | half | sent so far | left by |
//! |---|---|---|
//! | idle | nothing | HEAD (next: open) |
//! | open | HEAD, and DATA or OFFER | END (next: closed), TRAILERS (both halves closed) |
//! | closed | | |
//!
//! The server's END or TRAILERS, and a RESET of either end, close the call. Frames of a closed call that were under way are read and
//! dropped; what they offer is given back.
//!
//! **Flow control.** Each stream has a window of *cost*: a part of the body costs its length and a fixed number of bytes, so that many
//! small parts can't fill the memory of the receiver. DATA stays within the window. An OFFER needs some window left and may overdraw it,
//! because its bytes stay at the sender until the receiver reads them.
//!
//! **Turns.** Streams take turns, one message's worth at a time. Streams with much to send wait in a queue of their own, which gets
//! one turn after each message for the others. So a small call never waits behind a large one.

mod commands;
mod landing;
mod outbound;
mod receive;
mod state;
mod stream;
mod wire;

#[cfg(test)]
mod tests;
mod transmit;

pub(crate) use self::commands::OpenError;
pub(super) use self::state::{Core, LandedBytes, Role};
pub(crate) use self::stream::Part;
pub(super) use self::stream::{Parts, StreamKey};
pub(super) use self::wire::{FetchRefused, Wire};
