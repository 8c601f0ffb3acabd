//! The format of native calls: frames, and the compact form of headers.
//!
//! A message is a sequence of frames. A frame is a header of 12 bytes and a payload, all numbers
//! little-endian:
//!
//! ```text
//!  0     1      2      4        8        12
//!  kind  flags  extra  stream   length   payload …
//! ```
//!
//! | kind | sent by | payload |
//! |---|---|---|
//! | SETTINGS | both, first frame of a connection | [limits](Limits) of the sender |
//! | HEADERS | both | [headers], maybe in several frames |
//! | DATA | both | bytes of the body |
//! | OFFER | both | where bytes of the body lie ([`ContentOffer`]) |
//! | TAKEN | both | offers whose memory is free again, 8 bytes each |
//! | TRAILERS | server | as HEADERS; ends the call |
//! | RESET | both | none; `extra` is the [code](ResetCode); ends the call |
//! | CREDIT | both | 8 bytes: the cost of further bytes that the peer may send; for stream 0 16 bytes: what all streams may \
//!   cost for parts of bodies, and for headers and trailers |
//! | GOAWAY | both | text; `stream` is the last stream that is carried out |
//!
//! Nothing here has state but the tables of headers ([`headers`]).

pub(super) mod headers;
#[cfg(test)]
mod tests;

use std::fmt;

use bytes::{Buf as _, Bytes, TryGetError};

use tonic_rdma_verbs::{RemoteSegment, Rkey};

pub(crate) use self::headers::RequestHeaders;

/// The sender's half of the call ends with this frame (HEADERS, DATA, OFFER).
pub(in crate::grpc) const END: u8 = 1;
/// The next frame goes on with this payload (HEADERS, TRAILERS).
pub(in crate::grpc) const MORE: u8 = 2;
/// The content is one whole gRPC message with its prefix (OFFER).
pub(in crate::grpc) const MESSAGE: u8 = 4;

/// The kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(in crate::grpc) enum Kind {
    Settings = 1,
    Headers = 2,
    Data = 3,
    Offer = 4,
    Taken = 5,
    Trailers = 6,
    Reset = 7,
    Credit = 8,
    GoAway = 9,
}

impl Kind {
    /// All kinds, in the order of their numbers from 1 on.
    const ALL: [Self; 9] = {
        use Kind::{Credit, Data, GoAway, Headers, Offer, Reset, Settings, Taken, Trailers};
        [Settings, Headers, Data, Offer, Taken, Trailers, Reset, Credit, GoAway]
    };

    /// Returns the flags that frames of this kind may have.
    fn flags(self) -> u8 {
        match self {
            Self::Headers => END | MORE,
            Self::Trailers => MORE,
            Self::Data => END,
            Self::Offer => END | MESSAGE,
            _ => 0,
        }
    }
}

/// The header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::grpc) struct FrameHeader {
    pub(in crate::grpc) kind: Kind,
    pub(in crate::grpc) flags: u8,
    pub(in crate::grpc) extra: u16,
    pub(in crate::grpc) stream: u32,
    pub(in crate::grpc) length: u32,
}

impl FrameHeader {
    /// The length of a header, in bytes.
    pub(in crate::grpc) const LENGTH: usize = 12;

    /// Makes the header of a frame of `stream` without flags.
    pub(in crate::grpc) fn new(kind: Kind, stream: u32, length: usize) -> Self {
        // A frame fits into a message, which is shorter than 4 GiB.
        Self { kind, flags: 0, extra: 0, stream, length: length as u32 }
    }

