//! The errors of devices and channels.

use std::error::Error;
use std::fmt;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use super::types::TensorError;
use super::wire::tensor_frame::MAX_NAME;
use tonic_rdma::RdmaError;
use tonic_rdma_verbs::CompletionStatus;
use tonic_rdma_verbs::memory::MemRegion;

/// The settings that allow tensors beside TLS, for error messages.
pub(crate) const ALLOW_PLAINTEXT: &str =
    "DeviceBuilder::plaintext_tensors(true) or RDMA_PLAINTEXT_TENSORS=allow";

/// The reason why a tensor, or some bytes, did not arrive.
///
/// Variants that hold another error show its message in their own message. [`source`](Error::source) then
/// returns the source of that other error, so a report that prints the whole chain repeats nothing.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum ChannelError {
    /// The peer's process ended, or its machine can't be reached any more. Data in transit is lost. The receiver never gets a
    /// tensor that arrived in part.
    PeerLost {
        /// The peer's device: the address that it listens on or called from.
        peer: Arc<str>,
        /// The reason, as this end observed it.
        reason: Arc<str>,
    },
    /// This end closed the link to the peer.
    Closed(Arc<str>),
    /// The peer broke the protocol, and the link ended.
    Violation {
        /// The peer.
        peer: Arc<str>,
        /// The fault that this end found.
        cause: Cause,
    },
    /// The device failed a request. The link has ended.
    Device(CompletionStatus),
    /// There is no RDMA between this end and the peer.
    NoRdma {
        /// The address of the peer.
        endpoint: Arc<str>,
        /// The reason.
        cause: Cause,
    },
    /// The peer is reached over TLS, tensors would cross the network unencrypted, and no setting allows that.
    PlaintextRefused {
        /// The address of the peer.
        endpoint: Arc<str>,
    },
    /// The peer refused a call or a request.
    Refused {
        /// The address of the peer.
        endpoint: Arc<str>,
        /// The status code of gRPC.
        code: tonic::Code,
        /// The reason that the peer gave.
        message: Arc<str>,
    },
    /// The bytes do not lie within the memory.
    OutOfRange {
        /// `local` or `remote`.
        which: &'static str,
        /// The requested offset in bytes.
        offset: u64,
        /// The requested number of bytes.
        length: u64,
        /// The size of the memory in bytes.
        available: u64,
    },
    /// The peer gave no right for this operation on its memory.
    NotPermitted {
        /// `read` or `write`.
        what: &'static str,
        /// The name of the region.
        name: Arc<str>,
    },
    /// A tensor of another type, rank or size than agreed.
    Mismatch {
        /// The name of the slot.
        name: Arc<str>,
        /// A description of the tensors that the slot takes.
        expected: Arc<str>,
        /// A description of the tensor or the bytes that were to be sent.
        found: Arc<str>,
    },
    /// The name is in use already.
    NameTaken(Arc<str>),
    /// A name of this many bytes is empty or too long.
    BadName(usize),
    /// A number of [`DeviceBuilder`](super::DeviceBuilder) is out of range.
    BadSetting {
        /// The method of the builder.
        setting: &'static str,
        /// The number that was given.
        given: u64,
        /// The numbers that the setting takes.
        accepted: RangeInclusive<u64>,
    },
    /// An environment variable has a bad value.
    Config(RdmaError),
    /// The device can't listen on the address.
    Listen(Arc<std::io::Error>),
    /// A tensor can't be made or moved.
    Tensor(TensorError),
    /// There is no memory.
    Memory(Cause),
    /// The channel takes no further operation, because the allowed number of operations waits already. Or all buffers of a
    /// slot are in use: then the number is 1.
    Busy(usize),
    /// Something did not happen in time.
    TimedOut {
        /// The event that this end waited for.
        what: &'static str,
        /// The length of the wait.
        limit: Duration,
    },
    /// This end failed.
    Local(Cause),
}

/// The error that led to a [`ChannelError`]. Clones share one error.
///
/// ```
/// use tonic_rdma_tensor::ChannelError;
///
/// /// Returns the error of the system that left no memory, if it was one.
/// fn system_error(error: &ChannelError) -> Option<&std::io::Error> {
///     let ChannelError::Memory(cause) = error else { return None };
///     cause.get().downcast_ref()
/// }
/// ```
#[derive(Clone)]
pub struct Cause(Arc<dyn Error + Send + Sync>);

impl Cause {
    pub(crate) fn new(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self(Arc::from(error.into()))
    }

