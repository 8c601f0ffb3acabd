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
mod seeded;
mod tune;
mod units;
mod value_error;
mod workload;

use std::io::IsTerminal as _;
use std::process::ExitCode;

use tracing_subscriber::EnvFilter;

use failure::Failure;

/// The allocator of the process, the same for every mode. Reports name it because it has more influence on large
/// messages than the transport has. It is mimalloc unless the environment asks for the system's allocator, as `compare
/// --allocator` does.
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

/// Sends log messages to stderr.
fn log(command: &args::Command) -> Result<(), Failure> {
    let (filter, usual) = match command {
        // Operators of a bridge want to see first which transport its connections use.
        args::Command::Bridge(options) => (options.log.as_deref(), "warn,tonic_rdma::bridge=info"),
        _ => (None, "warn"),
    };
    let filter = match filter {
        Some(text) => EnvFilter::try_new(text).map_err(|error| {
            Failure::usage(format!(
                "--log {text}: {error}; accepted: error, warn, info, debug, trace, or a filter"
            ))
        })?,
        None => EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(usual)),
    };
    let tty = std::io::stderr().is_terminal();
    tracing_subscriber::fmt().with_env_filter(filter).with_ansi(tty).with_writer(std::io::stderr).init();
    Ok(())
}
