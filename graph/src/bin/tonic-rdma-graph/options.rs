//! The options of the command.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use tonic_rdma_commands::units::{number, parse_size, parse_time_within};
use tonic_rdma_commands::{List, ValueError, parse_list, parse_set};
use tonic_rdma_graph::schedule::ReceiveMode;
use tonic_rdma_graph::transfer::TransferMode;

/// The largest number of parts.
const MAX_PARTS: u64 = 64;

const HELP: &str = "\
Splits the model over processes, streams micro-batches through them in each mode in turn, and compares every tensor that crosses, and \
every result, with the unsplit model, bit by bit. All weights of 32-bit floats get random values of a fixed seed, because with constant \
weights a swapped tensor would go unnoticed. The transfer time is that of a replay: kernels do not run, and the tensors of the last \
micro-batch cross again. \
The exit status is 0 only if every check held; bad input makes it 2.

Examples:
  tonic-rdma-graph light_resnet50.onnx --parts 2
  tonic-rdma-graph light_vgg19.onnx --parts 4 --mode grpc-tcp,rdma-zerocp --explain
  tonic-rdma-graph light_resnet50.onnx --symbol gpu_0/data_0:0=N --lengths 1,4,2
  tonic-rdma-graph serve --listen 0.0.0.0:50070              on each of two other hosts, and then
  tonic-rdma-graph light_resnet50.onnx --hosts one:50070,two:50070";

/// Runs an ONNX model that is split over processes, and compares how its tensors cross: gRPC and RDMA
#[derive(Clone, Debug, Parser)]
#[command(name = "tonic-rdma-graph", version, after_long_help = HELP, args_conflicts_with_subcommands = true)]
pub(crate) struct Options {
    #[command(subcommand)]
    pub(crate) command: Option<Subcommands>,
    #[command(flatten)]
    pub(crate) run: RunOptions,
}

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Subcommands {
    /// Run a part of a model for a `tonic-rdma-graph` on another host
    ///
    /// It computes what any peer asks, so listen on a trusted network.
    Serve(ServeOptions),
}

/// Options of a process that runs a part.
#[derive(Clone, Debug, Args)]
pub(crate) struct ServeOptions {
    /// Address and port to listen at
    ///
    /// The other parts connect to another port of the same address.
    #[arg(long, value_name = "IP:PORT")]
    pub(crate) listen: SocketAddr,
    /// The process with which this one ends.
    #[arg(long, hide = true)]
    pub(crate) parent: Option<u32>,
}

