//! The `tonic-rdma` command: compares transports, moves a parameter server's traffic over them, carries what others send over
//! RDMA, says which RDMA devices there are, and tunes them.
#![forbid(unsafe_code)]

mod args;
mod bridge;
mod compare;
mod devices;
mod failure;
mod lists;
#[cfg(test)]
mod pages;
mod parameter_server;
mod seeded;
mod tune;
mod units;
mod workload;

use std::io::IsTerminal as _;
use std::process::ExitCode;

use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use failure::Failure;

/// The same allocator under every mode: it decides large messages more than the transport does, so every report names it.
/// It is mimalloc unless the environment asks for the system's, as `compare --allocator` does.
#[global_allocator]
static ALLOCATOR: tonic_rdma_allocator::Chosen = tonic_rdma_allocator::Chosen;

fn main() -> ExitCode {
    let outcome =
        args::parse().and_then(|command| log(&command).map(|()| command)).and_then(|command| match command {
            args::Command::Bridge(options) => bridge::run(&options),
            args::Command::Compare(options) => compare::run(&options),
            args::Command::CompareServer(options) => compare::serve(&options),
            args::Command::ParameterServer(options) => parameter_server::run(&options),
            args::Command::ParameterServerServer(options) => parameter_server::serve(&options),
            args::Command::ParameterServerWorker(options) => parameter_server::work(&options),
            args::Command::Devices(options) => devices::run(&options),
            args::Command::Tune(options) => tune::run(&options),
        });
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

/// Sends what is logged to stderr.
fn log(command: &args::Command) -> Result<(), Failure> {
    let (told, usual) = match command {
        // Over what its connections go is what a bridge is asked first.
        args::Command::Bridge(options) => (options.log.as_deref(), "warn,tonic_rdma::bridge=info"),
        _ => (None, "warn"),
    };
    let variable = std::env::var("RUST_LOG").ok();
    let (from, filter) = match (told, &variable) {
        (Some(told), _) => ("--log ", told),
        (None, Some(variable)) => ("RUST_LOG=", variable.as_str()),
        (None, None) => ("", usual),
    };
    let targets: Targets = filter.parse().map_err(|error| {
        Failure::usage(format!(
            "{from}{filter}: {error}; accepted: error, warn, info, debug, trace, off, or targets with a level each, \
             such as warn,tonic_rdma::bridge=info"
        ))
    })?;
    let lines = tracing_subscriber::fmt::layer()
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    tracing_subscriber::registry().with(lines).with(targets).init();
    Ok(())
}
