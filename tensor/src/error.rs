//! The error of devices, channels and tensors.

use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::wire::tensor_frame::MAX_NAME;
use tonic_rdma_verbs::CompletionStatus;
use tonic_rdma_verbs::memory::MemRegion;

/// The settings that allow tensors beside TLS, for error messages.
pub(crate) const ALLOW_PLAINTEXT: &str =
    "DeviceBuilder::plaintext_tensors(true) or RDMA_PLAINTEXT_TENSORS=allow";

type BoxedError = Box<dyn Error + Send + Sync>;

/// The error of a device, a channel, a slot or a tensor. Clones share one error.
///
/// A program decides by [`kind`](Self::kind), and people read [`reason`](Self::reason). The reason has the
/// message of the [`cause`](Self::cause), which is there to be downcast. [`source`](Error::source) is the first
/// source of the cause that the reason does not have, so a report of the whole chain repeats nothing.
///
/// ```
/// use tonic_rdma_tensor::{TensorError, VerbsError};
///
/// /// Returns the error of the system that left no memory, if it was one.
/// fn system_error(error: &TensorError) -> Option<&std::io::Error> {
///     error.cause()?.downcast_ref::<VerbsError>()?.system()
/// }
/// ```
#[derive(Clone)]
pub struct TensorError(Arc<Inner>);

struct Inner {
    kind: TensorErrorKind,
    reason: Box<str>,
    /// The offset in `reason` of what the peer said, or of how its link was lost.
    detail: usize,
    peer: Option<Arc<str>>,
    code: Option<tonic::Code>,
    source: Option<BoxedError>,
}

/// What a program can decide by when it gets a [`TensorError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TensorErrorKind {
    /// An argument of the call can't be used: a name, a range, a type, a shape, a length, or bytes that are
    /// no tensor.
    InvalidArgument,
    /// A setting of [`DeviceBuilder`](super::DeviceBuilder), a variable of the environment, or the address to
    /// listen on can't be used.
    InvalidSetting,
    /// The elements are not aligned, or are not contiguous. A copy is:
    /// [`Tensor::copy_from`](super::Tensor::copy_from),
    /// [`Tensor::to_contiguous`](super::Tensor::to_contiguous).
    Layout,
    /// The name is in use already.
    NameTaken,
    /// The allowed number of operations, links, offers or bytes is in use. Try again later.
    Busy,
    /// The peer did not answer in time.
    Timeout,
    /// The peer's process ended, or its machine can't be reached any more. Data in transit is lost. The
    /// receiver never gets a tensor that arrived in part.
    PeerLost,
    /// This process closed the link to the peer.
    Closed,
    /// The RDMA device failed a request, and the link has ended.
    Device,
    /// The peer broke the protocol, and the link has ended.
    Protocol,
    /// There is no RDMA between this process and the peer.
    NoRdma,
    /// The peer refused a call or a request. [`TensorError::code`] has its status.
    Refused,
    /// The peer gave no right for this operation on its memory, or no setting allows tensors beside TLS.
    NotPermitted,
    /// There is no memory, or `RDMA_PINNED_LIMIT` is used up.
    NoMemory,
    /// The lease of a [remote buffer](crate::buffer) has ended: its owner dropped it, its time is over, or all
    /// its readers have read.
    Gone,
    /// The owner of a remote buffer has revoked its lease.
    Revoked,
    /// The owner of a remote buffer is another process than the one that made the handle, or another pool.
    Restarted,
    /// Something else failed in this process.
    Other,
}

impl TensorError {
    /// Returns the kind of the error.
    pub fn kind(&self) -> TensorErrorKind {
        self.0.kind
    }

    /// Returns one line for people: what happened, to which peer, and what to do about it.
    pub fn reason(&self) -> &str {
        &self.0.reason
    }

    /// Returns the address of the peer, if the error is about a peer or the link to it.
    pub fn peer(&self) -> Option<&str> {
        self.0.peer.as_deref()
    }

    /// Returns the gRPC status code by which the peer refused, if the kind is
    /// [`Refused`](TensorErrorKind::Refused).
    pub fn code(&self) -> Option<tonic::Code> {
        self.0.code
    }

    /// Returns the error whose message is in the reason, if there was one.
    pub fn cause(&self) -> Option<&(dyn Error + Send + Sync + 'static)> {
        self.0.source.as_deref()
    }

