//! Checksums of tensors that arrived.

use xxhash_rust::xxh3::xxh3_64;

use super::RequestId;

/// Returns the XXH3 of a tensor's bytes, which a `Written` frame carries. It reads all bytes.
pub fn checksum(bytes: &[u8]) -> u64 {
    xxh3_64(bytes)
}

/// The bytes that arrived are not the bytes that the provider sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{request_id}: {bytes} bytes with checksum {found:#018x} arrived, but the provider computed {expected:#018x}"
)]
pub struct ChecksumMismatch {
    /// The request.
    pub request_id: RequestId,
    /// Number of bytes that arrived.
    pub bytes: usize,
    /// The provider's checksum.
    pub expected: u64,
    /// The checksum of the bytes that arrived.
    pub found: u64,
}

/// Checks that `bytes` have the checksum `expected`, which the provider computed.
///
/// # Errors
/// [`ChecksumMismatch`] if `bytes` have another checksum.
pub fn verify(request_id: RequestId, bytes: &[u8], expected: u64) -> Result<(), ChecksumMismatch> {
    let found = checksum(bytes);
    if found == expected {
        return Ok(());
    }
    Err(ChecksumMismatch { request_id, bytes: bytes.len(), expected, found })
}
