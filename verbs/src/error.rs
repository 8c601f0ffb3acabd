//! What verbs calls fail with. What a posted request fails with is a
//! [`CompletionStatus`](super::CompletionStatus).

use std::io;

use super::QueuePairState;

/// A verbs call that could not be carried out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VerbsError {
    /// The operating system refused.
    #[error("{action}: {source}")]
    Os {
        /// What was tried, such as "mapping 2097152 bytes of shared memory".
        action: String,
        /// What the system said.
        source: io::Error,
    },
    /// A number is above what the device has.
    #[error("{what}: asked for {asked}, the device has {limit}")]
    Limit {
        /// What is limited, such as "send queue depth".
        what: &'static str,
        /// What was asked for.
        asked: u64,
        /// What there is.
        limit: u64,
    },
    /// The object is in a state that does not allow the call.
    #[error("{call} is not allowed in state {state:?}")]
    State {
        /// The call.
        call: &'static str,
        /// The state that the queue pair is in.
        state: QueuePairState,
    },
    /// Objects of two devices, or of two protection domains, were mixed.
    #[error("{0} belongs to another device")]
    Foreign(&'static str),
    /// The peer's address is not one of this provider's, or is malformed.
    #[error("peer address: {0}")]
    BadAddress(String),
    /// A library that the provider needs is not installed, or is too old.
    #[error("{library}: {reason}; install {install}")]
    Library {
        /// The library, such as "libibverbs.so.1".
        library: &'static str,
        /// What the loader said.
        reason: String,
        /// Debian's package that has it.
        install: &'static str,
    },
    /// A device, port or GID index that does not exist.
    #[error("{what} {wanted} does not exist; there is {available}")]
    NotFound {
        /// What was looked for, such as "port".
        what: &'static str,
        /// Which one.
        wanted: String,
        /// Those that exist, for people.
        available: String,
    },
    /// What was asked for exists, but can't be used as it is.
    #[error("{0}")]
    Unusable(String),
    /// The device does not have this.
    #[error("the device has no {0}")]
    Unsupported(&'static str),
    /// The peer's device can't be reached from here.
    #[error("peer device unreachable: {0}")]
    Unreachable(String),
}

impl VerbsError {
    /// Makes an [`Os`](Self::Os) error of `action`.
    ///
    /// ```
    /// use std::io;
    /// use tonic_rdma_verbs::VerbsError;
    ///
    /// let error = VerbsError::os("mapping memory", io::Error::from(io::ErrorKind::OutOfMemory));
    /// assert!(error.to_string().contains("mapping memory"));
    /// ```
    pub fn os(action: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self::Os { action: action.into(), source: source.into() }
    }
}

/// A work request that was not posted, nor any after it in the same call; those before it were.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("work request {index} not posted: {kind}")]
pub struct PostError {
    /// Position in the slice that was posted.
    pub index: usize,
    /// Why.
    pub kind: PostErrorKind,
}

/// Why a work request was not posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PostErrorKind {
    /// As many requests are outstanding as the queue was created for (`ENOMEM`). Poll completions, then try again.
    #[error("queue full")]
    QueueFull,
    /// The queue pair is in a state that does not take this request.
    #[error("queue pair in state {0:?}")]
    State(QueuePairState),
    /// More segments than the queue pair was created for.
    #[error("too many segments")]
    TooManySegments,
    /// More inline bytes than the queue pair was created for.
    #[error("inline payload too long")]
    InlineTooLong,
    /// More bytes than [`max_message_size`](super::DeviceAttributes::max_message_size).
    #[error("message too long")]
    MessageTooLong,
    /// The device does not have this operation.
    #[error("operation not supported by the device")]
    Unsupported,
    /// The device refused it for a reason of its own: an error number of the system.
    #[error("refused by the device: {}", io::Error::from_raw_os_error(*.0))]
    Refused(i32),
}
