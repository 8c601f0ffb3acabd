//! The ways in which a peer can break the rules of native calls.

use super::header::Kind;

/// A message that breaks the rules of native calls. It ends the connection.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(in crate::grpc) enum CallViolation {
    #[error("a frame of the unknown kind {0}")]
    UnknownKind(u8),
    #[error("flags {flags:#x} on a frame of the kind {kind:?}")]
    Flags { kind: Kind, flags: u8 },
    #[error("{left} bytes where a frame needs {needed}")]
    Truncated { needed: usize, left: usize },
    #[error("a message without frames")]
    Empty,
    #[error("{0:?} before the settings")]
    BeforeSettings(Kind),
    #[error("settings a second time")]
    SecondSettings,
    #[error("a {0:?} frame, which only a server sends, from a client")]
    ServersOnly(Kind),
    #[error("{seen:?} of stream {stream} inside a head of stream {open}")]
    Interleaved { seen: Kind, stream: u32, open: u32 },
    #[error("{kind:?} for stream {stream}, which was never opened")]
    UnknownStream { kind: Kind, stream: u32 },
    #[error("stream {stream} opened after stream {last}")]
    StreamOrder { stream: u32, last: u32 },
    #[error("more than {0} streams at a time")]
    TooManyStreams(u32),
    #[error("{kind:?} of stream {stream} after the end of its sender's half")]
    AfterEnd { kind: Kind, stream: u32 },
    #[error("{kind:?} of stream {stream} where a head comes first")]
    BeforeHead { kind: Kind, stream: u32 },
    #[error("a second head of stream {0}")]
    SecondHead(u32),
    #[error("a head: {0}")]
    Head(&'static str),
    #[error("a head of more than {0} bytes")]
    HeadTooLong(usize),
    #[error("a head refers to entry {0} of a table, which is not there or is of another kind")]
    TableEntry(u16),
    #[error("a table of heads of more than {entries} entries or {bytes} bytes")]
    TableFull { entries: usize, bytes: usize },
    #[error("stream {stream} sent bytes of cost {cost}, of which {left} are left")]
    Overdrawn { stream: u32, cost: u64, left: i64 },
    #[error("credit of {0} bytes, which is too large")]
    Credit(u64),
    #[error("a {kind:?} frame of {length} bytes")]
    Length { kind: Kind, length: usize },
    #[error("an offer: {0}")]
    Offer(&'static str),
    #[error("offer {seen} where {expected} comes next")]
    OfferOrder { seen: u64, expected: u64 },
    #[error("offer {0} is taken, which is not open")]
    Taken(u64),
    #[error("more than {0} answers wait, because the peer takes no messages")]
    Unread(usize),
    #[error("a going away with the last stream {seen} after {before}")]
    GoAwayOrder { seen: u32, before: u32 },
}
