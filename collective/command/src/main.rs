//! The `tonic-rdma-allreduce` command. It measures and checks allreduce of `tonic-rdma-collective`.
#![forbid(unsafe_code)]

mod choices;
mod cores;
mod failure;
mod grid;
mod kills;
mod launch;
mod options;
mod output;
mod rank;
mod report;
mod statistics;
mod values;

use std::io::{self, IsTerminal as _, Write as _};
use std::process::ExitCode;

use clap::Parser as _;
use clap::error::ErrorKind;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use failure::Failure;
use options::Options;

fn main() -> ExitCode {
    let outcome = match Options::try_parse() {
        Ok(options) => log().and_then(|()| run(&options)),
        Err(error) => explain(&error),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

fn run(options: &Options) -> Result<(), Failure> {
    if let Some(place) = &options.child {
        return rank::work_as_child(options, place);
    }
    if options.kills.is_some() || options.stops.is_some() {
        return kills::run(options);
    }
    let launched = rank::is_launched();
    match &options.ranks {
        None if launched => match rank::work_as_launched(options)? {
            Some(results) => results.show(options),
            None => Ok(()),
        },
        Some(_) if std::env::var_os("OMPI_COMM_WORLD_RANK").is_some() => Err(Failure::usage(
            "--ranks starts local processes, and mpirun has started this one as a rank: leave --ranks or mpirun out",
        )),
        _ => launch::measure_local(options)?.show(options),
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
