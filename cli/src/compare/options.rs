//! The options of `compare` and of the server process that it starts, and the help text.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use tonic_rdma_commands::{List, units};

use super::values::{
    parse_connections, parse_inflight, parse_modes, parse_rates, parse_ratio, parse_sizes, parse_workloads,
    parse_yes_or_no,
};
use crate::compare::modes::mode::Mode;
use crate::compare::plan::direction::Direction;
use crate::measure::consume::Consume;
use crate::measure::process::allocator::Allocator;
use crate::measure::process::runtime::Flavour;
use crate::measure::transport::encode::Encode;
use crate::measure::transport::http2::Http2;
use crate::measure::transport::rdma::parse_provider;
use crate::workload::Workload;

pub(crate) const HELP: &str = "\
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
  tonic-rdma compare --newcomer                            with #[tokio::main], the system's malloc, and not pinned
  tonic-rdma compare --container                           the server in a container of its own, as another pod
  tonic-rdma compare --connections 100                     cost of calls as connections grow, and memory of each
  tonic-rdma compare --direction down --sizes 64KiB,16MiB  large replies in place of large requests
  tonic-rdma compare --newcomer --quick --at-least 0.5     the same for CI: fails if RDMA is slower than half of TCP";

/// The options of `compare`.
#[derive(Debug, Args)]
pub(crate) struct CompareOptions {
    /// Modes to compare. gRPC: grpc-tcp, grpc-tcp-busy (in a runtime that never sleeps, at both ends; not with
    /// --runtime multi-thread), grpc-tcp-tuned (always with --http2 tuned), grpc-uds, grpc-rdma, grpc-rdma-gather
    /// (payloads by reference), grpc-native (generated code as it is, over RDMA without HTTP/2), grpc-native-gather
    /// (likewise, payloads by reference at both ends, sent from registered memory). Tensors without RPC, written to the memory where the receiver expects them: rdma-cp
    /// (copied to registered memory first), rdma-zerocp (sent from registered memory; both ends poll),
    /// rdma-zerocp-await (likewise, but both ends wait by futures). No transport: memcpy (a copy within the client, as
    /// the limit of the memory) [default: all but memcpy; with --runtime multi-thread not grpc-tcp-busy; with
    /// --newcomer neither grpc-tcp-busy nor grpc-tcp-tuned]
    #[arg(long, value_name = "LIST", value_parser = parse_modes)]
    pub(crate) modes: Option<List<Mode>>,
    /// Payload sizes, such as 64,4k,1MiB,1GiB (units are binary); gRPC modes take less than 2GiB [default: 64 to 64MiB]
    #[arg(long, value_name = "LIST", value_parser = parse_sizes)]
    pub(crate) sizes: Option<List<u64>>,
    /// Traffic of deep learning, beside or in place of sizes: uniform, random, skew (a message of ten buffers);
    /// resnet50, alexnet, inception-v3, vgg16, lstm, gru, fcn5 (one operation sends a message for each of the model's
    /// variables); blocks (one operation sends 4096 blocks of 16 KiB that are scattered in memory)
    #[arg(long, value_name = "LIST", value_parser = parse_workloads)]
    pub(crate) workload: Option<List<Workload>>,
    /// Direction of payloads: up (in the request; the server checks them) or down (in the reply; the client checks them
    /// just as thoroughly). Modes of tensors without RPC have no direction down
    #[arg(long, value_name = "up|down", hide_possible_values = true, default_value = "up")]
    pub(crate) direction: Direction,
    /// Numbers of calls in flight at once, such as 1,32 [default: 1 to 512, by size]; with --rate, the largest number
    /// of them
    #[arg(long, value_name = "LIST", value_parser = parse_inflight)]
    pub(crate) inflight: Option<List<usize>>,
    /// Open loop: operations offered each second, such as 1000,20000, even if answers are late; latency counts from the
    /// time when each was due [default size: 64]
    #[arg(long, value_name = "LIST", value_parser = parse_rates)]
    pub(crate) rate: Option<List<f64>>,
    /// Cost of connections, in place of the comparison of sizes: latency with 1, 2, 4 to N connections, all of them busy
    /// or all but one idle, and the memory of each connection. --inflight is for each busy connection [default modes:
    /// grpc-tcp, grpc-rdma, grpc-native; default size: 64]
    #[arg(long, value_name = "N", value_parser = parse_connections, conflicts_with_all = ["workload", "rate", "at_least"])]
    pub(crate) connections: Option<usize>,
    /// Time to measure each cell in each mode, in seconds or with a unit (300ms, 2m) [default: such that the run ends within 90 s]
    #[arg(long, value_name = "TIME", allow_negative_numbers = true, value_parser = units::parse_time)]
    pub(crate) duration: Option<Duration>,
    /// RDMA provider: auto, soft, ibverbs, or the name of a device
    #[arg(long, value_name = "auto|soft|DEVICE", value_parser = parse_provider, default_value = "auto")]
    pub(crate) provider: String,
    /// RDMA provider of the server, if it differs from the client's [default: as --provider]
    #[arg(long, value_name = "auto|soft|DEVICE", value_parser = parse_provider)]
    pub(crate) server_provider: Option<String>,
    /// HTTP/2 windows and frames, for all modes: tonic's defaults, the best ones for grpc-tcp, or
    /// STREAM/CONNECTION/FRAME sizes of your own
    #[arg(long, value_name = "default|tuned", value_parser = Http2::parse, default_value = "default")]
    pub(crate) http2: Http2,
    /// Encoding of messages with payloads: copy (into one buffer, as generated code does), or gather (by reference with
    /// tonic_rdma::gather, in all modes)
    #[arg(long, value_name = "copy|gather", hide_possible_values = true, default_value = "copy")]
    pub(crate) encode: Encode,
    /// Use of a payload by the receiver, after its check and before its answer: auto (modes that carry tensors look for
    /// the largest element, gRPC modes leave the bytes as they are), reduce-max (all modes look for the largest
    /// element), none
    #[arg(long, value_name = "auto|reduce-max|none", hide_possible_values = true, default_value = "auto")]
    pub(crate) consume: Consume,
    /// Tokio runtime of both processes: idle-polling (current-thread, built with tonic_rdma::runtime::idle_polling),
    /// current-thread and multi-thread as tokio builds them; without WORKERS there are as many workers as cores
    /// [default: idle-polling]
    #[arg(long, value_name = "idle-polling|current-thread|multi-thread[:WORKERS]", value_parser = Flavour::parse)]
    pub(crate) runtime: Option<Flavour>,
    /// Keep each process on a core of its own, if both have one thread and there are two cores [default: yes]
    #[arg(long, value_name = "yes|no", value_parser = parse_yes_or_no)]
    pub(crate) pin: Option<bool>,
    /// Allocator of both processes: mimalloc, or the system's, which a Rust program has by default [default: mimalloc]
    #[arg(long, value_name = "system|mimalloc", hide_possible_values = true)]
    pub(crate) allocator: Option<Allocator>,
    /// Start the server in a container of its own: another user, pid, ipc and mount namespace, as another pod of the
    /// same node has. The software device then copies bytes through a ring, as between processes that don't trust one
    /// another. Needs unshare (util-linux)
    #[arg(long, conflicts_with = "connections")]
    pub(crate) container: bool,
    /// Settings of a program that chooses nothing: --runtime multi-thread --pin no --allocator system, and cells of its
    /// own. Each of the three options takes precedence if it is given too
    #[arg(long)]
    pub(crate) newcomer: bool,
    /// End with exit status 1 if a mode that uses RDMA has less than RATIO times the throughput (operations a second)
    /// of grpc-tcp in any cell, and name mode, cell and ratio
    #[arg(long, value_name = "RATIO", value_parser = parse_ratio)]
    pub(crate) at_least: Option<f64>,
    /// Write the rows as JSON to this file; - is stdout
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Write an HTML page with plots to this directory, as index.html
    #[arg(long, value_name = "DIR")]
    pub(crate) report: Option<PathBuf>,
    /// Fewer cells, less time: ends within 15 s, with --newcomer within 20 s
    #[arg(long)]
    pub(crate) quick: bool,
}

/// The options of the server process.
#[derive(Debug, Args)]
pub(crate) struct ServerOptions {
    /// Listen for RDMA peers too
    #[arg(long)]
    pub(crate) rdma: bool,
    /// The largest number of connections of a mode
    #[arg(long, default_value_t = 1)]
    pub(crate) connections: u32,
    /// Bytes of the longest payload of a call
    #[arg(long, default_value_t = 0)]
    pub(crate) longest_payload: u64,
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
    /// The allocator that the process must have; the environment chooses it
    #[arg(long)]
    pub(crate) allocator: Allocator,
    /// Core to run on
    #[arg(long)]
    pub(crate) core: Option<usize>,
}

#[cfg(test)]
impl CompareOptions {
    /// Returns the options that `arguments` give.
    pub(crate) fn of(arguments: &[&str]) -> Self {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            options: CompareOptions,
        }
        let line = ["compare"].iter().chain(arguments);
        match <Line as clap::Parser>::try_parse_from(line) {
            Ok(line) => line.options,
            Err(error) => panic!("{error}"),
        }
    }
}