    /// Returns the bytes of the header.
    pub(in crate::grpc) fn encode(&self) -> [u8; Self::LENGTH] {
        let mut bytes = [self.kind as u8, self.flags, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        bytes[2..4].copy_from_slice(&self.extra.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.stream.to_le_bytes());
        bytes[8..].copy_from_slice(&self.length.to_le_bytes());
        bytes
    }

    /// Reads a header.
    ///
    /// # Errors
    /// The kind is unknown, or does not have these flags.
    pub(in crate::grpc) fn decode(bytes: &[u8; Self::LENGTH]) -> Result<Self, CallViolation> {
        let &[kind, flags, e0, e1, s0, s1, s2, s3, l0, l1, l2, l3] = bytes;
        let kind = Kind::ALL
            .get(usize::from(kind).wrapping_sub(1))
            .copied()
            .ok_or(CallViolation::UnknownKind(kind))?;
        if flags & !kind.flags() != 0 {
            return Err(CallViolation::Flags { kind, flags });
        }
        Ok(Self {
            kind,
            flags,
            extra: u16::from_le_bytes([e0, e1]),
            stream: u32::from_le_bytes([s0, s1, s2, s3]),
            length: u32::from_le_bytes([l0, l1, l2, l3]),
        })
    }

    /// Returns whether the frame has `flag`.
    pub(in crate::grpc) fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }
}

/// The frames of a message.
#[derive(Debug)]
pub(in crate::grpc) struct Frames {
    message: Bytes,
    at: usize,
}

impl Frames {
    /// A part keeps the memory of its message if that memory is at most this many bytes longer than one and a
    /// half times the part. Otherwise the part is copied.
    const KEPT: usize = 256;
    /// The memory that a short message may share with others, in bytes.
    const SHARED: usize = 16 << 10;

    pub(in crate::grpc) fn new(message: Bytes) -> Self {
        Self { message, at: 0 }
    }

    /// Returns the next frame: its header, and where its payload lies.
    ///
    /// # Errors
    /// The bytes are no frame.
    pub(in crate::grpc) fn next_frame(&mut self) -> Result<Option<(FrameHeader, Payload)>, CallViolation> {
        let rest = &self.message[self.at..];
        if rest.is_empty() {
            return Ok(None);
        }
        let Some((header, rest)) = rest.split_first_chunk() else {
            return Err(CallViolation::Truncated { needed: FrameHeader::LENGTH, left: rest.len() });
        };
        let header = FrameHeader::decode(header)?;
        let length = header.length as usize;
        if rest.len() < length {
            return Err(CallViolation::Truncated { needed: length, left: rest.len() });
        }
        let start = self.at + FrameHeader::LENGTH;
        self.at = start + length;
        Ok(Some((header, Payload { start, end: self.at })))
    }

    /// Returns the bytes of a payload.
    pub(in crate::grpc) fn bytes(&self, payload: Payload) -> &[u8] {
        &self.message[payload.start..payload.end]
    }

    /// Returns the bytes of a payload to be kept: a slice of the message, or a copy if they are much shorter
    /// than the memory that the slice would keep. `is_first` is true for the first part of a stream that
    /// waits, if there are few streams. It keeps a short message that is four times as long, because most parts
    /// are taken at once, and a stream has only one such part.
    pub(in crate::grpc) fn keep(&self, payload: Payload, is_first: bool) -> Bytes {
        let length = payload.end - payload.start;
        // Short messages share memory of some KiB.
        let memory = if is_first { self.message.len() } else { self.message.len().max(Self::SHARED) };
        let most = if is_first && memory <= Self::SHARED { 4 * length } else { length + length / 2 };
        if memory > most + Self::KEPT {
            return Bytes::copy_from_slice(self.bytes(payload));
        }
        self.message.slice(payload.start..payload.end)
    }
}

/// The range of a payload in its message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::grpc) struct Payload {
    start: usize,
    end: usize,
}

/// The limits of one side, which the other side keeps within.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::grpc) struct Limits {
    /// The number of calls that the peer may have open.
    pub(in crate::grpc) streams: u32,
    /// The length of headers: names, values, and 32 bytes for each.
    pub(in crate::grpc) header_bytes: u32,
    /// The cost of what the peer may send on a stream before the first credit.
    pub(in crate::grpc) window: u32,
    /// The number of entries in the table of the peer's headers.
    pub(in crate::grpc) table_entries: u32,
    /// The length of these entries, counted as headers are.
    pub(in crate::grpc) table_bytes: u32,
    /// The cost of what the peer may send on all streams before the first credit for the connection: of parts
    /// of bodies, and of headers and trailers. None if a side has version 3, which does not know this.
    pub(in crate::grpc) windows: Option<[u32; 2]>,
}

