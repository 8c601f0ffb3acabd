use crate::args::DevicesOptions;
use crate::failure::Failure;
pub(crate) fn run(_: &DevicesOptions) -> Result<(), Failure> {
    Ok(())
}
