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
use crate::step::JobShape;

/// The largest number of ranks, and of workers and parameter servers.
pub(crate) const MOST_RANKS: u64 = 256;
const MOST_WORKERS: u64 = 8;

/// Train networks with several processes, with parameter servers or with tonic-rdma-collective
///
/// Starts its processes itself, and each computes with one thread. Without --sync parameter-server, the
/// processes average their gradients with tonic-rdma-collective; under mpirun, torchrun or srun, the program
/// is then one rank. With --listen on some hosts and --hosts on another, each host runs its share of the
/// workers and of the parameter servers.
#[derive(Clone, Debug, Parser, Serialize, Deserialize)]
#[command(name = "tonic-rdma-training", version)]
pub(crate) struct Options {
    /// Number of ranks [default: the number of cores, at least 2, with --hosts at most 8 for each host]
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
    /// How workers exchange gradients
    #[arg(long, value_enum, conflicts_with = "ranks", group = "way")]
    sync: Option<Sync>,
    /// With parameter servers: how tensors cross. Several modes take turns, and must have the same losses bit by
    /// bit
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
    /// Number of parameter servers, 1 to 8, which have the variables in turn
    #[arg(long, value_name = "N", value_parser = number::<usize>("number", 1..=MOST_WORKERS), requires = "sync", default_value = "1")]
    servers: usize,
    /// With parameter servers: end when this share of the tested samples is right, and report the time, for
    /// example 0.85
    #[arg(long, value_name = "SHARE", value_parser = |text: &str| parse_decimal("number", text, 1e-6..=1.0), requires = "sync")]
    pub(crate) target_accuracy: Option<f64>,
    /// What to do when a process dies
    #[arg(long, value_enum, default_value = "fail")]
    pub(crate) on_death: OnDeath,
    /// Write checkpoints to this folder, of which the newest three are kept
    #[arg(long, value_name = "FOLDER")]
    pub(crate) checkpoint: Option<PathBuf>,
    /// Steps between two checkpoints
    #[arg(long, value_name = "S", value_parser = positive(), requires = "checkpoint", default_value = "100")]
    pub(crate) checkpoint_every: usize,
    /// Go on from the newest checkpoint, if there is one
    #[arg(long, requires = "checkpoint")]
    pub(crate) resume: bool,
    /// With parameter servers: steps between two tests
    #[arg(long, value_name = "S", value_parser = positive(), requires = "sync", default_value = "50")]
    pub(crate) test_every: usize,
    /// With parameter servers: the largest number of samples of a test
    #[arg(long, value_name = "N", value_parser = positive(), requires = "sync", default_value = "10000")]
    pub(crate) test_samples: usize,
    /// With parameter servers: time without progress after which a part gives up, in seconds or with a unit
    /// (300ms, 2m)
    #[arg(long, value_name = "TIME", requires = "sync", default_value = "60", value_parser = |text: &str| parse_time_within(text, 0.1..=1e5))]
    pub(crate) deadline: Duration,
    /// With --model lstm: folder with the files of the program fortune; training/prepare installs them
    #[arg(long, value_name = "DIR", default_value = data::TEXTS_FOLDER)]
    pub(crate) texts: PathBuf,
    /// With --model lstm: characters after which a text is cut
    #[arg(long, value_name = "N", value_parser = positive(), default_value = "64")]
    length: usize,
    /// Write the results as JSON to this file; without FILE, or with -, to stdout
    #[arg(short = 'J', long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    pub(crate) json: Option<PathBuf>,
    /// Write a plot to this file, as SVG: the loss by step, or with parameter servers the accuracy by time
    #[arg(long, value_name = "FILE")]
    pub(crate) plot: Option<PathBuf>,
    /// Run processes of trainings that another host starts, for one caller at a time, until a signal comes.
    /// Takes --data, --texts and --limit; the caller has the other options
    #[arg(long, value_name = "HOST:PORT", group = "way", conflicts_with_all = [
        "ranks", "epochs", "steps", "batch", "model", "rate", "momentum", "seed", "mode", "workers", "servers", "target_accuracy",
        "on_death", "checkpoint", "test_every", "test_samples", "deadline", "length", "json", "plot", "hosts"
    ])]
    #[serde(skip)]
    pub(crate) listen: Option<String>,
    /// With --listen: the most registered memory of each process, and what its training may need. Allocations
    /// of 4 GiB more fail
    #[arg(long, value_name = "SIZE", value_parser = parse_size, requires = "listen", default_value = "4GiB")]
    #[serde(skip)]
    pub(crate) limit: u64,
    /// Run processes on these hosts too, where `tonic-rdma-training --listen` runs. The first workers run here,
    /// and the last ones and the last parameter server on the last host. This end reads its own --data and
    /// --texts
    #[arg(long, alias = "server", value_name = "HOST:PORT,HOST:PORT...", value_delimiter = ',')]
    #[serde(skip)]
    pub(crate) hosts: Vec<String>,
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
    /// Further processes keep the variables. Each step is a graph, split over all processes
    ParameterServer,
    /// Each worker keeps all variables. tonic-rdma-collective reduces buckets of gradients, as with --ranks
    #[value(alias = "collective")]
    Allreduce,
}

