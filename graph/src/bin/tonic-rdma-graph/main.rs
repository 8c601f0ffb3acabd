//! The command `tonic-rdma-graph`: runs an ONNX model that is split over processes, and compares how its
//! tensors cross.
#![forbid(unsafe_code)]

mod control;
#[cfg(test)]
#[allow(dead_code, reason = "the tests of the command use the rest")]
#[path = "../../../tests/onnx/mod.rs"]
mod onnx;
mod options;
mod output;
mod part;
mod run;

use std::process::ExitCode;

use tonic_rdma_verbs::memory::trace::TracingAllocator;
use tonic_rdma_verbs::unstable::allocator::Chosen;

use options::{Options, Subcommands};

/// The allocator of the process: mimalloc, and registered memory for tensors that cross. It is the same for
/// all modes.
#[global_allocator]
static ALLOCATOR: TracingAllocator<Chosen> = TracingAllocator::new(Chosen);

fn main() -> ExitCode {
    tonic_rdma_commands::main(|options: &Options| match &options.command {
        Some(Subcommands::Serve(serve)) => part::serve(serve),
        None => run::run(&options.run),
    })
}