    /// Returns the error, to be downcast to its type.
    pub fn get(&self) -> &(dyn Error + Send + Sync + 'static) {
        &*self.0
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl fmt::Debug for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl ChannelError {
    /// Makes the error of a failure at this end.
    pub(crate) fn local(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Local(Cause::new(error))
    }

    /// Makes the error of an allocation or registration that failed.
    pub(crate) fn memory(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Memory(Cause::new(error))
    }
}

impl fmt::Display for ChannelError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PeerLost { peer, reason } => write!(f, "the link to {peer} is lost: {reason}"),
            Self::Closed(peer) => write!(f, "the link to {peer} was closed here"),
            Self::Violation { peer, cause } => write!(f, "the peer {peer} broke the protocol: {cause}"),
            Self::Device(status) => write!(f, "the device ended a request: {status}"),
            Self::NoRdma { endpoint, cause } => write!(f, "no RDMA to {endpoint}: {cause}"),
            Self::PlaintextRefused { endpoint } => write!(
                f,
                "{endpoint} is reached over TLS, and tensors would cross the network unencrypted beside it: if that is \
                 acceptable, set {ALLOW_PLAINTEXT}"
            ),
            Self::Refused { endpoint, code, message } => {
                write!(f, "{endpoint} refused ({code:?}): {message}")
            }
            Self::OutOfRange { which, offset, length, available } => {
                write!(
                    f,
                    "{length} bytes at offset {offset} do not lie within the {which} region of {available}"
                )
            }
            Self::NotPermitted { what, name } => write!(f, "the peer gave no right to {what} {name:?}"),
            Self::Mismatch { name, expected, found } => write!(f, "{name:?} takes {expected}, not {found}"),
            Self::NameTaken(name) => write!(f, "{name:?} is in use already"),
            Self::BadName(length) => write!(f, "a name of {length} bytes; it takes from 1 to {MAX_NAME}"),
            Self::BadSetting { setting, given, accepted } => {
                let (least, most) = (accepted.start(), accepted.end());
                write!(f, "DeviceBuilder::{setting}: {given} is not within {least} to {most}")
            }
            Self::Config(error) => error.fmt(f),
            Self::Listen(error) => write!(f, "can't listen for tensor peers: {error}"),
            Self::Tensor(error) => error.fmt(f),
            Self::Memory(cause) => write!(f, "no memory: {cause}"),
            Self::Busy(most) => write!(f, "{most} operations wait on this channel already"),
            Self::TimedOut { what, limit } => write!(f, "{what} did not happen within {limit:?}"),
            Self::Local(cause) => cause.fmt(f),
        }
    }
}

impl Error for ChannelError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Violation { cause, .. }
            | Self::NoRdma { cause, .. }
            | Self::Memory(cause)
            | Self::Local(cause) => cause.0.source(),
            Self::Config(error) => error.source(),
            Self::Listen(error) => error.source(),
            Self::Tensor(error) => error.source(),
            _ => None,
        }
    }
}

impl From<RdmaError> for ChannelError {
    fn from(error: RdmaError) -> Self {
        Self::Config(error)
    }
}

impl From<TensorError> for ChannelError {
    fn from(error: TensorError) -> Self {
        Self::Tensor(error)
    }
}

/// The error of an operation that a region had moved into. The error gives the region back.
///
/// With `?` it becomes a [`ChannelError`], and the region is freed.
///
/// ```
/// use tonic_rdma_tensor::{ChannelError, MemRegion, StaticSender};
///
/// async fn send(sender: &mut StaticSender, region: MemRegion) -> (MemRegion, Option<ChannelError>) {
///     match sender.send_region(region).await {
///         Ok(region) => (region, None),
///         Err(failed) => {
///             let error = failed.error().clone();
///             (failed.into_region(), Some(error))
///         }
///     }
/// }
/// ```
#[derive(Debug)]
pub struct TransferError {
    region: MemRegion,
    error: ChannelError,
}

impl TransferError {
    pub(crate) fn new(region: MemRegion, error: ChannelError) -> Self {
        Self { region, error }
    }

    /// Returns the reason.
    pub fn error(&self) -> &ChannelError {
        &self.error
    }

    /// Returns the region that had moved into the operation.
    pub fn into_region(self) -> MemRegion {
        self.region
    }

    /// Returns the region, and the reason.
    pub fn into_parts(self) -> (MemRegion, ChannelError) {
        (self.region, self.error)
    }
}

impl fmt::Display for TransferError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl Error for TransferError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.error.source()
    }
}

impl From<TransferError> for ChannelError {
    fn from(failed: TransferError) -> Self {
        failed.error
    }
}

/// Returns `name` if its length is allowed.
pub(crate) fn check_name(name: &str) -> Result<Arc<str>, ChannelError> {
    match (1..=MAX_NAME).contains(&name.len()) {
        true => Ok(name.into()),
        false => Err(ChannelError::BadName(name.len())),
    }
}
