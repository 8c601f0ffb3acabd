//! How a command begins and ends: log messages, refusals of clap, exit status.

use std::io::{self, IsTerminal as _, Write as _};
use std::process::ExitCode;

use clap::error::ErrorKind;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::failure::{Failure, one_line};

/// Sends log messages to stderr. The filter is `option`, the value of `--log`, else the variable `RUST_LOG`, else `usual`.
///
/// # Errors
///
/// Fails if the filter can't be parsed. The error names the option or the variable.
pub fn log(option: Option<&str>, usual: &str) -> Result<(), Failure> {
    let variable = std::env::var("RUST_LOG").ok();
    let (origin, filter) = match (option, &variable) {
        (Some(option), _) => ("--log ", option),
        (None, Some(variable)) => ("RUST_LOG=", variable.as_str()),
        (None, None) => ("", usual),
    };
    let targets: Targets = filter.parse().map_err(|error| {
        Failure::usage(format!(
            "{origin}{filter}: {error}; accepted: error, warn, info, debug, trace, off, or targets with a level each, \
             such as warn,tonic_rdma=info"
        ))
    })?;
    let lines =
        tracing_subscriber::fmt::layer().with_ansi(io::stderr().is_terminal()).with_writer(io::stderr);
    tracing_subscriber::registry().with(lines).with(targets).init();
    Ok(())
}

/// Shows help or version, if `error` is such a request. Otherwise returns clap's message as a failure of one line.
///
/// # Errors
///
/// Returns the failure of the command line, or of stdout.
pub fn explain(error: &clap::Error) -> Result<(), Failure> {
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        return error.print().and_then(|()| io::stdout().flush()).map_err(|error| Failure::output(&error));
    }
    let rendered = error.render().to_string();
    let message = one_line(rendered.split("\n\n").next().unwrap_or_default());
    Err(Failure::usage(message.strip_prefix("error: ").unwrap_or(&message)))
}

/// Reports the failure of the command `name`, if there is one, and returns the exit status.
pub fn status(name: &str, outcome: Result<(), Failure>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(name),
    }
}
