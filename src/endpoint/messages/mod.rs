//! Connections that carry messages instead of a byte stream, for native calls.
//!
//! This module has the interface between such a connection and the session above it. A [`MessageEndpoint`] sends and receives
//! messages; each one is an eager message of the [protocol](crate::protocol), so it is at most as long as a receive buffer of the peer.
//! Long content goes by *fetches*: a message says where the content lies, and the peer's handler asks its connection to
//! read it ([`Sender::fetch`]). Fetches land in any order, and messages do not wait for them.
//!
//! ```text
//!  session ── drive ──▶ MessageEndpoint ── transmit ──▶ handler ── send, fetch ──▶ Sender      (under the connection's lock)
//!  poller ── completions ──▶ connection ── receive, landed ──▶ handler ── wakers, runs ──▶ Aftermath
//!                                                                                          (carried out without a lock)
//! ```
//!
//! The connection holds its handler until the connection has ended, and a session usually holds its endpoint. So the session's last
//! user must call [`MessageEndpoint::close`] or [`MessageEndpoint::abort`]; both let the connection end, which frees the handler.

mod endpoint;
mod fetches;
pub(in crate::endpoint) mod handler;
mod memory;
mod sender;
pub(in crate::endpoint) mod settings;
#[cfg(test)]
mod tests;
pub(in crate::endpoint) mod traffic;

pub(crate) use endpoint::{MessageEndpoint, Negotiated};
pub(crate) use handler::MessageHandler;
#[cfg(test)]
pub(crate) use sender::Exposed;
pub(crate) use sender::{FetchError, Piece, Sender};
pub(crate) use settings::MessageSettings;
