//! Frames: the small messages of the tensor channel, beside its one-sided operations.
//!
//! A frame is one Send of at most [`MAX_FRAME`] bytes. Frames arrive in the order of the queue pair:
//!
//! ```text
//!  0             3         4      5           8             12              16
//!  ├── magic ────┼─version─┼─kind─┼── zero ───┼── granted ──┼─ body length ─┼── body ──
//! ```
//!
//! There is one way to write each frame: if bytes are decoded and encoded again, the result equals the first
//! bytes.

#[cfg(test)]
mod tests;

use std::borrow::Cow;

use bytes::{Buf, BufMut};

use crate::wire::tensor_metadata::{MetadataError, WireMetadata};
use tonic_rdma_verbs::unstable::{RemoteRange, Versions};
use tonic_rdma_verbs::{RemoteSegment, Rkey};

/// The names of the kinds of frames. The kind in the header is the place here, from 1.
#[rustfmt::skip]
const KINDS: [&str; 12] = [
    "credit", "bell", "placed", "released", "request", "metadata", "written", "status", "dead", "cancel", "goodbye",
    "ended",
];

/// Length of the longest frame, with its header, in bytes. Every receive for frames has room for it.
pub const MAX_FRAME: usize = 2048;
/// Length of the longest name of a tensor, in bytes.
pub const MAX_NAME: usize = 1024;
/// First bytes of every frame.
pub const MAGIC: [u8; 3] = *b"\xd5tf";
/// The versions of the frames that this side knows. There was none before 1.
pub const VERSIONS: Versions = Versions::only(1);
/// Length of a frame's header, in bytes.
pub const HEADER: usize = 16;
/// Length of the longest text of a [`Frame::Status`], in bytes. A longer text is cut.
pub const MAX_TEXT: usize = MAX_FRAME - HEADER - 12;

/// Number of a request. The requester counts its requests on a link, from 0. If both ends speak version 4 of the
/// service, and the link has *n* queue pairs, the number is *n* times the count, plus the index of the queue pair by
/// which all frames of the request and its write go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

impl std::fmt::Display for RequestId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "request {}", self.0)
    }
}

/// What the immediate data of a write announces. Bit 31 tells the two apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Announcement {
    /// A slot or region was written that has a pair of words with this number.
    Placed(u32),
    /// The tensor is in the sink of a request, as [`Frame::Written`] says it. With the low 31 bits of the
    /// request's number. Since version 4 of the service.
    Written(u32),
}

impl Announcement {
    const WRITTEN: u32 = 1 << 31;

    /// Announces the tensor of a request.
    pub(crate) fn of(request_id: RequestId) -> Self {
        Self::Written(request_id.0 as u32 & !Self::WRITTEN)
    }

    /// Returns the immediate data.
    pub(crate) fn encode(self) -> u32 {
        match self {
            Self::Placed(slot) => slot,
            Self::Written(number) => Self::WRITTEN | number,
        }
    }

    /// Decodes immediate data.
    pub(crate) fn decode(immediate: u32) -> Self {
        match immediate & !Self::WRITTEN {
            number if number == immediate => Self::Placed(number),
            number => Self::Written(number),
        }
    }
}

/// A frame. The text of a frame that was decoded is still in the receive buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame<'a> {
    /// Carries nothing but the header's count of credits.
    Credit,
    /// Wakes a peer that sleeps until its word of `slot` changes: the slot was written or released, or a
    /// notice was sent.
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
    /// Describes the tensor, because the request had no sink or the sink does not fit. The requester asks
    /// again with a sink for this metadata.
    Metadata {
        /// The request that this frame answers.
        request_id: RequestId,
        /// Type, shape and length of the tensor.
        metadata: WireMetadata,
    },
    /// Reports that the tensor is in the sink. It follows a write that does not announce itself.
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
        text: Cow<'a, str>,
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
    /// Reports that the sender has given up its pair of words for a slot or region, and writes nothing more
    /// for it. It goes once by each queue pair, behind what was written there. Since version 3 of the service.
    Ended {
        /// Number of the slot or region at the receiver of this frame.
        slot: u32,
    },
}

/// A request for the tensor (`name`, `step`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorRequest<'a> {
    /// Number of the request. The second request, after a [`Frame::Metadata`], has the number of the first.
    pub request_id: RequestId,
    /// Step of the computation.
    pub step: u64,
    /// Memory to write the tensor to, if the requester has its metadata.
    pub sink: Option<TensorMemory>,
    /// Whether [`Frame::Written`] has to carry a checksum.
    pub checksum_wanted: bool,
    /// Name of the tensor. Encoding takes at most [`MAX_NAME`] bytes; decoding takes any name that fits into
    /// a frame.
    pub name: Cow<'a, str>,
}

