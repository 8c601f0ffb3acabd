//! Errors of verbs calls, and the states of a queue pair, which they name. A posted request fails with a
//! [`CompletionStatus`](super::CompletionStatus) instead.

use std::error::Error;
use std::io;
use std::sync::Arc;

/// A verbs call that could not be carried out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VerbsError {
    /// The operating system refused.
    #[error("{action}: {cause}")]
    Os {
        /// The action that failed, such as "mapping 2097152 bytes of shared memory".
        action: String,
        /// The error of the system. The message has its text, so it is not returned as source.
        cause: io::Error,
    },
    /// A number is above the limit of the device.
    #[error("{what}: asked for {asked}, the device has {limit}")]
    Limit {
        /// The limited quantity, such as "send queue depth".
        what: &'static str,
        /// The number asked for.
        asked: u64,
        /// The limit of the device.
        limit: u64,
    },
    /// The object is in a state that does not allow the call.
    #[error("{call} is not allowed in state {state:?}")]
    State {
        /// The call.
        call: &'static str,
        /// The state of the queue pair.
        state: QueuePairState,
    },
    /// Objects of two devices, or of two protection domains, were mixed.
    #[error("{0} belongs to another device")]
    Foreign(&'static str),
    /// The peer's address is not one of this provider's, or is malformed.
    #[error("peer address: {0}")]
    BadAddress(String),
    /// A library that the provider needs is not installed, or is too old.
    #[error("{library} can't be loaded: install {install}")]
    Library {
        /// The library, such as "libibverbs.so.1".
        library: &'static str,
        /// The package of Debian that has the library.
        install: &'static str,
        /// The error of the loader, which names the file or the symbol that is missing.
        source: Arc<dyn Error + Send + Sync>,
    },
    /// A device, port or GID index that does not exist.
    #[error("{what} {wanted} does not exist; there is {available}")]
    NotFound {
        /// The thing that was looked for, such as "port".
        what: &'static str,
        /// Its name or number.
        wanted: String,
        /// The existing ones, as text for people.
        available: String,
    },
    /// The thing exists, but can't be used in its present state.
    #[error("{0}")]
    Unusable(String),
    /// The device does not support the function.
    #[error("the device has no {0}")]
    Unsupported(&'static str),
    /// The peer's device can't be reached from here.
    #[error("peer device unreachable: {0}")]
    Unreachable(String),
}

impl VerbsError {
    /// Creates an [`Os`](Self::Os) error of `action`.
    ///
    /// ```
    /// use std::io;
    /// use tonic_rdma_verbs::VerbsError;
    ///
    /// let error = VerbsError::os("mapping memory", io::Error::from(io::ErrorKind::OutOfMemory));
    /// assert!(error.to_string().contains("mapping memory"));
    /// ```
    pub fn os(action: impl Into<String>, cause: impl Into<io::Error>) -> Self {
        Self::Os { action: action.into(), cause: cause.into() }
    }

    /// Fails with the first of the numbers that is greater than its limit: each comes as its name, the number and the limit.
    pub(crate) fn check_limits<T: Into<u64>, const N: usize>(
        numbers: [(&'static str, T, T); N],
    ) -> Result<(), Self> {
        let mut numbers = numbers.map(|(what, asked, limit)| (what, asked.into(), limit.into())).into_iter();
        match numbers.find(|(_, asked, limit)| asked > limit) {
            Some((what, asked, limit)) => Err(Self::Limit { what, asked, limit }),
            None => Ok(()),
        }
    }
}

/// Joins the messages of `error` and of all its sources. Some errors repeat the message of their source, which is left out then.
pub fn chain(error: &dyn Error) -> String {
    with_causes(&error.to_string(), error)
}

/// Joins `message` and the messages of all sources of `error`, as [`chain`] does. It is for errors whose own text is not for people.
pub fn with_causes(message: &str, error: &dyn Error) -> String {
    let mut text = message.to_owned();
    let mut next = error.source();
    while let Some(cause) = next {
        let message = cause.to_string();
        if !text.contains(&message) {
            text = format!("{text}: {message}");
        }
        next = cause.source();
    }
    text
}

/// A work request that was not posted. The requests before it in the call were posted; those after it were not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("work request {index} not posted: {kind}")]
pub struct PostError {
    /// Index in the slice of the call.
    pub index: usize,
    /// The reason.
    pub kind: PostErrorKind,
}

/// The reason why a work request was not posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PostErrorKind {
    /// The number of outstanding requests is at the capacity of the queue (`ENOMEM`). Poll completions, then try again.
    #[error("queue full")]
    QueueFull,
    /// The queue pair's state does not allow this request.
    #[error("queue pair in state {0:?}")]
    State(QueuePairState),
    /// The request has more segments than the queue pair was created for.
    #[error("too many segments")]
    TooManySegments,
    /// The request has more inline bytes than the queue pair was created for.
    #[error("inline payload too long")]
    InlineTooLong,
    /// The request has more bytes than [`max_message_size`](super::DeviceAttributes::max_message_size).
    #[error("message too long")]
    MessageTooLong,
    /// The device does not support this operation.
    #[error("operation not supported by the device")]
    Unsupported,
    /// The device refused the request with this error number of the system.
    #[error("refused by the device: {}", io::Error::from_raw_os_error(*.0))]
    Refused(i32),
}

/// State of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueuePairState {
    /// Created.
    Reset,
    /// Takes receives.
    Init,
    /// Connected; receives.
    Rtr,
    /// Receives and sends.
    Rts,
    /// Flushes everything.
    Error,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{0}")]
    struct Caused(&'static str, #[source] Option<Box<Caused>>);

    #[test]
    fn a_chain_has_every_message_once() {
        let reset = Caused("reset", None);
        let lost = Caused("the connection is lost", Some(Box::new(reset)));
        let repeated = Caused("it failed: the connection is lost", Some(Box::new(lost)));
        assert_eq!(chain(&repeated), "it failed: the connection is lost: reset");
        assert_eq!(with_causes("can't call", &repeated), "can't call: the connection is lost: reset");
    }
}