/// Options of a run.
#[derive(Clone, Debug, Args)]
pub(crate) struct RunOptions {
    /// The ONNX file
    #[arg(value_name = "MODEL.onnx", required = true)]
    pub(crate) model: Option<PathBuf>,
    /// Number of parts, each a process, from 1 to 64 [default: 2, or the number of hosts]
    #[arg(long, value_name = "N", value_parser = number::<u64>("number", 1..=MAX_PARTS))]
    pub(crate) parts: Option<u64>,
    /// Hosts that run `tonic-rdma-graph serve` [default: this machine]
    ///
    /// HOST:PORT, one for each part, separated by commas.
    #[arg(long, value_name = "LIST", value_parser = hosts)]
    pub(crate) hosts: Option<List<String>>,
    /// Modes: grpc-tcp, grpc-rdma, grpc-native, rdma-cp, rdma-zerocp, rdma-in-place [default: all]
    #[arg(long, value_name = "LIST", value_parser = modes)]
    pub(crate) mode: Option<List<TransferMode>>,
    /// Names of nodes; a part ends with each [default: balanced by bytes and work]
    #[arg(long, value_name = "NODES", value_parser = names, conflicts_with = "assign")]
    pub(crate) cut: Option<List<String>>,
    /// A file with a line `NODE=PART` for each node that is not to go with its inputs
    #[arg(long, hide_short_help = true, value_name = "FILE")]
    pub(crate) assign: Option<PathBuf>,
    /// A symbolic dimension of an input, such as `input:0=N`; may be repeated
    #[arg(long = "symbol", value_name = "SYMBOL")]
    pub(crate) symbols: Vec<String>,
    /// Lengths of the symbolic dimensions, in turn, from 0
    #[arg(long, value_name = "LIST", value_parser = lengths, default_value = "2,1,3")]
    pub(crate) lengths: List<u64>,
    /// Micro-batches of a step, which are under way at the same time
    #[arg(long, value_name = "M", value_parser = number::<u64>("number", 1..=64), default_value = "2")]
    pub(crate) micro_batches: u64,
    /// Measured steps of each mode
    #[arg(long, value_name = "S", value_parser = number::<u64>("number", 1..=1_000_000), default_value = "6")]
    pub(crate) steps: u64,
    /// Rounds, in each of which all modes take a trial [default: 3]
    ///
    /// A trial has steps and replays; there are more rounds if the steps of a round take long. With fewer steps than
    /// rounds, some rounds have replays alone.
    #[arg(long, hide_short_help = true, value_name = "R", value_parser = number::<u64>("number", 1..=10_000))]
    pub(crate) rounds: Option<u64>,
    /// What becomes of a receive that has not arrived: polling-async, blocking, callback
    #[arg(long, hide_short_help = true, value_name = "NAME", value_parser = receive, default_value = "polling-async")]
    pub(crate) receive: ReceiveMode,
    /// Most registered memory that a part reserves before the first step, to receive and to send [default: no limit]
    ///
    /// Where tensors of known shape need more, the largest of them are read by the receiver instead.
    /// --explain names them.
    #[arg(long, value_name = "BYTES", value_parser = parse_size)]
    pub(crate) memory: Option<u64>,
    /// Threads of a part that run its nodes, from 1 to 64
    #[arg(long, hide_short_help = true, value_name = "N", value_parser = number::<u64>("number", 1..=64), default_value = "1")]
    pub(crate) threads: u64,
    /// The seed of weights and inputs
    #[arg(long, value_name = "NUMBER", default_value = "1")]
    pub(crate) seed: u64,
    /// Longest wait for a part that loads, connects or runs a trial, in seconds or with a unit (300ms, 2m)
    #[arg(long, hide_short_help = true, value_name = "TIME", value_parser = seconds, default_value = "300")]
    pub(crate) timeout: Duration,
    /// Print what became of each crossing tensor
    ///
    /// Its producer, consumers, shape, placement and why, allocation site, bytes and copies.
    #[arg(long)]
    pub(crate) explain: bool,
    /// Print the nodes of the model, as --cut and --assign name them
    #[arg(long)]
    pub(crate) nodes: bool,
    /// Write the results as JSON to this file; without FILE, or with -, to stdout
    #[arg(short = 'J', long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    pub(crate) json: Option<PathBuf>,
    /// Write a plot of the times to this file, as SVG
    #[arg(long, value_name = "FILE")]
    pub(crate) plot: Option<PathBuf>,
}

fn seconds(text: &str) -> Result<Duration, ValueError> {
    parse_time_within(text, 0.1..=86400.0)
}

fn lengths(text: &str) -> Result<List<u64>, ValueError> {
    parse_list(text, number("number", 0..=1 << 20))
}

fn names(text: &str) -> Result<List<String>, ValueError> {
    parse_set(text, |name| Ok(name.to_owned()))
}

fn hosts(text: &str) -> Result<List<String>, ValueError> {
    parse_set(text, |host| match host.rsplit_once(':') {
        Some((name, port)) if !name.is_empty() && port.parse::<u16>().is_ok() => Ok(host.to_owned()),
        _ => Err(ValueError::unknown_name("address", host, "HOST:PORT".to_owned())),
    })
}

fn modes(text: &str) -> Result<List<TransferMode>, ValueError> {
    parse_set(text, |name| named("mode", name, &TransferMode::ALL))
}

fn receive(text: &str) -> Result<ReceiveMode, ValueError> {
    named("receive mode", text, &ReceiveMode::ALL)
}

/// Finds the choice of `all` with this name.
fn named<T: FromStr + ToString>(kind: &'static str, name: &str, all: &[T]) -> Result<T, ValueError> {
    let accepted = || all.iter().map(T::to_string).collect::<Vec<_>>().join(", ");
    name.parse().map_err(|_| ValueError::unknown_name(kind, name, accepted()))
}
