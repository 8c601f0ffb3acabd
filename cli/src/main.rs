//! The `tonic-rdma` command: compares transports, moves a parameter server's traffic over them, carries what others send over
//! RDMA, says which RDMA devices there are, and tunes them.
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
mod workload;

use std::io::IsTerminal as _;
use std::process::ExitCode;

use tracing_subscriber::EnvFilter;

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
    let filter = match told {
        Some(told) => EnvFilter::try_new(told).map_err(|error| {
            Failure::usage(format!(
                "--log {told}: {error}; accepted: error, warn, info, debug, trace, or a filter"
            ))
        })?,
        None => EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(usual)),
    };
    let tty = std::io::stderr().is_terminal();
    tracing_subscriber::fmt().with_env_filter(filter).with_ansi(tty).with_writer(std::io::stderr).init();
    Ok(())
}
