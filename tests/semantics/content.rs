//! Messages whose content shows every byte that is lost, doubled, moved or stale, and short words for
//! outcomes.

use bytes::Bytes;
use support::Content;
use tonic::Status;

/// Period of long messages. Making each byte of 64 MiB anew takes long without optimisation, so a long
/// message repeats; the period is a prime number, so that no piece of a usual length can stand in for another
/// one.
const PERIOD: usize = 65_521;

/// Returns a message of `length` bytes that depends on `seed`.
pub(crate) fn message(seed: u64, length: usize) -> Bytes {
    let block = Content::new(seed).take(length.min(PERIOD));
    let mut bytes = Vec::with_capacity(length);
    while bytes.len() < length {
        let rest = (length - bytes.len()).min(block.len());
        bytes.extend_from_slice(&block[..rest]);
    }
    bytes.into()
}

/// Checks that `found` is the message of `seed` and `length`.
pub(crate) fn check(found: &[u8], seed: u64, length: usize) {
    assert_eq!(found.len(), length, "length of message {seed}");
    let block = Content::new(seed).take(length.min(PERIOD));
    for (number, piece) in found.chunks(PERIOD).enumerate() {
        assert!(piece == &block[..piece.len()], "block {number} of message {seed} is wrong");
    }
}

/// Returns the outcome of a call in words: `ok`, or the code of the error.
pub(crate) fn code<T>(result: Result<T, Status>) -> String {
    match result {
        Ok(_) => "OK".to_owned(),
        Err(status) => name(&status),
    }
}

/// Returns the name of a status' code as gRPC writes it.
pub(crate) fn name(status: &Status) -> String {
    let mut name = String::new();
    for letter in format!("{:?}", status.code()).chars() {
        if letter.is_uppercase() && !name.is_empty() {
            name.push('_');
        }
        name.push(letter.to_ascii_uppercase());
    }
    name
}

/// Joins outcomes.
pub(crate) fn joined(parts: impl IntoIterator<Item = String>) -> String {
    parts.into_iter().collect::<Vec<_>>().join(", ")
}
