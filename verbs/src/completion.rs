//! Completion queues and their completions.

use std::any::Any;
use std::fmt::{self, Debug};
use std::os::fd::BorrowedFd;

use super::sealed::Sealed;
use super::{QueuePairNumber, VerbsError};

/// A completion queue (`struct ibv_cq` with its completion channel).
///
/// A caller polls the queue, or arms the queue and waits. Arming is one-shot: the event descriptor becomes
/// readable with the first completion that is added after [`arm`](Self::arm). An earlier completion makes no
/// event. Therefore arm, then poll once more, then wait.
pub trait CompletionQueue: Sealed + Any + Send + Sync + Debug {
    /// Takes up to `completions.len()` completions and returns their number. Never blocks.
    fn poll(&self, completions: &mut [WorkCompletion]) -> usize;

    /// Makes the queue hold at least `capacity` completions, if it holds fewer (`ibv_resize_cq`). Completions
    /// in the queue stay, and queue pairs may be at work meanwhile. On real devices this takes some
    /// milliseconds, in which polls wait.
    ///
    /// # Errors
    /// The queue is as it was.
    /// - [`Limit`](crate::VerbsErrorKind::Limit) if the device has no queue of this capacity.
    /// - [`Unsupported`](crate::VerbsErrorKind::Unsupported) if the driver can't resize queues. That of
    ///   soft-iWARP can't.
    /// - [`System`](crate::VerbsErrorKind::System) if the system refuses.
    fn resize(&self, capacity: u32) -> Result<(), VerbsError>;

    /// Returns whether the last poll has moved a part of a message whose rest follows when the peer has
    /// continued. Only the software device moves messages in parts; there a message hardly continues while a
    /// thread of one side sleeps.
    fn is_moving(&self) -> bool {
        false
    }

    /// Asks for one event with the next completion.
    fn arm(&self) -> Result<(), VerbsError>;

    /// Takes back an [`arm`](Self::arm) that has not fired, to spare peers a wake-up. This is a hint: a
    /// device without support does nothing, and the event may still come.
    fn disarm(&self) {}

    /// Returns the descriptor that becomes readable with an event. The descriptor does not block.
    fn event_fd(&self) -> BorrowedFd<'_>;

    /// Takes every event that has come. [`event_fd`](Self::event_fd) is then not readable any more.
    fn acknowledge_events(&self);
}

/// One finished work request (`struct ibv_wc`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkCompletion {
    /// The identifier that the request was posted with.
    pub wr_id: u64,
    /// The result. All fields except `wr_id` and `queue_pair` are valid only on success.
    pub status: CompletionStatus,
    /// The kind of the request.
    pub opcode: CompletionOpcode,
    /// Number of bytes received; valid only for a receive.
    pub byte_len: u64,
    /// Immediate data; `Some` for a receive that came with immediate data.
    pub immediate: Option<u32>,
    /// The queue pair that the request was posted on.
    pub queue_pair: QueuePairNumber,
}

impl WorkCompletion {
    /// A placeholder to fill arrays with before polling.
    pub const EMPTY: Self = Self {
        wr_id: 0,
        status: CompletionStatus::Success,
        opcode: CompletionOpcode::Send,
        byte_len: 0,
        immediate: None,
        queue_pair: QueuePairNumber(0),
    };
}

/// Kind of the request that a completion belongs to (`enum ibv_wc_opcode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompletionOpcode {
    /// A send, with or without immediate data.
    Send,
    /// An RDMA WRITE, with or without immediate data.
    Write,
    /// An RDMA READ.
    Read,
    /// A receive that a send consumed.
    Receive,
    /// A receive that an RDMA WRITE with immediate data consumed; its buffer was not touched.
    ReceiveWriteWithImmediate,
}

/// Result of a work request (`enum ibv_wc_status`; IBA vol. 1, 11.6.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CompletionStatus {
    /// The request was carried out.
    Success,
    /// The message was longer than the receive buffer (`IBV_WC_LOC_LEN_ERR`).
    LocalLength,
    /// The device could not carry out the request, for a local reason (`IBV_WC_LOC_QP_OP_ERR`). Soft-RoCE
    /// reports this status for some faults that have a status of their own on other devices.
    LocalOperation,
    /// A local segment named no registered memory, or the memory lacks the right (`IBV_WC_LOC_PROT_ERR`).
    LocalProtection,
    /// The queue pair was in Error before the request ran, or moved there meanwhile (`IBV_WC_WR_FLUSH_ERR`).
    WorkRequestFlushed,
    /// The peer could not take the request, such as a send longer than its receive buffer
    /// (`IBV_WC_REM_INV_REQ_ERR`).
    RemoteInvalidRequest,
    /// A wrong rkey, a range out of bounds, or a right that the region does not grant
    /// (`IBV_WC_REM_ACCESS_ERR`).
    RemoteAccess,
    /// The peer failed to carry out the request (`IBV_WC_REM_OP_ERR`).
    RemoteOperation,
    /// The peer did not answer, for example because its process died (`IBV_WC_RETRY_EXC_ERR`).
    RetryExceeded,
    /// The peer had no receive posted while the retries lasted (`IBV_WC_RNR_RETRY_EXC_ERR`).
    RnrRetryExceeded,
    /// The device failed (`IBV_WC_FATAL_ERR` and every status not listed here).
    Fatal,
}

impl fmt::Display for CompletionStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Success => "success",
            Self::LocalLength => "local length error",
            Self::LocalOperation => "local operation error",
            Self::LocalProtection => "local protection error",
            Self::WorkRequestFlushed => "work request flushed (the connection had ended)",
            Self::RemoteInvalidRequest => "remote invalid request",
            Self::RemoteAccess => "remote access error",
            Self::RemoteOperation => "remote operation error",
            Self::RetryExceeded => "transport retries exceeded (the peer did not answer)",
            Self::RnrRetryExceeded => "receiver-not-ready retries exceeded",
            Self::Fatal => "fatal device error",
        })
    }
}
