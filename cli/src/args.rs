//! The command line: the commands, and a message of one line for input that is not accepted.

use std::io::{self, Write};

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};
use tonic_rdma_commands::{Failure, one_line};

use crate::bridge::{self, BridgeOptions};
use crate::compare::options::{self as compare, CompareOptions, ServerOptions};
use crate::devices::DevicesOptions;
use crate::parameter_server::{self, ParameterServerOptions, ProcessOptions};
use crate::tune::{self, TuneOptions};

#[derive(Debug, Parser)]
#[command(
    name = "tonic-rdma",
    version,
    about = "Compare RDMA with TCP beneath gRPC, carry byte streams over RDMA, list RDMA devices, and tune them"
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// The command to run.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Measure the same gRPC calls over TCP, Unix sockets and RDMA, side by side
    #[command(after_help = compare::HELP)]
    Compare(CompareOptions),
    /// The server process of `compare`, which starts it
    #[command(hide = true)]
    CompareServer(ServerOptions),
    /// Measure the traffic of training: workers pull a model's variables and push gradients, by gRPC and by the tensor
    /// channel
    #[command(after_help = parameter_server::HELP)]
    ParameterServer(ParameterServerOptions),
    /// The server process of `parameter-server`, which starts it
    #[command(hide = true)]
    ParameterServerServer(ProcessOptions),
    /// A worker process of `parameter-server`, which starts it
    #[command(hide = true)]
    ParameterServerWorker(ProcessOptions),
    /// Carry byte streams between TCP or Unix sockets and RDMA, for clients and servers that have no RDMA of their own
    #[command(after_help = bridge::HELP)]
    Bridge(BridgeOptions),
    /// List RDMA devices, their limits, and why a device can't be used; with --check, test them
    Devices(DevicesOptions),
    /// Measure the cost of both ways of sending on a device, and show which is chosen and why
    #[command(after_help = tune::HELP)]
    Tune(TuneOptions),
}

/// Parses the command line of this process.
pub(crate) fn parse() -> Result<Command, Failure> {
    match Cli::try_parse() {
        Ok(cli) => Ok(cli.command),
        Err(error) => match error.kind() {
            ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
                error.print().map_err(|error| Failure::output(&error))?;
                io::stdout().flush().map_err(|error| Failure::output(&error))?;
                #[expect(clippy::disallowed_methods, reason = "nothing has been started yet")]
                std::process::exit(0)
            }
            ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand if std::env::args_os().len() <= 1 => {
                // To stderr, because a missing command is an error.
                error.print().map_err(|error| Failure::output(&error))?;
                #[expect(clippy::disallowed_methods, reason = "nothing has been started yet")]
                std::process::exit(2)
            }
            _ => Err(Failure::usage(explain(&error))),
        },
    }
}

/// Returns clap's message as one line, with the accepted words in place of its usage block.
fn explain(error: &clap::Error) -> String {
    let rendered = error.render().to_string();
    let message = one_line(rendered.split("\n\n").next().unwrap_or_default());
    let message = message.strip_prefix("error: ").unwrap_or(&message).trim_end_matches('.').to_owned();
    let root = Cli::command();
    match error.kind() {
        ErrorKind::InvalidSubcommand
        | ErrorKind::MissingSubcommand
        | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let message = match error.kind() {
                ErrorKind::InvalidSubcommand => message,
                _ => "a command is missing".to_owned(),
            };
            format!(
                "{message}; accepted: compare, parameter-server, bridge, devices, tune, --help, --version"
            )
        }
        ErrorKind::UnknownArgument => {
            // Only clap's usage line names the command that was being parsed.
            let name = std::env::args().nth(1).unwrap_or_default();
            let flags = root.find_subcommand(&name).map(flags).unwrap_or_else(|| flags(&root));
            format!("{message}; accepted: {flags}")
        }
        _ => message,
    }
}

/// Returns the flags of `command`.
fn flags(command: &clap::Command) -> String {
    let own = command.get_arguments().filter_map(|argument| argument.get_long());
    own.filter(|name| *name != "help")
        .chain(["help"])
        .map(|name| format!("--{name}"))
        .collect::<Vec<_>>()
        .join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
