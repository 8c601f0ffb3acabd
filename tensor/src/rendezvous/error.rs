//! What can go wrong in asking, and what a peer can do wrong in answering.

use tonic::Code;

use super::RequestId;
use crate::wire::tensor_frame::MAX_NAME;

/// Why nothing was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// A name that no request can carry.
    #[error("a tensor with a name of {length} bytes, of which 1 to {MAX_NAME} are allowed")]
    Name {
        /// Its length.
        length: usize,
    },
    /// Too much at a time.
    #[error("{pending} requests have no answer yet, which is as many as may (max_requests)")]
    TooMany {
        /// How many there are.
        pending: usize,
    },
    /// The link is gone.
    #[error("the link has ended: {0}")]
    Gone(String),
}

impl From<RequestError> for tonic::Status {
    fn from(error: RequestError) -> Self {
        let code = match error {
            RequestError::Name { .. } => Code::InvalidArgument,
            RequestError::TooMany { .. } => Code::ResourceExhausted,
            RequestError::Gone(_) => Code::Unavailable,
        };
        Self::new(code, error.to_string())
    }
}

/// An answer that the peer may not have given. It ends the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// To nothing that was asked, or that was answered before.
    #[error("a {frame} frame in answer to {request_id}, which is none that waits for an answer")]
    Unknown {
        /// The frame's kind.
        frame: &'static str,
        /// What it answers.
        request_id: RequestId,
    },
    /// Not an answer to what was asked.
    #[error("a {frame} frame in answer to {request_id}, which is {state}")]
    Unexpected {
        /// The frame's kind.
        frame: &'static str,
        /// What it answers.
        request_id: RequestId,
        /// Where the request is.
        state: &'static str,
    },
    /// A checksum that was not wanted, or none although one was.
    #[error("{request_id} was answered {}", if *.wanted { "without the checksum that it wanted" } else { "with a checksum, unasked" })]
    Checksum {
        /// The request.
        request_id: RequestId,
        /// Whether it wanted one.
        wanted: bool,
    },
}
