//! Messages that the protocol writes itself, and the codes of an abort.

use std::fmt;

use crate::wire::{Chunk, Header, MAX_CHUNKS};

/// The longest body of a control message or an RTS, in bytes.
pub const MAX_CONTROL_BODY: usize = MAX_CHUNKS * Chunk::LENGTH;

/// A whole message, to be posted as one Send.
#[derive(Clone, Copy, Debug)]
pub struct ControlMessage {
    bytes: [u8; Header::LENGTH + MAX_CONTROL_BODY],
    length: usize,
}

impl ControlMessage {
    pub(super) fn new(header: &Header, body: &[u8]) -> Self {
        let mut bytes = [0; Header::LENGTH + MAX_CONTROL_BODY];
        let length = Header::LENGTH + body.len();
        bytes[..Header::LENGTH].copy_from_slice(&header.encode());
        bytes[Header::LENGTH..length].copy_from_slice(body);
        Self { bytes, length }
    }

    /// Returns header and body.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

/// The reason of an abort.
///
/// ```
/// use tonic_rdma::AbortCode;
///
/// assert!(AbortCode::RESET.is_reset() && !AbortCode::VIOLATION.is_reset());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AbortCode(pub u32);

impl AbortCode {
    /// The application dropped the stream while data was still coming.
    pub const CLOSED: Self = Self(1);
    /// The other end violated the protocol.
    pub const VIOLATION: Self = Self(2);
    /// The application reset the connection: the other end sees an error and not the end of the stream.
    pub const RESET: Self = Self(3);

    /// Returns true if the application ended the connection, as a TCP reset does, and no error was found.
    pub fn is_reset(self) -> bool {
        matches!(self, Self::CLOSED | Self::RESET)
    }
}

impl fmt::Display for AbortCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::CLOSED => f.write_str("it closed the stream without reading to its end"),
            Self::VIOLATION => f.write_str("it says that this end broke the protocol"),
            Self::RESET => f.write_str("its application reset the connection"),
            Self(code) => write!(f, "code {code}"),
        }
    }
}
