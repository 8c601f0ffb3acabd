//! Wire formats: the headers of messages between queue pairs ([`Header`]), and the messages of the
//! negotiation ([`hello`]).
//!
//! Decoding is total: any bytes give a value, or an error that names the fault. Headers are decoded without
//! an allocation. All numbers are little-endian. This layer keeps no state, and does not know what a message
//! means.
//!
//! A message is one Send:
//!
//! ```text
//!  0        1        2        4              8                16               24               32
//!  ├────────┼────────┼────────┼──────────────┼────────────────┼────────────────┼────────────────┼── body ──
//!  │ kind   │ flags  │ zero   │ body length  │ sequence       │ granted        │ reads done     │
//! ```

pub mod hello;

use bytes::Buf as _;

/// The number of chunks that one RTS may have.
pub const MAX_CHUNKS: usize = 8;

/// A part of a write, in the sender's registered memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Chunk {
    /// The virtual address in the sender's process.
    pub address: u64,
    /// The key of the memory region.
    pub rkey: u32,
    /// The length in bytes, at least 1.
    pub length: u64,
}

/// A fault in the body of an RTS.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChunkError {
    /// The body is not a whole number of chunks, or has no chunk, or too many.
    #[error("an offer of {0} bytes, which is not 1 to {MAX_CHUNKS} chunks")]
    Length(usize),
    /// A chunk has no bytes.
    #[error("an offer with an empty chunk")]
    Empty,
}

impl Chunk {
    /// The length of an encoded chunk, in bytes.
    pub const LENGTH: usize = 20;

    /// Returns the bytes of the chunk.
    pub fn encode(&self) -> [u8; Self::LENGTH] {
        let mut bytes = [0; Self::LENGTH];
        bytes[..8].copy_from_slice(&self.address.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.rkey.to_le_bytes());
        bytes[12..].copy_from_slice(&self.length.to_le_bytes());
        bytes
    }

    /// Reads the body of an RTS.
    ///
    /// # Errors
    /// The body is not a list of chunks. The device checks whether the memory exists when it reads.
    pub fn decode_all(body: &[u8]) -> Result<impl Iterator<Item = Self>, ChunkError> {
        let (chunks, rest) = body.as_chunks::<{ Self::LENGTH }>();
        if !rest.is_empty() || chunks.is_empty() || chunks.len() > MAX_CHUNKS {
            return Err(ChunkError::Length(body.len()));
        }
        let chunks = chunks.iter().map(Self::decode);
        if chunks.clone().any(|chunk| chunk.length == 0) {
            return Err(ChunkError::Empty);
        }
        Ok(chunks)
    }

    fn decode(bytes: &[u8; Self::LENGTH]) -> Self {
        let mut rest = &bytes[..];
        Self { address: rest.get_u64_le(), rkey: rest.get_u32_le(), length: rest.get_u64_le() }
    }
}

/// A header. All of its fields are in range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The kind of message, which says what the body is.
    pub kind: MessageKind,
    /// The flag that an application's message ends here. The format has it; no side sets it today.
    pub end_of_message: bool,
    /// The length of the body in bytes.
    pub body_length: u32,
    /// The number of this message on its queue pair, from 0. Credits that the sender returned count as
    /// messages.
    pub sequence: u64,
    /// The count of messages that the sender has been ready to receive since the start.
    pub granted: u64,
    /// The count of chunks that the sender has read since the start, in the order of the offers.
    pub reads_done: u64,
}

/// The kind of a message. The numbers are those on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum MessageKind {
    /// The body is data.
    Eager = 1,
    /// Ready to send: the body names chunks of the sender's memory with the data.
    Rts = 2,
    /// An acknowledgement: the header's counts, without a body.
    Ack = 3,
    /// The sender sends no more data.
    Fin = 4,
    /// The sender aborts the connection; the body is a code.
    Abort = 5,
    /// A ping: the body is a nonce that the receiver sends back.
    Ping = 6,
    /// The answer to a ping: the body is the ping's nonce.
    Pong = 7,
    /// The sender returns credits; the body is their number. Returned credits count as used.
    Return = 8,
}

impl MessageKind {
    const ALL: [Self; 8] =
        [Self::Eager, Self::Rts, Self::Ack, Self::Fin, Self::Abort, Self::Ping, Self::Pong, Self::Return];

    /// Returns true if the message carries data, so that it needs a credit for data.
    pub const fn is_data(self) -> bool {
        matches!(self, Self::Eager | Self::Rts)
    }
}

/// A fault in a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// The kind is unknown.
    #[error("message of unknown kind {0}")]
    UnknownKind(u8),
    /// Flags that this version does not define are set.
    #[error("message with unknown flags {0:#04x}")]
    UnknownFlags(u8),
    /// The reserved field is not zero.
    #[error("message with reserved field {0:#06x}")]
    Reserved(u16),
}

