//! Texts of errors.

use std::error::Error;

use tonic::Status;

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
    match status.source() {
        Some(cause) => format!("{}: {}", status.message(), chain(cause)),
        None => status.message().to_owned(),
    }
}

/// Returns the message of `error` and of all its sources, and leaves out what an earlier message contains.
pub(super) fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let message = error.to_string();
        if !text.contains(&message) {
            text = format!("{text}: {message}");
        }
        cause = error.source();
    }
    text
}
