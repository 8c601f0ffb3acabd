//! The command line.

use std::path::PathBuf;

use clap::Parser;

use crate::data;
use crate::distributed::{Common, GraphArguments, Named, Plan, Sync};
use crate::failure::Failure;
use crate::job::{Compute, Job, OverlapJob, TrainJob};

/// The largest number of processes that this program starts.
const MOST_RANKS: usize = 256;

/// Samples of a step of all ranks together, unless --batch says otherwise.
const BATCH: usize = 128;

/// Steps of a scaling run and of a measurement of the overlap, unless --steps says otherwise. Baidu ran 300.
const SCALING_STEPS: usize = 300;
const OVERLAP_STEPS: usize = 20;

/// Train a network on Fashion-MNIST with several processes, which average their gradients with tonic-rdma-collective
///
/// Starts its ranks as local processes. Under mpirun, torchrun or srun, the program is one rank. Each rank computes with one thread.
#[derive(Debug, Parser)]
#[command(name = "tonic-rdma-training", version)]
pub(crate) struct Arguments {
    /// Number of ranks, started as local processes [default: the number of cores, at least 2]
    #[arg(long, value_name = "N")]
    ranks: Option<usize>,
    /// Number of passes over the samples [default: 1]
    #[arg(long, value_name = "E")]
    epochs: Option<usize>,
    /// End after this number of steps; with --scaling [default: 300] and --overlap [default: 20], the number of measured steps
    #[arg(long, value_name = "S")]
    steps: Option<usize>,
    /// Samples of one step, of all ranks together [default: 128]
    #[arg(long, value_name = "B")]
    batch: Option<usize>,
    /// The network
    #[arg(long, value_enum, default_value = "cnn")]
    model: Named,
    /// Learning rate [default: 0.02; lstm: 0.5]
    #[arg(long)]
    rate: Option<f32>,
    /// Momentum of the gradients
    #[arg(long, default_value = "0.9")]
    momentum: f32,
    /// Seed of the weights and of the order of the samples
    #[arg(long, default_value = "1")]
    seed: u64,
    /// Folder with the files of Fashion-MNIST; training/prepare installs them
    #[arg(long, value_name = "DIR", default_value = data::FOLDER)]
    data: PathBuf,
    /// Train with one rank too, and compare the losses of both
    #[arg(long, conflicts_with_all = ["scaling", "overlap"])]
    check: bool,
    /// Measure samples a second for each of these numbers of ranks, as in Baidu's figure
    #[arg(long, value_name = "N,N...", value_delimiter = ',', conflicts_with_all = ["overlap", "ranks", "batch", "epochs"])]
    scaling: Vec<usize>,
    /// With --scaling: samples of one step of each rank [default: 32, as Baidu]
    #[arg(long, value_name = "B", requires = "scaling")]
    rank_batch: Option<usize>,
    /// With --scaling: how often each number of ranks is measured, in turns [default: 3]
    #[arg(long, value_name = "T", requires = "scaling")]
    turns: Option<usize>,
    /// Measure how much of the communication of this network's step is hidden behind its computation
    #[arg(long, value_name = "NETWORK", conflicts_with_all = ["batch", "epochs"])]
    overlap: Option<Synthetic>,
    /// With --overlap: duration of a step's computation [default: 1.5 × the measured time of the communication, so that the
    /// backward pass, two thirds of it, takes as long]
    #[arg(long, value_name = "MS", requires = "overlap")]
    step_ms: Option<f64>,
    /// With --overlap: where a step computes
    #[arg(long, value_enum, requires = "overlap")]
    compute: Option<Compute>,
    #[command(flatten)]
    pub(crate) graph: GraphArguments,
    /// Write the results to this file, as JSON; - is stdout
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Write a plot to this file, as SVG: the loss by step, samples a second by ranks, or with --sync the accuracy by time
    #[arg(long, value_name = "FILE", conflicts_with = "overlap")]
    pub(crate) plot: Option<PathBuf>,
    /// Work of a process that this program starts
    #[arg(long, hide = true, requires = "result", requires = "parent")]
    pub(crate) job: Option<String>,
    /// File for the result of such a process
    #[arg(long, hide = true)]
    pub(crate) result: Option<PathBuf>,
    /// The process that started it
    #[arg(long, hide = true)]
    pub(crate) parent: Option<u32>,
}

/// A network whose step is imitated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Synthetic {
    /// 161 tensors, 25 557 032 parameters
    Resnet50,
}

