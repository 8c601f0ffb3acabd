//! The group of all ranks.

use tokio::runtime::{Builder, Runtime};
use tonic_rdma_collective::{CollectiveError, Communicator, Launch, Reduction};

use crate::failure::{Context as _, Failure};

/// The variables by which launchers tell a process its rank.
const LAUNCHERS: [&str; 4] = ["RDMA_COLLECTIVE_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"];

/// All ranks, as one of them sees them.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) communicator: Communicator,
    /// The connections to the other ranks run on it.
    _runtime: Runtime,
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
    Launch::from_env().context("can't learn the rank of this process")
}

impl Group {
    /// Meets the other ranks.
    pub(crate) fn connect() -> Result<Self, Failure> {
        let launch = launch()?;
        let (rank, size) = (launch.rank(), launch.size());
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.context("can't make a runtime")?;
        let communicator = runtime.block_on(Communicator::builder().launch(launch).connect());
        let communicator =
            communicator.context(format!("rank {rank} of {size} can't meet the other ranks"))?;
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
        self.ended("the barrier", self.communicator.barrier().wait())
    }

    /// Replaces the values by those of rank 0.
    pub(crate) fn broadcast(&self, values: &mut [f32]) -> Result<(), Failure> {
        self.ended("the broadcast of the weights", self.communicator.broadcast(values, 0).wait())
    }

    /// Makes each value the sum of all ranks, or the largest.
    pub(crate) fn reduce(&self, values: &mut [f64], reduction: Reduction) -> Result<(), Failure> {
        self.ended("the reduction of results", self.communicator.all_reduce(values, reduction).wait())
    }

    /// Returns the value of each rank.
    pub(crate) fn gather(&self, value: u64) -> Result<Vec<u64>, Failure> {
        let mut values: Vec<u64> =
            (0..self.size()).map(|rank| if rank == self.rank() { value } else { 0 }).collect();
        let gathered = self.communicator.all_gather(values.as_mut_slice()).wait().map(drop);
        self.ended("the comparison of all ranks", gathered)?;
        Ok(values)
    }

    /// Names this rank in the failure of an operation.
    fn ended<T, E: Into<CollectiveError>>(&self, what: &str, result: Result<T, E>) -> Result<(), Failure> {
        result.map(drop).map_err(Into::into).context(format!("rank {}: {what} failed", self.rank()))
    }
}
