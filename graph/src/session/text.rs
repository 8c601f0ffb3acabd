//! Texts of errors.

use tonic::Status;
use tonic_rdma_verbs::internal::with_causes;

/// The longest text of another part that this part keeps or passes on, in bytes.
pub(super) const MAX_TEXT: usize = 4096;

/// Returns the beginning of a text.
pub(super) fn shortened(text: &str) -> String {
    let ends = text.char_indices().map(|(start, letter)| start + letter.len_utf8());
    let end = ends.take_while(|end| *end <= MAX_TEXT).last().unwrap_or(0);
    text.get(..end).unwrap_or_default().to_owned()
}

/// Returns the message of a status, with those of its sources, because tonic's message of a lost connection gives no reason.
pub(super) fn describe(status: &Status) -> String {
    with_causes(status.message(), status)
}