    /// Returns the part of the reason that the peer said, or how the link to it was lost.
    pub(crate) fn detail(&self) -> &str {
        self.0.reason.get(self.0.detail..).unwrap_or_default()
    }

    pub(crate) fn new(kind: TensorErrorKind, reason: impl Into<Box<str>>) -> Self {
        Self(Arc::new(Inner { kind, reason: reason.into(), detail: 0, peer: None, code: None, source: None }))
    }

    /// Makes an error with the message of `source` behind `prefix`.
    pub(crate) fn caused(
        kind: TensorErrorKind,
        prefix: &str,
        source: impl Error + Send + Sync + 'static,
    ) -> Self {
        Self::new(kind, format!("{prefix}{source}")).because(source)
    }

    fn of_peer(kind: TensorErrorKind, peer: &Arc<str>, prefix: String, detail: impl fmt::Display) -> Self {
        let (peer, reason) = (Some(Arc::clone(peer)), format!("{prefix}{detail}").into());
        Self(Arc::new(Inner { kind, reason, detail: prefix.len(), peer, code: None, source: None }))
    }

    /// Returns the error with `source`, whose message it already has.
    pub(crate) fn because(mut self, source: impl Into<BoxedError>) -> Self {
        if let Some(inner) = Arc::get_mut(&mut self.0) {
            inner.source = Some(source.into());
        }
        self
    }

    /// Makes the error of a failure in this process that has no other kind.
    pub(crate) fn other(reason: impl Into<Box<str>>) -> Self {
        Self::new(TensorErrorKind::Other, reason)
    }

    /// Makes the error of a failure in this process that `source` describes.
    pub(crate) fn local(source: impl Error + Send + Sync + 'static) -> Self {
        Self::caused(TensorErrorKind::Other, "", source)
    }

    /// Makes the error of an argument that can't be used.
    pub(crate) fn argument(reason: impl Into<Box<str>>) -> Self {
        Self::new(TensorErrorKind::InvalidArgument, reason)
    }

    /// Makes the error of settings that can't be used.
    pub(crate) fn setting(prefix: &str, source: impl Error + Send + Sync + 'static) -> Self {
        Self::caused(TensorErrorKind::InvalidSetting, prefix, source)
    }

    /// Makes the error of an allocation or registration that failed.
    pub(crate) fn memory(source: impl Error + Send + Sync + 'static) -> Self {
        Self::caused(TensorErrorKind::NoMemory, "no memory: ", source)
    }

    pub(crate) fn peer_lost(peer: &Arc<str>, reason: impl fmt::Display) -> Self {
        Self::of_peer(TensorErrorKind::PeerLost, peer, format!("the link to {peer} is lost: "), reason)
    }

    pub(crate) fn closed(peer: &Arc<str>) -> Self {
        Self::of_peer(TensorErrorKind::Closed, peer, format!("the link to {peer} was closed here"), "")
    }

    pub(crate) fn violation(peer: &Arc<str>, fault: impl fmt::Display) -> Self {
        Self::of_peer(TensorErrorKind::Protocol, peer, format!("the peer {peer} broke the protocol: "), fault)
    }

    pub(crate) fn no_rdma(peer: &Arc<str>, reason: impl fmt::Display) -> Self {
        Self::of_peer(TensorErrorKind::NoRdma, peer, format!("no RDMA to {peer}: "), reason)
    }

    pub(crate) fn plaintext_refused(peer: &Arc<str>) -> Self {
        let reason = format!(
            "{peer} is reached over TLS, and tensors would cross the network unencrypted beside it: if that is \
             acceptable, set {ALLOW_PLAINTEXT}"
        );
        Self::of_peer(TensorErrorKind::NotPermitted, peer, reason, "")
    }

    pub(crate) fn refused(peer: &Arc<str>, code: tonic::Code, message: &str) -> Self {
        let prefix = format!("{peer} refused ({code:?}): ");
        let (kind, detail, reason) = (TensorErrorKind::Refused, prefix.len(), (prefix + message).into());
        let (peer, code) = (Some(Arc::clone(peer)), Some(code));
        Self(Arc::new(Inner { kind, reason, detail, peer, code, source: None }))
    }

    /// Makes the error of a remote buffer.
    pub(crate) fn of_owner(kind: TensorErrorKind, owner: &str, reason: &str) -> Self {
        Self::of_peer(kind, &owner.into(), format!("buffer of {owner}: "), reason)
    }

