//! Errors of connecting and of negotiation, and the reasons why a connection ends early.

use std::error::Error;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use super::reason::{RdmaUnavailable, ReasonCode};
use crate::error::{RdmaError, RdmaErrorKind};
use crate::protocol::{AbortCode, ProtocolViolation};
use crate::wire::hello::HelloError;
use tonic_rdma_verbs::{CompletionOpcode, CompletionStatus, PostError, PostErrorKind, VerbsError};

/// Returns the error of a host whose addresses could not be connected to, each with its error.
pub(super) fn unreachable(failed: &[(SocketAddr, io::Error)]) -> RdmaError {
    RdmaError::new(RdmaErrorKind::Unreachable, format!("connecting to {}", listed(failed)))
}

/// Returns the error of a TCP connection that was not established within `limit`. `failed` has the addresses
/// that were tried; it is empty if the name did not resolve in time, or if tonic's
/// `Endpoint::connect_timeout` ended the attempt.
pub(crate) fn not_in_time(authority: &str, limit: Duration, failed: &[(SocketAddr, io::Error)]) -> RdmaError {
    let tried = if failed.is_empty() { "" } else { "; tried " };
    let reason = format!("connecting to {authority}: no answer within {limit:?}{tried}{}", listed(failed));
    RdmaError::new(RdmaErrorKind::Timeout, reason)
}

/// Returns the error of a connection without RDMA under a policy that requires RDMA.
pub(super) fn rdma_required(authority: &str, reason: &RdmaUnavailable) -> RdmaError {
    RdmaError::new(
        RdmaErrorKind::RdmaRequired,
        format!("{authority}: RDMA is required (RDMA_POLICY=require), but {reason}"),
    )
}

/// Returns addresses with their errors, for a message.
fn listed(failed: &[(SocketAddr, io::Error)]) -> String {
    let each: Vec<_> = failed.iter().map(|(peer, error)| format!("{peer}: {error}")).collect();
    each.join(", ")
}

/// The reason why a negotiation failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NegotiationError {
    /// The peer's first bytes are not those of a gRPC client, nor of this crate's hello.
    #[error("not a gRPC client, nor one of ours: first bytes {0:02x?}")]
    Garbage(Vec<u8>),
    /// The peer connected, and then sent nothing, or not enough.
    #[error("no complete message of the negotiation within {0:?}")]
    Silent(Duration),
    /// The peer closed the connection without sending a byte, as health probes do.
    #[error("the peer closed the connection without having said anything")]
    Nothing,
    /// The peer closed the connection during the negotiation.
    #[error("the peer closed the connection before the negotiation was over")]
    Closed,
    /// The connection failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The peer sent bytes that are no message of the negotiation.
    #[error(transparent)]
    Hello(#[from] HelloError),
    /// The peer sent a message that is not due now.
    #[error("the peer sent {0} out of turn")]
    OutOfTurn(&'static str),
    /// The listener has no slot for a new client, and has waited for this client for longest, among the
    /// clients of the source with most unfinished negotiations.
    #[error("the listener needs the place of this unfinished negotiation for a new client")]
    Displaced,
    /// The policy requires RDMA, and there is none to this client.
    #[error("RDMA is required (RDMA_POLICY=require), but {0}")]
    RdmaRequired(RdmaUnavailable),
}

impl NegotiationError {
    /// Returns the code of the reason.
    pub(super) fn code(&self) -> ReasonCode {
        match self {
            Self::Garbage(_) => ReasonCode::NotGrpc,
            Self::Silent(_) => ReasonCode::Silent,
            Self::Nothing | Self::Closed | Self::Io(_) => ReasonCode::Closed,
            Self::Hello(HelloError::Version { .. }) => ReasonCode::Version,
            Self::Hello(_) | Self::OutOfTurn(_) => ReasonCode::Protocol,
            Self::Displaced => ReasonCode::Busy,
            Self::RdmaRequired(reason) => reason.code,
        }
    }
}

impl From<ConnectionFault> for RdmaUnavailable {
    fn from(fault: ConnectionFault) -> Self {
        let code = match &fault {
            ConnectionFault::PeerLost(_) | ConnectionFault::Aborted(_) | ConnectionFault::Closed => {
                ReasonCode::Closed
            }
            ConnectionFault::NoAnswer(_) => ReasonCode::Unreachable,
            ConnectionFault::Violation(_) | ConnectionFault::Calls(_) => ReasonCode::Protocol,
            ConnectionFault::Device { .. }
            | ConnectionFault::DeviceFailed(_)
            | ConnectionFault::Refused(_) => ReasonCode::DeviceFailed,
            ConnectionFault::Local(error) => {
                error.downcast_ref::<VerbsError>().map_or(ReasonCode::Other, ReasonCode::of_device)
            }
        };
        Self::new(code, fault)
    }
}

/// The reason why a connection ended early. Reads and writes fail with it, as an [`RdmaError`] in an
/// [`io::Error`] of a fitting kind, after all bytes that had arrived before were read.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum ConnectionFault {
    /// The peer's TCP connection, which stays open as long as the peer's process runs, has ended, or the
    /// device reports that the peer is gone.
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
    Violation(ProtocolViolation),
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
    /// This side could not go on.
    #[error(transparent)]
    Local(Arc<dyn Error + Send + Sync>),
    /// This side dropped the stream and the peer did not finish in time.
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

    /// Returns whether the fault says only that nothing gets through to the peer any more. Then the
    /// completion queue may still have messages that the peer sent before.
    pub(super) fn is_loss(&self) -> bool {
        matches!(self, Self::PeerLost(_) | Self::DeviceFailed(_) | Self::Refused(_))
    }
}

impl From<ProtocolViolation> for ConnectionFault {
    fn from(violation: ProtocolViolation) -> Self {
        Self::Violation(violation)
    }
}

/// A queue pair that takes no more requests has usually lost its peer.
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
        Self::new(kind, RdmaError::from(fault))
    }
}

impl From<ConnectionFault> for RdmaError {
    fn from(fault: ConnectionFault) -> Self {
        let kind = match &fault {
            ConnectionFault::PeerLost(_) => RdmaErrorKind::PeerLost,
            ConnectionFault::Aborted(code) if code.is_reset() => RdmaErrorKind::Reset,
            ConnectionFault::Aborted(AbortCode::CLOSED) | ConnectionFault::Closed => RdmaErrorKind::Closed,
            ConnectionFault::NoAnswer(_) => RdmaErrorKind::Timeout,
            ConnectionFault::Aborted(_) | ConnectionFault::Violation(_) | ConnectionFault::Calls(_) => {
                RdmaErrorKind::Protocol
            }
            ConnectionFault::Device { .. }
            | ConnectionFault::DeviceFailed(_)
            | ConnectionFault::Refused(_) => RdmaErrorKind::Device,
            ConnectionFault::Local(_) => RdmaErrorKind::Internal,
        };
        Self::of(kind, fault)
    }
}
