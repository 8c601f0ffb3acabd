//! Errors of this crate, and the states of a queue pair, which they name. A posted request fails with a
//! [`CompletionStatus`](super::CompletionStatus) instead.

use std::borrow::Cow;
use std::error::Error;
use std::ops::Range;
use std::sync::Arc;
use std::{fmt, io};

/// A verbs call, or a request for registered memory, that could not be carried out. It has one pointer, so
/// that results stay small.
///
/// ```
/// use tonic_rdma_verbs::{HostMemory, VerbsErrorKind};
///
/// let memory = HostMemory::shared(4096, 4096)?;
/// let error = memory.copy_in(4095, b"two").unwrap_err();
/// assert_eq!(error.kind(), VerbsErrorKind::InvalidArgument);
/// assert_eq!(error.reason(), "3 bytes at offset 4095 do not lie within 4096");
/// # Ok::<(), tonic_rdma_verbs::VerbsError>(())
/// ```
#[derive(Clone, Debug)]
pub struct VerbsError(Arc<Failure>);

#[derive(Debug)]
struct Failure {
    kind: VerbsErrorKind,
    reason: Cow<'static, str>,
    /// The reason has its text, so it is not the source.
    system: Option<Arc<io::Error>>,
    source: Option<Arc<dyn Error + Send + Sync>>,
}

/// The kind of a [`VerbsError`], for programs that decide by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum VerbsErrorKind {
    /// The operating system refused. [`VerbsError::system`] has its error.
    System,
    /// A number is above the limit of the device.
    Limit,
    /// The queue pair is in a state that does not allow the call.
    InvalidState,
    /// An argument is wrong: a range that does not lie in its memory, an address that is not a multiple of 8,
    /// an object of another device or protection domain, or a tensor of DLPack that this process can't use.
    InvalidArgument,
    /// The peer's address is not one of this provider's, or is malformed.
    InvalidAddress,
    /// The device, port or GID index does not exist, or the library that the provider needs is not installed,
    /// or is too old.
    NoDevice,
    /// What the call names exists, but can't be used in its present state, or with the present settings.
    Unusable,
    /// The device does not support the function.
    Unsupported,
    /// The peer's device can't be reached from here.
    Unreachable,
    /// The peer's process runs as another user, and one of the two devices does not let the other in.
    NotAdmitted,
    /// The quota of the pool is used up for now. Try again after memory has been given back.
    QuotaExhausted,
    /// The request exceeds the whole quota, so the pool can never serve it.
    TooLarge,
    /// The process may pin no more memory. Try again after memory has been given back, or raise the limit as
    /// the reason says.
    NoMemory,
    /// The peer's memory is not mapped yet. The first READ of it makes the peer offer it, and some
    /// milliseconds later it is mapped. The bounds on mapped memory may delay that.
    NotMapped,
    /// The key is not valid: the peer has taken the memory back, or the bytes do not lie within it.
    Revoked,
}

impl VerbsError {
    /// Creates an error. `reason` is one line for people.
    ///
    /// ```
    /// use tonic_rdma_verbs::{VerbsError, VerbsErrorKind};
    ///
    /// let error = VerbsError::new(VerbsErrorKind::Unreachable, "the peer's process has ended");
    /// assert_eq!(error.to_string(), "the peer's process has ended");
    /// ```
    pub fn new(kind: VerbsErrorKind, reason: impl Into<Cow<'static, str>>) -> Self {
        Self(Arc::new(Failure { kind, reason: reason.into(), system: None, source: None }))
    }

    /// Creates an error of the kind [`System`](VerbsErrorKind::System), of `action`.
    ///
    /// ```
    /// use std::io;
    /// use tonic_rdma_verbs::VerbsError;
    ///
    /// let error = VerbsError::os("mapping memory", io::Error::from(io::ErrorKind::OutOfMemory));
    /// assert!(error.reason().starts_with("mapping memory: "));
    /// assert_eq!(error.system().map(io::Error::kind), Some(io::ErrorKind::OutOfMemory));
    /// ```
    pub fn os(action: impl fmt::Display, cause: impl Into<io::Error>) -> Self {
        let cause = cause.into();
        let reason = format!("{action}: {cause}").into();
        let system = Some(Arc::new(cause));
        Self(Arc::new(Failure { kind: VerbsErrorKind::System, reason, system, source: None }))
    }

    /// Returns the kind, for programs that decide by it.
    pub fn kind(&self) -> VerbsErrorKind {
        self.0.kind
    }

    /// Returns what happened, in one line for people.
    pub fn reason(&self) -> &str {
        &self.0.reason
    }

    /// Returns the error of the operating system, if it refused. The reason has its text.
    pub fn system(&self) -> Option<&io::Error> {
        self.0.system.as_deref()
    }

    /// Adds to the reason that a slab of `bytes` bytes could not be registered. Keeps the kind and the
    /// sources.
    pub(crate) fn not_registered(self, bytes: u64) -> Self {
        let Failure { kind, reason, system, source } = &*self.0;
        let reason = format!("a slab of {bytes} bytes could not be registered: {reason}").into();
        Self(Arc::new(Failure { kind: *kind, reason, system: system.clone(), source: source.clone() }))
    }

    /// Makes the error that `asked` is more than the device has.
    pub(crate) fn limit(what: &str, asked: u64, limit: u64) -> Self {
        let reason = format!("{what}: asked for {asked}, the device has {limit}");
        Self::new(VerbsErrorKind::Limit, reason)
    }

