//! Why a connection ended before its time.

use std::io;
use std::sync::Arc;

use crate::protocol::Violation;
use crate::verbs::{CompletionOpcode, CompletionStatus, PostError, PostErrorKind};

/// Why a connection ended. Reads and writes fail with it, wrapped in an [`io::Error`] of a fitting kind, once
/// everything that had arrived before was read.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectionFault {
    /// The TCP connection that the peer holds open for as long as it lives has ended, or its device says so.
    #[error("the peer is gone: {0}")]
    PeerLost(Arc<str>),
    /// The peer gave the connection up and said why.
    #[error("the peer aborted the connection: {0}")]
    Aborted(Arc<str>),
    /// The peer was asked whether it is alive and did not answer in time.
    #[error("the peer did not answer a ping within {0:?}")]
    NoAnswer(std::time::Duration),
    /// The peer broke the protocol.
    #[error("the peer broke the protocol: {0}")]
    Violation(#[from] Violation),
    /// The device failed a request.
    #[error("the device ended a {opcode:?} request: {status}")]
    Device {
        /// What was asked of it.
        opcode: CompletionOpcode,
        /// How it ended.
        status: CompletionStatus,
    },
    /// The device, or its port, is in no state to go on.
    #[error("the device ended the connection: {0}")]
    DeviceFailed(Arc<str>),
    /// This end could not go on.
    #[error("{0}")]
    Local(Arc<str>),
    /// This end dropped the stream and the peer did not finish in time.
    #[error("closed here while the peer was still sending")]
    Closed,
}

impl ConnectionFault {
    /// Whether all it says is that nothing gets through to the peer any more. What the peer had said before may still be
    /// waiting to be taken in.
    pub(super) fn is_loss(&self) -> bool {
        matches!(self, Self::PeerLost(_) | Self::DeviceFailed(_))
    }
}

/// A queue pair that takes no more has mostly lost its peer.
impl From<PostError> for ConnectionFault {
    fn from(error: PostError) -> Self {
        let reason = error.to_string().into();
        match error.kind {
            PostErrorKind::State(_) | PostErrorKind::Refused(_) => Self::DeviceFailed(reason),
            _ => Self::Local(reason),
        }
    }
}

impl From<ConnectionFault> for io::Error {
    fn from(fault: ConnectionFault) -> Self {
        let kind = match &fault {
            ConnectionFault::PeerLost(_)
            | ConnectionFault::Device { .. }
            | ConnectionFault::DeviceFailed(_) => io::ErrorKind::ConnectionReset,
            ConnectionFault::Aborted(_) | ConnectionFault::Closed => io::ErrorKind::ConnectionAborted,
            ConnectionFault::NoAnswer(_) => io::ErrorKind::TimedOut,
            ConnectionFault::Violation(_) => io::ErrorKind::InvalidData,
            ConnectionFault::Local(_) => io::ErrorKind::Other,
        };
        Self::new(kind, fault)
    }
}
