//! The options of `parameter-server` and of the processes that it starts, and the help text.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::mode::TransferMode;
use crate::lists::{List, parse_list};
use crate::measure::consume::Consume;
use crate::measure::transport::http2::Http2;
use crate::measure::transport::rdma::parse_provider;
use crate::units;
use crate::value_error::ValueError;
use crate::workload::Model;

/// The largest number of worker processes.
pub(crate) const MAX_WORKERS: usize = 8;
/// The largest number of mini-batches of a turn.
pub(crate) const MAX_STEPS: u32 = 10_000;
/// The largest number of calls in flight.
const MAX_INFLIGHT: usize = 1024;

pub(crate) const HELP: &str = "\
For each mini-batch every worker pulls all of a model's variables from the server, and then pushes a gradient for each.
Lists are separated by commas. Server and workers are separate processes, spread over the cores. They end with this one.
Everything that arrives is checked; any error makes the exit status 1, bad input makes it 2.

Examples:
  tonic-rdma parameter-server                                    seven models, one worker, all modes
  tonic-rdma parameter-server --models gru --duration 0.5        in a few seconds
  tonic-rdma parameter-server --models vgg16,lstm --workers 1,2,4 --report out";

/// The options of `parameter-server`.
#[derive(Debug, Args)]
pub(crate) struct ParameterServerOptions {
    /// Models: resnet50, alexnet, inception-v3, vgg16, lstm, gru, fcn5 [default: all]
    #[arg(long, value_name = "LIST", value_parser = parse_models)]
    pub(crate) models: Option<List<Model>>,
    /// Numbers of worker processes, from 1 to 8
    #[arg(long, value_name = "LIST", value_parser = parse_workers, default_value = "1")]
    pub(crate) workers: List<usize>,
    /// Modes: grpc-tcp, grpc-rdma, grpc-rdma-gather (values and gradients by reference), grpc-native (RDMA without
    /// HTTP/2), grpc-native-gather (likewise, values and gradients by reference at both ends), rdma-cp (static slots,
    /// copied to registered memory first), rdma-zerocp (static slots, from registered memory) [default: all]
    #[arg(long, value_name = "LIST", value_parser = parse_modes)]
    pub(crate) modes: Option<List<TransferMode>>,
    /// Seconds to measure each mode with each model and number of workers
    #[arg(long, value_name = "SECS", value_parser = units::parse_seconds, default_value = "2")]
    pub(crate) duration: Duration,
    /// Mini-batches of each worker in each of the three turns of a mode, instead of a duration
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_STEPS)),
          conflicts_with = "duration")]
    pub(crate) steps: Option<u32>,
    /// Calls that a worker has in flight at once in gRPC modes
    #[arg(long, value_name = "NUMBER", value_parser = parse_inflight, default_value = "16")]
    pub(crate) inflight: usize,
    /// Use of a variable or gradient by its receiver after the check: look for the largest element, or nothing
    #[arg(long, value_name = "reduce-max|none", value_parser = parse_consume, default_value = "reduce-max")]
    pub(crate) consume: Consume,
    /// HTTP/2 windows and frames of gRPC modes: tonic's defaults, the best ones for grpc-tcp, or
    /// STREAM/CONNECTION/FRAME sizes of your own
    #[arg(long, value_name = "default|tuned", value_parser = Http2::parse, default_value = "default")]
    pub(crate) http2: Http2,
    /// RDMA provider: auto, soft, ibverbs, or the name of a device
    #[arg(long, value_name = "auto|soft|DEVICE", value_parser = parse_provider, default_value = "auto")]
    pub(crate) provider: String,
    /// Write the rows as JSON to this file
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Write an HTML page with plots to this directory, as index.html
    #[arg(long, value_name = "DIR")]
    pub(crate) report: Option<PathBuf>,
}

impl ParameterServerOptions {
    /// Returns the models to measure, in the order of the command line.
    pub(crate) fn models(&self) -> Vec<Model> {
        self.models.as_ref().map_or_else(|| Model::ALL.to_vec(), |list| list.0.clone())
    }

