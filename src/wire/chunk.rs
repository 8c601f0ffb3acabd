//! The body of an RTS: the places of the data in the sender's memory.

use bytes::Buf as _;

/// The number of chunks that one RTS may have.
pub const MAX_CHUNKS: usize = 8;

/// A piece of the sender's registered memory.
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
///
/// ```
/// use tonic_rdma::ChunkError;
///
/// assert_eq!(ChunkError::Empty.to_string(), "an offer with an empty chunk");
/// ```
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

#[cfg(test)]
mod tests {
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
