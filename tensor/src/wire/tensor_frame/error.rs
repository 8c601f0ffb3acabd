//! What can be wrong with a frame.

use super::{MAX_NAME, RequestId, VERSION};
use crate::wire::tensor_metadata::MetadataError;

/// What is wrong with a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// Shorter than a header.
    #[error("a frame of {0} bytes, shorter than its header")]
    Short(usize),
    /// It does not begin with the magic.
    #[error("not a frame of the tensor channel")]
    Magic,
    /// Another version than ours.
    #[error("a frame of version {0}, this end speaks {VERSION}")]
    Version(u8),
    /// No such kind.
    #[error("a frame of unknown kind {0}")]
    Kind(u8),
    /// The bytes that are always zero are not.
    #[error("a frame whose reserved bytes are not zero")]
    Reserved,
    /// Not as long as its header says, or longer than any frame.
    #[error("a frame of {received} bytes whose header promises a body of {promised}")]
    Length {
        /// Bytes received.
        received: usize,
        /// Body length in the header.
        promised: u32,
    },
    /// The body is not as long as its kind demands.
    #[error("a {kind} frame with a body of {length} bytes")]
    Body {
        /// What it is.
        kind: &'static str,
        /// Length of the body.
        length: usize,
    },
    /// A status that is none of gRPC's errors.
    #[error("a status with code {0}, which is no error of gRPC's")]
    Code(u32),
    /// The text of a status is not UTF-8.
    #[error("a status whose text is not UTF-8")]
    Text,
    /// An answer whose metadata is none.
    #[error("metadata in answer to {request_id}: {fault}")]
    Metadata {
        /// The request that it answers.
        request_id: RequestId,
        /// What is wrong with it.
        fault: MetadataError,
    },
    /// A request that says who asks, but not properly for what. It can be refused by a status; the link may live on.
    #[error("{request_id}: {fault}")]
    Request {
        /// The request.
        request_id: RequestId,
        /// What is wrong with it.
        fault: RequestFault,
    },
    /// A name that no frame shall carry.
    #[error("a name of {0} bytes, of which 1 to {MAX_NAME} are allowed")]
    Name(usize),
}

/// What is wrong with a request whose number is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RequestFault {
    /// Flags that nobody has defined.
    #[error("unknown flags {0:#04x}")]
    Flags(u8),
    /// The body ends too soon.
    #[error("a body of {0} bytes, which ends too soon")]
    Short(usize),
    /// The sink's metadata is none.
    #[error("the sink's metadata: {0}")]
    Metadata(MetadataError),
    /// The name is not UTF-8.
    #[error("a name that is not UTF-8")]
    Name,
}
