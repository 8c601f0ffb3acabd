//! The format of native calls: frames, and the compact form of heads.
//!
//! A message is a sequence of frames. A frame is a header of 12 bytes and a payload, all numbers little-endian:
//!
//! ```text
//!  0     1      2      4        8        12
//!  kind  flags  extra  stream   length   payload …
//! ```
//!
//! | kind | sent by | payload |
//! |---|---|---|
//! | SETTINGS | both, first frame of a connection | [limits](Limits) of the sender |
//! | HEAD | both | a [head](head), maybe in several frames |
//! | DATA | both | bytes of the body |
//! | OFFER | both | where bytes of the body lie ([`Offer`]) |
//! | TAKEN | both | offers whose memory is free again, 8 bytes each |
//! | TRAILERS | server | as HEAD; ends the call |
//! | RESET | both | none; `extra` is the [code](ResetCode); ends the call |
//! | CREDIT | both | 8 bytes: the cost of further bytes that the peer may send |
//! | GOAWAY | both | text; `stream` is the last stream that is carried out |
//!
//! Nothing here has state but the tables of heads ([`head`]).

mod frames;
pub(super) mod head;
#[cfg(test)]
mod tests;

pub(super) use frames::CallViolation;
pub(super) use frames::Limits;
pub use frames::ResetCode;
pub(super) use frames::{END, FrameHeader, Frames, Kind, MESSAGE, MORE, Payload};
pub(super) use frames::{Offer, OfferPiece};
pub(crate) use head::RequestHead;