/// Memory of one side for one tensor: a sink, which the peer may write, or a tensor that the sender of a dynamic slot
/// announces, which the peer may read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorMemory {
    /// Metadata of the tensor.
    pub metadata: WireMetadata,
    /// The bytes that the peer may access.
    pub place: RemoteRange,
}

/// A frame and the count of its header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decoded<'a> {
    /// Number of receives that the sender has ever posted for frames, including the receives of the start.
    /// The number wraps.
    pub granted: u32,
    /// The frame.
    pub frame: Frame<'a>,
}

// A frame has room for the longest request, so that encoding a request can't fail for lack of room.
const _: () = assert!(HEADER + 17 + TensorMemory::LENGTH + MAX_NAME <= MAX_FRAME);

impl<'a> Frame<'a> {
    /// Writes the frame to the start of `buffer`, and returns its length. `granted` is the number of receives
    /// that this side has ever posted for frames.
    ///
    /// # Errors
    /// [`FrameError::Name`] for a name that is empty or too long, [`FrameError::Code`] for a status with a
    /// code that is no error.
    pub fn encode(&self, granted: u32, buffer: &mut [u8; MAX_FRAME]) -> Result<usize, FrameError> {
        let (header, mut body) = buffer.split_at_mut(HEADER);
        let room = body.len();
        self.encode_body(&mut body)?;
        let length = room - body.len();
        header[..3].copy_from_slice(&MAGIC);
        header[3] = VERSIONS.newest as u8;
        header[4..8].copy_from_slice(&[self.kind(), 0, 0, 0]);
        header[8..12].copy_from_slice(&granted.to_le_bytes());
        header[12..].copy_from_slice(&(length as u32).to_le_bytes());
        Ok(HEADER + length)
    }

    /// Sets the number of receives in the bytes of a frame, which [`encode`](Self::encode) has written.
    pub(crate) fn set_granted(bytes: &mut [u8], granted: u32) {
        if let Some(at) = bytes.get_mut(8..12) {
            at.copy_from_slice(&granted.to_le_bytes());
        }
    }

