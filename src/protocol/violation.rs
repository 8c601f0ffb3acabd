//! The ways in which a peer can violate the protocol.

use crate::wire::{ChunkError, HeaderError};

/// A message that violates the protocol. It ends the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProtocolViolation {
    /// The header is invalid.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// The list of chunks is invalid.
    #[error(transparent)]
    Chunks(#[from] ChunkError),
    /// The message is shorter than a header, or its length is not the length in its header.
    #[error("a message of {received} bytes whose header promises a body of {promised}")]
    Length {
        /// Bytes received.
        received: usize,
        /// The body length in the header.
        promised: u32,
    },
    /// The message is not the next one.
    #[error("message {seen} where {expected} comes next")]
    Sequence {
        /// The number of the message.
        seen: u64,
        /// The number of the next message.
        expected: u64,
    },
    /// The count of credits went down, or is larger than possible.
    #[error("ready to receive {seen} messages, which can only be {least} to {most}")]
    CreditsGranted {
        /// The count in the header.
        seen: u64,
        /// The count in the header before.
        least: u64,
        /// The largest possible count: one for each message sent, and one for each slot that there can be.
        most: u64,
    },
    /// The peer had no credit for the message.
    #[error("a message beyond the {granted} that were granted")]
    CreditsExceeded {
        /// The number of messages that the peer may send since the start.
        granted: u64,
    },
    /// The peer returned more credits than it can have.
    #[error("{seen} credits given back, of which there can be {most}")]
    CreditsReturned {
        /// The number of credits returned.
        seen: u32,
        /// The number of credits that the peer has beyond those at the start.
        most: u64,
    },
    /// The count of finished reads went down, or is larger than the count of offers.
    #[error("{seen} chunks read, which can only be {least} to {most}")]
    ChunksRead {
        /// The count in the header.
        seen: u64,
        /// The count in the header before.
        least: u64,
        /// The count of chunks offered.
        most: u64,
    },
    /// Data arrived after the end of the stream.
    #[error("data after the end of the stream")]
    DataAfterFin,
    /// The stream ended a second time.
    #[error("the stream ended twice")]
    SecondFin,
    /// More chunks were offered than may wait at a time.
    #[error("{0} chunks offered and not read yet")]
    TooManyChunks(u64),
    /// A chunk is longer than agreed.
    #[error("a chunk of {length} bytes, of which {most} are allowed")]
    ChunkTooLong {
        /// The length of the chunk, in bytes.
        length: u64,
        /// The limit, in bytes.
        most: u64,
    },
    /// The body of a control message has the wrong length for its kind.
    #[error("a control message with a body of {0} bytes")]
    ControlBody(usize),
    /// A pong answers a ping that was not sent.
    #[error("an answer to a ping that was not sent")]
    UnexpectedPong,
    /// An offer by rendezvous came on a connection of native calls, which have none.
    #[error("an offer by rendezvous on a connection of native calls")]
    Rendezvous,
}