    /// Returns the modes to measure.
    pub(crate) fn modes(&self) -> Vec<TransferMode> {
        self.modes.as_ref().map_or_else(|| TransferMode::ALL.to_vec(), |list| list.0.clone())
    }
}

/// The options of a server or worker process. Only its parent uses them.
#[derive(Clone, Debug, Args)]
pub(crate) struct ProcessOptions {
    #[arg(long, value_parser = parse_model)]
    pub(crate) model: Model,
    /// Number of workers, for the server
    #[arg(long, default_value_t = 0)]
    pub(crate) workers: u32,
    /// Number of this worker, for a worker
    #[arg(long, default_value_t = 0)]
    pub(crate) worker: u32,
    /// Modes that turns will use
    #[arg(long, value_parser = parse_modes)]
    pub(crate) modes: List<TransferMode>,
    #[arg(long, default_value = "1")]
    pub(crate) inflight: usize,
    #[arg(long, value_parser = parse_consume)]
    pub(crate) consume: Consume,
    #[arg(long, value_parser = Http2::parse)]
    pub(crate) http2: Http2,
    #[arg(long, value_parser = parse_provider)]
    pub(crate) provider: String,
    /// Core to run on
    #[arg(long)]
    pub(crate) core: Option<usize>,
    /// Addresses of the server for a worker: gRPC over TCP, gRPC over RDMA, gRPC over RDMA by reference, native calls,
    /// native calls by reference, and tensors
    #[arg(long)]
    pub(crate) tcp: Option<SocketAddr>,
    #[arg(long)]
    pub(crate) rdma: Option<SocketAddr>,
    #[arg(long)]
    pub(crate) rdma_gather: Option<SocketAddr>,
    #[arg(long)]
    pub(crate) native: Option<SocketAddr>,
    #[arg(long)]
    pub(crate) native_gather: Option<SocketAddr>,
    #[arg(long)]
    pub(crate) device: Option<String>,
}

impl ProcessOptions {
    /// Returns whether any mode uses static slots.
    pub(crate) fn uses_slots(&self) -> bool {
        self.modes.0.iter().any(|mode| mode.uses_slots())
    }

    /// Returns whether receivers look for the largest element.
    pub(crate) fn reduces(&self) -> bool {
        self.consume == Consume::ReduceMax
    }
}

fn parse_models(text: &str) -> Result<List<Model>, ValueError> {
    parse_list(text, parse_model)
}

fn parse_model(name: &str) -> Result<Model, ValueError> {
    Model::ALL
        .into_iter()
        .find(|model| model.name() == name)
        .ok_or_else(|| ValueError::unknown_name("model", name, Model::ALL.map(Model::name).join(", ")))
}

fn parse_modes(text: &str) -> Result<List<TransferMode>, ValueError> {
    parse_list(text, |item| {
        TransferMode::from_name(item).ok_or_else(|| {
            let accepted = TransferMode::ALL.map(TransferMode::name).join(", ");
            ValueError::unknown_name("mode", item, accepted)
        })
    })
}

fn parse_workers(text: &str) -> Result<List<usize>, ValueError> {
    parse_list(text, |item| within(item, "number of workers", MAX_WORKERS))
}

fn parse_inflight(text: &str) -> Result<usize, ValueError> {
    within(text, "number of calls in flight", MAX_INFLIGHT)
}

fn within(text: &str, kind: &'static str, most: usize) -> Result<usize, ValueError> {
    match text.parse() {
        Ok(number) if (1..=most).contains(&number) && text.bytes().all(|byte| byte.is_ascii_digit()) => {
            Ok(number)
        }
        _ => Err(ValueError::number(kind, text, format!("whole numbers from 1 to {most}"))),
    }
}

fn parse_consume(text: &str) -> Result<Consume, ValueError> {
    match text {
        "reduce-max" => Ok(Consume::ReduceMax),
        "none" => Ok(Consume::None),
        _ => Err(ValueError::unknown("reduce-max, none")),
    }
}