/// What the program does.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Mode {
    /// One job, with `ranks` processes unless the program is a rank itself.
    Job { ranks: Option<usize>, job: Job },
    /// The same training with one rank and with `ranks`.
    Check { ranks: usize, job: TrainJob },
    /// A training for each number of ranks, `turns` times. The job is that of one rank.
    Scaling { ranks: Vec<usize>, turns: usize, job: TrainJob },
    /// A training through a graph.
    Graph(Plan),
}

impl Arguments {
    /// Returns what the program has to do.
    pub(crate) fn mode(&self) -> Result<Mode, Failure> {
        let positive = [
            ("--ranks", self.ranks),
            ("--epochs", self.epochs),
            ("--steps", self.steps),
            ("--batch", self.batch),
            ("--rank-batch", self.rank_batch),
            ("--turns", self.turns),
        ];
        if let Some((flag, _)) = positive.iter().find(|(_, value)| *value == Some(0)) {
            return Err(Failure::usage(format!("{flag} is 0, and has to be at least 1")));
        }
        for (flag, value) in [("--rate", self.rate()), ("--momentum", self.momentum)] {
            if !value.is_finite() || value < 0.0 {
                return Err(Failure::usage(format!("{flag} is {value}, and has to be a number from 0 up")));
            }
        }
        if let Some(milliseconds) = self.step_ms
            && !(milliseconds > 0.0 && milliseconds <= 1e5)
        {
            return Err(Failure::usage(format!(
                "--step-ms is {milliseconds}, and has to be above 0 and at most 100000"
            )));
        }
        for ranks in self.scaling.iter().copied().chain(self.ranks) {
            if ranks == 0 || ranks > MOST_RANKS {
                return Err(Failure::usage(format!("{ranks} ranks are not possible, 1 to {MOST_RANKS} are")));
            }
        }
        if self.overlap.is_some() {
            let job = Job::Overlap(OverlapJob {
                compute: self.compute.unwrap_or(Compute::Wait),
                step_ms: self.step_ms,
                steps: self.steps.unwrap_or(OVERLAP_STEPS),
            });
            return Ok(Mode::Job { ranks: self.ranks, job });
        }
        if let Some(plan) = self.graph.plan(&self.common())? {
            return Ok(Mode::Graph(plan));
        }
        let job = self.train_job()?;
        if self.graph.sync == Some(Sync::Collective) {
            return Ok(Mode::Job { ranks: Some(self.graph.workers), job: Job::Train(job) });
        }
        if !self.scaling.is_empty() {
            return Ok(Mode::Scaling { ranks: self.scaling.clone(), turns: self.turns.unwrap_or(3), job });
        }
        if self.check {
            return Ok(Mode::Check { ranks: self.ranks.unwrap_or_else(default_ranks), job });
        }
        Ok(Mode::Job { ranks: self.ranks, job: Job::Train(job) })
    }

    /// Returns the learning rate.
    fn rate(&self) -> f32 {
        self.rate.unwrap_or(if self.model == Named::Lstm { 0.5 } else { 0.02 })
    }

    fn common(&self) -> Common {
        Common {
            model: self.model,
            data: self.data.clone(),
            epochs: self.epochs.unwrap_or(1),
            steps: self.steps,
            batch: self.batch.unwrap_or(BATCH),
            rate: self.rate(),
            momentum: self.momentum,
            seed: self.seed,
        }
    }

    fn train_job(&self) -> Result<TrainJob, Failure> {
        let scaling = !self.scaling.is_empty();
        let Some(model) = self.model.architecture() else {
            return Err(Failure::usage(
                "--model lstm has tensors of varying shape, which need a graph: add --sync parameter-server or --sync allreduce",
            ));
        };
        Ok(TrainJob {
            model,
            data: self.data.clone(),
            // A scaling run ends by its steps.
            epochs: if scaling { usize::MAX } else { self.epochs.unwrap_or(1) },
            steps: if scaling { Some(self.steps.unwrap_or(SCALING_STEPS)) } else { self.steps },
            batch: if scaling { self.rank_batch.unwrap_or(32) } else { self.batch.unwrap_or(BATCH) },
            rate: self.rate(),
            momentum: self.momentum,
            seed: self.seed,
            test: !scaling,
            warm_up: if scaling { 10 } else { 0 },
        })
    }
}

