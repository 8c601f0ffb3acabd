//! The runtimes of the program.

use tonic_rdma_commands::Failure;

/// Makes a runtime.
pub(crate) fn start(builder: &mut tokio::runtime::Builder) -> Result<tokio::runtime::Runtime, Failure> {
    builder.enable_all().build().map_err(|error| Failure::run("can't start a runtime").because(error))
}
