//! The group of all ranks.

use tokio::runtime::{Builder, Runtime};
use tonic_rdma_collective::{CollectiveError, Communicator, Launch, Reduction};
use tonic_rdma_commands::{Context as _, Failure};

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

    /// Makes each value the sum of all ranks.
    pub(crate) fn sum(&self, values: &mut [f64]) -> Result<(), Failure> {
        let summed = self.communicator.all_reduce(values, Reduction::Sum).wait();
        self.done("the sum of results", summed).map(drop)
    }

    /// Names this rank in the failure of an operation.
    pub(crate) fn done<T>(
        &self,
        what: &str,
        result: Result<T, impl Into<CollectiveError>>,
    ) -> Result<T, Failure> {
        result.map_err(Into::into).context(format!("rank {}: {what} failed", self.rank()))
    }
}
