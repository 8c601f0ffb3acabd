//! Errors of requests, and violations in a peer's answers.

use super::RequestId;
use crate::wire::tensor_frame::MAX_NAME;

/// A request that was not sent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// No request can carry the name.
    #[error("the name of the tensor has {length} bytes, and 1 to {MAX_NAME} are allowed")]
    Name {
        /// Length of the name, in bytes.
        length: usize,
    },
    /// Too many requests wait for an answer.
    #[error("{pending} requests wait for an answer already, and no more may (max_requests)")]
    TooMany {
        /// Number of requests that wait.
        pending: usize,
    },
    /// The link has ended, for this reason.
    #[error("the link has ended: {0}")]
    Gone(String),
}

/// An answer that breaks the protocol. It ends the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// No request with this number waits for an answer.
    #[error("a {frame} frame answers {request_id}, which does not wait for an answer")]
    Unknown {
        /// The frame's kind.
        frame: &'static str,
        /// The request that the frame answers.
        request_id: RequestId,
    },
    /// The request can't have this answer in its state.
    #[error("a {frame} frame answers {request_id}, which is {state}")]
    Unexpected {
        /// The frame's kind.
        frame: &'static str,
        /// The request that the frame answers.
        request_id: RequestId,
        /// State of the request.
        state: &'static str,
    },
    /// A checksum is missing, or comes although the request did not ask for one.
    #[error("the answer to {request_id} comes {}", if *.wanted { "without the checksum that it asked for" } else { "with a checksum that it did not ask for" })]
    Checksum {
        /// The request.
        request_id: RequestId,
        /// Whether the request asked for a checksum.
        wanted: bool,
    },
}
