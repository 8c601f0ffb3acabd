//! The address of a queue pair: 34 bytes by which a peer's device finds the queue pair.

use crate::{QueuePairAddress, VerbsError};

/// Version of the layout of shared memory and of the messages between devices. Both sides must have one version. Every change of
/// either increments the version.
pub(crate) const VERSION: u8 = 5;

const MAGIC: u8 = b's';
const LENGTH: usize = 34;

/// The address of a queue pair: the device and the number. The token is a secret, so that a process without the address can't
/// reach the queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) device: DeviceId,
    pub(crate) number: u32,
    pub(crate) token: u64,
}

/// The identity of a device: a random number. The rest is information. The process number is that of the device's pid
/// namespace, so it may be the number of another process here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct DeviceId {
    pub(crate) process: u32,
    pub(crate) nonce: u64,
    /// The directory in which the device has its socket (`RDMA_SOFT_DIR`): a number that is made of the numbers of the file
    /// system and the file; 0 if the socket is in the abstract namespace.
    pub(crate) directory: u64,
}

impl DeviceId {
    /// Returns the name of the device's socket in the abstract namespace.
    pub(crate) fn socket_name(self) -> String {
        format!("tonic-rdma-soft-{}-{:016x}", self.process, self.nonce)
    }
}

impl Address {
    fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(LENGTH);
        bytes.extend([MAGIC, VERSION]);
        bytes.extend(self.device.process.to_le_bytes());
        bytes.extend(self.device.nonce.to_le_bytes());
        bytes.extend(self.number.to_le_bytes());
        bytes.extend(self.token.to_le_bytes());
        bytes.extend(self.device.directory.to_le_bytes());
        bytes
    }

    pub(crate) fn decode(address: &QueuePairAddress) -> Result<Self, VerbsError> {
        let bytes = address.as_bytes();
        if bytes.first() != Some(&MAGIC) {
            return Err(VerbsError::BadAddress("it is not the address of a soft device".into()));
        }
        if bytes.get(1) != Some(&VERSION) {
            return Err(VerbsError::BadAddress(format!(
                "the peer's soft device has version {:?} of the layout, this one has {VERSION}: use one version of this library",
                bytes.get(1)
            )));
        }
        let Ok(bytes) = <&[u8; LENGTH]>::try_from(bytes) else {
            return Err(VerbsError::BadAddress(format!("{} bytes, not {LENGTH}", bytes.len())));
        };
        let device =
            DeviceId { process: u32_at(bytes, 2), nonce: u64_at(bytes, 6), directory: u64_at(bytes, 26) };
        if device.process == 0 {
            return Err(VerbsError::BadAddress("process 0".into()));
        }
        Ok(Self { device, number: u32_at(bytes, 14), token: u64_at(bytes, 18) })
    }
}

impl From<Address> for QueuePairAddress {
    fn from(address: Address) -> Self {
        const { assert!(LENGTH <= QueuePairAddress::MAX_LENGTH) };
        QueuePairAddress::new(address.encode()).unwrap_or_else(|| unreachable!())
    }
}

/// Returns the little-endian number at `offset`; 0 beyond the end.
pub(crate) fn u32_at(bytes: &[u8], offset: usize) -> u32 {
    bytes.get(offset..).and_then(|rest| rest.first_chunk()).map_or(0, |bytes| u32::from_le_bytes(*bytes))
}

/// Returns the little-endian number at `offset`; 0 beyond the end.
pub(crate) fn u64_at(bytes: &[u8], offset: usize) -> u64 {
    bytes.get(offset..).and_then(|rest| rest.first_chunk()).map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    fn sample() -> Address {
        let device = DeviceId { process: 4711, nonce: 0x0123_4567_89ab_cdef, directory: 99 };
        Address { device, number: 17, token: u64::MAX - 3 }
    }

    #[test]
    fn survives_the_round_trip() {
        let bytes = QueuePairAddress::from(sample());
        assert_eq!(Address::decode(&bytes).unwrap(), sample());
    }

    #[test]
    fn refuses_every_other_length_and_header() {
        let good = sample().encode();
        for length in (0..60).filter(|length| *length != good.len()) {
            let mut bytes = good.clone();
            bytes.resize(length, 7);
            assert!(Address::decode(&QueuePairAddress::new(bytes).unwrap()).is_err(), "{length}");
        }
        for index in 0..2 {
            let mut bytes = good.clone();
            bytes[index] ^= 1;
            assert!(Address::decode(&QueuePairAddress::new(bytes).unwrap()).is_err(), "{index}");
        }
    }
}
