//! The protocol between two queue pairs, as a state machine without IO: no clock, no verbs, no executor.
//!
//! The caller of a [`Connection`] reports what happened (`handle_*`), gives commands (such as
//! [`send_eager`](Connection::send_eager)), and asks what to do next (`poll_*`). A connection owns no memory:
//! receive slots, reads and offered chunks are numbers, and the caller moves the bytes. The caller passes the
//! time as an argument.
//!
//! ```text
//!  sender                                              receiver
//!  eager        ── header │ data ─────────────────▶    into the next receive slot; delivered; slot posted again
//!  rendezvous   ── RTS: header │ chunks ──────────▶
//!                  chunks' memory ◀── RDMA READ ───    many at once, delivered in order as each lands
//!  (frees them) ◀── reads done, in any header (ATS) ──
//! ```
//!
//! Each direction of a connection has these states, independent of the other direction:
//!
//! | state | data may be sent | left by |
//! |---|---|---|
//! | open | yes | `close_write` (next: closing) |
//! | closing | no; the Fin waits for a credit | Fin sent (next: closed) |
//! | closed | no | |
//!
//! An abort, sent or received, ends both directions at once.
//!
//! Credits: every header has the absolute count of receive slots posted since the start; a side that has sent
//! that many messages waits. Some slots are kept for control messages. Acknowledgements are sent even if the
//! application neither reads nor writes. So neither direction can block the other. The book's page on the
//! protocol has the reasons.

mod connection;
mod directions;
mod settings;
#[cfg(test)]
mod tests;
mod violation;

pub use connection::{Blocked, Connection, Event, SendError};
pub use directions::{MAX_UNREAD_CHUNKS, Part, ReadId, ReadRequest, SlotIndex};
pub use settings::{AbortCode, ControlMessage, MAX_CONTROL_BODY, Settings, SettingsError};
pub use violation::ProtocolViolation;

pub(crate) use crate::wire::{Chunk, MAX_CHUNKS};
