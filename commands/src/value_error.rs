//! The errors of option values.

use crate::units::{SIZE_FORMS, SizeError};

/// The reason why the value of an option is refused.
#[expect(missing_docs, reason = "the texts say what each is")]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ValueError {
    #[error("the list is empty")]
    EmptyList,
    #[error("an item of the list is empty")]
    EmptyItem,
    #[error("{0:?} is there twice")]
    Repeated(String),
    /// The value is no known word.
    #[error("accepted: {0}")]
    Unknown(String),
    /// An item is no known name.
    #[error("unknown {kind} {given:?}; accepted: {accepted}")]
    UnknownName { kind: &'static str, given: String, accepted: String },
    /// The value is not a number, or is out of range.
    #[error("bad {kind} {given:?}; accepted: {accepted}")]
    Number { kind: &'static str, given: String, accepted: String },
    #[error("bad size {given:?}: {reason}; accepted: {SIZE_FORMS}")]
    Size { given: String, reason: SizeError },
    #[error("size {given:?} is {fault}; accepted: {accepted}")]
    SizeRange { given: String, fault: &'static str, accepted: String },
}

impl ValueError {
    /// Makes the error of a value that is none of the words of `accepted`.
    pub fn unknown(accepted: impl Into<String>) -> Self {
        Self::Unknown(accepted.into())
    }

    /// Makes the error of an item that is none of the names of `accepted`.
    pub fn unknown_name(kind: &'static str, given: &str, accepted: String) -> Self {
        Self::UnknownName { kind, given: given.to_owned(), accepted }
    }

    /// Makes the error of a bad number.
    pub fn number(kind: &'static str, given: &str, accepted: String) -> Self {
        Self::Number { kind, given: given.to_owned(), accepted }
    }
}