/// Returns the number of ranks if the command line has none.
pub(crate) fn default_ranks() -> usize {
    crate::processes::cores().clamp(2, MOST_RANKS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Architecture;
    use crate::step::Synchrony;

    fn parse(line: &str) -> Result<Mode, String> {
        let words = std::iter::once("training").chain(line.split_whitespace());
        let arguments = Arguments::try_parse_from(words).map_err(|error| error.to_string())?;
        arguments.mode().map_err(|error| error.with_causes())
    }

    #[test]
    fn a_line_without_a_mode_trains() {
        let Ok(Mode::Job { ranks: Some(3), job: Job::Train(job) }) =
            parse("--ranks 3 --epochs 2 --batch 96 --model mlp --seed 9")
        else {
            panic!("the mode is another")
        };
        assert_eq!((job.epochs, job.batch, job.model, job.seed), (2, 96, Architecture::Mlp, 9));
        assert_eq!((job.steps, job.test, job.warm_up), (None, true, 0));
    }

    #[test]
    fn sync_trains_through_a_graph_or_with_the_collective() {
        let Ok(Mode::Graph(plan)) =
            parse("--sync parameter-server --workers 4 --mode grpc-tcp,rdma-cp --model lstm")
        else {
            panic!("the mode is another")
        };
        assert_eq!((plan.shape.synchrony, plan.shape.workers), (Synchrony::ParameterServer, 4));
        assert_eq!((plan.job.modes.join(" ").as_str(), plan.job.rate), ("grpc-tcp rdma-cp", 0.5));
        let collective = parse("--sync collective --workers 3");
        assert!(matches!(collective, Ok(Mode::Job { ranks: Some(3), job: Job::Train(_) })), "{collective:?}");
    }

    #[test]
    fn scaling_has_a_batch_for_each_rank_and_ends_by_steps() {
        let Ok(Mode::Scaling { ranks, turns, job }) = parse("--scaling 1,2,4 --turns 5") else {
            panic!("the mode is another")
        };
        assert_eq!((ranks, turns), (vec![1, 2, 4], 5));
        assert_eq!((job.batch, job.steps, job.test), (32, Some(300), false));
    }

    #[test]
    fn overlap_and_check_have_their_modes() {
        let Ok(Mode::Job { ranks: None, job: Job::Overlap(job) }) =
            parse("--overlap resnet50 --compute cores --step-ms 12.5")
        else {
            panic!("the mode is another")
        };
        assert_eq!(job, OverlapJob { compute: Compute::Cores, step_ms: Some(12.5), steps: OVERLAP_STEPS });
        let Ok(Mode::Job { job: Job::Overlap(job), .. }) = parse("--overlap resnet50 --compute copy") else {
            panic!("the mode is another")
        };
        assert_eq!((job.compute, job.step_ms), (Compute::Copy, None));
        assert!(matches!(parse("--check --ranks 4 --steps 50"), Ok(Mode::Check { ranks: 4, .. })));
    }

    #[test]
    fn arguments_that_make_no_sense_are_named() {
        for (line, text) in [
            ("--ranks 0", "--ranks is 0"),
            ("--ranks 257", "257 ranks are not possible"),
            ("--scaling 1,0", "0 ranks are not possible"),
            ("--batch 0", "--batch is 0"),
            ("--rate=-1", "--rate is -1"),
            ("--rate NaN", "--rate is NaN"),
            ("--overlap resnet50 --step-ms 0", "--step-ms is 0"),
            ("--overlap resnet50 --step-ms NaN", "--step-ms is NaN"),
            ("--overlap alexnet", "alexnet"),
            ("--overlap resnet50 --plot x", "--plot"),
            ("--scaling 1 --overlap resnet50", "cannot be used with"),
            ("--scaling 1 --ranks 2", "cannot be used with"),
            ("--check --scaling 1", "cannot be used with"),
            ("--compute cores", "--overlap"),
            ("--rank-batch 5", "--scaling"),
            ("--job {}", "--result"),
            ("--model lstm", "--sync parameter-server"),
            ("--workers 2", "--sync"),
            ("--sync allreduce --workers 9", "--workers is 9"),
            ("--sync allreduce --mode tcp", "\"tcp\" is no mode; use grpc-tcp"),
            ("--sync allreduce --mode grpc-tcp,grpc-tcp", "grpc-tcp twice"),
            ("--sync allreduce --mode grpc-tcp,rdma-cp --on-death continue", "takes one --mode"),
            ("--sync allreduce --target-accuracy 85", "--target-accuracy is 85"),
            ("--sync allreduce --test-every 0", "--test-every is 0"),
            ("--sync allreduce --deadline 0", "seconds from 0.1 to 100000"),
            ("--sync allreduce --check", "cannot be used with"),
            ("--sync collective --workers 9", "--workers is 9"),
            ("--sync collective --mode grpc-tcp", "leave out --mode"),
            ("--sync star", "star"),
        ] {
            let error = parse(line).unwrap_err();
            assert!(error.contains(text), "{line}: {error}");
        }
    }
}
