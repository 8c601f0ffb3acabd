//! The header of a frame, and the frames of a message.

use bytes::Bytes;

use super::violation::CallViolation;

/// The sender's half of the call ends with this frame (HEAD, DATA, OFFER).
pub(in crate::grpc) const END: u8 = 1;
/// The next frame goes on with this payload (HEAD, TRAILERS).
pub(in crate::grpc) const MORE: u8 = 2;
/// The content is one whole gRPC message with its prefix (OFFER).
pub(in crate::grpc) const MESSAGE: u8 = 4;

/// The kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(in crate::grpc) enum Kind {
    Settings = 1,
    Head = 2,
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
    const ALL: [Self; 9] = [
        Self::Settings,
        Self::Head,
        Self::Data,
        Self::Offer,
        Self::Taken,
        Self::Trailers,
        Self::Reset,
        Self::Credit,
        Self::GoAway,
    ];

    /// Returns the flags that frames of this kind may have.
    fn flags(self) -> u8 {
        match self {
            Self::Head => END | MORE,
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
    /// The most bytes of a message that a part may keep in memory beside itself, and four times its own length. A part that would
    /// keep more is copied.
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

    /// Returns the bytes of a payload to be kept: a slice of the message, or a copy if they are much shorter than the memory that the
    /// slice would keep. `is_first` is true for the first part of a stream that waits. It is copied less often, because most parts
    /// are taken at once, and a stream has only one such part.
    pub(in crate::grpc) fn keep(&self, payload: Payload, is_first: bool) -> Bytes {
        let length = payload.end - payload.start;
        // Short messages share memory of some KiB.
        let memory = if is_first { self.message.len() } else { self.message.len().max(Self::SHARED) };
        if memory > 4 * length + Self::KEPT {
            return Bytes::copy_from_slice(self.bytes(payload));
        }
        self.message.slice(payload.start..payload.end)
    }
}

/// A place in a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::grpc) struct Payload {
    start: usize,
    end: usize,
}
