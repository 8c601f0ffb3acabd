//! The options of `parameter-server` and of the processes that it starts, the help text, and the computing
//! that options ask for.

use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use tonic_rdma_commands::cores::thread_cpu_time;
use tonic_rdma_commands::output::Outputs;
use tonic_rdma_commands::units::{self, parse_decimal, parse_number};
use tonic_rdma_commands::{
    Context as _, Failure, List, Named as _, ValueError, name_list, number_list, parse_set,
};

use crate::compare::modes::mode::{Contender, Mode};
use crate::compare::plan::MAX_RUNS;
use crate::compare::server::Addresses;
use crate::measure::process::parse_job;
use crate::measure::settings::{Consume, Http2};
use crate::measure::transport::{Rdma, parse_provider};
use crate::workload::{Model, Shard, Variable};

/// The largest number of worker processes.
pub(crate) const MAX_WORKERS: u64 = 8;
/// The largest number of mini-batches of a trial.
pub(crate) const MAX_STEPS: u32 = 10_000;
/// The largest number of calls in flight.
const MAX_INFLIGHT: u64 = 1024;
/// The largest number of samples of a mini-batch.
const MAX_BATCH: u64 = 64;
/// The samples of a mini-batch if workers compute, as in the paper's figure 11.
const USUAL_BATCH: u32 = 32;

pub(crate) const HELP: &str = "\
For each mini-batch every worker pulls all of a model's variables from the server, and then pushes a gradient for each. \
Lists are separated by commas. Server and workers are separate processes, spread over the cores. They end with this one. \
Everything that arrives is checked; any error makes the exit status 1, bad input makes it 2.

With --compute each worker computes between its pull and its push, for the time of table 2 of Xue et al. (EuroSys 2019), \
measured on a Tesla P100: alexnet 7.61 ms, inception-v3 68.32 ms, vgg16 30.92 ms, lstm 33.33 ms, gru 30.44 ms, fcn5 4.88 ms. \
The table has the time of one sample, and the paper gives larger batches in words: up to 32 samples take as long as one; \
from there the time of inception-v3, lstm and gru grows, here in proportion, and that of the others does not. resnet50 is not \
in the table. Transfers and computing of one worker do not overlap.

--compute-scale multiplies these times. The paper's network moves at most 12.5 GB/s each way for each machine: a pull and a push of \
N bytes take at least 2 N / 12.5 GB/s. To keep its ratio of computing to transfer, take 12.5 divided by the GB/s that rdma-zerocp has \
here with one worker and without --compute. All workers share the cores here, and each has a network of its own there: the \
factor \"workers\" makes up for this, because W workers then compute W times as long.

Examples:
  tonic-rdma parameter-server                                    seven models, all modes
  tonic-rdma parameter-server --models gru --duration 0.5        in a few seconds
  tonic-rdma parameter-server --models vgg16,lstm --workers 1,2,4
  tonic-rdma parameter-server --compute wait,work --batch 32,64 --runs 5   figure 9 of the paper
  tonic-rdma parameter-server --http2 default,tuned              gRPC as it is, and tuned
  tonic-rdma parameter-server --listen 10.0.0.1:7000             on one of two hosts: the servers
  tonic-rdma parameter-server --server 10.0.0.1:7000             on the other: the workers
  tonic-rdma parameter-server --models lstm --workers 1,2,4,8 --servers workers --compute wait --compute-scale workers";

