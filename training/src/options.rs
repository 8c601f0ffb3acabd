//! The command line. It is also a part of the job of the processes that the program starts, which get it as
//! JSON.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use serde::{Deserialize, Serialize};
use tonic_rdma_commands::remote::MOST_CHILDREN;
use tonic_rdma_commands::units::{number, parse_decimal, parse_size, parse_time_within};
use tonic_rdma_commands::{Context as _, Failure, ValueError};
use tonic_rdma_graph::GraphError;
use tonic_rdma_graph::transfer::TransferMode;

use crate::data;
use crate::network::Model;
use crate::step::{JobShape, Synchrony};

/// The largest number of ranks, and of workers.
pub(crate) const MOST_RANKS: u64 = 256;
const MOST_WORKERS: u64 = 8;

/// Train networks with several processes, through a graph (--sync) or with tonic-rdma-collective
///
/// Starts its processes itself, and each computes with one thread. Without --sync parameter-server or
/// allreduce, the processes average their gradients with tonic-rdma-collective; under mpirun, torchrun or
/// srun, the program is then one rank. With --listen on one host and --server on another, the latter half of
/// the processes, with the parameter server, runs at the end that listens.
#[derive(Clone, Debug, Parser, Serialize, Deserialize)]
#[command(name = "tonic-rdma-training", version)]
pub(crate) struct Options {
    /// Number of ranks [default: the number of cores, at least 2, with --server at most 16]
    #[arg(long, value_name = "N", value_parser = number::<usize>("number", 1..=MOST_RANKS))]
    pub(crate) ranks: Option<usize>,
    /// Number of passes over the samples
    #[arg(long, value_name = "E", value_parser = positive(), default_value = "1")]
    pub(crate) epochs: usize,
    /// End after this number of steps
    #[arg(long, value_name = "S", value_parser = positive())]
    pub(crate) steps: Option<usize>,
    /// Samples of one step, of all processes together
    #[arg(long, value_name = "B", value_parser = positive(), default_value = "128")]
    pub(crate) batch: usize,
    /// The network
    #[arg(long, value_enum, default_value = "cnn")]
    pub(crate) model: Model,
    /// Learning rate [default: 0.02; lstm: 0.5]
    #[arg(long, value_parser = factor)]
    rate: Option<f32>,
    /// Momentum of the gradients
    #[arg(long, value_parser = factor, default_value = "0.9")]
    pub(crate) momentum: f32,
    /// Seed of the weights and of the order of the samples
    #[arg(long, default_value = "1")]
    pub(crate) seed: u64,
    /// Folder with the files of Fashion-MNIST; training/prepare installs them
    #[arg(long, value_name = "DIR", default_value = data::PICTURES_FOLDER)]
    pub(crate) data: PathBuf,
    /// Train through a graph that is split over processes, or, with `collective`, with tonic-rdma-collective
    #[arg(long, value_enum, conflicts_with = "ranks", group = "way")]
    sync: Option<Sync>,
    /// With --sync: how tensors cross. Several modes take turns, and must have the same losses bit by bit
    #[arg(
        long,
        value_name = "MODE,MODE...",
        value_delimiter = ',',
        value_parser = mode,
        requires = "sync",
        default_value = "rdma-zerocp"
    )]
    pub(crate) mode: Vec<String>,
    /// With --sync: number of workers, 1 to 8
    #[arg(long, value_name = "N", value_parser = number::<usize>("number", 1..=MOST_WORKERS), requires = "sync", default_value = "2")]
    workers: usize,
    /// With --sync: end when this share of the tested samples is right, and report the time, for example 0.85
    #[arg(long, value_name = "SHARE", value_parser = |text: &str| parse_decimal("number", text, 1e-6..=1.0), requires = "sync")]
    pub(crate) target_accuracy: Option<f64>,
    /// With --sync: what to do when a worker dies
    #[arg(long, value_enum, requires = "sync", default_value = "fail")]
    pub(crate) on_death: OnDeath,
    /// With --sync: steps between two tests
    #[arg(long, value_name = "S", value_parser = positive(), requires = "sync", default_value = "50")]
    pub(crate) test_every: usize,
    /// With --sync: the largest number of samples of a test
    #[arg(long, value_name = "N", value_parser = positive(), requires = "sync", default_value = "10000")]
    pub(crate) test_samples: usize,
    /// With --sync: time without progress after which a part gives up, in seconds or with a unit (300ms, 2m)
    #[arg(long, value_name = "TIME", requires = "sync", default_value = "60", value_parser = |text: &str| parse_time_within(text, 0.1..=1e5))]
    pub(crate) deadline: Duration,
    /// With --model lstm: folder with the files of the program fortune; training/prepare installs them
    #[arg(long, value_name = "DIR", requires = "way", default_value = data::TEXTS_FOLDER)]
    pub(crate) texts: PathBuf,
    /// With --model lstm: characters after which a text is cut
    #[arg(long, value_name = "N", value_parser = positive(), requires = "sync", default_value = "64")]
    length: usize,
    /// Write the results as JSON to this file; without FILE, or with -, to stdout
    #[arg(short = 'J', long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    pub(crate) json: Option<PathBuf>,
    /// Write a plot to this file, as SVG: the loss by step, or with --sync the accuracy by time
    #[arg(long, value_name = "FILE")]
    pub(crate) plot: Option<PathBuf>,
    /// Run processes of trainings that another host starts, for one caller at a time, until a signal comes.
    /// Takes --data, --texts and --limit; the caller has the other options
    #[arg(long, value_name = "HOST:PORT", group = "way", conflicts_with_all = [
        "ranks", "epochs", "steps", "batch", "model", "rate", "momentum", "seed", "mode", "workers", "target_accuracy", "on_death",
        "test_every", "test_samples", "deadline", "length", "json", "plot", "server"
    ])]
    #[serde(skip)]
    pub(crate) listen: Option<String>,
    /// With --listen: the most registered memory of each process, and what its training may need. Allocations
    /// of 4 GiB more fail
    #[arg(long, value_name = "SIZE", value_parser = parse_size, requires = "listen", default_value = "4GiB")]
    #[serde(skip)]
    pub(crate) limit: u64,
    /// Run the latter half of the processes, with the parameter server, on the host where
    /// `tonic-rdma-training --listen` runs, at this address. This end reads its own --data and --texts
    #[arg(long, value_name = "HOST:PORT")]
    #[serde(skip)]
    pub(crate) server: Option<String>,
    /// A [`Job`] as JSON, for a process that this program starts
    #[arg(long, hide = true, requires = "parent")]
    #[serde(skip)]
    pub(crate) job: Option<String>,
    /// The process that started it
    #[arg(long, hide = true)]
    #[serde(skip)]
    pub(crate) parent: Option<u32>,
}