    /// Makes the error of a call to the owner of a remote buffer.
    pub(crate) fn of_call(owner: &str, status: tonic::Status) -> Self {
        let code = status.code();
        let kind = match code {
            tonic::Code::Unavailable => TensorErrorKind::PeerLost,
            tonic::Code::DeadlineExceeded => TensorErrorKind::Timeout,
            tonic::Code::ResourceExhausted => TensorErrorKind::NoMemory,
            tonic::Code::OutOfRange => TensorErrorKind::Protocol,
            // Another server has the address.
            tonic::Code::Unimplemented => TensorErrorKind::Restarted,
            // tonic's transport ended the call: statuses of a server have no source.
            _ if status.source().is_some() => TensorErrorKind::PeerLost,
            _ => return Self::refused(&owner.into(), code, status.message()).because(status),
        };
        Self::of_owner(kind, owner, status.message()).because(status)
    }

    pub(crate) fn device(status: CompletionStatus) -> Self {
        Self::new(TensorErrorKind::Device, format!("the device ended a request: {status}"))
    }

    pub(crate) fn out_of_range(which: &str, offset: u64, length: u64, available: u64) -> Self {
        Self::argument(format!(
            "{length} bytes at offset {offset} do not lie within the {which} region of {available}"
        ))
    }

    pub(crate) fn not_permitted(what: &str, name: &str) -> Self {
        Self::new(TensorErrorKind::NotPermitted, format!("the peer gave no right to {what} {name:?}"))
    }

    pub(crate) fn mismatch(name: &str, expected: impl fmt::Display, found: impl fmt::Display) -> Self {
        Self::argument(format!("{name:?} takes {expected}, not {found}"))
    }

    pub(crate) fn busy(most: usize) -> Self {
        Self::new(TensorErrorKind::Busy, format!("{most} operations wait on this channel already"))
    }

    pub(crate) fn timeout(what: &str, limit: Duration) -> Self {
        Self::new(TensorErrorKind::Timeout, format!("{what} did not happen within {limit:?}"))
    }
}

/// Errors are equal if their kinds and reasons are.
impl PartialEq for TensorError {
    fn eq(&self, other: &Self) -> bool {
        (self.kind(), self.reason()) == (other.kind(), other.reason())
    }
}

impl Eq for TensorError {}

impl fmt::Display for TensorError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.reason())
    }
}

impl fmt::Debug for TensorError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { kind, reason, source, .. } = &*self.0;
        f.debug_struct("TensorError")
            .field("kind", kind)
            .field("reason", reason)
            .field("source", source)
            .finish_non_exhaustive()
    }
}

impl Error for TensorError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        // A reason may have the whole chain.
        let mut source = self.0.source.as_ref()?.source();
        while let Some(told) = source.filter(|source| self.reason().contains(&source.to_string())) {
            source = told.source();
        }
        source
    }
}

/// The error of an operation that a region had moved into. The error gives the region back.
///
/// It is not a [`TensorError`] because the region is worth more than the message. With `?` it becomes one,
/// and the region is freed.
///
/// ```
/// use tonic_rdma_tensor::{MemRegion, StaticSender, TensorError};
///
/// async fn send(sender: &mut StaticSender, region: MemRegion) -> (MemRegion, Option<TensorError>) {
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
    error: TensorError,
}

impl TransferError {
    pub(crate) fn new(region: MemRegion, error: TensorError) -> Self {
        Self { region, error }
    }

    /// Returns the reason.
    pub fn error(&self) -> &TensorError {
        &self.error
    }

    /// Returns the region that had moved into the operation.
    pub fn into_region(self) -> MemRegion {
        self.region
    }

    /// Returns the region, and the reason.
    pub fn into_parts(self) -> (MemRegion, TensorError) {
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

impl From<TransferError> for TensorError {
    fn from(failed: TransferError) -> Self {
        failed.error
    }
}

/// Returns `name` if its length is allowed.
pub(crate) fn check_name(name: &str) -> Result<Arc<str>, TensorError> {
    match (1..=MAX_NAME).contains(&name.len()) {
        true => Ok(name.into()),
        false => {
            let length = name.len();
            Err(TensorError::argument(format!("a name of {length} bytes; it takes from 1 to {MAX_NAME}")))
        }
    }
}
