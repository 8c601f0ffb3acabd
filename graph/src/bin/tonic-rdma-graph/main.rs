//! The command `tonic-rdma-graph`: runs an ONNX model that is split over processes, and compares how its tensors cross.
#![forbid(unsafe_code)]

mod control;
mod failure;
mod launch;
mod options;
mod output;
mod part;
mod run;
mod set;
mod values;

use std::io::{self, IsTerminal as _, Write as _};
use std::process::ExitCode;

use clap::Parser as _;
use clap::error::ErrorKind;
use tonic_rdma_verbs::allocator::Chosen;
use tonic_rdma_verbs::memory::trace::TracingAllocator;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use failure::Failure;
use options::{Options, Subcommands};

/// The allocator of the process: mimalloc, and registered memory for tensors that cross. It is the same for all modes.
#[global_allocator]
static ALLOCATOR: TracingAllocator<Chosen> = TracingAllocator::new(Chosen);

fn main() -> ExitCode {
    let outcome = match Options::try_parse() {
        Ok(options) => log().and_then(|()| match &options.command {
            Some(Subcommands::Serve(serve)) => part::serve(serve),
            None => run::run(&options.run),
        }),
        Err(error) => explain(&error),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

/// Shows help and version, or makes clap's message one line.
fn explain(error: &clap::Error) -> Result<(), Failure> {
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        return error.print().and_then(|()| io::stdout().flush()).map_err(|error| Failure::output(&error));
    }
    let rendered = error.render().to_string();
    let message = failure::one_line(rendered.split("\n\n").next().unwrap_or_default());
    Err(Failure::usage(message.strip_prefix("error: ").unwrap_or(&message)))
}

/// Sends log messages to stderr.
fn log() -> Result<(), Failure> {
    let filter = std::env::var("RUST_LOG").unwrap_or_else(|_| "warn".to_owned());
    let targets: Targets = filter.parse().map_err(|error| {
        Failure::usage(format!(
            "RUST_LOG={filter}: {error}; accepted: error, warn, info, debug, trace, off, or targets"
        ))
    })?;
    let lines =
        tracing_subscriber::fmt::layer().with_ansi(io::stderr().is_terminal()).with_writer(io::stderr);
    tracing_subscriber::registry().with(lines).with(targets).init();
    Ok(())
}