/// The options of `parameter-server`.
#[derive(Clone, Debug, Args, Serialize, Deserialize)]
pub(crate) struct ParameterServerOptions {
    /// Models, such as vgg16,lstm [default: all]
    ///
    /// With --compute the default lacks resnet50. resnet50, alexnet, inception-v3, vgg16, lstm, gru, fcn5.
    #[arg(long, value_name = "LIST", value_parser = name_list::<Model>("model"))]
    pub(crate) models: Option<List<Model>>,
    /// Numbers of worker processes, from 1 to 8
    #[arg(long, value_name = "LIST", value_parser = number_list::<usize>("number of workers", 1..=MAX_WORKERS), default_value = "1")]
    pub(crate) workers: List<usize>,
    /// Number of server processes, from 1 to 8, or "workers"
    ///
    /// "workers": as many as workers. Servers hold the variables in turn.
    #[arg(
        long,
        value_name = "N",
        value_parser = ScaledByWorkers::parse_servers,
        default_value = "1"
    )]
    pub(crate) servers: ScaledByWorkers,
    /// Computing between pull and push: none, wait, work
    ///
    /// wait takes no core, as an accelerator; work takes the same cores.
    #[arg(long, value_name = "LIST", value_parser = name_list::<Compute>("way to compute"), default_value = "none")]
    pub(crate) compute: List<Compute>,
    /// Samples of a mini-batch, from 1 to 64 [default: 32]
    ///
    /// They decide the computing time.
    #[arg(long, value_name = "LIST", value_parser = number_list::<u32>("batch", 1..=MAX_BATCH))]
    pub(crate) batch: Option<List<u32>>,
    /// Factors of the computing times, from 0.001 to 100
    ///
    /// Also "workers" (their number), or both: NUMBER*workers. Such as workers,1 for both settings of figure 11.
    #[arg(long, value_name = "LIST", value_parser = parse_scales, default_value = "1")]
    pub(crate) compute_scale: List<ScaledByWorkers>,
    /// Modes, which compare --list-modes explains [default: all]
    ///
    /// grpc-tcp, grpc-rdma, grpc-rdma-gather, grpc-native, grpc-native-gather; rdma-cp and rdma-zerocp, with static slots for
    /// the variables.
    #[arg(long, value_name = "LIST", value_parser = parse_modes)]
    pub(crate) modes: Option<List<Mode>>,
    /// Time for each mode in each cell, such as 300ms
    ///
    /// In seconds or with a unit.
    #[arg(short = 't', long, value_name = "TIME", value_parser = units::parse_time, default_value = "2")]
    pub(crate) duration: Duration,
    /// Measure all cells N times, and show medians and spread
    ///
    /// The spread is that from the least to the largest run. Each run has new processes, and one trial of each mode instead of
    /// three. Ratios are medians of the ratios of each run.
    #[arg(short = 'r', long, value_name = "N", value_parser = units::number::<u32>("number of runs", 1..=MAX_RUNS), default_value = "1")]
    #[serde(skip)]
    pub(crate) runs: u32,
    /// Mini-batches of each worker, instead of a duration
    ///
    /// In each trial of a mode.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_STEPS)),
          conflicts_with = "duration")]
    pub(crate) steps: Option<u32>,
    /// Calls that a worker has in flight in gRPC modes
    #[arg(long, value_name = "N", value_parser = units::number::<usize>("number of calls in flight", 1..=MAX_INFLIGHT), default_value = "16")]
    pub(crate) inflight: usize,
    /// Use of tensors by receivers: reduce-max, none
    ///
    /// reduce-max finds the largest element.
    #[arg(long, value_name = "USE", value_parser = parse_consume, default_value = "reduce-max")]
    pub(crate) consume: Consume,
    /// HTTP/2 windows and frames, such as default,tuned
    ///
    /// default, tuned, or STREAM/CONNECTION/FRAME sizes; default is tonic's own, tuned what is best for grpc-tcp. With several
    /// settings each mode over HTTP/2 is measured with each of them, and compared with the same setting of other modes.
    #[arg(long, value_name = "LIST", value_parser = Http2::parse_list, default_value = "default")]
    pub(crate) http2: List<Http2>,
    /// RDMA provider: auto, soft, ibverbs, or a device
    #[arg(short = 'd', long, value_name = "NAME", value_parser = parse_provider, default_value = "auto")]
    pub(crate) provider: String,
    #[command(flatten)]
    #[serde(skip)]
    pub(crate) outputs: Outputs,
    /// Run the server processes for another host
    ///
    /// Until a signal comes, and for one caller at a time. Takes --provider and --limit; the caller has the other options.
    #[arg(short = 's', long, value_name = "HOST:PORT", conflicts_with_all = [
        "models", "workers", "servers", "compute", "batch", "compute_scale", "modes", "duration", "runs", "steps", "inflight", "consume", "http2",
        "json", "csv", "markdown", "server"
    ])]
    #[serde(skip)]
    pub(crate) listen: Option<String>,
    /// With --listen: memory of each server process
    ///
    /// And as much registered memory.
    #[arg(long, value_name = "SIZE", value_parser = units::parse_size, requires = "listen", default_value = "4GiB")]
    #[serde(skip)]
    pub(crate) limit: u64,
    /// Run the server processes where --listen runs
    ///
    /// At this address, and the workers here. --provider is of this end.
    #[arg(short = 'c', long, value_name = "HOST:PORT")]
    #[serde(skip)]
    pub(crate) server: Option<String>,
}

