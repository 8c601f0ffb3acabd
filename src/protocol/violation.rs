//! What a peer can do wrong.

use crate::wire::{ChunkError, HeaderError};

/// A message that the peer may not have sent. It ends the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// Its header is none.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// Its list of chunks is none.
    #[error(transparent)]
    Chunks(#[from] ChunkError),
    /// Shorter than a header, or not as long as its header says.
    #[error("a message of {received} bytes whose header promises a body of {promised}")]
    Length {
        /// Bytes received.
        received: usize,
        /// Body length in the header.
        promised: u32,
    },
    /// Not the message that comes next.
    #[error("message {seen} where {expected} comes next")]
    Sequence {
        /// Its number.
        seen: u64,
        /// The number that it should have.
        expected: u64,
    },
    /// A count of credits that went down, or more credits than there can be.
    #[error("ready to receive {seen} messages, which can only be {least} to {most}")]
    Granted {
        /// What the header says.
        seen: u64,
        /// What it said before.
        least: u64,
        /// One for every message sent to it, and as many as there can be slots.
        most: u64,
    },
    /// A message for which the peer has no credit.
    #[error("a message beyond the {granted} that were granted")]
    Overdrawn {
        /// Messages that the peer was told it may ever send.
        granted: u64,
    },
    /// More credits given back than there were to spare.
    #[error("{seen} credits given back, of which there can be {most}")]
    Returned {
        /// How many.
        seen: u32,
        /// How many there are beyond those of the start.
        most: u64,
    },
    /// A count of finished reads that went down, or more than were offered.
    #[error("{seen} chunks read, which can only be {least} to {most}")]
    ReadsDone {
        /// What the header says.
        seen: u64,
        /// What it said before.
        least: u64,
        /// Chunks offered.
        most: u64,
    },
    /// Data after its end.
    #[error("data after the end of the stream")]
    DataAfterFin,
    /// A second end.
    #[error("the stream ended twice")]
    SecondFin,
    /// More chunks offered than may wait at a time.
    #[error("{0} chunks offered and not read yet")]
    TooManyOffers(u64),
    /// A chunk longer than agreed.
    #[error("a chunk of {length} bytes, of which {most} are allowed")]
    ChunkTooLong {
        /// Its length.
        length: u64,
        /// The limit.
        most: u64,
    },
    /// A control message whose body is not as long as its kind demands.
    #[error("a control message with a body of {0} bytes")]
    ControlBody(usize),
    /// A pong to no ping.
    #[error("an answer to a ping that was not sent")]
    UnexpectedPong,
}
