//! The options of trainings through a graph.

use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;
use tonic_rdma_commands::ValueError;
use tonic_rdma_commands::units::parse_time_within;
use tonic_rdma_graph::transfer::Mode;

use super::coordinator::Plan;
use super::messages::Job;
use crate::data::fortunes;
use crate::failure::Failure;
use crate::model::Architecture;
use crate::step::{Model, Recurrent, Shape, Synchrony};

/// The largest number of workers.
const MOST_WORKERS: usize = 8;

/// Registered memory for crossing tensors of a part.
const REGISTERED: u64 = 1 << 30;

/// The options of a training through a graph.
#[derive(Debug, clap::Args)]
pub(crate) struct GraphArguments {
    /// Train through a graph that is split over processes, or, with `collective`, with tonic-rdma-collective
    #[arg(long, value_enum, conflicts_with_all = ["ranks", "check", "scaling", "overlap"])]
    pub(crate) sync: Option<Sync>,
    /// With --sync: how tensors cross. Several modes take turns, and must have the same losses bit by bit
    #[arg(
        long,
        value_name = "MODE,MODE...",
        value_delimiter = ',',
        requires = "sync",
        default_value = "rdma-zerocp"
    )]
    mode: Vec<String>,
    /// With --sync: number of workers, 1 to 8
    #[arg(long, value_name = "N", requires = "sync", default_value = "2")]
    pub(crate) workers: usize,
    /// With --sync: end when this share of the tested samples is right, and report the time, for example 0.85
    #[arg(long, value_name = "SHARE", requires = "sync")]
    target_accuracy: Option<f64>,
    /// With --sync: what to do when a worker dies
    #[arg(long, value_enum, requires = "sync", default_value = "fail")]
    on_death: OnDeath,
    /// With --sync: steps between two tests
    #[arg(long, value_name = "S", requires = "sync", default_value = "50")]
    test_every: u64,
    /// With --sync: the largest number of samples of a test
    #[arg(long, value_name = "N", requires = "sync", default_value = "10000")]
    test_samples: usize,
    /// With --sync: time without progress after which a part gives up, in seconds or with a unit (300ms, 2m)
    #[arg(long, value_name = "TIME", allow_negative_numbers = true, requires = "sync", default_value = "60", value_parser = deadline)]
    deadline: Duration,
    /// With --model lstm: folder with the files of the program fortune; training/prepare installs them
    #[arg(long, value_name = "DIR", requires = "sync", default_value = fortunes::FOLDER)]
    texts: PathBuf,
    /// With --model lstm: characters after which a text is cut
    #[arg(long, value_name = "N", requires = "sync", default_value = "64")]
    length: usize,
    /// Work of a part
    #[arg(long, hide = true, requires = "parent")]
    pub(crate) part: Option<String>,
}

fn deadline(text: &str) -> Result<Duration, ValueError> {
    parse_time_within(text, 0.1..=1e5)
}

/// How workers exchange gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Sync {
    /// A further process keeps the variables
    ParameterServer,
    /// Sums of gradients go round a ring of workers
    Allreduce,
    /// Buckets of gradients are reduced by tonic-rdma-collective, without a graph
    Collective,
}

/// What happens when a worker dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum OnDeath {
    /// The training ends with an error that names the worker
    Fail,
    /// The others go on from the last complete step
    Continue,
}

/// The models of the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Named {
    /// Two convolutions and two linear layers, 147 146 parameters: much computation for each gradient
    Cnn,
    /// Three linear layers, 669 706 parameters: little computation for each gradient
    Mlp,
    /// Three wide linear layers, 5 824 522 parameters: bound by the communication, with small batches
    Wide,
    /// An LSTM that predicts the next character of texts of varying length; needs --sync parameter-server or allreduce
    Lstm,
}

impl Named {
    /// Returns the network for pictures, if it is one.
    pub(crate) fn architecture(self) -> Option<Architecture> {
        match self {
            Self::Cnn => Some(Architecture::Cnn),
            Self::Mlp => Some(Architecture::Mlp),
            Self::Wide => Some(Architecture::Wide),
            Self::Lstm => None,
        }
    }
}

/// Options that trainings of both kinds have.
#[derive(Clone, Debug)]
pub(crate) struct Common {
    pub(crate) model: Named,
    pub(crate) data: PathBuf,
    pub(crate) epochs: usize,
    pub(crate) steps: Option<usize>,
    pub(crate) batch: usize,
    pub(crate) rate: f32,
    pub(crate) momentum: f32,
    pub(crate) seed: u64,
}

impl GraphArguments {
    /// Returns what is to be done, or `None` if the training needs no graph.
    pub(crate) fn plan(&self, common: &Common) -> Result<Option<Plan>, Failure> {
        if self.sync.is_some() {
            self.check()?;
        }
        let synchrony = match self.sync {
            Some(Sync::ParameterServer) => Synchrony::ParameterServer,
            Some(Sync::Allreduce) => Synchrony::Allreduce,
            Some(Sync::Collective) | None => return Ok(None),
        };
        let (model, data) = match common.model.architecture() {
            Some(architecture) => (Model::Pictures(architecture), &common.data),
            None => (Model::Recurrent(Recurrent { embedding: 64, hidden: 128 }), &self.texts),
        };
        let job = Job {
            data: data.clone(),
            length: self.length,
            seed: common.seed,
            rate: common.rate,
            momentum: common.momentum,
            tested: self.test_samples,
            modes: self.mode.clone(),
            deadline: self.deadline.as_secs_f64(),
            registered: REGISTERED,
        };
        Ok(Some(Plan {
            job,
            shape: Shape { model, synchrony, workers: self.workers, batch: common.batch },
            epochs: common.epochs as u64,
            steps: common.steps.map(|steps| steps as u64),
            test_every: self.test_every,
            target: self.target_accuracy,
            goes_on: self.on_death == OnDeath::Continue,
        }))
    }

    fn check(&self) -> Result<(), Failure> {
        if self.workers == 0 || self.workers > MOST_WORKERS {
            return Err(Failure::usage(format!(
                "--workers is {}, and has to be 1 to {MOST_WORKERS}",
                self.workers
            )));
        }
        let of_graphs = self.mode != ["rdma-zerocp"]
            || self.on_death == OnDeath::Continue
            || self.target_accuracy.is_some();
        if self.sync == Some(Sync::Collective) && of_graphs {
            return Err(Failure::usage(
                "--sync collective has no graph, so leave out --mode, --on-death and --target-accuracy",
            ));
        }
        for (place, mode) in self.mode.iter().enumerate() {
            mode.parse::<Mode>().map_err(|reason| Failure::usage(format!("--mode: {reason}")))?;
            if self.mode.iter().take(place).any(|earlier| earlier == mode) {
                return Err(Failure::usage(format!("--mode names {mode} twice")));
            }
        }
        if self.on_death == OnDeath::Continue && self.mode.len() > 1 {
            return Err(Failure::usage(
                "--on-death continue takes one --mode, because modes that lose workers in different steps can't be compared",
            ));
        }
        if let Some(target) = self.target_accuracy
            && !(target > 0.0 && target <= 1.0)
        {
            return Err(Failure::usage(format!(
                "--target-accuracy is {target}, and has to be above 0 and at most 1"
            )));
        }
        let positive = [
            ("--test-every", self.test_every),
            ("--test-samples", self.test_samples as u64),
            ("--length", self.length as u64),
        ];
        match positive.iter().find(|(_, value)| *value == 0) {
            Some((flag, _)) => Err(Failure::usage(format!("{flag} is 0, and has to be at least 1"))),
            None => Ok(()),
        }
    }
}