/// What a process that this program starts needs to know.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Job {
    pub(crate) options: Options,
    /// The address on which a part listens for the others.
    pub(crate) ip: IpAddr,
    /// The memory that a listening end grants, in bytes.
    pub(crate) memory: Option<u64>,
}

/// How workers exchange gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub(crate) enum Sync {
    /// A further process keeps the variables
    ParameterServer,
    /// Sums of gradients go round a ring of workers
    Allreduce,
    /// Buckets of gradients are reduced by tonic-rdma-collective, without a graph
    Collective,
}

/// What happens when a worker dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub(crate) enum OnDeath {
    /// The training ends with an error that names the worker
    Fail,
    /// The others go on from the last complete step
    Continue,
}

fn positive() -> impl Fn(&str) -> Result<usize, ValueError> + Clone {
    number("number", 1..=u64::from(u32::MAX))
}

fn factor(text: &str) -> Result<f32, ValueError> {
    parse_decimal("number", text, 0.0..=1e6).map(|number| number as f32)
}

fn mode(text: &str) -> Result<String, String> {
    text.parse::<TransferMode>().map(|mode| mode.to_string()).map_err(|error| error.to_string())
}

/// Returns the number of cores that this process may use.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

impl Options {
    /// Checks what clap does not: options that exclude one another by their values.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        let goes_on = self.on_death == OnDeath::Continue;
        let of_graphs = self.mode != ["rdma-zerocp"] || goes_on || self.target_accuracy.is_some();
        let repeated =
            |(index, mode): &(usize, &String)| self.mode.iter().take(*index).any(|earlier| earlier == *mode);
        let (processes, most) = (self.processes(), 2 * MOST_CHILDREN + 1);
        let reason = if self.server.is_some() && !(2..=most).contains(&processes) {
            format!(
                "--server runs half of the processes at the other end, of 2 to {most} in all, and this training has {processes}"
            )
        } else if let Some((_, mode)) = self.mode.iter().enumerate().find(repeated) {
            format!("--mode names {mode} twice")
        } else if self.sync == Some(Sync::Collective) && of_graphs {
            "--sync collective has no graph, so leave out --mode, --on-death and --target-accuracy".to_owned()
        } else if goes_on && self.mode.len() > 1 {
            "--on-death continue takes one --mode, because modes that lose workers in different steps can't be compared".to_owned()
        } else if self.model.reads_texts() && self.shape().is_none() {
            "--model lstm has tensors of varying shape, which need a graph: add --sync parameter-server or --sync allreduce".to_owned()
        } else {
            return Ok(());
        };
        Err(Failure::usage(reason))
    }

    /// Returns the shape of the graph, unless the training needs none.
    pub(crate) fn shape(&self) -> Option<JobShape> {
        let synchrony = match self.sync? {
            Sync::ParameterServer => Synchrony::ParameterServer,
            Sync::Allreduce => Synchrony::Allreduce,
            Sync::Collective => return None,
        };
        Some(JobShape { model: self.model, synchrony, workers: self.workers, batch: self.batch })
    }

    /// Returns the number of ranks that the command line asks for.
    pub(crate) fn asked_ranks(&self) -> Option<usize> {
        self.ranks.or_else(|| self.sync.map(|_| self.workers))
    }

    /// Returns the number of processes: parts, or ranks.
    pub(crate) fn processes(&self) -> usize {
        let most = if self.server.is_some() { 2 * MOST_CHILDREN } else { MOST_RANKS as usize };
        let ranks = || self.asked_ranks().unwrap_or_else(|| cores().clamp(2, most));
        self.shape().map_or_else(ranks, |shape| shape.parts())
    }

    /// Returns the name of a process, for people to read.
    pub(crate) fn name(&self, process: usize) -> String {
        self.shape().map_or_else(|| format!("rank {process}"), |shape| shape.name(process))
    }

    /// Returns the learning rate.
    pub(crate) fn rate(&self) -> f32 {
        self.rate.unwrap_or(if self.model.reads_texts() { 0.5 } else { 0.02 })
    }

    /// Reads the samples of the model.
    pub(crate) fn samples(&self) -> Result<data::Data, Failure> {
        match self.model.reads_texts() {
            true => data::Data::texts(&self.texts, self.length),
            false => data::Data::pictures(&self.data),
        }
    }

    /// Returns the modes of transfer.
    pub(crate) fn modes(&self) -> Result<Vec<TransferMode>, Failure> {
        self.mode.iter().map(|mode| mode.parse()).collect::<Result<_, GraphError>>().context("--mode")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Options, String> {
        let words = std::iter::once("training").chain(line.split_whitespace());
        let options = Options::try_parse_from(words).map_err(|error| error.to_string())?;
        options.check().map_err(|error| error.with_causes())?;
        Ok(options)
    }

    #[test]
    fn a_line_without_a_mode_trains_with_ranks() {
        let options = parse("--ranks 3 --epochs 2 --batch 96 --model mlp --seed 9").unwrap();
        assert_eq!((options.asked_ranks(), options.shape()), (Some(3), None));
        assert_eq!((options.epochs, options.batch, options.model, options.seed), (2, 96, Model::Mlp, 9));
        assert_eq!((options.steps, options.rate()), (None, 0.02));
    }

    #[test]
    fn sync_trains_through_a_graph_or_with_the_collective() {
        let options =
            parse("--sync parameter-server --workers 4 --mode grpc-tcp,rdma-cp --model lstm").unwrap();
        let shape = options.shape().unwrap();
        assert_eq!((shape.synchrony, shape.workers), (Synchrony::ParameterServer, 4));
        assert_eq!((options.mode.join(" ").as_str(), options.rate()), ("grpc-tcp rdma-cp", 0.5));
        let collective = parse("--sync collective --workers 3").unwrap();
        assert_eq!((collective.shape(), collective.asked_ranks()), (None, Some(3)));
    }

    #[test]
    fn a_process_gets_the_same_options_as_json() {
        for line in ["--steps 3 --rate 0.1", "--sync allreduce --deadline 300ms"] {
            let options = parse(line).unwrap();
            let json = serde_json::to_string(&options).unwrap();
            let job: Options = serde_json::from_str(&json).unwrap();
            assert_eq!(serde_json::to_string(&job).unwrap(), json);
            assert_eq!((job.deadline, job.rate()), (options.deadline, options.rate()));
        }
    }

    #[test]
    fn arguments_that_make_no_sense_are_named() {
        for (line, text) in [
            ("--ranks 0", "'--ranks <N>': bad number \"0\"; accepted: whole numbers from 1 to 256"),
            ("--ranks 257", "'--ranks <N>': bad number \"257\""),
            ("--batch 0", "'--batch <B>': bad number \"0\""),
            ("--rate=-1", "'--rate <RATE>': bad number \"-1\"; accepted: numbers from 0"),
            ("--rate NaN", "'--rate <RATE>': bad number \"NaN\""),
            ("--job {}", "--parent"),
            ("--model lstm", "--sync parameter-server"),
            ("--workers 2", "--sync"),
            ("--sync allreduce --workers 9", "'--workers <N>': bad number \"9\""),
            ("--sync allreduce --mode tcp", "\"tcp\" is no mode; use grpc-tcp"),
            ("--sync allreduce --mode grpc-tcp,grpc-tcp", "grpc-tcp twice"),
            ("--sync allreduce --mode grpc-tcp,rdma-cp --on-death continue", "takes one --mode"),
            ("--sync allreduce --target-accuracy 85", "'--target-accuracy <SHARE>': bad number \"85\""),
            ("--sync allreduce --test-every 0", "'--test-every <S>': bad number \"0\""),
            ("--sync allreduce --deadline 0", "seconds from 0.1 to 100000"),
            ("--sync allreduce --ranks 2", "cannot be used with"),
            ("--sync collective --workers 9", "'--workers <N>': bad number \"9\""),
            ("--sync collective --mode grpc-tcp", "leave out --mode"),
            ("--server a:1 --ranks 1", "of 2 to 17 in all, and this training has 1"),
            ("--server a:1 --ranks 18", "this training has 18"),
            ("--server a:1 --sync allreduce --workers 1", "this training has 1"),
            ("--server a:1 --listen a:2", "cannot be used with"),
            ("--listen a:1 --sync allreduce", "cannot be used with"),
            ("--listen a:1 --ranks 2", "cannot be used with"),
            ("--listen a:1 --json -", "cannot be used with"),
            ("--listen a:1 --length 5", "cannot be used with"),
            ("--listen a:1 --workers 2", "cannot be used with"),
            ("--limit 1GiB", "--listen"),
            ("--texts /tmp", "--sync"),
            ("--sync star", "star"),
        ] {
            let error = parse(line).unwrap_err();
            assert!(error.contains(text), "{line}: {error}");
        }
    }
}
