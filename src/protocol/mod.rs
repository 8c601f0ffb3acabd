//! The protocol between two queue pairs, sans-IO: no clock, no verbs, no executor.
//!
//! [`Connection`] is told what happened (`handle_*`), asked to do things (commands such as
//! [`send_eager`](Connection::send_eager)), and says what is to be done (`poll_*`). It owns no memory: receive slots,
//! reads and offered chunks are numbers, and the caller moves the bytes. Time comes in as an argument.
//!
//! ```text
//!  sender                                              receiver
//!  eager        ── header │ data ─────────────────▶    into the next receive slot; delivered; slot posted again
//!  rendezvous   ── RTS: header │ chunks ──────────▶
//!                  chunks' memory ◀── RDMA READ ───    many at once, delivered in order as each lands
//!  (frees them) ◀── reads done, in any header (ATS) ──
//! ```
//!
//! Each direction of a connection goes through these states by itself:
//!
//! | state | data may be sent | left by |
//! |---|---|---|
//! | open | yes | `close_write`: closing |
//! | closing | no; the Fin waits for a credit | Fin sent: closed |
//! | closed | no | |
//!
//! An abort, sent or received, ends both at once. Credits: every header tells the absolute count of receive slots ever
//! posted; an end that has sent that many messages waits. Some slots are kept back for control messages, and
//! acknowledgements flow whatever the application reads or writes, so neither direction can block the other. The book's
//! page on the protocol has the reasons.
#![forbid(unsafe_code)]

mod connection;
mod control;
mod inbound;
mod liveness;
mod outbound;
mod settings;
#[cfg(test)]
mod tests;
mod violation;

pub use connection::{Blocked, Connection, Event, SendError};
pub use control::{AbortCode, ControlMessage, MAX_CONTROL_BODY};
pub use inbound::{Finished, Part, ReadId, ReadRequest, SlotIndex};
pub use outbound::MAX_OFFERED;
pub use settings::{Settings, SettingsError};
pub use violation::Violation;

pub use crate::wire::{Chunk, MAX_CHUNKS};