impl Limits {
    /// The length of encoded limits of version 3, in bytes.
    const LENGTH_3: usize = 20;
    /// The length of encoded limits, in bytes.
    pub(in crate::grpc) const LENGTH: usize = Self::LENGTH_3 + 8;

    /// Returns the payload of a SETTINGS frame.
    pub(in crate::grpc) fn encode(&self) -> Vec<u8> {
        let Self { streams, header_bytes, window, table_entries, table_bytes, windows } = *self;
        let fields = [streams, header_bytes, window, table_entries, table_bytes];
        fields.into_iter().chain(windows.into_iter().flatten()).flat_map(u32::to_le_bytes).collect()
    }

    /// Reads the payload of a SETTINGS frame. `has_windows`: both sides know windows of the connection. Later
    /// versions may add fields at its end.
    ///
    /// # Errors
    /// The payload is too short.
    pub(in crate::grpc) fn decode(payload: &[u8], has_windows: bool) -> Result<Self, CallViolation> {
        let (fields, _) = payload.as_chunks::<4>();
        let needed = if has_windows { Self::LENGTH } else { Self::LENGTH_3 };
        let short = CallViolation::Truncated { needed, left: payload.len() };
        let &[streams, header_bytes, window, table_entries, table_bytes, ref more @ ..] = fields else {
            return Err(short);
        };
        let read = u32::from_le_bytes;
        let windows = match *more {
            _ if !has_windows => None,
            [parts, headers, ..] => Some([read(parts), read(headers)]),
            _ => return Err(short),
        };
        Ok(Self {
            streams: read(streams),
            header_bytes: read(header_bytes),
            window: read(window),
            table_entries: read(table_entries),
            table_bytes: read(table_bytes),
            windows,
        })
    }
}

/// A part of the offered bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::grpc) enum OfferSegment {
    /// Memory of the sender, which the receiver reads.
    Remote { from: RemoteSegment, length: u64 },
    /// Bytes in the frame, at most 65 535.
    Inline(Bytes),
}

impl OfferSegment {
    /// The length of an encoded segment of the sender's memory.
    pub(in crate::grpc) const REMOTE_LENGTH: usize = 21;
    /// The length of what precedes the bytes of an inline segment.
    pub(in crate::grpc) const INLINE_PREFIX: usize = 3;

    /// Returns the number of offered bytes.
    pub(in crate::grpc) fn length(&self) -> u64 {
        match self {
            Self::Remote { length, .. } => *length,
            Self::Inline(bytes) => bytes.len() as u64,
        }
    }

    /// Returns the bytes of an inline segment.
    pub(in crate::grpc) fn into_inline(self) -> Option<Bytes> {
        match self {
            Self::Remote { .. } => None,
            Self::Inline(bytes) => Some(bytes),
        }
    }

    /// Returns the length of the encoded segment.
    pub(in crate::grpc) fn encoded_length(&self) -> usize {
        match self {
            Self::Remote { .. } => Self::REMOTE_LENGTH,
            Self::Inline(bytes) => Self::INLINE_PREFIX + bytes.len(),
        }
    }
}

/// Bytes of a body by reference.
///
/// ```text
///  0      8      16          24
///  offer  total  aligned_at  segments …     1 │ address (8) │ rkey (4) │ length (8)      memory of the sender
///                                         0 │ length (2) │ bytes                       bytes in this frame
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::grpc) struct ContentOffer {
    /// The number of the offer, in order of the sender's offers.
    pub(in crate::grpc) id: u64,
    /// The number of bytes: the sum of the segments.
    pub(in crate::grpc) total: u64,
    /// The byte that is to land at a multiple of 64 bytes.
    pub(in crate::grpc) aligned_at: u64,
    pub(in crate::grpc) segments: Vec<OfferSegment>,
}

impl ContentOffer {
    /// The longest offer, in bytes. Sums of lengths and costs never overflow.
    pub(in crate::grpc) const LONGEST: u64 = 1 << 60;
    /// The most segments of an offer.
    pub(in crate::grpc) const SEGMENTS: usize = 256;
    /// The length of what precedes the segments.
    pub(in crate::grpc) const PREFIX: usize = 24;

