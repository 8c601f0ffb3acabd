//! Variables of the environment, and errors that name them.

use std::ffi::OsString;

use crate::error::CollectiveError;
use crate::group::launch::setup;

/// Reads variables from a source.
pub(super) struct Variables<'a> {
    lookup: &'a dyn Fn(&str) -> Option<OsString>,
}

impl<'a> Variables<'a> {
    pub(super) fn new(lookup: &'a dyn Fn(&str) -> Option<OsString>) -> Self {
        Self { lookup }
    }

    /// Returns the text of a variable; `None` if it is not set.
    pub(super) fn text(&self, name: &str) -> Result<Option<String>, CollectiveError> {
        match (self.lookup)(name).map(OsString::into_string) {
            None => Ok(None),
            Some(Ok(text)) => Ok(Some(text)),
            Some(Err(raw)) => Err(refuse(name, &raw.to_string_lossy(), "takes text in UTF-8")),
        }
    }

    /// Returns the text of the first variable that is set.
    pub(super) fn first(&self, names: &[&str]) -> Result<Option<String>, CollectiveError> {
        for name in names {
            if let Some(text) = self.text(name)? {
                return Ok(Some(text));
            }
        }
        Ok(None)
    }

    /// Returns a variable that is a number.
    pub(super) fn number(&self, name: &str) -> Result<Option<usize>, CollectiveError> {
        let Some(text) = self.text(name)? else { return Ok(None) };
        let number = text.parse::<u32>().map_err(|_| refuse(name, &text, "takes a number"))?;
        Ok(Some(number as usize))
    }

    /// Returns the first variable that is set, which is a number.
    pub(super) fn first_number(&self, names: &[&str]) -> Result<Option<usize>, CollectiveError> {
        for name in names {
            if let Some(number) = self.number(name)? {
                return Ok(Some(number));
            }
        }
        Ok(None)
    }

    /// Returns a port.
    pub(super) fn port(&self, name: &str) -> Result<Option<u16>, CollectiveError> {
        let Some(text) = self.text(name)? else { return Ok(None) };
        match text.parse() {
            Ok(0) | Err(_) => Err(refuse(name, &text, "takes a number from 1 to 65535")),
            Ok(port) => Ok(Some(port)),
        }
    }
}

/// Makes the error of a bad value.
pub(super) fn refuse(name: &str, value: &str, accepted: &str) -> CollectiveError {
    setup(format!("{name}={value:?}: {accepted}"))
}
