//! Faults of frames.

use super::{MAX_NAME, RequestId, VERSION};
use crate::wire::tensor_metadata::MetadataError;

/// A fault of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// The frame is shorter than a header.
    #[error("a frame of {0} bytes, shorter than its header")]
    Short(usize),
    /// The frame does not begin with the magic bytes.
    #[error("not a frame of the tensor channel")]
    Magic,
    /// This end does not know the version.
    #[error("a frame of version {0}, but this end knows version {VERSION}")]
    Version(u8),
    /// There is no such kind of frame.
    #[error("a frame of unknown kind {0}")]
    Kind(u8),
    /// The reserved bytes are not zero.
    #[error("a frame whose reserved bytes are not zero")]
    Reserved,
    /// The frame is not as long as its header states, or longer than any frame.
    #[error("a frame of {received} bytes whose header states a body of {promised}")]
    Length {
        /// Number of bytes received.
        received: usize,
        /// Length of the body, as the header states it.
        promised: u32,
    },
    /// The body does not have the length that its kind needs.
    #[error("a {kind} frame with a body of {length} bytes")]
    Body {
        /// Kind of the frame.
        kind: &'static str,
        /// Length of the body.
        length: usize,
    },
    /// The code of a status is no error of gRPC.
    #[error("a status with code {0}, which is no error of gRPC")]
    Code(u32),
    /// The text of a status is not UTF-8.
    #[error("a status whose text is not UTF-8")]
    Text,
    /// The metadata in an answer is malformed.
    #[error("the metadata in the answer to {request_id}: {fault}")]
    Metadata {
        /// The request that the frame answers.
        request_id: RequestId,
        /// The fault.
        fault: MetadataError,
    },
    /// A request has a number, but is malformed otherwise.
    #[error("{request_id}: {fault}")]
    Request {
        /// Number of the request.
        request_id: RequestId,
        /// The fault.
        fault: RequestFault,
    },
    /// No frame may carry the name.
    #[error("the name of the tensor has {0} bytes, and 1 to {MAX_NAME} are allowed")]
    Name(usize),
}

/// A fault of a request whose number is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RequestFault {
    /// The request has unknown flags.
    #[error("unknown flags {0:#04x}")]
    Flags(u8),
    /// The body ends too soon.
    #[error("a body of {0} bytes, which ends too soon")]
    Short(usize),
    /// The metadata of the sink is malformed.
    #[error("the sink's metadata: {0}")]
    Metadata(MetadataError),
    /// The name is not UTF-8.
    #[error("a name that is not UTF-8")]
    Name,
}