    /// Makes the error that `call` is not allowed in `state`.
    pub(crate) fn state(call: &str, state: QueuePairState) -> Self {
        Self::new(VerbsErrorKind::InvalidState, format!("{call} is not allowed in state {state:?}"))
    }

    /// Makes the error that `what` belongs to another device.
    pub(crate) fn foreign(what: &str) -> Self {
        Self::new(VerbsErrorKind::InvalidArgument, format!("{what} belongs to another device"))
    }

    pub(crate) fn bad_address(fault: impl fmt::Display) -> Self {
        Self::new(VerbsErrorKind::InvalidAddress, format!("peer address: {fault}"))
    }

    /// Makes the error that `library` can't be loaded. `install` is the package of Debian that has the
    /// library. `error` names the file or the symbol that is missing.
    #[cfg(feature = "ibverbs")]
    pub(crate) fn library(library: &str, install: &str, error: Arc<dyn Error + Send + Sync>) -> Self {
        let reason = format!("{library} can't be loaded: install {install}").into();
        let kind = VerbsErrorKind::NoDevice;
        Self(Arc::new(Failure { kind, reason, system: None, source: Some(error) }))
    }

    /// Makes the error that no `what` has the name or number `wanted`; `available` lists those that exist.
    #[cfg(feature = "ibverbs")]
    pub(crate) fn not_found(what: &str, wanted: impl fmt::Display, available: impl fmt::Display) -> Self {
        let reason = format!("{what} {wanted} does not exist; there is {available}");
        Self::new(VerbsErrorKind::NoDevice, reason)
    }

    pub(crate) fn unusable(reason: impl Into<Cow<'static, str>>) -> Self {
        Self::new(VerbsErrorKind::Unusable, reason)
    }

    pub(crate) fn unsupported(what: &str) -> Self {
        Self::new(VerbsErrorKind::Unsupported, format!("the device has no {what}"))
    }

    pub(crate) fn unreachable(reason: impl fmt::Display) -> Self {
        Self::new(VerbsErrorKind::Unreachable, format!("peer device unreachable: {reason}"))
    }

    /// Makes the error of a device that does not let in processes of another user.
    pub(crate) fn not_admitted(reason: impl fmt::Display) -> Self {
        Self::new(VerbsErrorKind::NotAdmitted, format!("peer device unreachable: {reason}"))
    }

    /// Checks that `length` bytes at `offset` lie within `available` bytes.
    #[inline]
    pub(crate) fn check_bounds(offset: usize, length: usize, available: usize) -> Result<(), Self> {
        match offset.checked_add(length) {
            Some(end) if end <= available => Ok(()),
            _ => Err(Self::out_of_bounds(offset, length, available)),
        }
    }

    /// Checks that `range` lies within `available` bytes. Returns the range, which is empty at its start if
    /// it ends before it starts.
    #[inline]
    pub(crate) fn check_range(range: Range<usize>, available: usize) -> Result<Range<usize>, Self> {
        let length = range.end.saturating_sub(range.start);
        Self::check_bounds(range.start, length, available)?;
        Ok(range.start..range.start + length)
    }

    #[cold]
    pub(crate) fn out_of_bounds(offset: usize, length: usize, available: usize) -> Self {
        let reason = format!("{length} bytes at offset {offset} do not lie within {available}");
        Self::new(VerbsErrorKind::InvalidArgument, reason)
    }

    /// Makes the error that the address of the 8 bytes at `offset` is not a multiple of 8.
    #[cold]
    pub(crate) fn misaligned(offset: usize) -> Self {
        let reason = format!("the word at offset {offset} is not at a multiple of 8 bytes");
        Self::new(VerbsErrorKind::InvalidArgument, reason)
    }

    /// Fails with the first of the numbers that is greater than its limit: each comes as its name, the number
    /// and the limit.
    pub(crate) fn check_limits<T: Into<u64>, const N: usize>(
        numbers: [(&'static str, T, T); N],
    ) -> Result<(), Self> {
        let mut numbers = numbers.map(|(what, asked, limit)| (what, asked.into(), limit.into())).into_iter();
        match numbers.find(|(_, asked, limit)| asked > limit) {
            Some((what, asked, limit)) => Err(Self::limit(what, asked, limit)),
            None => Ok(()),
        }
    }
}

/// Errors are equal if their kinds and reasons are.
impl PartialEq for VerbsError {
    fn eq(&self, other: &Self) -> bool {
        self.kind() == other.kind() && self.reason() == other.reason()
    }
}

impl fmt::Display for VerbsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.reason)
    }
}

impl Error for VerbsError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.0.source.as_deref().map(|source| source as _)
    }
}

/// Joins the messages of `error` and of all its sources. Some errors repeat the message of their source,
/// which is left out then.
pub fn chain(error: &dyn Error) -> String {
    with_causes(&error.to_string(), error)
}

/// Joins `message` and the messages of all sources of `error`, as [`chain`] does. It is for errors whose own
/// text is not for people.
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

/// A work request that was not posted. The requests before it in the call were posted; those after it were
/// not.
///
/// This is not a [`VerbsError`], because a full queue is a part of the normal flow of messages: the caller
/// reacts to it for each message, without an allocation.
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
    /// The number of outstanding requests is at the capacity of the queue (`ENOMEM`). Poll completions, then
    /// try again.
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

impl QueuePairState {
    /// Returns the state with the number that `as u8` gives it, or `Error` if there is none.
    #[inline]
    pub(crate) fn of(number: u8) -> Self {
        match number {
            0 => Self::Reset,
            1 => Self::Init,
            2 => Self::Rtr,
            3 => Self::Rts,
            _ => Self::Error,
        }
    }
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
