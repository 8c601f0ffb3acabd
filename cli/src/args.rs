//! The command line: what it takes, and one clear line for what it does not.

use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Duration;

use clap::error::ErrorKind;
use clap::{Args, CommandFactory, Parser, Subcommand};

use crate::bridge::{self, BridgeOptions};
use crate::compare::allocator::Allocator;
use crate::compare::consume::Consume;
use crate::compare::direction::Direction;
use crate::compare::encode::Encode;
use crate::compare::gate;
use crate::compare::http2::Http2;
use crate::compare::mode::Mode;
use crate::compare::runtime::Flavour;
use crate::failure::{Failure, one_line};
use crate::lists::{List, parse_inflight, parse_modes, parse_rates, parse_sizes, parse_workloads};
use crate::parameter_server::{self, ParameterServerOptions, ProcessOptions};
use crate::units;
use crate::workload::Workload;

#[derive(Debug, Parser)]
#[command(
    name = "tonic-rdma",
    version,
    about = "Compare RDMA with TCP beneath gRPC, carry others' bytes over RDMA, look at RDMA devices, and tune them"
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// What is to be done.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Measure the same gRPC calls over TCP, Unix sockets and RDMA, side by side
    #[command(after_help = COMPARE_HELP)]
    Compare(CompareOptions),
    /// The serving half of `compare`, which starts it
    #[command(hide = true)]
    CompareServer(ServerOptions),
    /// Measure what training moves: workers that pull a model's variables and push gradients, by gRPC and by the tensor channel
    #[command(after_help = parameter_server::HELP)]
    ParameterServer(ParameterServerOptions),
    /// The serving process of `parameter-server`, which starts it
    #[command(hide = true)]
    ParameterServerServer(ProcessOptions),
    /// A worker process of `parameter-server`, which starts it
    #[command(hide = true)]
    ParameterServerWorker(ProcessOptions),
    /// Carry byte streams between TCP or Unix sockets and RDMA, for clients and servers that know nothing of RDMA
    #[command(after_help = bridge::HELP)]
    Bridge(BridgeOptions),
    /// List RDMA devices, their limits, and why something can't be used; with --check, test them
    Devices(DevicesOptions),
    /// Measure what both ways of sending cost on a device, and show what is chosen and why
    #[command(after_help = TUNE_HELP)]
    Tune(TuneOptions),
}

const COMPARE_HELP: &str = "\
Lists are separated by commas. A second process is started as the server and ends with this one.
Every answer is checked; any error makes the exit status 1, bad input makes it 2.

Examples:
  tonic-rdma compare                                       all modes but memcpy, nine cells, within 90 s
  tonic-rdma compare --quick --report out                  fewer cells, within 15 s, with plots in out/index.html
  tonic-rdma compare --sizes 64,1MiB --inflight 1,32 --json out.json
  tonic-rdma compare --modes grpc-tcp,grpc-rdma,memcpy --sizes 1GiB --duration 5
  tonic-rdma compare --workload uniform,random,skew        messages of ten buffers, as TensorFlow sends them
  tonic-rdma compare --workload resnet50 --inflight 1,16   all variables of a model, up to 16 calls at once
  tonic-rdma compare --rate 1000,10000,50000               latency under load: calls begin when they are due
  tonic-rdma compare --runtime multi-thread:2 --sizes 64 --inflight 32
  tonic-rdma compare --newcomer                            what #[tokio::main], the system's malloc and free cores get
  tonic-rdma compare --direction down --sizes 64KiB,16MiB  large replies in place of large requests
  tonic-rdma compare --newcomer --quick --at-least 0.5     the same for CI: fails if RDMA is slower than half of TCP";

const TUNE_HELP: &str = "\
A write goes eagerly, into buffers that the peer has posted, or, from a threshold on, by rendezvous: the peer reads it. \
Which is faster depends on the device; connections measure it at first use, in the background, and then follow what they see. \
This shows what they go by: kept in RDMA_TUNE_CACHE, or else in the user's cache directory. RDMA_EAGER_THRESHOLD and \
RDMA_CHUNK_SIZE fix what is chosen.";