impl ParameterServerOptions {
    /// Returns the models to measure, in the order of the command line.
    pub(crate) fn models(&self) -> Vec<Model> {
        let usual = || {
            let usual = Model::value_variants().iter().copied();
            usual.filter(|model| !self.computes() || model.compute_time(1).is_some()).collect()
        };
        self.models.as_ref().map_or_else(usual, |list| list.0.clone())
    }

    /// Returns whether workers compute in any row.
    pub(crate) fn computes(&self) -> bool {
        self.compute.0.iter().any(|compute| *compute != Compute::None)
    }

    /// Returns the loads to measure with each `model` and number of workers, in the order of the command
    /// line.
    pub(crate) fn loads(&self, model: Model, workers: usize) -> Result<Vec<Load>, Failure> {
        if !self.computes() && self.batch.is_some() {
            return Err(Failure::usage(
                "--batch decides the computing time: give --compute wait or --compute work too",
            ));
        }
        let batches = self.batch.as_ref().map_or_else(|| vec![USUAL_BATCH], |list| list.0.clone());
        let scales = &self.compute_scale.0;
        let mut loads = Vec::new();
        for compute in &self.compute.0 {
            if *compute == Compute::None {
                loads.push(Load::NONE);
                continue;
            }
            for (scale, batch) in
                scales.iter().flat_map(|scale| batches.iter().map(move |batch| (scale, batch)))
            {
                let Some(time) = model.compute_time(*batch) else {
                    return Err(Failure::usage(format!(
                        "{}: the paper's table 2 has no computing time for it: leave it out of --models, or leave out --compute",
                        model.name()
                    )));
                };
                let time = time.mul_f64(scale.beside(workers));
                let scale = (scales.len() > 1).then_some(*scale);
                loads.push(Load { compute: *compute, batch: Some(*batch), time, scale });
            }
        }
        Ok(loads)
    }

    /// Returns the modes to measure.
    pub(crate) fn modes(&self) -> Vec<Mode> {
        self.modes.as_ref().map_or_else(|| Mode::TRAINING.to_vec(), |list| list.0.clone())
    }

    /// Returns the modes with the settings of HTTP/2 to measure.
    pub(crate) fn contenders(&self) -> Vec<Contender> {
        Contender::all(&self.modes(), &self.http2.0)
    }

    /// Returns the number of trials of each mode in a run.
    pub(crate) const fn trials(&self) -> u32 {
        if self.runs > 1 { 1 } else { 3 }
    }
}

/// A model, and the numbers of servers that hold it and of workers that train it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TrainingCell {
    pub(crate) model: Model,
    pub(crate) servers: usize,
    pub(crate) workers: usize,
}

impl TrainingCell {
    /// Returns the bytes of all variables.
    pub(crate) fn bytes(&self) -> u64 {
        self.model.variables().iter().map(Variable::bytes).sum()
    }

    /// Returns the cell's name for people.
    pub(crate) fn label(&self) -> String {
        let plural = if self.workers == 1 { "" } else { "s" };
        let servers = if self.servers == 1 { String::new() } else { format!(", {} servers", self.servers) };
        format!("{}, {} worker{plural}{servers}", self.model.name(), self.workers)
    }
}

/// The command line of a server or worker process.
#[derive(Debug, Args)]
pub(crate) struct ProcessOptions {
    #[arg(value_parser = parse_job::<ProcessJob>)]
    pub(crate) job: ProcessJob,
}

