//! The JSON that scripts rely on.

use std::path::Path;

use serde::Serialize;

use super::facts::Facts;
use super::results::Row;
use crate::failure::Failure;

#[derive(Serialize)]
struct Document<'a> {
    #[serde(flatten)]
    facts: &'a Facts,
    rows: &'a [Row],
}

/// Writes the run to `path`.
pub(crate) fn write(path: &Path, facts: &Facts, rows: &[Row]) -> Result<(), Failure> {
    let mut text = serde_json::to_string_pretty(&Document { facts, rows })
        .map_err(|error| Failure::run(format!("can't make JSON of the results: {error}")))?;
    text.push('\n');
    std::fs::write(path, text)
        .map_err(|error| Failure::run(format!("can't write {}: {error}", path.display())))
}
