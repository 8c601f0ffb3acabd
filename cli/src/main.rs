//! The `tonic-rdma` command. It compares transports, measures the traffic of a parameter server, carries the byte
//! streams of other programs over RDMA, lists RDMA devices, and tunes them.
#![forbid(unsafe_code)]

mod args;
mod bridge;
mod compare;
mod devices;
mod failure;
mod lists;
mod measure;
#[cfg(test)]
mod pages;
mod parameter_server;
mod tune;
mod units;
mod value_error;
mod workload;

use std::io::IsTerminal as _;
use std::process::ExitCode;

use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use failure::Failure;

/// The allocator of the process, for all modes. Reports name it because it has more influence on large messages than
/// the transport has. It is mimalloc unless the environment asks for the system's allocator, as `compare --allocator`
/// does.
#[global_allocator]
static ALLOCATOR: tonic_rdma_verbs::allocator::Chosen = tonic_rdma_verbs::allocator::Chosen;

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

/// Sends log messages to stderr.
fn log(command: &args::Command) -> Result<(), Failure> {
    let (option, usual) = match command {
        // Operators of a bridge want to see first which transport its connections use.
        args::Command::Bridge(options) => (options.log.as_deref(), "warn,tonic_rdma::bridge=info"),
        _ => (None, "warn"),
    };
    let variable = std::env::var("RUST_LOG").ok();
    let (origin, filter) = match (option, &variable) {
        (Some(option), _) => ("--log ", option),
        (None, Some(variable)) => ("RUST_LOG=", variable.as_str()),
        (None, None) => ("", usual),
    };
    let targets: Targets = filter.parse().map_err(|error| {
        Failure::usage(format!(
            "{origin}{filter}: {error}; accepted: error, warn, info, debug, trace, off, or targets with a level each, \
             such as warn,tonic_rdma::bridge=info"
        ))
    })?;
    let lines = tracing_subscriber::fmt::layer()
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    tracing_subscriber::registry().with(lines).with(targets).init();
    Ok(())
}
