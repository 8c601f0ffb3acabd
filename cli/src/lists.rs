//! Lists on the command line.

use crate::value_error::ValueError;

/// The values of a comma-separated list: at least one, none twice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct List<T>(pub(crate) Vec<T>);

/// Parses the items of `text` between commas with `item`.
pub(crate) fn parse_list<T: PartialEq>(
    text: &str,
    item: impl Fn(&str) -> Result<T, ValueError>,
) -> Result<List<T>, ValueError> {
    if text.trim().is_empty() {
        return Err(ValueError::EmptyList);
    }
    let mut values = Vec::new();
    for part in text.split(',').map(str::trim) {
        if part.is_empty() {
            return Err(ValueError::EmptyItem);
        }
        let value = item(part)?;
        if values.contains(&value) {
            return Err(ValueError::Repeated(part.to_owned()));
        }
        values.push(value);
    }
    Ok(List(values))
}
