//! The group of all ranks, and the means of its gradients.

use tokio::runtime::{Builder, Runtime};
use tonic_rdma_collective::{
    CollectiveError, Communicator, Fusion, FusionError, Launch, Overlap, Reduction, Slot,
};

use crate::failure::Failure;

/// The variables by which launchers tell a process its rank.
const LAUNCHERS: [&str; 4] = ["RDMA_COLLECTIVE_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"];

/// All ranks, as one of them sees them.
#[derive(Debug)]
pub(crate) struct Group {
    communicator: Communicator,
    /// The connections to the other ranks run on it.
    _runtime: Runtime,
}

/// The gradients of a network. Their means over all ranks are computed in buckets, while the rank computes further gradients.
#[derive(Debug)]
pub(crate) struct Gradients {
    fusion: Fusion<f32>,
    /// The names of the gradients, by their index.
    names: Vec<String>,
    /// What was hidden in the steps that are reported, and their number.
    overlap: Overlap,
    steps: usize,
    /// Whether the next step is reported.
    reported: bool,
    rank: usize,
}

/// One step of the training.
#[derive(Debug)]
pub(crate) struct Step<'a> {
    step: tonic_rdma_collective::Step<'a, f32>,
    names: &'a [String],
    overlap: &'a mut Overlap,
    steps: &'a mut usize,
    reported: bool,
    rank: usize,
}

/// The means of one step.
#[derive(Debug)]
pub(crate) struct Means<'a> {
    means: tonic_rdma_collective::Means<'a, f32>,
    names: &'a [String],
}

/// Returns whether a launcher started this process as one of several ranks.
pub(crate) fn is_launched() -> Result<bool, Failure> {
    if LAUNCHERS.iter().all(|name| std::env::var_os(name).is_none()) {
        return Ok(false);
    }
    // An interactive shell of Slurm is the only task of its step.
    Ok(launch()?.size() > 1 || std::env::var_os("SLURM_PROCID").is_none())
}

fn launch() -> Result<Launch, Failure> {
    Launch::from_env().map_err(|error| Failure::run("can't learn the rank of this process").because(error))
}

impl Group {
    /// Meets the other ranks.
    pub(crate) fn connect() -> Result<Self, Failure> {
        let launch = launch()?;
        let (rank, size) = (launch.rank(), launch.size());
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .map_err(|error| Failure::run("can't make a runtime").because(error))?;
        let communicator =
            runtime.block_on(Communicator::builder().launch(launch).connect()).map_err(|error| {
                Failure::run(format!("rank {rank} of {size} can't meet the other ranks")).because(error)
            })?;
        Ok(Self { communicator, _runtime: runtime })
    }

    pub(crate) fn rank(&self) -> usize {
        self.communicator.rank()
    }

    pub(crate) fn size(&self) -> usize {
        self.communicator.size()
    }

    /// Waits until all ranks are here.
    pub(crate) fn barrier(&self) -> Result<(), Failure> {
        self.ended("the barrier", self.communicator.barrier().wait().map(drop))
    }

    /// Replaces the values by those of rank 0.
    pub(crate) fn broadcast(&self, values: &mut [f32]) -> Result<(), Failure> {
        self.ended("the broadcast of the weights", self.communicator.broadcast(values, 0).wait().map(drop))
    }

    /// Makes each value the sum of all ranks.
    pub(crate) fn sum(&self, values: &mut [f64]) -> Result<(), Failure> {
        self.ended("a sum", self.communicator.all_reduce(values, Reduction::Sum).wait().map(drop))
    }

    /// Makes each value the largest of all ranks.
    pub(crate) fn maximum(&self, values: &mut [f64]) -> Result<(), Failure> {
        self.ended("a maximum", self.communicator.all_reduce(values, Reduction::Max).wait().map(drop))
    }

    /// Returns the value of each rank.
    pub(crate) fn gather(&self, value: u64) -> Result<Vec<u64>, Failure> {
        let mut values = vec![0; self.size()];
        if let Some(own) = values.get_mut(self.rank()) {
            *own = value;
        }
        self.ended(
            "the comparison of all ranks",
            self.communicator.all_gather(values.as_mut_slice()).wait().map(drop),
        )?;
        Ok(values)
    }

