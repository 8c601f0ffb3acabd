//! The reasons why an end resets a call.

use std::fmt;

/// The reason that an end gives when it resets a call.
///
/// ```
/// use tonic::Code;
/// use tonic_rdma::{CallFault, ResetCode};
///
/// assert_eq!(CallFault::Reset(ResetCode::Cancel).code(), Code::Cancelled);
/// assert_eq!(CallFault::Reset(ResetCode::Refused).code(), Code::Unavailable);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ResetCode {
    /// The caller, or the handler, is no longer interested.
    Cancel,
    /// The peer did not begin with the call. It may be sent again.
    Refused,
    /// The peer failed within.
    Internal,
    /// The deadline has passed.
    DeadlineExceeded,
    /// The call exceeds a limit of the peer.
    ResourceExhausted,
    /// A code that this version does not know.
    Other(u16),
}

impl ResetCode {
    /// Returns the code on the wire.
    pub(in crate::grpc) fn to_wire(self) -> u16 {
        match self {
            Self::Cancel => 1,
            Self::Refused => 2,
            Self::Internal => 3,
            Self::DeadlineExceeded => 4,
            Self::ResourceExhausted => 5,
            Self::Other(code) => code,
        }
    }

    /// Returns the meaning of a code on the wire.
    pub(in crate::grpc) fn from_wire(code: u16) -> Self {
        match code {
            1 => Self::Cancel,
            2 => Self::Refused,
            3 => Self::Internal,
            4 => Self::DeadlineExceeded,
            5 => Self::ResourceExhausted,
            code => Self::Other(code),
        }
    }
}

impl fmt::Display for ResetCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cancel => f.write_str("cancelled"),
            Self::Refused => f.write_str("refused before it began"),
            Self::Internal => f.write_str("internal failure"),
            Self::DeadlineExceeded => f.write_str("deadline exceeded"),
            Self::ResourceExhausted => f.write_str("a limit of the peer is exceeded"),
            Self::Other(code) => write!(f, "code {code}"),
        }
    }
}
