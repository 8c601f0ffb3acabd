//! Messages of the two ends. A message owns its content until it is sent.

use std::fmt;
use std::sync::Arc;

use tonic::Code;

use super::{RequestId, Sink, TensorRequest};
use crate::wire::tensor_frame::{Frame, MAX_NAME};
use crate::wire::tensor_metadata::WireMetadata;

/// Number of a link to a peer. The driver gives each number once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerId(pub u64);

/// Name and step of a tensor.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct TensorKey {
    pub(super) name: Arc<str>,
    pub(super) step: u64,
}

impl fmt::Display for TensorKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tensor {:?} of step {}", self.name, self.step)
    }
}

/// Returns whether a frame can carry `name`.
pub(super) fn is_name(name: &str) -> bool {
    (1..=MAX_NAME).contains(&name.len())
}

/// The reason why a request gets no tensor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct Failure {
    /// Kind of failure.
    pub code: Code,
    /// Description. A frame has room for some 2 000 bytes; a longer text is cut.
    pub text: String,
}

impl Failure {
    /// Makes a failure.
    pub fn new(code: Code, text: impl Into<String>) -> Self {
        Self { code, text: text.into() }
    }

    /// Makes the failure of a request that the requester cancelled.
    pub(super) fn cancelled() -> Self {
        Self::new(Code::Cancelled, "cancelled by the requester")
    }
}

/// A frame of the rendezvous before it is sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// See [`Frame::Request`].
    Request {
        /// Number of the request.
        request_id: RequestId,
        /// Name of the tensor.
        name: Arc<str>,
        /// Step of the tensor.
        step: u64,
        /// Memory to write the tensor to.
        sink: Option<Sink>,
        /// Whether the answer shall carry a checksum.
        checksum_wanted: bool,
    },
    /// See [`Frame::Metadata`].
    Metadata {
        /// Number of the request.
        request_id: RequestId,
        /// Type, shape and length of the tensor.
        metadata: WireMetadata,
    },
    /// See [`Frame::Written`].
    Written {
        /// Number of the request.
        request_id: RequestId,
        /// Checksum of the tensor's bytes, if the request asked for one.
        checksum: Option<u64>,
    },
    /// See [`Frame::Status`].
    Status {
        /// Number of the request.
        request_id: RequestId,
        /// The reason why there is no tensor.
        failure: Failure,
    },
    /// See [`Frame::Dead`].
    Dead {
        /// Number of the request.
        request_id: RequestId,
    },
    /// See [`Frame::Cancel`].
    Cancel {
        /// Number of the request.
        request_id: RequestId,
    },
}

impl Message {
    /// Returns the frame to encode. Encoding does not fail, because names and codes were checked before.
    pub fn frame(&self) -> Frame<'_> {
        match *self {
            Self::Request { request_id, ref name, step, sink, checksum_wanted } => {
                Frame::Request(TensorRequest { request_id, step, sink, checksum_wanted, name })
            }
            Self::Metadata { request_id, metadata } => Frame::Metadata { request_id, metadata },
            Self::Written { request_id, checksum } => Frame::Written { request_id, checksum },
            Self::Status { request_id, ref failure } => {
                Frame::Status { request_id, code: failure.code as u32, text: &failure.text }
            }
            Self::Dead { request_id } => Frame::Dead { request_id },
            Self::Cancel { request_id } => Frame::Cancel { request_id },
        }
    }

    /// Makes a status message.
    pub(super) fn status(request_id: RequestId, code: Code, text: impl Into<String>) -> Self {
        Self::Status { request_id, failure: Failure::new(code, text) }
    }
}