impl Header {
    /// The length of a header, in bytes.
    pub const LENGTH: usize = 32;
    const END_OF_MESSAGE: u8 = 1;

    /// Returns the bytes of the header.
    pub fn encode(&self) -> [u8; Self::LENGTH] {
        let mut bytes = [0; Self::LENGTH];
        bytes[0] = self.kind as u8;
        bytes[1] = if self.end_of_message { Self::END_OF_MESSAGE } else { 0 };
        bytes[4..8].copy_from_slice(&self.body_length.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.granted.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.reads_done.to_le_bytes());
        bytes
    }

    /// Reads a header.
    ///
    /// # Errors
    /// The bytes are not a header of this version. The protocol checks the counts, not this function.
    pub fn decode(bytes: &[u8; Self::LENGTH]) -> Result<Self, HeaderError> {
        let mut rest = &bytes[..];
        let (number, flags, reserved) = (rest.get_u8(), rest.get_u8(), rest.get_u16_le());
        let kind = MessageKind::ALL.into_iter().find(|kind| *kind as u8 == number);
        let kind = kind.ok_or(HeaderError::UnknownKind(number))?;
        if flags & !Self::END_OF_MESSAGE != 0 {
            return Err(HeaderError::UnknownFlags(flags));
        }
        if reserved != 0 {
            return Err(HeaderError::Reserved(reserved));
        }
        Ok(Self {
            kind,
            end_of_message: flags != 0,
            body_length: rest.get_u32_le(),
            sequence: rest.get_u64_le(),
            granted: rest.get_u64_le(),
            reads_done: rest.get_u64_le(),
        })
    }
}

#[cfg(test)]
mod chunk_tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn decoding_reverses_encoding(fields in prop::collection::vec((any::<u64>(), any::<u32>(), 1..u64::MAX), 1..=MAX_CHUNKS)) {
            let chunks: Vec<Chunk> =
                fields.into_iter().map(|(address, rkey, length)| Chunk { address, rkey, length }).collect();
            let body: Vec<u8> = chunks.iter().flat_map(|chunk| chunk.encode()).collect();
            prop_assert_eq!(Chunk::decode_all(&body).unwrap().collect::<Vec<_>>(), chunks);
        }

        #[test]
        fn any_bytes_are_chunks_or_an_error(body in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(chunks) = Chunk::decode_all(&body) {
                let again: Vec<u8> = chunks.flat_map(|chunk| chunk.encode()).collect();
                prop_assert_eq!(&again, &body);
            }
        }
    }

    #[test]
    fn faults_are_named() {
        assert_eq!(Chunk::decode_all(&[]).err(), Some(ChunkError::Length(0)));
        assert_eq!(Chunk::decode_all(&[1; 21]).err(), Some(ChunkError::Length(21)));
        assert_eq!(Chunk::decode_all(&[1; 180]).err(), Some(ChunkError::Length(180)));
        assert_eq!(Chunk::decode_all(&[0; 20]).err(), Some(ChunkError::Empty));
    }
}

#[cfg(test)]
mod header_tests {
    use proptest::prelude::*;

    use super::*;

    fn headers() -> impl Strategy<Value = Header> {
        (0..MessageKind::ALL.len(), any::<bool>(), any::<u32>(), any::<[u64; 3]>()).prop_map(
            |(kind, end_of_message, body_length, [sequence, granted, reads_done])| Header {
                kind: MessageKind::ALL[kind],
                end_of_message,
                body_length,
                sequence,
                granted,
                reads_done,
            },
        )
    }

    proptest! {
        #[test]
        fn decoding_reverses_encoding(header in headers()) {
            prop_assert_eq!(Header::decode(&header.encode()), Ok(header));
        }

        /// A header that decodes encodes to the same bytes, so there is one encoding of each header.
        #[test]
        fn any_bytes_are_a_header_or_an_error(bytes in any::<[u8; Header::LENGTH]>(), kind in 0..9_u8) {
            for bytes in [bytes, { let mut near = bytes; near[..4].copy_from_slice(&[kind, 0, 0, 0]); near }] {
                if let Ok(header) = Header::decode(&bytes) {
                    prop_assert_eq!(header.encode(), bytes);
                }
            }
        }
    }

    #[test]
    fn faults_are_named() {
        let mut bytes = [0; Header::LENGTH];
        assert_eq!(Header::decode(&bytes), Err(HeaderError::UnknownKind(0)));
        bytes[..3].copy_from_slice(&[1, 2, 0]);
        assert_eq!(Header::decode(&bytes), Err(HeaderError::UnknownFlags(2)));
        bytes[..3].copy_from_slice(&[1, 1, 9]);
        assert_eq!(Header::decode(&bytes), Err(HeaderError::Reserved(9)));
    }
}
