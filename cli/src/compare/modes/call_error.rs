//! The errors of calls, in all modes.

use std::time::Duration;

use tokio::task::JoinError;
use tonic_rdma::VerbsError;
use tonic_rdma_commands::payload::reduce::Reduced;
use tonic_rdma_commands::{Failure, units};
use tonic_rdma_tensor::TensorError;

use crate::compare::modes::placement::geometry::Discrepancy;

/// The reason why a call counts as an error.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError {
    #[error("{}: {}", .0.code().description(), deepest(.0))]
    Status(#[from] tonic::Status),
    #[error("buffers of {sent:?} bytes were sent and of {arrived:?} arrived")]
    Buffers { sent: Vec<u64>, arrived: Vec<u64> },
    #[error("byte {offset} of buffer {buffer} arrived wrong")]
    BufferContent { buffer: u64, offset: u64 },
    #[error("the receiver found {arrived:?} in the payload, and {sent:?} was sent")]
    Consumed { sent: Option<Reduced>, arrived: Option<Reduced> },
    #[error(transparent)]
    Tensor(#[from] TensorError),
    #[error(transparent)]
    Discrepancy(#[from] Discrepancy),
    #[error("the operation was not prepared")]
    Unprepared,
    #[error("there is no memory for {} more", units::rough_size(*.0))]
    Memory(u64),
    #[error("there is no registered memory for the payloads")]
    Registered(#[from] VerbsError),
    #[error("{}", .0.with_causes())]
    Connect(#[from] Failure),
    #[error(transparent)]
    Crash(#[from] JoinError),
    #[error("no answer within {} s", .0.as_secs())]
    NoAnswer(Duration),
}

impl CallError {
    /// Returns whether the content that arrived differs from the content that was sent.
    pub(crate) fn is_mismatch(&self) -> bool {
        matches!(
            self,
            Self::Buffers { .. } | Self::BufferContent { .. } | Self::Consumed { .. } | Self::Discrepancy(_)
        )
    }
}

/// Returns the message of the innermost cause, because tonic's own message is seldom more than "transport
/// error".
pub(crate) fn deepest(status: &tonic::Status) -> String {
    let mut message = status.message().to_owned();
    let mut cause = std::error::Error::source(status);
    while let Some(error) = cause {
        message = error.to_string();
        cause = error.source();
    }
    message
}