/// Options of `compare`.
#[derive(Debug, Args)]
pub(crate) struct CompareOptions {
    /// Modes to compare: grpc-tcp, grpc-tcp-busy (in a runtime that never sleeps, at both ends; not with --runtime multi-thread), grpc-tcp-tuned (as with
    /// --http2 tuned, whatever that is for the others), grpc-uds, grpc-rdma, grpc-rdma-gather (payloads by reference); without RPC, tensors
    /// written to where the receiver looks for them: rdma-cp (copied to registered memory first), rdma-zerocp (from where
    /// they are; both ends poll), rdma-zerocp-await (the same, but both ends wait by futures); and, where memory is the limit, memcpy (no transport: a copy within the client)
    /// [default: all but memcpy; with --runtime multi-thread not grpc-tcp-busy; with --newcomer neither grpc-tcp-busy nor
    /// grpc-tcp-tuned]
    #[arg(long, value_name = "LIST", value_parser = parse_modes)]
    pub(crate) modes: Option<List<Mode>>,
    /// Payload sizes, such as 64,4KiB,1MiB,1GiB; gRPC's modes take less than 2GiB [default: 64 to 64MiB]
    #[arg(long, value_name = "LIST", value_parser = parse_sizes)]
    pub(crate) sizes: Option<List<u64>>,
    /// Traffic of deep learning, beside or in place of sizes: uniform, random, skew (a message of ten buffers); resnet50,
    /// alexnet, inception-v3, vgg16, lstm, gru, fcn5 (a message for each of the model's variables, all of them being one
    /// operation); blocks (the same for 4096 blocks of 16 KiB, scattered in memory)
    #[arg(long, value_name = "LIST", value_parser = parse_workloads)]
    pub(crate) workload: Option<List<Workload>>,
    /// Which way payloads go: up (in the request; the server checks them), down (in the reply; the client checks them, just as
    /// thoroughly). Tensors without RPC have no way down
    #[arg(long, value_name = "up|down", hide_possible_values = true, default_value = "up")]
    pub(crate) direction: Direction,
    /// Numbers of calls in flight at once, such as 1,32 [default: 1 to 512, by size]; with --rate, the most of them
    #[arg(long, value_name = "LIST", value_parser = parse_inflight)]
    pub(crate) inflight: Option<List<usize>>,
    /// Open loop: operations offered each second, such as 1000,20000, whatever becomes of them; latency counts from when
    /// each was due [default size: 64]
    #[arg(long, value_name = "LIST", value_parser = parse_rates)]
    pub(crate) rate: Option<List<f64>>,
    /// Seconds to measure each cell in each mode [default: so that all ends within 90 s]
    #[arg(long, value_name = "SECS", value_parser = units::parse_seconds)]
    pub(crate) duration: Option<Duration>,
    /// RDMA provider: auto, soft, ibverbs, or the name of a device
    #[arg(long, value_name = "auto|soft|DEVICE", value_parser = parse_provider, default_value = "auto")]
    pub(crate) provider: String,
    /// The same for the server, where it is to use another device than the client [default: as --provider]
    #[arg(long, value_name = "auto|soft|DEVICE", value_parser = parse_provider)]
    pub(crate) server_provider: Option<String>,
    /// HTTP/2 windows and frames, for all modes alike: tonic's defaults, what is best for grpc-tcp, or
    /// STREAM/CONNECTION/FRAME sizes of your own
    #[arg(long, value_name = "default|tuned", value_parser = Http2::parse, default_value = "default")]
    pub(crate) http2: Http2,
    /// How messages with payloads are encoded: payloads copied into one buffer, as generated code does; or by reference with
    /// tonic_rdma::gather, in all modes
    #[arg(long, value_name = "copy|gather", hide_possible_values = true, default_value = "copy")]
    pub(crate) encode: Encode,
    /// What the receiver does with a payload, after its check and before it answers: auto (modes that carry tensors look for
    /// the largest element, gRPC's hand the bytes over as they are), reduce-max (all of them do), none
    #[arg(long, value_name = "auto|reduce-max|none", hide_possible_values = true, default_value = "auto")]
    pub(crate) consume: Consume,
    /// Tokio runtime of both processes: idle-polling (current-thread, built with tonic_rdma::runtime::idle_polling),
    /// current-thread and multi-thread as tokio builds them; without WORKERS it has as many as there are cores [default:
    /// idle-polling]
    #[arg(long, value_name = "idle-polling|current-thread|multi-thread[:WORKERS]", value_parser = Flavour::parse)]
    pub(crate) runtime: Option<Flavour>,
    /// Whether each process is kept on a core of its own, where both have one thread and there are two cores [default: yes]
    #[arg(long, value_name = "yes|no", value_parser = parse_yes_or_no)]
    pub(crate) pin: Option<bool>,
    /// Allocator of both processes: mimalloc, or the system's, which a Rust program has that names none [default: mimalloc]
    #[arg(long, value_name = "system|mimalloc", hide_possible_values = true)]
    pub(crate) allocator: Option<Allocator>,
    /// What a program has that chooses nothing: --runtime multi-thread --pin no --allocator system, and cells of its own.
    /// Each of the three can be given beside it, and then decides
    #[arg(long)]
    pub(crate) newcomer: bool,
    /// End with exit status 1 if a mode that uses RDMA has less than RATIO times the throughput (operations a second) of
    /// grpc-tcp in any cell, and name mode, cell and ratio
    #[arg(long, value_name = "RATIO", value_parser = gate::parse)]
    pub(crate) at_least: Option<f64>,
    /// Write the rows as JSON to this file
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Write an HTML page with plots to this directory, as index.html
    #[arg(long, value_name = "DIR")]
    pub(crate) report: Option<PathBuf>,
    /// Fewer cells, less time: ends within 15 s, with --newcomer within 20 s
    #[arg(long)]
    pub(crate) quick: bool,
}