    /// Decodes a frame, which fills all of `bytes`. It does not check whether the frame makes sense at this
    /// time.
    ///
    /// # Errors
    /// [`FrameError`]: no frame of this version has these bytes.
    pub fn decode(bytes: &'a [u8]) -> Result<Decoded<'a>, FrameError> {
        let (header, body) = bytes.split_first_chunk::<HEADER>().ok_or(FrameError::Short(bytes.len()))?;
        let &[m0, m1, m2, version, kind, z0, z1, z2, g0, g1, g2, g3, l0, l1, l2, l3] = header;
        if [m0, m1, m2] != MAGIC {
            return Err(FrameError::Magic);
        }
        if !VERSIONS.speaks(version.into()) {
            return Err(FrameError::Version(version));
        }
        if !(1..=KINDS.len()).contains(&kind.into()) {
            return Err(FrameError::Kind(kind));
        }
        if [z0, z1, z2] != [0; 3] {
            return Err(FrameError::Reserved);
        }
        let promised = u32::from_le_bytes([l0, l1, l2, l3]);
        if bytes.len() > MAX_FRAME || body.len() as u64 != u64::from(promised) {
            return Err(FrameError::Length { received: bytes.len(), promised });
        }
        let granted = u32::from_le_bytes([g0, g1, g2, g3]);
        Ok(Decoded { granted, frame: Self::decode_body(kind, body)? })
    }

    fn encode_body(&self, body: &mut &mut [u8]) -> Result<(), FrameError> {
        match self {
            Self::Credit | Self::Goodbye => {}
            Self::Bell { slot } | Self::Ended { slot } => body.put_u32_le(*slot),
            Self::Placed { slot, epoch } | Self::Released { slot, epoch } => {
                body.put_u32_le(*slot);
                body.put_u64_le(*epoch);
            }
            Self::Request(request) => request.encode(body)?,
            Self::Metadata { request_id, metadata } => {
                body.put_u64_le(request_id.0);
                body.put_slice(&metadata.encode());
            }
            Self::Written { request_id, checksum } => {
                body.put_u64_le(request_id.0);
                checksum.iter().for_each(|checksum| body.put_u64_le(*checksum));
            }
            Self::Status { request_id, code, text } => {
                body.put_u64_le(request_id.0);
                body.put_u32_le(check_code(*code)?);
                body.put_slice(cut(text, MAX_TEXT).as_bytes());
            }
            Self::Dead { request_id } | Self::Cancel { request_id } => body.put_u64_le(request_id.0),
        }
        Ok(())
    }

    fn decode_body(kind: u8, bytes: &'a [u8]) -> Result<Self, FrameError> {
        let mut body = Body { kind: KINDS[usize::from(kind) - 1], whole: bytes.len(), rest: bytes };
        let frame = match kind {
            1 => Self::Credit,
            2 => Self::Bell { slot: body.u32()? },
            3 => Self::Placed { slot: body.u32()?, epoch: body.u64()? },
            4 => Self::Released { slot: body.u32()?, epoch: body.u64()? },
            5 => Self::Request(TensorRequest::decode(&mut body)?),
            6 => {
                let request_id = body.request_id()?;
                let metadata = WireMetadata::decode(&body.take::<{ WireMetadata::LENGTH }>()?);
                let metadata = metadata.map_err(|fault| FrameError::Metadata { request_id, fault })?;
                Self::Metadata { request_id, metadata }
            }
            7 => {
                let request_id = body.request_id()?;
                let checksum = if body.rest.is_empty() { None } else { Some(body.u64()?) };
                Self::Written { request_id, checksum }
            }
            8 => {
                let (request_id, code) = (body.request_id()?, check_code(body.u32()?)?);
                let text =
                    std::str::from_utf8(std::mem::take(&mut body.rest)).map_err(|_| FrameError::Text)?;
                Self::Status { request_id, code, text: text.into() }
            }
            9 => Self::Dead { request_id: body.request_id()? },
            10 => Self::Cancel { request_id: body.request_id()? },
            11 => Self::Goodbye,
            _ => Self::Ended { slot: body.u32()? },
        };
        if body.rest.is_empty() { Ok(frame) } else { Err(body.fault()) }
    }

    /// Returns the kind, as the header has it.
    fn kind(&self) -> u8 {
        match self {
            Self::Credit => 1,
            Self::Bell { .. } => 2,
            Self::Placed { .. } => 3,
            Self::Released { .. } => 4,
            Self::Request(_) => 5,
            Self::Metadata { .. } => 6,
            Self::Written { .. } => 7,
            Self::Status { .. } => 8,
            Self::Dead { .. } => 9,
            Self::Cancel { .. } => 10,
            Self::Goodbye => 11,
            Self::Ended { .. } => 12,
        }
    }

    /// Returns the name of the frame's kind, for errors.
    pub fn name(&self) -> &'static str {
        KINDS[usize::from(self.kind()) - 1]
    }
}

impl<'a> TensorRequest<'a> {
    const SINK: u8 = 1;
    const CHECKSUM: u8 = 2;

    fn encode(&self, body: &mut &mut [u8]) -> Result<(), FrameError> {
        if self.name.is_empty() || self.name.len() > MAX_NAME {
            return Err(FrameError::Name(self.name.len()));
        }
        body.put_u64_le(self.request_id.0);
        body.put_u64_le(self.step);
        let sink = if self.sink.is_some() { Self::SINK } else { 0 };
        body.put_u8(sink | if self.checksum_wanted { Self::CHECKSUM } else { 0 });
        if let Some(TensorMemory { metadata, place }) = self.sink {
            body.put_u64_le(place.start.address);
            body.put_u32_le(place.start.rkey.0);
            body.put_u64_le(place.length);
            body.put_slice(&metadata.encode());
        }
        body.put_slice(self.name.as_bytes());
        Ok(())
    }

    /// Decodes a request. Every fault after the request's number names the request.
    fn decode(body: &mut Body<'a>) -> Result<Self, FrameError> {
        let request_id = body.request_id()?;
        Self::decode_rest(request_id, body).map_err(|fault| FrameError::Request { request_id, fault })
    }

    fn decode_rest(request_id: RequestId, body: &mut Body<'a>) -> Result<Self, RequestFault> {
        let short = RequestFault::Short(body.whole);
        let step = body.u64().map_err(|_| short)?;
        let [flags] = body.take().map_err(|_| short)?;
        if flags & !(Self::SINK | Self::CHECKSUM) != 0 {
            return Err(RequestFault::Flags(flags));
        }
        let sink = match flags & Self::SINK {
            0 => None,
            _ => Some(TensorMemory::decode(&body.take().map_err(|_| short)?)?),
        };
        let name = std::str::from_utf8(std::mem::take(&mut body.rest)).map_err(|_| RequestFault::Name)?;
        Ok(Self { request_id, step, sink, checksum_wanted: flags & Self::CHECKSUM != 0, name: name.into() })
    }
}

