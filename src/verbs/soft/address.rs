//! What the hello says of a queue pair of this device.

use super::super::{QueuePairAddress, VerbsError};

/// Where a queue pair is, and the proof that whoever asks for it was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Address {
    /// Process, in its own process namespace; part of the socket's name alone.
    pub(super) pid: u32,
    /// Random part of the socket's name.
    pub(super) device: u64,
    /// Queue pair number.
    pub(super) queue_pair: u32,
    /// Random number that goes with every request for its memory.
    pub(super) token: u64,
}

const VERSION: u8 = 1;
const LENGTH: usize = 25;

impl Address {
    pub(super) fn encode(self) -> QueuePairAddress {
        let mut bytes = Vec::with_capacity(LENGTH);
        bytes.push(VERSION);
        bytes.extend_from_slice(&self.pid.to_le_bytes());
        bytes.extend_from_slice(&self.device.to_le_bytes());
        bytes.extend_from_slice(&self.queue_pair.to_le_bytes());
        bytes.extend_from_slice(&self.token.to_le_bytes());
        QueuePairAddress::from_bytes(bytes)
    }

    pub(super) fn decode(address: &QueuePairAddress) -> Result<Self, VerbsError> {
        let bytes: &[u8; LENGTH] = address.as_bytes().try_into().map_err(|_| {
            VerbsError::BadAddress(format!("{} bytes, not {LENGTH}", address.as_bytes().len()))
        })?;
        let [version, rest @ ..] = bytes;
        if *version != VERSION {
            return Err(VerbsError::BadAddress(format!("version {version}, not {VERSION}")));
        }
        let word = |at: usize, length: usize| {
            rest[at..at + length].iter().rev().fold(0_u64, |word, byte| word << 8 | u64::from(*byte))
        };
        Ok(Self {
            pid: word(0, 4) as u32,
            device: word(4, 8),
            queue_pair: word(12, 4) as u32,
            token: word(16, 8),
        })
    }

    /// Name of the device's socket, in the abstract namespace, which each network namespace has its own of.
    pub(super) fn socket_name(pid: u32, device: u64) -> Vec<u8> {
        format!("tonic-rdma/{pid}/{device:016x}").into_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn survives_the_hello_and_nothing_else_does() {
        let address = Address { pid: 77, device: u64::MAX - 5, queue_pair: 0x00ab_cdef, token: 42 };
        let encoded = address.encode();
        assert_eq!(Address::decode(&encoded).unwrap(), address);
        for bytes in [&encoded.as_bytes()[1..], &[], &[9; LENGTH]] {
            let error = Address::decode(&QueuePairAddress::new(bytes).unwrap()).unwrap_err();
            assert!(matches!(error, VerbsError::BadAddress(_)), "{error}");
        }
    }
}
