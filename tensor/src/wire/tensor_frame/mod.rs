//! Frames: the small messages of the tensor channel, beside its one-sided operations.
//!
//! A frame is one Send of at most [`MAX_FRAME`] bytes. Frames arrive in the order of the queue pair:
//!
//! ```text
//!  0             3         4      5           8             12              16
//!  ├── magic ────┼─version─┼─kind─┼── zero ───┼── granted ──┼─ body length ─┼── body ──
//! ```
//!
//! There is one way to write each frame: if bytes are decoded and encoded again, the result equals the first bytes.

mod codec;
mod error;
#[cfg(test)]
mod tests;

pub use error::{FrameError, RequestFault};

use super::tensor_metadata::WireMetadata;

/// Length of the longest frame, with its header, in bytes. Every receive for frames has room for it.
pub const MAX_FRAME: usize = 2048;
/// Length of the longest name of a tensor, in bytes.
pub const MAX_NAME: usize = 1024;
/// First bytes of every frame.
pub const MAGIC: [u8; 3] = *b"\xd5tf";
/// Version of the frames that this end knows.
pub const VERSION: u8 = 1;
/// Length of a frame's header, in bytes.
pub const HEADER: usize = 16;
/// Length of the longest text of a [`Frame::Status`], in bytes. A longer text is cut.
pub const MAX_TEXT: usize = MAX_FRAME - HEADER - 12;

/// Number of a request. The requester chooses it; it is unique on its link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

impl std::fmt::Display for RequestId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "request {}", self.0)
    }
}

/// A frame. Its text is still in the receive buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame<'a> {
    /// Carries nothing but the header's count of credits.
    Credit,
    /// Wakes a peer that sleeps until its word of `slot` changes: the slot was written or released, or a notice was sent.
    Bell {
        /// Number of the slot on the link.
        slot: u32,
    },
    /// Reports that a slot was written. For devices without immediate data and without in-order placement.
    Placed {
        /// Number of the slot on the link.
        slot: u32,
        /// Number of the message in this slot, from 1.
        epoch: u64,
    },
    /// Reports that a slot may be written again.
    Released {
        /// Number of the slot on the link.
        slot: u32,
        /// Number of the message that was taken from the slot.
        epoch: u64,
    },
    /// Asks for a tensor.
    Request(TensorRequest<'a>),
    /// Describes the tensor, because the request had no sink or the sink does not fit. The requester asks again with a sink
    /// for this metadata.
    Metadata {
        /// The request that this frame answers.
        request_id: RequestId,
        /// Type, shape and length of the tensor.
        metadata: WireMetadata,
    },
    /// Reports that the tensor is in the sink.
    Written {
        /// The request that this frame answers.
        request_id: RequestId,
        /// Checksum of the tensor's bytes at the provider, if the request asked for one.
        checksum: Option<u64>,
    },
    /// Reports that there will be no tensor.
    Status {
        /// The request that this frame answers.
        request_id: RequestId,
        /// gRPC's code, 1 to 16.
        code: u32,
        /// The reason. A text longer than [`MAX_TEXT`] is cut.
        text: &'a str,
    },
    /// Reports that the tensor is dead: the branch of the graph that would have computed it was not taken.
    Dead {
        /// The request that this frame answers.
        request_id: RequestId,
    },
    /// Cancels a request. The provider answers the request nevertheless.
    Cancel {
        /// Number of the request.
        request_id: RequestId,
    },
    /// Closes the link. No frame follows.
    Goodbye,
}

/// A request for the tensor (`name`, `step`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorRequest<'a> {
    /// Number of the request. The second request, after a [`Frame::Metadata`], has the number of the first.
    pub request_id: RequestId,
    /// Step of the computation.
    pub step: u64,
    /// Memory to write the tensor to, if the requester has its metadata.
    pub sink: Option<Sink>,
    /// Whether [`Frame::Written`] has to carry a checksum.
    pub checksum_wanted: bool,
    /// Name of the tensor. Encoding takes at most [`MAX_NAME`] bytes; decoding takes any name that fits into a frame.
    pub name: &'a str,
}

/// Memory of the requester that the provider may write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sink {
    /// Metadata of the tensor that the sink is made for.
    pub metadata: WireMetadata,
    /// Virtual address of the sink at the requester.
    pub address: u64,
    /// Key of the region with the sink.
    pub rkey: u32,
    /// Length of the sink, in bytes.
    pub length: u64,
}

/// A frame and the count of its header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decoded<'a> {
    /// Number of receives that the sender has ever posted for frames, including the receives of the start. The number wraps.
    pub granted: u32,
    /// The frame.
    pub frame: Frame<'a>,
}