    /// Returns the length of the payload.
    pub(in crate::grpc) fn encoded_length(&self) -> usize {
        Self::PREFIX + self.segments.iter().map(OfferSegment::encoded_length).sum::<usize>()
    }

    /// Adds the payload to `out`.
    pub(in crate::grpc) fn encode(&self, out: &mut Vec<u8>) {
        for number in [self.id, self.total, self.aligned_at] {
            out.extend_from_slice(&number.to_le_bytes());
        }
        for segment in &self.segments {
            match segment {
                OfferSegment::Remote { from, length } => {
                    out.push(1);
                    out.extend_from_slice(&from.address.to_le_bytes());
                    out.extend_from_slice(&from.rkey.0.to_le_bytes());
                    out.extend_from_slice(&length.to_le_bytes());
                }
                OfferSegment::Inline(bytes) => {
                    out.push(0);
                    // The sender makes no longer segments.
                    out.extend_from_slice(&(bytes.len() as u16).to_le_bytes());
                    out.extend_from_slice(bytes);
                }
            }
        }
    }

    /// Reads the payload of an OFFER, which may have `most` segments.
    ///
    /// # Errors
    /// The payload is no offer: too short, without bytes, with an empty segment, with too many segments,
    /// with a sum that differs from the total, with memory beyond the end of the address space, with an
    /// unknown tag, above `LONGEST`, or with `aligned_at` beyond the last byte.
    pub(in crate::grpc) fn decode(
        frames: &Frames,
        payload: Payload,
        most: usize,
    ) -> Result<Self, CallViolation> {
        let mut rest = frames.bytes(payload);
        let bad = CallViolation::Offer;
        let id = rest.try_get_u64_le().map_err(short)?;
        let total = rest.try_get_u64_le().map_err(short)?;
        let aligned_at = rest.try_get_u64_le().map_err(short)?;
        let (mut segments, mut sum) = (Vec::with_capacity(2), 0_u64);
        // Segments wait in memory, so they must not keep the message there. They share one copy.
        let mut kept = Bytes::new();
        while let Some((tag, after)) = rest.split_first() {
            if segments.len() == most {
                return Err(bad("more than 256 segments"));
            }
            rest = after;
            let segment = match tag {
                1 => {
                    let address = rest.try_get_u64_le().map_err(short)?;
                    let rkey = Rkey(rest.try_get_u32_le().map_err(short)?);
                    let length = rest.try_get_u64_le().map_err(short)?;
                    let from = RemoteSegment { address, rkey };
                    from.address.checked_add(length).ok_or(bad("a segment ends beyond the address space"))?;
                    OfferSegment::Remote { from, length }
                }
                0 => {
                    let length = rest.try_get_u16_le().map_err(short)?.into();
                    let (bytes, after) =
                        rest.split_at_checked(length).ok_or(bad("a segment is longer than the frame"))?;
                    if kept.is_empty() {
                        kept = Bytes::copy_from_slice(rest);
                    }
                    let start = kept.len() - rest.len();
                    rest = after;
                    OfferSegment::Inline(kept.slice(start..start + bytes.len()))
                }
                _ => return Err(bad("a segment has an unknown tag")),
            };
            if segment.length() == 0 {
                return Err(bad("a segment is empty"));
            }
            sum = sum.checked_add(segment.length()).ok_or(bad("the sum of the segments is too large"))?;
            segments.push(segment);
        }
        if total == 0 || sum != total || total > Self::LONGEST {
            return Err(bad("the segments do not add up to the total"));
        }
        if aligned_at >= total {
            return Err(bad("the aligned byte is beyond the end"));
        }
        Ok(Self { id, total, aligned_at, segments })
    }
}

/// Returns the error of a payload that ends too early.
fn short(_: TryGetError) -> CallViolation {
    CallViolation::Offer("the frame is too short")
}

/// The reason that a side gives when it resets a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ResetCode {
    /// The caller, or the handler, is no longer interested.
    Cancel,
    /// The peer did not begin with the call. It may be sent again.
    Refused,
    /// The peer failed for a reason of its own.
    Internal,
    /// The deadline has passed.
    DeadlineExceeded,
    /// The call exceeds a limit of the peer.
    ResourceExhausted,
    /// A code that this version does not know.
    Other(u16),
}

