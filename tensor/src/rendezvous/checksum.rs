//! Checksums of what arrived, for those who want to be sure.

use xxhash_rust::xxh3::xxh3_64;

use super::RequestId;

/// XXH3 of a tensor's bytes, as a `Written` carries it. Reads all of them.
pub fn checksum(bytes: &[u8]) -> u64 {
    xxh3_64(bytes)
}

/// What arrived is not what was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{request_id}: {bytes} bytes with checksum {found:#018x} arrived, of which the provider says {expected:#018x}"
)]
pub struct ChecksumMismatch {
    /// The request.
    pub request_id: RequestId,
    /// How many bytes.
    pub bytes: usize,
    /// What the provider computed.
    pub expected: u64,
    /// What they give here.
    pub found: u64,
}

/// Whether `bytes` are those that the provider computed `expected` of.
///
/// # Errors
/// [`ChecksumMismatch`] if not.
pub fn verify(request_id: RequestId, bytes: &[u8], expected: u64) -> Result<(), ChecksumMismatch> {
    let found = checksum(bytes);
    if found == expected {
        return Ok(());
    }
    Err(ChecksumMismatch { request_id, bytes: bytes.len(), expected, found })
}