/// What happens when a process dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub(crate) enum OnDeath {
    /// The training ends with an error that names the process
    Fail,
    /// With parameter servers: the other workers go on from the last complete step
    Continue,
    /// All processes start again, and go on from the newest checkpoint
    Restart,
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
        let of_graphs =
            self.mode != ["rdma-zerocp"] || self.servers > 1 || goes_on || self.target_accuracy.is_some();
        let repeated =
            |(index, mode): &(usize, &String)| self.mode.iter().take(*index).any(|earlier| earlier == *mode);
        let processes = self.processes();
        let at = |host: usize| (0..processes).filter(|process| self.host_of(*process) == host).count();
        let unfit = |(number, _): &(usize, &String)| !(1..=MOST_CHILDREN).contains(&at(number + 1));
        let variables = self.model.shapes().len();
        let reason = if let Some((number, host)) = self.hosts.iter().enumerate().find(unfit) {
            format!(
                "--hosts: {host} would run {} of the {processes} processes of this training; accepted: 1 to {MOST_CHILDREN}",
                at(number + 1)
            )
        } else if self.shape().is_some_and(|shape| shape.servers > variables) {
            format!("--servers is {}, and this model has {variables} variables for them", self.servers)
        } else if self.on_death == OnDeath::Restart && self.checkpoint.is_none() {
            "--on-death restart goes on from a checkpoint, so it needs --checkpoint FOLDER".to_owned()
        } else if let Some((_, mode)) = self.mode.iter().enumerate().find(repeated) {
            format!("--mode names {mode} twice")
        } else if self.shape().is_none() && of_graphs {
            "--mode, --servers, --target-accuracy and --on-death continue are for --sync parameter-server"
                .to_owned()
        } else if goes_on && self.mode.len() > 1 {
            "--on-death continue takes one --mode, because modes that lose workers in different steps can't be compared".to_owned()
        } else {
            return Ok(());
        };
        Err(Failure::usage(reason))
    }

    /// Returns the shape of the graph, unless the training needs none.
    pub(crate) fn shape(&self) -> Option<JobShape> {
        let Self { model, workers, servers, batch, .. } = *self;
        (self.sync == Some(Sync::ParameterServer)).then_some(JobShape { model, workers, servers, batch })
    }

    /// Returns the number of ranks that the command line asks for.
    pub(crate) fn asked_ranks(&self) -> Option<usize> {
        self.ranks.or_else(|| self.sync.map(|_| self.workers))
    }

    /// Returns the number of processes: parts, or ranks.
    pub(crate) fn processes(&self) -> usize {
        let hosts = self.hosts.len() + 1;
        let most = if hosts > 1 { hosts * MOST_CHILDREN } else { MOST_RANKS as usize };
        let ranks = || self.asked_ranks().unwrap_or_else(|| cores().clamp(hosts.max(2), most));
        self.shape().map_or_else(ranks, |shape| shape.parts())
    }

    /// Returns the host of a process: 0 for this one, 1 for the first of `--hosts`, and so on. Workers are dealt in
    /// their order to the hosts from the first one on, and parameter servers so that the last one is at the last
    /// host. With as many workers and servers as hosts, each host has one of both (the paper, section 5).
    pub(crate) fn host_of(&self, process: usize) -> usize {
        let hosts = self.hosts.len() + 1;
        let (workers, servers) =
            self.shape().map_or((self.processes(), 0), |shape| (shape.workers, shape.servers));
        match process.checked_sub(workers) {
            None => process * hosts / workers,
            Some(server) => ((server + 1) * hosts).div_ceil(servers.max(1)) - 1,
        }
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
        assert_eq!((shape.workers, shape.servers, shape.parts()), (4, 1, 5));
        assert_eq!((options.mode.join(" ").as_str(), options.rate()), ("grpc-tcp rdma-cp", 0.5));
        for way in ["allreduce", "collective"] {
            let ranks = parse(&format!("--sync {way} --workers 3 --model lstm")).unwrap();
            assert_eq!((ranks.shape(), ranks.asked_ranks()), (None, Some(3)));
        }
    }

    #[test]
    fn each_host_has_its_share_of_workers_and_of_servers() {
        for (line, hosts) in [
            ("--sync parameter-server --server a:1", &[0, 1, 1][..]),
            ("--sync parameter-server --workers 4 --hosts a:1", &[0, 0, 1, 1, 1]),
            ("--sync parameter-server --workers 3 --servers 3 --hosts a:1,b:2", &[0, 1, 2, 0, 1, 2]),
            ("--sync parameter-server --workers 2 --servers 4 --hosts a:1", &[0, 1, 0, 0, 1, 1]),
            ("--sync parameter-server --workers 3 --servers 2 --hosts a:1,b:2", &[0, 1, 2, 1, 2]),
            ("--sync parameter-server --servers 2", &[0, 0, 0, 0]),
            ("--ranks 5 --hosts a:1", &[0, 0, 0, 1, 1]),
            ("--ranks 3 --hosts a:1,b:2", &[0, 1, 2]),
        ] {
            let options = parse(line).unwrap();
            let placed: Vec<usize> =
                (0..options.processes()).map(|process| options.host_of(process)).collect();
            assert_eq!(placed, hosts, "{line}");
        }
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
            ("--workers 2", "--sync"),
            ("--servers 2", "--sync"),
            ("--sync parameter-server --servers 9", "'--servers <N>': bad number \"9\""),
            (
                "--sync parameter-server --servers 7 --model mlp",
                "--servers is 7, and this model has 6 variables",
            ),
            ("--sync allreduce --servers 2", "for --sync parameter-server"),
            ("--checkpoint-every 5", "--checkpoint"),
            ("--resume", "--checkpoint"),
            ("--on-death restart", "needs --checkpoint FOLDER"),
            ("--on-death continue", "for --sync parameter-server"),
            ("--sync allreduce --workers 9", "'--workers <N>': bad number \"9\""),
            ("--sync parameter-server --mode tcp", "\"tcp\" is no mode; use grpc-tcp"),
            ("--sync parameter-server --mode grpc-tcp,grpc-tcp", "grpc-tcp twice"),
            ("--sync parameter-server --mode grpc-tcp,rdma-cp --on-death continue", "takes one --mode"),
            (
                "--sync parameter-server --target-accuracy 85",
                "'--target-accuracy <SHARE>': bad number \"85\"",
            ),
            ("--sync parameter-server --test-every 0", "'--test-every <S>': bad number \"0\""),
            ("--sync parameter-server --deadline 0", "seconds from 0.1 to 100000"),
            ("--sync allreduce --ranks 2", "cannot be used with"),
            ("--sync collective --workers 9", "'--workers <N>': bad number \"9\""),
            ("--sync collective --mode grpc-tcp", "--mode, --servers"),
            ("--hosts a:1 --ranks 1", "a:1 would run 0 of the 1 processes"),
            (
                "--hosts a:1 --ranks 18",
                "a:1 would run 9 of the 18 processes of this training; accepted: 1 to 8",
            ),
            ("--hosts a:1,b:2 --sync allreduce --workers 2", "b:2 would run 0"),
            ("--hosts a:1 --listen a:2", "cannot be used with"),
            ("--listen a:1 --sync allreduce", "cannot be used with"),
            ("--listen a:1 --ranks 2", "cannot be used with"),
            ("--listen a:1 --json -", "cannot be used with"),
            ("--listen a:1 --length 5", "cannot be used with"),
            ("--listen a:1 --workers 2", "cannot be used with"),
            ("--limit 1GiB", "--listen"),
            ("--sync star", "star"),
        ] {
            let error = parse(line).unwrap_err();
            assert!(error.contains(text), "{line}: {error}");
        }
    }
}
