//! The command line: the commands, and a message of one line for input that is not accepted.

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};
use tonic_rdma_commands::{Failure, explain};

use crate::bridge::{self, BridgeOptions};
use crate::compare::options::{self as compare, CompareOptions, ServerOptions};
use crate::devices::DevicesOptions;
use crate::diff::{self, DiffOptions};
use crate::parameter_server::{self, ParameterServerOptions, ProcessOptions};
use crate::probe::{self, ProbeOptions};
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
    /// Compare two files of --json, cell by cell: what differs by more than its runs do
    #[command(after_long_help = diff::HELP)]
    Diff(DiffOptions),
    /// The server process of `compare`, which starts it
    #[command(hide = true)]
    CompareServer(ServerOptions),
    /// Measure the traffic of training: workers pull a model's variables and push gradients, by gRPC and by
    /// the tensor channel
    #[command(after_help = parameter_server::HELP)]
    ParameterServer(ParameterServerOptions),
    /// The server process of `parameter-server`, which starts it
    #[command(hide = true)]
    ParameterServerServer(ProcessOptions),
    /// A worker process of `parameter-server`, which starts it
    #[command(hide = true)]
    ParameterServerWorker(ProcessOptions),
    /// Carry byte streams between TCP or Unix sockets and RDMA, for clients and servers that have no RDMA of
    /// their own
    #[command(after_help = bridge::HELP)]
    Bridge(BridgeOptions),
    /// List RDMA devices, their limits, and why a device can't be used; with --check, test them
    Devices(DevicesOptions),
    /// Connect to a server as a client does, and show transport, reason, device and round trip
    #[command(after_help = probe::HELP)]
    Probe(ProbeOptions),
    /// Measure the cost of both ways of sending on a device, and show which is chosen and why
    #[command(after_help = tune::HELP)]
    Tune(TuneOptions),
}

/// Parses the command line of this process.
pub(crate) fn parse() -> Result<Command, Failure> {
    let error = match Cli::try_parse() {
        Ok(cli) => return Ok(cli.command),
        Err(error) => error,
    };
    let is_empty = std::env::args_os().len() <= 1;
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand && is_empty {
        // To stderr, because a missing command is an error.
        error.print().map_err(|error| Failure::output(&error))?;
        #[expect(clippy::disallowed_methods, reason = "nothing has been started yet")]
        std::process::exit(2)
    }
    explain(&error, &Cli::command())?;
    #[expect(clippy::disallowed_methods, reason = "nothing has been started yet")]
    std::process::exit(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
