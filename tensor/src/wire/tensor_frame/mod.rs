//! Frames: the small messages beside the tensor channel's one-sided operations.
//!
//! A frame is one Send of at most [`MAX_FRAME`] bytes, in the order of the queue pair:
//!
//! ```text
//!  0             3         4      5           8             12              16
//!  ├── magic ────┼─version─┼─kind─┼── zero ───┼── granted ──┼─ body length ─┼── body ──
//! ```
//!
//! There is one way to write each frame: what decodes encodes to the same bytes.

mod codec;
mod error;
#[cfg(test)]
mod tests;

pub use error::{FrameError, RequestFault};

use super::tensor_metadata::WireMetadata;

/// Longest frame, header included, in bytes: what every receive posted for frames has room for.
pub const MAX_FRAME: usize = 2048;
/// Longest name of a tensor that is asked for, in bytes.
pub const MAX_NAME: usize = 1024;
/// What every frame begins with.
pub const MAGIC: [u8; 3] = *b"\xd5tf";
/// The version that this end speaks.
pub const VERSION: u8 = 1;
/// Bytes of a frame's header.
pub const HEADER: usize = 16;
/// Longest text of a [`Frame::Status`], in bytes; a longer one is cut.
pub const MAX_TEXT: usize = MAX_FRAME - HEADER - 12;

/// Number of a request, of the requester's choice, unique on its link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

impl std::fmt::Display for RequestId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "request {}", self.0)
    }
}

/// A frame, its text still in the receive buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame<'a> {
    /// Nothing but the header's count of credits.
    Credit,
    /// Something was written for the receiver of `slot`, which may have gone to sleep.
    Bell {
        /// Number of the slot on the link.
        slot: u32,
    },
    /// A slot was written, for devices without immediate data and without in-order placement.
    Placed {
        /// Number of the slot on the link.
        slot: u32,
        /// Which of the slot's messages it is, from 1.
        epoch: u64,
    },
    /// A slot may be written again.
    Released {
        /// Number of the slot on the link.
        slot: u32,
        /// The message that was taken from it.
        epoch: u64,
    },
    /// Asks for a tensor.
    Request(TensorRequest<'a>),
    /// The tensor is not what the request says, or the request says nothing: ask again with a sink for this.
    Metadata {
        /// The request that it answers.
        request_id: RequestId,
        /// What the tensor is.
        metadata: WireMetadata,
    },
    /// The tensor is in the sink.
    Written {
        /// The request that it answers.
        request_id: RequestId,
        /// Checksum of the tensor's bytes at the provider, if the request wanted it.
        checksum: Option<u64>,
    },
    /// There will be no tensor.
    Status {
        /// The request that it answers.
        request_id: RequestId,
        /// gRPC's code, 1 to 16.
        code: u32,
        /// Why; what is longer than [`MAX_TEXT`] is cut when it is written.
        text: &'a str,
    },
    /// The tensor is dead: the branch of the graph that would have computed it was not taken.
    Dead {
        /// The request that it answers.
        request_id: RequestId,
    },
    /// The requester has no use for the answer any more. There is one nevertheless.
    Cancel {
        /// The request.
        request_id: RequestId,
    },
    /// The sender leaves; nothing follows.
    Goodbye,
}

/// Asks for the tensor (`name`, `step`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorRequest<'a> {
    /// Number of the request. Asking again after a [`Frame::Metadata`] repeats it.
    pub request_id: RequestId,
    /// Step of the computation.
    pub step: u64,
    /// Where to write it, if the requester believes to know what it is.
    pub sink: Option<Sink>,
    /// Whether [`Frame::Written`] shall carry a checksum.
    pub checksum_wanted: bool,
    /// Name of the tensor: on decoding whatever a frame has room for, on encoding at most [`MAX_NAME`] bytes.
    pub name: &'a str,
}

/// Memory of the requester that the provider may write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sink {
    /// What it is made for.
    pub metadata: WireMetadata,
    /// Its virtual address at the requester.
    pub address: u64,
    /// Key of the region that it lies in.
    pub rkey: u32,
    /// Its length in bytes.
    pub length: u64,
}

/// A frame and what its header says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decoded<'a> {
    /// Receives that the sender has ever posted for frames, the first ones included; wraps.
    pub granted: u32,
    /// The frame.
    pub frame: Frame<'a>,
}
