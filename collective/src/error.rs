//! Errors of collective operations.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tonic_rdma_tensor::TensorError;

/// An error of a collective operation, or of the group.
///
/// After the first error of an operation, all later operations of the communicator fail with [`Revoked`](Self::Revoked). The
/// survivors get a working group from [`Communicator::shrink`](crate::Communicator::shrink).
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CollectiveError {
    /// The process of a rank has ended, or the connection to it has.
    #[error("rank {rank} is lost, noticed {place}: {reason}")]
    RankLost {
        /// The lost rank.
        rank: usize,
        /// The operation and step of this rank at that time.
        place: Place,
        /// The error of the connection.
        reason: TensorError,
    },
    /// A rank did not answer within the deadline of the operation.
    #[error(
        "rank {rank} did not answer within {limit:?}, {place}; it may be stopped, or may not have made this call"
    )]
    Deadline {
        /// The rank that did not answer.
        rank: usize,
        /// The operation and step of this rank at that time.
        place: Place,
        /// The deadline.
        limit: Duration,
    },
    /// A rank called another operation, or called it with another type, length or reduction.
    #[error("rank {rank} called {theirs}, and this rank called {ours}, as operation {operation}")]
    Mismatch {
        /// The other rank.
        rank: usize,
        /// The number of the operation, counted from 0 by each rank.
        operation: u64,
        /// The call of the other rank.
        theirs: Arc<str>,
        /// The call of this rank.
        ours: Arc<str>,
    },
    /// A rank sent a message that breaks the protocol.
    #[error("rank {rank} broke the protocol, {place}: {what}")]
    Violation {
        /// The other rank.
        rank: usize,
        /// The operation and step of this rank at that time.
        place: Place,
        /// The broken rule.
        what: Arc<str>,
    },
    /// Another rank reported an error first, and so ended the operations of the group.
    #[error("rank {rank} ended the operations of this group: {message}")]
    Reported {
        /// The rank that reported the error.
        rank: usize,
        /// The error there.
        message: Arc<str>,
    },
    /// An earlier operation of this communicator failed.
    #[error("an earlier operation of this communicator failed: {0}")]
    Revoked(Arc<CollectiveError>),
    /// The survivors of a failure formed a group without this rank.
    #[error("the other ranks went on without rank {rank}, because {reason}")]
    Excluded {
        /// This rank.
        rank: usize,
        /// The reason that the other ranks had.
        reason: Arc<str>,
    },
    /// An argument of a call does not fit.
    #[error("{0}")]
    Argument(Arc<str>),
    /// A setting, a variable of the environment, or the meeting of the ranks is at fault.
    #[error("{0}")]
    Setup(Arc<str>),
    /// A call of the tensor channel failed.
    #[error(transparent)]
    Channel(#[from] TensorError),
}

/// The operation and the step at which a rank was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The number of the operation, counted from 0 by each rank.
    pub operation: u64,
    /// The index of the step in the plan of this rank.
    pub step: u32,
    /// The number of steps of that plan.
    pub steps: u32,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at step {} of {} of operation {}", self.step, self.steps, self.operation)
    }
}

/// Makes the error of a group that can't be set up.
pub(crate) fn setup(message: impl Into<Arc<str>>) -> CollectiveError {
    CollectiveError::Setup(message.into())
}

/// Makes the error of a bad argument.
pub(crate) fn argument(message: impl Into<Arc<str>>) -> CollectiveError {
    CollectiveError::Argument(message.into())
}