impl TensorMemory {
    const LENGTH: usize = 20 + WireMetadata::LENGTH;

    fn decode(bytes: &[u8; Self::LENGTH]) -> Result<Self, RequestFault> {
        // The fields have a fixed length, so none of them is missing.
        let mut fields = &bytes[..];
        let start = RemoteSegment { address: fields.get_u64_le(), rkey: Rkey(fields.get_u32_le()) };
        let place = RemoteRange { start, length: fields.get_u64_le() };
        let metadata = WireMetadata::decode(fields).map_err(RequestFault::Metadata)?;
        Ok(Self { metadata, place })
    }
}

fn check_code(code: u32) -> Result<u32, FrameError> {
    if (1..=16).contains(&code) { Ok(code) } else { Err(FrameError::Code(code)) }
}

/// Returns the longest prefix of `text` that is at most `most` bytes long.
fn cut(text: &str, most: usize) -> &str {
    let end = (0..=text.len().min(most)).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
    &text[..end]
}

/// A body that is being decoded.
struct Body<'a> {
    kind: &'static str,
    whole: usize,
    rest: &'a [u8],
}

impl Body<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], FrameError> {
        let (taken, rest) = self.rest.split_first_chunk::<N>().ok_or_else(|| self.fault())?;
        self.rest = rest;
        Ok(*taken)
    }

    fn u32(&mut self) -> Result<u32, FrameError> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, FrameError> {
        self.take().map(u64::from_le_bytes)
    }

    fn request_id(&mut self) -> Result<RequestId, FrameError> {
        self.u64().map(RequestId)
    }

    fn fault(&self) -> FrameError {
        FrameError::Body { kind: self.kind, length: self.whole }
    }
}

/// A fault of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// The frame is shorter than a header.
    #[error("a frame of {0} bytes, shorter than its header")]
    Short(usize),
    /// The frame does not begin with the magic bytes.
    #[error("not a frame of the tensor channel")]
    Magic,
    /// This side does not know the version.
    #[error("a frame of version {0}, but this end knows version {VERSIONS}")]
    Version(u8),
    /// There is no such kind of frame.
    #[error("a frame of unknown kind {0}")]
    Kind(u8),
    /// The reserved bytes are not zero.
    #[error("a frame whose reserved bytes are not zero")]
    Reserved,
    /// The frame is not as long as its header states, or longer than any frame.
    #[error("a frame of {received} bytes whose header states a body of {promised}")]
    Length {
        /// Number of bytes received.
        received: usize,
        /// Length of the body, as the header states it.
        promised: u32,
    },
    /// The body does not have the length that its kind needs.
    #[error("a {kind} frame with a body of {length} bytes")]
    Body {
        /// Kind of the frame.
        kind: &'static str,
        /// Length of the body.
        length: usize,
    },
    /// The code of a status is no error of gRPC.
    #[error("a status with code {0}, which is no error of gRPC")]
    Code(u32),
    /// The text of a status is not UTF-8.
    #[error("a status whose text is not UTF-8")]
    Text,
    /// The metadata in an answer is malformed.
    #[error("the metadata in the answer to {request_id}: {fault}")]
    Metadata {
        /// The request that the frame answers.
        request_id: RequestId,
        /// The fault.
        fault: MetadataError,
    },
    /// A request has a number, but is malformed otherwise.
    #[error("{request_id}: {fault}")]
    Request {
        /// Number of the request.
        request_id: RequestId,
        /// The fault.
        fault: RequestFault,
    },
    /// No frame may carry the name.
    #[error("the name of the tensor has {0} bytes, and 1 to {MAX_NAME} are allowed")]
    Name(usize),
}

/// A fault of a request whose number is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RequestFault {
    /// The request has unknown flags.
    #[error("unknown flags {0:#04x}")]
    Flags(u8),
    /// The body ends too soon.
    #[error("a body of {0} bytes, which ends too soon")]
    Short(usize),
    /// The metadata of the sink is malformed.
    #[error("the sink's metadata: {0}")]
    Metadata(MetadataError),
    /// The name is not UTF-8.
    #[error("a name that is not UTF-8")]
    Name,
}