/// What a server or worker process needs to know.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ProcessJob {
    /// The options of the process that starts it.
    pub(crate) options: ParameterServerOptions,
    pub(crate) cell: TrainingCell,
    /// The number of this server or worker.
    pub(crate) number: usize,
    /// The core to run on.
    pub(crate) core: Option<usize>,
    /// The addresses of all servers, in their order, for a worker.
    pub(crate) servers: Vec<Addresses>,
    /// The address to listen on.
    pub(crate) ip: IpAddr,
    /// The memory that a listening end grants, in bytes.
    pub(crate) memory: Option<u64>,
}

/// What a client asks of a listening end: a server process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ServerRequest {
    /// The arguments of its command line.
    pub(crate) arguments: Vec<String>,
    pub(crate) cell: TrainingCell,
    /// The number of this server.
    pub(crate) number: usize,
}

impl ProcessJob {
    /// Returns whether any mode uses static slots.
    pub(crate) fn uses_slots(&self) -> bool {
        self.options.modes().iter().any(|mode| mode.carries_tensors())
    }

    /// Returns the settings of RDMA connections if any mode needs them, with memory for the connections of
    /// all peers and for the model's largest variable. All connections of a process share its memory to
    /// register, so all of them have these settings.
    pub(crate) fn rdma(&self) -> Result<Option<Rdma>, Failure> {
        if !self.options.modes().iter().any(|mode| mode.uses_rdma()) {
            return Ok(None);
        }
        let TrainingCell { model, workers, .. } = self.cell;
        // A worker knows its servers, and a server serves all workers.
        let peers = if self.servers.is_empty() { workers } else { self.servers.len() };
        let longest = model.variables().iter().map(Variable::bytes).max().unwrap_or(0);
        let rdma = Rdma::new(&self.options.provider)?.for_load(peers as u32, longest);
        Ok(Some(self.memory.map_or(rdma.clone(), |bytes| rdma.at_most(bytes))))
    }

    /// Returns the share of the model that this server holds.
    pub(crate) const fn shard(&self, server: usize) -> Shard {
        Shard { model: self.cell.model, server, servers: self.cell.servers }
    }

    /// Returns whether receivers find the largest element.
    pub(crate) fn reduces(&self) -> bool {
        self.options.consume == Consume::ReduceMax
    }
}

fn parse_scales(text: &str) -> Result<List<ScaledByWorkers>, ValueError> {
    parse_set(text, ScaledByWorkers::parse_scale)
}

fn parse_modes(text: &str) -> Result<List<Mode>, ValueError> {
    parse_set(text, |item| {
        Mode::TRAINING.into_iter().find(|mode| mode.name() == item).ok_or_else(|| {
            let accepted = Mode::TRAINING.map(|mode| mode.name()).join(", ");
            ValueError::unknown_name("mode", item, accepted)
        })
    })
}

fn parse_consume(text: &str) -> Result<Consume, ValueError> {
    match text {
        "reduce-max" => Ok(Consume::ReduceMax),
        "none" => Ok(Consume::None),
        _ => Err(ValueError::unknown("reduce-max, none")),
    }
}

/// A way to compute, for a worker between its pull and its push.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Compute {
    /// Workers only pull and push.
    None,
    /// A wait, which takes no core: the computing is done by an accelerator.
    Wait,
    /// Arithmetic on the worker's own core, which takes this much CPU time.
    Work,
}

/// The computing of each mini-batch: its kind, batch and time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Load {
    pub(crate) compute: Compute,
    /// Samples of a worker's mini-batch. Nothing depends on them if workers do not compute.
    pub(crate) batch: Option<u32>,
    /// Computing time of a worker's mini-batch.
    pub(crate) time: Duration,
    /// The factor in this time, if the run has several.
    pub(crate) scale: Option<ScaledByWorkers>,
}

impl Load {
    /// The load of workers that only pull and push.
    pub(crate) const NONE: Self =
        Self { compute: Compute::None, batch: None, time: Duration::ZERO, scale: None };

