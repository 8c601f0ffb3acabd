//! The `tonic-rdma` command: compares transports, moves a parameter server's traffic over them, says which RDMA devices there
//! are, and tunes them.
#![forbid(unsafe_code)]

mod args;
mod compare;
mod devices;
mod failure;
mod parameter_server;
mod seeded;
mod tune;
mod units;
mod workload;

use std::process::ExitCode;

/// The same allocator under every mode: it decides large messages more than the transport does, so every report names it.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();

    let outcome = args::parse().and_then(|command| match command {
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