/// Options of the serving process.
#[derive(Debug, Args)]
pub(crate) struct ServerOptions {
    /// Whether to listen for RDMA peers too
    #[arg(long)]
    pub(crate) rdma: bool,
    #[arg(long, value_parser = parse_provider)]
    pub(crate) provider: String,
    #[arg(long, value_parser = Http2::parse)]
    pub(crate) http2: Http2,
    #[arg(long)]
    pub(crate) direction: Direction,
    #[arg(long)]
    pub(crate) encode: Encode,
    #[arg(long)]
    pub(crate) consume: Consume,
    #[arg(long, value_parser = Flavour::parse)]
    pub(crate) runtime: Flavour,
    /// The allocator that it has to have; it is chosen by the environment
    #[arg(long)]
    pub(crate) allocator: Allocator,
    /// Core to run on
    #[arg(long)]
    pub(crate) core: Option<usize>,
}

/// Options of `devices`.
#[derive(Debug, Args)]
pub(crate) struct DevicesOptions {
    /// Test each usable device: SEND, WRITE and READ between two queue pairs of this process
    #[arg(long)]
    pub(crate) check: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Options of `tune`.
#[derive(Debug, Args)]
pub(crate) struct TuneOptions {
    /// The device, as `tonic-rdma devices` shows it [default: the first usable one]
    #[arg(long, value_name = "NAME", env = "RDMA_DEVICE", hide_env = true)]
    pub(crate) device: Option<String>,
    /// Write all of it as JSON to this file
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Draw the curve into this file, as SVG
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) plot: Option<PathBuf>,
    /// Measure, even if there is a calibration on disk
    #[arg(long)]
    pub(crate) fresh: bool,
}

/// The command line of this process.
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
                // On stderr, as it is an error all the same.
                error.print().map_err(|error| Failure::output(&error))?;
                #[expect(clippy::disallowed_methods, reason = "nothing has been started yet")]
                std::process::exit(2)
            }
            _ => Err(Failure::Usage(explain(&error))),
        },
    }
}

/// clap's message as one line, with what is accepted in place of its usage block.
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
            // clap's usage line is the only place that tells which command was being parsed.
            let name = std::env::args().nth(1).unwrap_or_default();
            let flags = root.find_subcommand(&name).map(flags).unwrap_or_else(|| flags(&root));
            format!("{message}; accepted: {flags}")
        }
        _ => message,
    }
}

/// The flags of `command`.
fn flags(command: &clap::Command) -> String {
    let own = command.get_arguments().filter_map(|argument| argument.get_long());
    own.filter(|name| *name != "help")
        .chain(["help"])
        .map(|name| format!("--{name}"))
        .collect::<Vec<_>>()
        .join(", ")
}

/// `yes` or `no`.
fn parse_yes_or_no(text: &str) -> Result<bool, String> {
    match text {
        "yes" => Ok(true),
        "no" => Ok(false),
        _ => Err("accepted: yes, no".to_owned()),
    }
}

/// A name that can be a device's; whether it is one, the library says.
pub(crate) fn parse_provider(text: &str) -> Result<String, String> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.:".contains(&byte);
    if text.is_empty() || text.len() > 64 || !text.bytes().all(plain) {
        return Err(
            "accepted: auto, soft, ibverbs, or the name of a device as `tonic-rdma devices` shows it"
                .to_owned(),
        );
    }
    Ok(text.to_owned())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use proptest::prelude::*;

    use super::*;

    impl CompareOptions {
        /// What `compare` is told by `arguments`.
        pub(crate) fn of(arguments: &[&str]) -> Self {
            let line = ["tonic-rdma", "compare"].iter().chain(arguments);
            match Cli::try_parse_from(line).unwrap().command {
                Command::Compare(options) => options,
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_device_s_name_has_no_blanks() {
        assert!(parse_provider("a b").is_err() && parse_provider("mlx5_0").is_ok());
    }

    proptest! {
        #[test]
        fn no_text_brings_the_parsers_down(text in "[0-9a-zA-Z,. -]{0,40}") {
            let _ = Flavour::parse(&text);
            let _ = parse_provider(&text);
            let _ = gate::parse(&text);
            let _ = parse_yes_or_no(&text);
        }
    }
}
