//! Why a connection ended before its time.

use std::io;
use std::sync::Arc;

use crate::protocol::{AbortCode, Violation};
use tonic_rdma_verbs::{CompletionOpcode, CompletionStatus, PostError, PostErrorKind};

/// Why a connection ended. Reads and writes fail with it, wrapped in an [`io::Error`] of a fitting kind, once
/// everything that had arrived before was read.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectionFault {
    /// The TCP connection that the peer holds open for as long as it lives has ended, or its device says so.
    #[error("the peer left without closing the connection (its process ended, or can't be reached): {0}")]
    PeerLost(Arc<str>),
    /// The peer gave the connection up and said why.
    #[error("the peer gave the connection up: {0}")]
    Aborted(AbortCode),
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
    /// What the device says of a peer that is gone.
    const OTHER_END: &str = "its end of the RDMA connection is closed";

    /// Why a request ended with `status`.
    pub(super) fn of_completion(opcode: CompletionOpcode, status: CompletionStatus) -> Self {
        match status {
            CompletionStatus::WorkRequestFlushed => Self::PeerLost(Self::OTHER_END.into()),
            CompletionStatus::RetryExceeded => {
                Self::PeerLost("its device acknowledges nothing any more".into())
            }
            status => Self::Device { opcode, status },
        }
    }

    /// Whether all it says is that nothing gets through to the peer any more. What the peer had said before may still be
    /// waiting to be taken in.
    pub(super) fn is_loss(&self) -> bool {
        matches!(self, Self::PeerLost(_) | Self::DeviceFailed(_))
    }
}

/// A queue pair that takes no more has mostly lost its peer.
impl From<PostError> for ConnectionFault {
    fn from(error: PostError) -> Self {
        match error.kind {
            PostErrorKind::State(_) => Self::PeerLost(Self::OTHER_END.into()),
            PostErrorKind::Refused(_) => Self::DeviceFailed(error.to_string().into()),
            _ => Self::Local(error.to_string().into()),
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
