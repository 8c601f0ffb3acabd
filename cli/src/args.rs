//! The command line: the commands, and a message of one line for input that is not accepted.

use clap::{CommandFactory, Parser, Subcommand};

use crate::about::{self, CompletionsOptions, ManOptions};
use crate::bridge::{self, BridgeOptions};
use crate::call::load::{self, LoadOptions};
use crate::call::{self, CallOptions};
use crate::compare::options::{self as compare, CompareOptions, ServerOptions};
use crate::devices::DevicesOptions;
use crate::diff::{self, DiffOptions};
use crate::parameter_server::{self, ParameterServerOptions, ProcessOptions};
use crate::probe::{self, ProbeOptions};
use crate::programs::{self, Arguments};
use crate::tune::{self, TuneOptions};

#[derive(Debug, Parser)]
#[command(
    name = "tonic-rdma",
    version,
    long_version = about::VERSION.as_str(),
    about = "Compare RDMA with TCP beneath gRPC, carry byte streams over RDMA, list RDMA devices, and tune them",
    after_help = "`tonic-rdma COMMAND -h` lists the options of a command, and --help explains them."
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// The command to run.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Measure the same gRPC calls over TCP, Unix sockets and RDMA, side by side
    #[command(after_long_help = compare::HELP)]
    Compare(CompareOptions),
    /// The server process of `compare`, which starts it
    #[command(hide = true)]
    CompareServer(ServerOptions),
    /// Compare two files of --json, cell by cell: what differs by more than its runs do
    #[command(after_long_help = diff::HELP)]
    Diff(DiffOptions),
    /// Measure the traffic of training: pulls and pushes, by gRPC and by tensors
    #[command(after_long_help = parameter_server::HELP)]
    ParameterServer(ParameterServerOptions),
    /// The server process of `parameter-server`, which starts it
    #[command(hide = true)]
    ParameterServerServer(ProcessOptions),
    /// A worker process of `parameter-server`, which starts it
    #[command(hide = true)]
    ParameterServerWorker(ProcessOptions),
    /// Call a method of a server, found by gRPC reflection, with a message in JSON
    #[command(after_long_help = call::HELP)]
    Call(CallOptions),
    /// Measure calls of your own server over TCP, drop-in and native, side by side
    #[command(after_long_help = load::HELP)]
    Load(LoadOptions),
    /// Carry byte streams over RDMA, for programs that have no RDMA of their own
    #[command(after_long_help = bridge::HELP)]
    Bridge(BridgeOptions),
    /// List RDMA devices and limits, and say why one can't be used; --check tests them
    Devices(DevicesOptions),
    /// Connect as a client does, and show transport, reason, device and round trip
    #[command(after_long_help = probe::HELP)]
    Probe(ProbeOptions),
    /// Measure both ways of sending on a device, and show which is chosen and why
    #[command(after_long_help = tune::HELP)]
    Tune(TuneOptions),
    /// Measure and check collectives, alone or as a rank (tonic-rdma-allreduce)
    #[command(hide = true)]
    Allreduce(Arguments),
    /// Run an ONNX model split over processes, and check it (tonic-rdma-graph)
    #[command(hide = true)]
    Graph(Arguments),
    /// Train networks with several processes (tonic-rdma-training)
    #[command(hide = true)]
    Training(Arguments),
    /// Print the completions of commands and options for a shell
    #[command(after_long_help = about::COMPLETIONS_HELP)]
    Completions(CompletionsOptions),
    /// Print the page for man, or write those of all commands to a folder
    Man(ManOptions),
}

/// Returns the parser, whose help has the programs that are installed.
pub(crate) fn command() -> clap::Command {
    let is_there = |name| programs::find(name).is_some();
    let show = |command: clap::Command, name| command.mut_subcommand(name, |it| it.hide(!is_there(name)));
    programs::NAMES.into_iter().fold(Cli::command(), show)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        command().debug_assert();
    }

    #[test]
    fn short_help_has_a_line_for_each_option() {
        let mut root = command().term_width(100);
        root.build();
        let shown = root.get_subcommands().filter(|command| !command.is_hide_set());
        let listed = root.clone().render_help().to_string();
        let listed = listed.lines().filter(|line| line.starts_with("  ")).count();
        assert_eq!(listed, shown.count() + 2, "a command or an option needs more than a line");
        for shown in root.get_subcommands_mut().filter(|command| !command.is_hide_set()) {
            let (name, short) = (shown.get_name().to_owned(), shown.render_help().to_string());
            let options = short.split_once("Options:\n").map_or("", |(_, options)| options);
            let options = options.split_once("\n\n").map_or(options, |(options, _)| options);
            let wrapped: Vec<_> =
                options.lines().filter(|line| !line.trim_start().starts_with('-')).collect();
            assert!(
                wrapped.is_empty(),
                "`{name} -h` needs more than a line for an option: {wrapped:#?}\n{short}"
            );
            let long = shown.render_long_help().to_string();
            for text in [&short, &long] {
                let wide: Vec<_> = text.lines().filter(|line| line.chars().count() > 100).collect();
                assert!(wide.is_empty(), "`{name}` has lines of more than 100 columns: {wide:#?}");
            }
        }
    }
}