    /// Returns the load for people, such as `batch 32, wait`, or `None` without computing.
    pub(crate) fn label(&self) -> Option<String> {
        let scale = self.scale.map(|scale| format!(" × {scale}")).unwrap_or_default();
        self.batch.map(|batch| format!("batch {batch}, {}{scale}", self.compute.name()))
    }

    /// Computes on a thread of its own, so that the runtime's thread stays free for the connections.
    pub(crate) async fn run(self) -> Result<(), Failure> {
        let time = self.time;
        let computed = match self.compute {
            Compute::None => return Ok(()),
            // Tokio's timer counts whole milliseconds, which is too coarse for the shortest times.
            Compute::Wait => tokio::task::spawn_blocking(move || std::thread::sleep(time)).await,
            Compute::Work => tokio::task::spawn_blocking(move || work(time)).await,
        };
        computed.context("the computing of a mini-batch crashed")
    }
}

/// Multiplies and adds numbers that fit into a core's cache, until this thread has used `time` of its core.
fn work(time: Duration) {
    const NUMBERS: usize = 4096;
    let begun = thread_cpu_time();
    let mut numbers = [1.0_f32; NUMBERS];
    while thread_cpu_time().saturating_sub(begun) < time {
        for number in &mut numbers {
            *number = number.mul_add(0.999, 0.001);
        }
        std::hint::black_box(&mut numbers);
    }
}

/// The least and the largest factor of computing times.
const LEAST_SCALE: f64 = 0.001;
const MOST_SCALE: f64 = 100.0;

/// The largest number of server processes: each of them holds a variable of each model.
pub(crate) const MAX_SERVERS: u64 = 8;

/// A number, or a multiple of the number of workers: the settings `--servers` and `--compute-scale`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct ScaledByWorkers {
    factor: f64,
    /// Whether the number of workers is a factor too.
    by_workers: bool,
}

impl ScaledByWorkers {
    pub(crate) const ONE: Self = Self { factor: 1.0, by_workers: false };

    /// Parses a factor of computing times: `NUMBER`, `workers`, or `NUMBER*workers`.
    pub(crate) fn parse_scale(text: &str) -> Result<Self, ValueError> {
        let (number, by_workers) = match text.strip_suffix("workers") {
            Some("") => ("1", true),
            Some(number) => (number.strip_suffix('*').unwrap_or("no number"), true),
            None => (text, false),
        };
        match parse_decimal("scale", number, LEAST_SCALE..=MOST_SCALE) {
            Ok(factor) => Ok(Self { factor, by_workers }),
            Err(_) => {
                let accepted =
                    format!("numbers from {LEAST_SCALE} to {MOST_SCALE}, workers, or NUMBER*workers");
                Err(ValueError::number("scale", text, accepted))
            }
        }
    }

    /// Parses a number of servers, or `workers` for as many as workers: a machine of the paper runs one of
    /// each.
    pub(crate) fn parse_servers(text: &str) -> Result<Self, ValueError> {
        match parse_number("number of servers", text, 1..=MAX_SERVERS) {
            Ok(number) => Ok(Self { factor: number as f64, by_workers: false }),
            Err(_) if text == "workers" => Ok(Self { factor: 1.0, by_workers: true }),
            Err(_) => {
                let accepted = format!("whole numbers from 1 to {MAX_SERVERS}, or workers");
                Err(ValueError::number("number of servers", text, accepted))
            }
        }
    }

    /// Returns the value beside this number of workers.
    pub(crate) fn beside(self, workers: usize) -> f64 {
        if self.by_workers { self.factor * workers as f64 } else { self.factor }
    }
}

