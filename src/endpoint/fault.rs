//! The reasons why a connection ends early.

use std::error::Error;
use std::io;
use std::sync::Arc;

use crate::protocol::{AbortCode, Violation};
use tonic_rdma_verbs::{CompletionOpcode, CompletionStatus, PostError, PostErrorKind};

/// The reason why a connection ended early. Reads and writes fail with the reason, wrapped in an [`io::Error`] of a fitting
/// kind, after all bytes that had arrived before were read.
///
/// ```
/// use std::error::Error;
/// use tonic_rdma::ConnectionFault;
///
/// /// Finds the fault of the connection among the sources of an error of tonic's.
/// fn find<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a ConnectionFault> {
///     let inside = error.downcast_ref::<std::io::Error>().and_then(|error| error.get_ref());
///     let fault = inside.and_then(|error| error.downcast_ref());
///     fault.or_else(|| error.source().and_then(find))
/// }
/// # assert!(find(&std::io::Error::other(ConnectionFault::Closed)).is_some());
/// ```
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectionFault {
    /// The peer's TCP connection, which stays open as long as the peer's process runs, has ended, or the device reports that the
    /// peer is gone.
    #[error("the peer left without closing the connection (its process ended, or can't be reached): {0}")]
    PeerLost(Arc<str>),
    /// The peer ended the connection with an abort.
    #[error("the peer gave the connection up: {0}")]
    Aborted(AbortCode),
    /// The peer did not answer a ping in time.
    #[error("the peer did not answer a ping within {0:?}")]
    NoAnswer(std::time::Duration),
    /// The peer broke the protocol.
    #[error("the peer broke the protocol: {0}")]
    Violation(Violation),
    /// The peer broke the rules of native calls.
    #[error("the peer broke the protocol of native calls: {0}")]
    Calls(Arc<dyn Error + Send + Sync>),
    /// The device failed a request.
    #[error("the device ended a {opcode:?} request: {status}")]
    Device {
        /// The operation.
        opcode: CompletionOpcode,
        /// The status of its completion.
        status: CompletionStatus,
    },
    /// The device, or its port, has failed.
    #[error("the device ended the connection: {0}")]
    DeviceFailed(Arc<str>),
    /// The device refused a request.
    #[error("the device ended the connection: {0}")]
    Refused(PostError),
    /// This end could not go on.
    #[error(transparent)]
    Local(Arc<dyn Error + Send + Sync>),
    /// This end dropped the stream and the peer did not finish in time.
    #[error("closed here while the peer was still sending")]
    Closed,
}

impl ConnectionFault {
    /// The reason for a queue pair whose peer is gone.
    const OTHER_END: &str = "its end of the RDMA connection is closed";

    /// Returns the fault of a connection that could not go on because of `error`.
    pub(super) fn local(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Local(error.into().into())
    }

    /// Returns the fault of a connection whose peer broke the rules of native calls.
    pub(crate) fn of_calls(violation: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Calls(violation.into().into())
    }

    /// Returns the fault of a connection whose request ended with `status`.
    pub(super) fn of_completion(opcode: CompletionOpcode, status: CompletionStatus) -> Self {
        match status {
            CompletionStatus::WorkRequestFlushed => Self::PeerLost(Self::OTHER_END.into()),
            CompletionStatus::RetryExceeded => {
                Self::PeerLost("its device acknowledges nothing any more".into())
            }
            status => Self::Device { opcode, status },
        }
    }

    /// Returns whether the fault says only that nothing gets through to the peer any more. Then the completion queue may still
    /// have messages that the peer sent before.
    pub(super) fn is_loss(&self) -> bool {
        matches!(self, Self::PeerLost(_) | Self::DeviceFailed(_) | Self::Refused(_))
    }
}

/// A queue pair that takes no more requests has usually lost its peer.
impl From<Violation> for ConnectionFault {
    fn from(violation: Violation) -> Self {
        Self::Violation(violation)
    }
}

impl From<PostError> for ConnectionFault {
    fn from(error: PostError) -> Self {
        match error.kind {
            PostErrorKind::State(_) => Self::PeerLost(Self::OTHER_END.into()),
            PostErrorKind::Refused(_) => Self::Refused(error),
            _ => Self::local(error),
        }
    }
}

impl From<ConnectionFault> for io::Error {
    fn from(fault: ConnectionFault) -> Self {
        let kind = match &fault {
            ConnectionFault::PeerLost(_)
            | ConnectionFault::Device { .. }
            | ConnectionFault::DeviceFailed(_)
            | ConnectionFault::Refused(_) => io::ErrorKind::ConnectionReset,
            ConnectionFault::Aborted(_) | ConnectionFault::Closed => io::ErrorKind::ConnectionAborted,
            ConnectionFault::NoAnswer(_) => io::ErrorKind::TimedOut,
            ConnectionFault::Violation(_) | ConnectionFault::Calls(_) => io::ErrorKind::InvalidData,
            ConnectionFault::Local(_) => io::ErrorKind::Other,
        };
        Self::new(kind, fault)
    }
}
