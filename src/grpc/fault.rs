//! The reasons why a call ends early.

use std::sync::Arc;

use tonic::{Code, Status};

use crate::error::{RdmaError, RdmaErrorKind};
use crate::grpc::frame::ResetCode;

/// The reason why a native call ended early. The call's [`Status`] has it as an [`RdmaError`] among its
/// sources.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum CallFault {
    /// The connection ended while the call ran.
    #[error("the connection ended while the call ran")]
    Connection(#[source] RdmaError),
    /// The peer closed the connection while the call ran.
    #[error("the peer closed the connection before the call ended")]
    PeerClosed,
    /// The peer accepts no new calls on this connection, and has not begun with this one. It may be sent
    /// again.
    #[error("the peer takes no new calls on this connection, and has not begun with this one: {0}")]
    GoneAway(Arc<str>),
    /// The peer reset the call.
    #[error("the peer reset the call: {0}")]
    Reset(ResetCode),
    /// This side reset the call.
    #[error("this end reset the call: {0}")]
    ResetHere(ResetCode),
    /// Headers or trailers of this side are longer than the peer accepts.
    #[error(
        "metadata of {length} bytes, of which the peer takes {limit} (CallConfig::max_header_list_size there)"
    )]
    HeadersTooLarge {
        /// The length of the headers: names, values, and 32 bytes for each.
        length: usize,
        /// The limit.
        limit: usize,
    },
    /// A message of the peer is longer than this side decodes.
    #[error("Error, decoded message length too large: found {length} bytes, the limit is: {limit} bytes")]
    MessageTooLarge {
        /// The length of the message, without its prefix.
        length: u64,
        /// The limit.
        limit: usize,
    },
    /// There was no memory for a message of the peer.
    #[error("no memory for a message of {length} bytes of the peer: {reason}")]
    NoMemory {
        /// The length of the message.
        length: u64,
        /// The reason.
        reason: Arc<str>,
    },
    /// The call has ended, and nothing more can be sent.
    #[error("the call has ended")]
    Ended,
}

impl CallFault {
    /// Returns the code of the call's status.
    pub(crate) fn code(&self) -> Code {
        match self {
            Self::Connection(_) | Self::PeerClosed | Self::GoneAway(_) => Code::Unavailable,
            Self::Reset(code) | Self::ResetHere(code) => match code {
                ResetCode::Cancel => Code::Cancelled,
                ResetCode::Refused => Code::Unavailable,
                ResetCode::DeadlineExceeded => Code::DeadlineExceeded,
                ResetCode::ResourceExhausted => Code::ResourceExhausted,
                ResetCode::Internal | ResetCode::Other(_) => Code::Internal,
            },
            Self::HeadersTooLarge { .. } | Self::NoMemory { .. } => Code::ResourceExhausted,
            Self::MessageTooLarge { .. } => Code::OutOfRange,
            Self::Ended => Code::Internal,
        }
    }

    /// Returns whether the peer has not begun with the call, so that it may be sent again on another
    /// connection.
    pub(crate) fn is_unprocessed(&self) -> bool {
        matches!(self, Self::GoneAway(_) | Self::Reset(ResetCode::Refused))
    }
}

impl From<CallFault> for RdmaError {
    fn from(fault: CallFault) -> Self {
        let kind = match &fault {
            CallFault::Connection(error) => error.kind(),
            CallFault::PeerClosed | CallFault::Ended => RdmaErrorKind::Closed,
            fault if fault.is_unprocessed() => RdmaErrorKind::NotProcessed,
            fault => match fault.code() {
                Code::DeadlineExceeded => RdmaErrorKind::Timeout,
                Code::ResourceExhausted | Code::OutOfRange => RdmaErrorKind::ResourceExhausted,
                _ => RdmaErrorKind::Reset,
            },
        };
        Self::of(kind, fault)
    }
}

impl From<CallFault> for Status {
    fn from(fault: CallFault) -> Self {
        let message = match &fault {
            CallFault::Connection(reason) => format!("{fault}: {reason}"),
            fault => fault.to_string(),
        };
        let mut status = Self::new(fault.code(), message);
        status.set_source(Arc::new(RdmaError::from(fault)));
        status
    }
}
