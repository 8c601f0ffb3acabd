use super::facts::Facts;
use super::results::Row;
use crate::failure::Failure;
use std::path::Path;
pub(crate) fn write(_: &Path, _: &Facts, _: &[Row]) -> Result<(), Failure> {
    Ok(())
}