    /// Returns the plans that the ranks agreed on.
    pub(crate) fn plans(&self) -> String {
        self.communicator.plans().to_string()
    }

    /// Makes the gradients of a network, numbered in the order of its backward pass.
    pub(crate) fn gradients(&self, number: usize) -> Result<Gradients, Failure> {
        let fusion = Fusion::builder(&self.communicator).build();
        Ok(Gradients {
            fusion: fusion.map_err(|error| failed(self.rank(), error))?,
            names: (0..number).map(|index| index.to_string()).collect(),
            overlap: Overlap::default(),
            steps: 0,
            reported: true,
            rank: self.rank(),
        })
    }

    /// Makes the failure of an operation.
    fn ended<E: Into<CollectiveError>>(&self, what: &str, result: Result<(), E>) -> Result<(), Failure> {
        result.map_err(|error| {
            Failure::run(format!("rank {}: {what} failed", self.rank())).because(error.into())
        })
    }
}

impl Gradients {
    /// Begins a step.
    pub(crate) fn begin(&mut self) -> Result<Step<'_>, Failure> {
        Ok(Step {
            step: self.fusion.step().map_err(|error| failed(self.rank, error))?,
            names: &self.names,
            overlap: &mut self.overlap,
            steps: &mut self.steps,
            reported: self.reported,
            rank: self.rank,
        })
    }

    /// Returns whether the ranks have chosen the size of the buckets. They try several in the first steps.
    pub(crate) fn is_settled(&self) -> bool {
        !self.fusion.bucket_size().measuring()
    }

    /// Sets whether the next steps are part of the report.
    pub(crate) fn set_reported(&mut self, reported: bool) {
        self.reported = reported;
    }

    /// Returns the size of the buckets, and what was hidden in all steps.
    pub(crate) fn report(&self) -> String {
        format!(
            "{}\nof {} steps, as rank {} saw them: {}",
            self.fusion.bucket_size(),
            self.steps,
            self.rank,
            self.overlap
        )
    }
}

impl<'a> Step<'a> {
    /// Gives a gradient away to be reduced.
    pub(crate) fn put(&mut self, index: usize, gradient: &[f32]) -> Result<(), Failure> {
        self.fill(index, gradient)?;
        self.ready(index, gradient.len())
    }

    /// Copies a gradient to its place, from where [`ready`](Self::ready) gives it away.
    pub(crate) fn fill(&mut self, index: usize, gradient: &[f32]) -> Result<(), Failure> {
        self.slot(index, gradient.len())?.copy_from_slice(gradient);
        Ok(())
    }

    /// Gives a gradient of `length` elements away to be reduced, from its place.
    pub(crate) fn ready(&mut self, index: usize, length: usize) -> Result<(), Failure> {
        let rank = self.rank;
        self.slot(index, length)?.ready().map_err(|error| failed(rank, error))
    }

    fn slot(&mut self, index: usize, length: usize) -> Result<Slot<'_, f32>, Failure> {
        let Some(name) = self.names.get(index) else {
            return Err(Failure::run(format!("there is no gradient {index}")));
        };
        self.step.slot(name, length).map_err(|error| failed(self.rank, error))
    }

    /// Waits for the means of all gradients.
    pub(crate) fn finish(self) -> Result<Means<'a>, Failure> {
        let means = self.step.finish().wait().map_err(|error| failed(self.rank, error))?;
        if self.reported {
            *self.overlap += means.overlap();
            *self.steps += 1;
        }
        Ok(Means { means, names: self.names })
    }
}

impl Means<'_> {
    /// Returns the number of gradients.
    pub(crate) fn len(&self) -> usize {
        self.names.len()
    }

    /// Returns the mean of a gradient over all ranks.
    pub(crate) fn mean(&self, index: usize) -> Result<&[f32], Failure> {
        let mean = self.names.get(index).and_then(|name| self.means.get(name));
        mean.ok_or_else(|| Failure::run(format!("there is no mean of gradient {index}")))
    }
}

fn failed(rank: usize, error: FusionError) -> Failure {
    Failure::run(format!("rank {rank}: the reduction of the gradients failed")).because(error)
}