impl fmt::Display for ScaledByWorkers {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.by_workers, self.factor) {
            (true, 1.0) => write!(formatter, "workers"),
            (true, factor) => write!(formatter, "{factor}*workers"),
            (false, factor) => write!(formatter, "{factor}"),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        options: ParameterServerOptions,
    }

    fn of(line: &str) -> ParameterServerOptions {
        Line::try_parse_from(["parameter-server"].into_iter().chain(line.split_whitespace())).unwrap().options
    }

    #[test]
    fn all_models_with_a_time_compute_by_default() {
        assert_eq!(of("").models(), Model::value_variants());
        assert_eq!(of("--compute none").models(), Model::value_variants());
        assert_eq!(of("--compute none,wait").models(), Model::value_variants()[1..]);
        assert_eq!(Model::value_variants()[0], Model::Resnet50);
    }

    #[test]
    fn loads_are_each_way_to_compute_with_each_batch() {
        let loads = |line| of(line).loads(Model::Lstm, 4).unwrap();
        assert_eq!(loads(""), [Load::NONE]);
        let load = |compute, batch, micros| {
            let time = Duration::from_micros(micros);
            Load { compute, batch: Some(batch), time, scale: None }
        };
        assert_eq!(loads("--compute work"), [load(Compute::Work, 32, 33_330)]);
        assert_eq!(
            loads("--compute none,wait --batch 1,64 --compute-scale workers"),
            [Load::NONE, load(Compute::Wait, 1, 133_320), load(Compute::Wait, 64, 266_640)]
        );
        let both = loads("--compute wait --compute-scale workers,0.5");
        let shown: Vec<_> =
            both.iter().filter_map(|load| Some((load.label()?, load.time.as_micros()))).collect();
        let scaled = |text: &str, micros| (format!("batch 32, wait × {text}"), micros);
        assert_eq!(shown, [scaled("workers", 133_320), scaled("0.5", 16_665)]);
        let refused = |line, model| of(line).loads(model, 1).unwrap_err().to_string();
        assert!(refused("--batch 8", Model::Lstm).contains("--compute wait"));
        assert!(refused("--compute wait", Model::Resnet50).contains("resnet50"));
    }
}

#[cfg(test)]
mod load_tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use std::time::Instant;

    use super::*;

    #[test]
    fn names_are_distinct_and_read_back() {
        for compute in Compute::value_variants() {
            assert_eq!(Compute::from_str(compute.name(), false), Ok(*compute));
            assert_eq!(serde_json::to_value(compute).ok(), Some(compute.name().into()));
        }
    }

    #[tokio::test]
    async fn computing_takes_its_time() {
        let time = Duration::from_millis(20);
        for compute in [Compute::Wait, Compute::Work] {
            let begun = Instant::now();
            Load { compute, batch: None, time, scale: None }.run().await.unwrap();
            assert!(begun.elapsed() >= time, "{compute:?}");
        }
    }

    #[test]
    fn work_takes_cpu_time() {
        let (time, before) = (Duration::from_millis(20), thread_cpu_time());
        work(time);
        assert!(thread_cpu_time().saturating_sub(before) >= time);
    }

    #[test]
    fn scales_are_read_back_and_multiply() {
        let ten = Duration::from_millis(10);
        for (text, milliseconds) in
            [("1", 10), ("0.5", 5), ("workers", 40), ("1*workers", 40), ("0.25*workers", 10)]
        {
            let scale = ScaledByWorkers::parse_scale(text).unwrap();
            assert_eq!(ten.mul_f64(scale.beside(4)), Duration::from_millis(milliseconds), "{text}");
            assert_eq!(ScaledByWorkers::parse_scale(&scale.to_string()), Ok(scale));
        }
    }

    #[test]
    fn other_texts_are_refused_with_the_accepted_ones() {
        for bad in ["", "0", "-1", "101", "NaN", "inf", "x", "2workers", "*workers", "workers*2", "0*workers"]
        {
            let reason = ScaledByWorkers::parse_scale(bad).unwrap_err().to_string();
            assert!(
                reason.contains("0.001 to 100") && reason.contains("NUMBER*workers"),
                "{bad:?}: {reason}"
            );
        }
    }

    #[test]
    fn numbers_and_workers_are_read_back() {
        for (text, beside_four) in [("1", 1.0), ("8", 8.0), ("workers", 4.0)] {
            assert_eq!(ScaledByWorkers::parse_servers(text).unwrap().beside(4), beside_four);
        }
        for bad in ["0", "9", "", "all"] {
            let reason = ScaledByWorkers::parse_servers(bad).unwrap_err().to_string();
            assert!(reason.contains("1 to 8, or workers"), "{reason}");
        }
    }
}
