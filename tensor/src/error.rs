//! What can go wrong.

use std::sync::Arc;

use tonic_rdma_verbs::CompletionStatus;

/// Why a tensor, or some bytes, did not get where they should.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChannelError {
    /// The peer's process ended, or its machine can't be reached any more. What was on its way is lost; nothing that arrived
    /// in part is ever shown.
    #[error("the link to {peer} is lost: {reason}")]
    PeerLost {
        /// The peer's device, where it listens or called from.
        peer: Arc<str>,
        /// What was seen.
        reason: Arc<str>,
    },
    /// This end closed the link.
    #[error("the link to {0} was closed here")]
    Closed(Arc<str>),
    /// The peer broke the rules, and so the link ended.
    #[error("the peer {peer} broke the protocol: {reason}")]
    Violation {
        /// The peer.
        peer: Arc<str>,
        /// What it did.
        reason: Arc<str>,
    },
    /// The device failed a request. The link has ended with it.
    #[error("the device ended a request: {0}")]
    Device(CompletionStatus),
    /// There is no RDMA to that peer.
    #[error("no RDMA to {endpoint}: {reason}")]
    NoRdma {
        /// Where it listens.
        endpoint: Arc<str>,
        /// Why.
        reason: Arc<str>,
    },
    /// The peer is reached over TLS, which tensors would bypass, and no setting says that this is acceptable.
    #[error(
        "{endpoint} is reached over TLS, and tensors would cross the network unencrypted beside it: if that is acceptable, set {setting}",
        setting = super::caller::SETTING
    )]
    PlaintextRefused {
        /// Where it listens.
        endpoint: Arc<str>,
    },
    /// The peer refused, and said why.
    #[error("{endpoint} refused ({code:?}): {message}")]
    Refused {
        /// Where it listens.
        endpoint: Arc<str>,
        /// The status code of gRPC.
        code: tonic::Code,
        /// What it said.
        message: Arc<str>,
    },
    /// The bytes do not lie within the memory.
    #[error("{length} bytes at offset {offset} do not lie within the {which} region of {available}")]
    OutOfRange {
        /// `local` or `remote`.
        which: &'static str,
        /// Offset asked for.
        offset: u64,
        /// Bytes asked for.
        length: u64,
        /// Bytes there are.
        available: u64,
    },
    /// The peer gave no right to do that with its memory.
    #[error("the peer gave no right to {what} {name:?}")]
    NotPermitted {
        /// `read` or `write`.
        what: &'static str,
        /// The region's name.
        name: Arc<str>,
    },
    /// A tensor of another type, rank or size than agreed.
    #[error("{name:?} takes {expected}, not {found}")]
    Mismatch {
        /// The slot's name.
        name: Arc<str>,
        /// What it takes.
        expected: Arc<str>,
        /// What was offered.
        found: Arc<str>,
    },
    /// A name that is in use already.
    #[error("{0:?} is in use already")]
    NameTaken(Arc<str>),
    /// A name that can't be used.
    #[error("a name of {0} bytes; it takes from 1 to {max}", max = crate::wire::tensor_frame::MAX_NAME)]
    BadName(usize),
    /// There is no memory for it.
    #[error("no memory: {0}")]
    Memory(Arc<str>),
    /// As many operations are waiting as may.
    #[error("{0} operations wait on this channel already")]
    Busy(usize),
    /// It did not happen in time.
    #[error("{what} did not happen within {limit:?}")]
    TimedOut {
        /// What was waited for.
        what: &'static str,
        /// How long.
        limit: std::time::Duration,
    },
    /// This end could not go on.
    #[error("{0}")]
    Local(Arc<str>),
}

impl ChannelError {
    /// An error of this end's, in words.
    pub(super) fn local(error: impl std::fmt::Display) -> Self {
        Self::Local(error.to_string().into())
    }

    pub(super) fn memory(error: impl std::fmt::Display) -> Self {
        Self::Memory(error.to_string().into())
    }
}
