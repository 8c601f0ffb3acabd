//! Errors of connecting and of negotiation, and the reasons why a connection ends early.

use std::error::Error;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{RdmaError, RdmaErrorKind};
use crate::protocol::{AbortCode, ProtocolViolation};
use crate::wire::hello::HelloError;
use tonic_rdma_verbs::unstable::Versions;
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

/// The reason why a connection does not use RDMA.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RdmaUnavailable {
    /// No device could be opened, by the client, or by the server of the provider that the client offered.
    #[error(transparent)]
    Device(#[from] RdmaError),
    /// The device refused a call, or there is no registered memory.
    #[error(transparent)]
    Verbs(#[from] VerbsError),
    /// The connection failed before its first use.
    #[error(transparent)]
    Fault(#[from] ConnectionFault),
    /// The connection could not be set up on this side for another reason.
    #[error(transparent)]
    Setup(Box<dyn Error + Send + Sync>),
    /// The peer did not answer over the device.
    #[error(
        "the server can't be reached over {device}: {fault} (RoCE needs UDP port 4791, and equal partition keys)"
    )]
    Unreachable {
        /// The device of this side.
        device: String,
        /// The fault of the queue pair.
        fault: ConnectionFault,
    },
    /// The peer did not answer over the device in time.
    #[error(
        "the server can't be reached over {device}: no answer within {} s (RoCE needs UDP port 4791, and equal partition keys)",
        timeout.as_secs()
    )]
    NoAnswer {
        /// The device of this side.
        device: String,
        /// The time for an answer.
        timeout: Duration,
    },
    /// The server declined, with its reason.
    #[error("the server declined: {0}")]
    Declined(String),
    /// The peer could not set up its end, with its reason.
    #[error("the peer can't: {0}")]
    PeerFailed(String),
    /// The two sides do not reach each other's memory.
    #[error("the peer read something else than was written here: memory is not shared")]
    MemoryNotShared,
    /// The peer speaks no version of the protocol that this side speaks.
    #[error("the peer speaks version {0} of the protocol, this end {1}")]
    Version(u8, Versions),
    /// The peer's queue pair address is longer than any provider's.
    #[error("the peer's queue pair address is too long")]
    BadAddress,
    /// The server is a stock one, or did not answer the hello.
    #[error("the server does not understand our hello ({0})")]
    StockServer(Arc<NegotiationError>),
    /// The client is a stock one.
    #[error("this is {0}")]
    StockClient(&'static str),
    /// The negotiation failed.
    #[error("the negotiation failed: {0}")]
    Negotiation(Box<NegotiationError>),
    /// The server's policy is TCP only.
    #[error("the server's policy is tcp-only")]
    TcpOnly,
    /// The server prepares as many connections over RDMA as it prepares at a time, and there was no slot for
    /// this one.
    #[error("the server has {0} unfinished negotiations over RDMA, which is the limit")]
    Crowded(usize),
    /// The server's device did not prepare the connection in time.
    #[error("the server's device did not prepare a connection within {0:?}")]
    TooSlow(Duration),
    /// The client offered nothing.
    #[error("the client has no RDMA device")]
    NothingOffered,
    /// The server could not accept any of the client's offers; one reason for each offer.
    #[error("{}", joined(.0))]
    NoOfferFits(Vec<RdmaUnavailable>),
    /// The client offered a provider that the server's configuration excludes, or does not know.
    #[error("this end does not use the provider offered, {0:?}")]
    ProviderNotUsed(String),
    /// The two sides are on different hosts.
    #[error("the software device reaches this host only, and the peer is on another")]
    OtherHost,
    /// The two sides are in different network namespaces.
    #[error(
        "the peer is in another network namespace, out of the software device's reach: \
         set RDMA_SOFT_DIR to one directory at both ends"
    )]
    OtherNamespace,
    /// The two sides run as different users.
    #[error(
        "the peer runs as another user (uid {ours} here, {theirs} there): \
         set RDMA_SOFT_PEERS=any at both ends to share memory with other users"
    )]
    OtherUser {
        /// User id of this side.
        ours: u32,
        /// User id of the peer.
        theirs: u32,
    },
}

impl RdmaUnavailable {
    /// Makes the reason for an error of the setup.
    pub(super) fn setup(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Setup(error.into())
    }
}

fn joined(reasons: &[RdmaUnavailable]) -> String {
    reasons.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
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