impl ResetCode {
    /// Returns the code on the wire.
    pub(in crate::grpc) fn to_wire(self) -> u16 {
        match self {
            Self::Cancel => 1,
            Self::Refused => 2,
            Self::Internal => 3,
            Self::DeadlineExceeded => 4,
            Self::ResourceExhausted => 5,
            Self::Other(code) => code,
        }
    }

    /// Returns the meaning of a code on the wire.
    pub(in crate::grpc) fn from_wire(code: u16) -> Self {
        match code {
            1 => Self::Cancel,
            2 => Self::Refused,
            3 => Self::Internal,
            4 => Self::DeadlineExceeded,
            5 => Self::ResourceExhausted,
            code => Self::Other(code),
        }
    }
}

impl fmt::Display for ResetCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cancel => f.write_str("cancelled"),
            Self::Refused => f.write_str("refused before it began"),
            Self::Internal => f.write_str("internal failure"),
            Self::DeadlineExceeded => f.write_str("deadline exceeded"),
            Self::ResourceExhausted => f.write_str("a limit of the peer is exceeded"),
            Self::Other(code) => write!(f, "code {code}"),
        }
    }
}

/// A message that breaks the rules of native calls. It ends the connection.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(in crate::grpc) enum CallViolation {
    #[error("a frame of the unknown kind {0}")]
    UnknownKind(u8),
    #[error("flags {flags:#x} on a frame of the kind {kind:?}")]
    Flags { kind: Kind, flags: u8 },
    #[error("{left} bytes where a frame needs {needed}")]
    Truncated { needed: usize, left: usize },
    #[error("a message without frames")]
    Empty,
    #[error("{0:?} before the settings")]
    BeforeSettings(Kind),
    #[error("settings a second time")]
    SecondSettings,
    #[error("a {0:?} frame, which only a server sends, from a client")]
    ServersOnly(Kind),
    #[error("{seen:?} of stream {stream} inside the headers of stream {open}")]
    Interleaved { seen: Kind, stream: u32, open: u32 },
    #[error("{kind:?} for stream {stream}, which was never opened")]
    UnknownStream { kind: Kind, stream: u32 },
    #[error("stream {stream} opened after stream {last}")]
    StreamOrder { stream: u32, last: u32 },
    #[error("more than {0} streams at a time")]
    TooManyStreams(u32),
    #[error("{kind:?} of stream {stream} after the end of its sender's half")]
    AfterEnd { kind: Kind, stream: u32 },
    #[error("{kind:?} of stream {stream} where headers come first")]
    BeforeHeaders { kind: Kind, stream: u32 },
    #[error("second headers of stream {0}")]
    SecondHeaders(u32),
    #[error("headers: {0}")]
    Headers(&'static str),
    #[error("headers of more than {0} bytes")]
    HeadersTooLong(usize),
    #[error("headers refer to entry {0} of a table, which is not there or is of another kind")]
    TableEntry(u16),
    #[error("a table of headers of more than {entries} entries or {bytes} bytes")]
    TableFull { entries: usize, bytes: usize },
    #[error("stream {stream} sent bytes of cost {cost}, of which {left} are left")]
    Overdrawn { stream: u32, cost: u64, left: i64 },
    #[error("{kind:?} beyond the window of the connection, of which {left} bytes are left")]
    ConnectionOverdrawn { kind: Kind, left: i64 },
    #[error("credit of {0} bytes, which is too large")]
    Credit(u64),
    #[error("a {kind:?} frame of {length} bytes")]
    Length { kind: Kind, length: usize },
    #[error("an offer: {0}")]
    Offer(&'static str),
    #[error("offer {seen} where {expected} comes next")]
    OfferOrder { seen: u64, expected: u64 },
    #[error("offer {0} is taken, which is not open")]
    Taken(u64),
    #[error("more than {0} answers wait, because the peer takes no messages")]
    Unread(usize),
    #[error("a going away with the last stream {seen} after {before}")]
    GoAwayOrder { seen: u32, before: u32 },
}
