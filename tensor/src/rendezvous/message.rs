//! What the two ends say, owned until it is sent.

use std::fmt;
use std::sync::Arc;

use tonic::Code;

use super::{RequestId, Sink, TensorRequest};
use crate::wire::tensor_frame::{Frame, MAX_NAME};
use crate::wire::tensor_metadata::WireMetadata;

/// A link to a peer, by a number that the driver gives and never gives again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerId(pub u64);

/// What a tensor is asked for by.
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

/// Whether a frame can carry `name`.
pub(super) fn is_name(name: &str) -> bool {
    (1..=MAX_NAME).contains(&name.len())
}

/// Why there is no tensor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct Failure {
    /// What kind of failure.
    pub code: Code,
    /// What happened. A frame has room for some 2 000 bytes; what is longer is cut.
    pub text: String,
}

impl Failure {
    /// A failure.
    pub fn new(code: Code, text: impl Into<String>) -> Self {
        Self { code, text: text.into() }
    }
}

impl From<Failure> for tonic::Status {
    fn from(failure: Failure) -> Self {
        Self::new(failure.code, failure.text)
    }
}

/// A frame of the rendezvous that waits to be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// See [`Frame::Request`].
    Request {
        /// Number of the request.
        request_id: RequestId,
        /// Name of the tensor.
        name: Arc<str>,
        /// Its step.
        step: u64,
        /// Where to write it.
        sink: Option<Sink>,
        /// Whether a checksum shall come with it.
        checksum_wanted: bool,
    },
    /// See [`Frame::Metadata`].
    Metadata {
        /// Number of the request.
        request_id: RequestId,
        /// What the tensor is.
        metadata: WireMetadata,
    },
    /// See [`Frame::Written`].
    Written {
        /// Number of the request.
        request_id: RequestId,
        /// Of the tensor's bytes, if it was wanted.
        checksum: Option<u64>,
    },
    /// See [`Frame::Status`].
    Status {
        /// Number of the request.
        request_id: RequestId,
        /// Why there is no tensor.
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
    /// The frame, to be encoded. Names and codes were looked at before, so encoding it does not fail.
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

    /// A status.
    pub(super) fn status(request_id: RequestId, code: Code, text: impl Into<String>) -> Self {
        Self::Status { request_id, failure: Failure::new(code, text) }
    }
}
