//! The communicator of one algorithm.

use tokio::runtime::Runtime;
use tonic_rdma::Config;
use tonic_rdma_collective::{CollectiveError, Communicator, Launch, PlanChoice, Reduction};
use tonic_rdma_commands::Failure;

use crate::choices::Algorithm;

/// The largest message of a step of a fixed algorithm, in bytes.
const PIECE: usize = 256 << 10;

/// The communicator of one algorithm.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) communicator: Communicator,
    pub(crate) algorithm: Algorithm,
}

impl Group {
    /// Meets the other ranks. The variables `RDMA_*` have the settings of connections.
    pub(crate) fn connect(runtime: &Runtime, launch: Launch, algorithm: Algorithm) -> Result<Self, Failure> {
        let rank = launch.rank();
        let config = Config::from_env().map_err(|error| Failure::usage(error.to_string()))?;
        let mut builder = Communicator::builder().config(config).launch(launch);
        if let Some(algorithm) = algorithm.fixed() {
            builder = builder.plans(PlanChoice::Fixed { algorithm, piece_bytes: PIECE });
        }
        let communicator = runtime.block_on(builder.connect()).map_err(|error| {
            Failure::run(format!("rank {rank} can't meet the other ranks")).because(error)
        })?;
        Ok(Self { communicator, algorithm })
    }

    /// Waits until all ranks are here.
    pub(crate) fn barrier(&self) -> Result<(), Failure> {
        self.communicator.barrier().wait().map(drop).map_err(failed)
    }

    /// Makes each value that of all ranks.
    pub(crate) fn combine(&self, values: &mut [f64], reduction: Reduction) -> Result<(), Failure> {
        self.communicator.all_reduce(values, reduction).wait().map(drop).map_err(failed)
    }

    /// Returns the bytes that the operations of this rank have sent with messages or pulled from other ranks, and those that they have
    /// copied within this rank. Barriers move none.
    pub(crate) fn moved(&self) -> [u64; 2] {
        let statistics = self.communicator.statistics();
        [statistics.inline_bytes + statistics.pulled_bytes, statistics.copied_bytes]
    }
}

/// Makes the failure of an operation.
pub(crate) fn failed(error: impl Into<CollectiveError>) -> Failure {
    Failure::run("an operation failed").because(error.into())
}
