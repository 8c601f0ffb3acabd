//! Errors of collective operations.

use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tonic_rdma_tensor::{TensorError, TensorErrorKind};

/// An error of a collective operation, of a [`Fusion`](crate::Fusion), of a setting or of the group.
///
/// A program decides by [`kind`](Self::kind), [`rank`](Self::rank) and [`lost_rank`](Self::lost_rank).
/// Display prints the [`reason`](Self::reason).
///
/// After the first error of an operation that has started, all later operations of the communicator fail with
/// [`Revoked`](CollectiveErrorKind::Revoked). The survivors get a working group from
/// [`Communicator::shrink`](crate::Communicator::shrink).
#[derive(Clone, Debug)]
pub struct CollectiveError {
    kind: CollectiveErrorKind,
    reason: Arc<str>,
    rank: Option<usize>,
    /// The reason of the loss of `rank`, if it is lost.
    loss: Option<Arc<str>>,
    source: Option<Arc<dyn Error + Send + Sync>>,
}

/// What a program decides by when it gets a [`CollectiveError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CollectiveErrorKind {
    /// An argument of a call does not fit. Unless the call was of an operation that had started, the group
    /// still works.
    InvalidArgument,
    /// A setting or a variable of the environment has a bad value, or the ranks have different ones.
    InvalidSetting,
    /// The ranks did not find one another in time, could not connect, or did not agree on the survivors.
    /// Another attempt may succeed.
    Setup,
    /// There is no memory, or its pinned part has reached `RDMA_PINNED_LIMIT`.
    NoMemory,
    /// The tensor device, or a call of it to another rank, failed.
    Device,
    /// The process of a rank has ended, or the connection to it has.
    RankLost,
    /// A rank did not answer within the deadline of the operation. It may be stopped, or may not have made
    /// this call.
    Deadline,
    /// A rank called another operation, or called it with another type, length or reduction, or gave other
    /// gradients.
    Mismatch,
    /// A rank sent a message that breaks the protocol.
    Protocol,
    /// Another rank reported an error first, and so ended the operations of the group.
    Reported,
    /// An earlier operation of this communicator failed, the group shrinks, or a step of a
    /// [`Fusion`](crate::Fusion) did not end.
    Revoked,
    /// The survivors of a failure formed a group without this rank.
    Excluded,
}

impl CollectiveError {
    /// Returns what a program decides by.
    pub fn kind(&self) -> CollectiveErrorKind {
        self.kind
    }

    /// Returns one line: what happened, on which rank, and what can be done about it.
    pub fn reason(&self) -> &str {
        &self.reason
    }

    /// Returns the rank that the error is about: the one that is lost, late, reported the error, made another
    /// call or broke the protocol, or, if it was excluded, this rank. With
    /// [`Revoked`](CollectiveErrorKind::Revoked), the rank of the first error.
    pub fn rank(&self) -> Option<usize> {
        self.rank
    }

    /// Returns the rank whose loss ended the operation: this one's or, with
    /// [`Revoked`](CollectiveErrorKind::Revoked), an earlier one. Survivors that fail because of the loss get
    /// the same rank. A survivor whose first news is a failure of another rank gets
    /// [`Reported`](CollectiveErrorKind::Reported) instead. [`Communicator::shrink`](crate::Communicator::shrink)
    /// works after both.
    pub fn lost_rank(&self) -> Option<usize> {
        self.loss.as_ref().and(self.rank)
    }

    /// Returns why the lost rank is lost.
    pub(crate) fn loss(&self) -> Option<&str> {
        self.loss.as_deref()
    }

    pub(crate) fn new(kind: CollectiveErrorKind, rank: Option<usize>, reason: impl Into<Arc<str>>) -> Self {
        Self { kind, reason: reason.into(), rank, loss: None, source: None }
    }

    pub(crate) fn rank_lost(rank: usize, at: OperationStep, loss: impl Into<Arc<str>>) -> Self {
        let loss = loss.into();
        let reason = format!("rank {rank} is lost, noticed {at}: {loss}");
        Self { loss: Some(loss), ..Self::new(CollectiveErrorKind::RankLost, Some(rank), reason) }
    }

    pub(crate) fn deadline(rank: usize, at: OperationStep, limit: Duration) -> Self {
        let reason = format!(
            "rank {rank} did not answer within {limit:?}, {at}; it may be stopped, or may not have made this call"
        );
        Self::new(CollectiveErrorKind::Deadline, Some(rank), reason)
    }

    pub(crate) fn mismatch(rank: usize, operation: u64, theirs: &str, ours: &str) -> Self {
        let reason =
            format!("rank {rank} called {theirs}, and this rank called {ours}, as operation {operation}");
        Self::new(CollectiveErrorKind::Mismatch, Some(rank), reason)
    }

    pub(crate) fn violation(rank: usize, at: OperationStep, what: &str) -> Self {
        let reason = format!("rank {rank} broke the protocol, {at}: {what}");
        Self::new(CollectiveErrorKind::Protocol, Some(rank), reason)
    }

    pub(crate) fn reported(rank: usize, message: &str) -> Self {
        let reason = format!("rank {rank} ended the operations of this group: {message}");
        Self::new(CollectiveErrorKind::Reported, Some(rank), reason)
    }

    /// Makes the error of an operation after one that failed with `first`.
    pub(crate) fn revoked(first: &Self) -> Self {
        let reason = format!("an earlier operation of this communicator failed: {first}");
        Self { loss: first.loss.clone(), ..Self::new(CollectiveErrorKind::Revoked, first.rank, reason) }
    }

    pub(crate) fn excluded(rank: usize, why: &str) -> Self {
        let reason = format!("the other ranks went on without rank {rank}, because {why}");
        Self::new(CollectiveErrorKind::Excluded, Some(rank), reason)
    }
}

impl fmt::Display for CollectiveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)
    }
}

impl Error for CollectiveError {
    /// Returns the cause of what the reason says.
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        // The reason is the message of the source itself.
        self.source.as_ref()?.source()
    }
}

impl From<TensorError> for CollectiveError {
    fn from(error: TensorError) -> Self {
        let kind = match error.kind() {
            TensorErrorKind::NoMemory => CollectiveErrorKind::NoMemory,
            TensorErrorKind::InvalidSetting => CollectiveErrorKind::InvalidSetting,
            _ => CollectiveErrorKind::Device,
        };
        Self { source: Some(Arc::new(error.clone())), ..Self::new(kind, None, error.to_string()) }
    }
}

/// The operation and the step at which a rank was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OperationStep {
    /// The number of the operation, counted from 0 by each rank.
    pub operation: u64,
    /// The index of the step in the plan of this rank.
    pub step: u32,
    /// The number of steps of that plan.
    pub steps: u32,
}

impl fmt::Display for OperationStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at step {} of {} of operation {}", self.step, self.steps, self.operation)
    }
}

/// Makes the error of a group that can't be set up.
pub(crate) fn setup(reason: impl Into<Arc<str>>) -> CollectiveError {
    CollectiveError::new(CollectiveErrorKind::Setup, None, reason)
}

/// Makes the error of a bad setting.
pub(crate) fn setting(reason: impl Into<Arc<str>>) -> CollectiveError {
    CollectiveError::new(CollectiveErrorKind::InvalidSetting, None, reason)
}

/// Makes the error of a bad argument.
pub(crate) fn argument(reason: impl Into<Arc<str>>) -> CollectiveError {
    CollectiveError::new(CollectiveErrorKind::InvalidArgument, None, reason)
}
