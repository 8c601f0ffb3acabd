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

    /// Returns the value of the first variable that is set; `None` if none is. `parse` returns `None` for a value that is not `accepted`.
    fn find<T>(
        &self,
        names: &[&str],
        accepted: &str,
        parse: impl Fn(String) -> Option<T>,
    ) -> Result<Option<T>, CollectiveError> {
        let value = |name: &&str| (self.lookup)(name).map(|value| ((*name).to_owned(), value));
        let Some((name, value)) = names.iter().find_map(value) else { return Ok(None) };
        let text = value
            .into_string()
            .map_err(|raw| refuse(&name, &raw.to_string_lossy(), "takes text in UTF-8"))?;
        parse(text.clone()).map(Some).ok_or_else(|| refuse(&name, &text, accepted))
    }

    /// Returns the text of a variable.
    pub(super) fn text(&self, name: &str) -> Result<Option<String>, CollectiveError> {
        self.first(&[name])
    }

    /// Returns the text of the first variable that is set.
    pub(super) fn first(&self, names: &[&str]) -> Result<Option<String>, CollectiveError> {
        self.find(names, "", Some)
    }

    /// Returns a variable that is a number.
    pub(super) fn number(&self, name: &str) -> Result<Option<usize>, CollectiveError> {
        self.first_number(&[name])
    }

    /// Returns the first variable that is set, which is a number.
    pub(super) fn first_number(&self, names: &[&str]) -> Result<Option<usize>, CollectiveError> {
        self.find(names, "takes a number", |text| text.parse::<u32>().ok().map(|number| number as usize))
    }

    /// Returns a port.
    pub(super) fn port(&self, name: &str) -> Result<Option<u16>, CollectiveError> {
        self.find(&[name], "takes a number from 1 to 65535", |text| {
            text.parse().ok().filter(|port| *port != 0)
        })
    }
}

/// Makes the error of a bad value.
pub(super) fn refuse(name: &str, value: &str, accepted: &str) -> CollectiveError {
    setup(format!("{name}={value:?}: {accepted}"))
}
