//! The communicator of one algorithm.

use tokio::runtime::Runtime;
use tonic_rdma::Config;
use tonic_rdma_collective::{Buffer, CollectiveError, Communicator, Launch, PlanChoice};
use tonic_rdma_commands::Failure;

use super::content::Value;
use crate::choices::{Algorithm, Reduction};

/// The largest message of a step of a fixed algorithm, in bytes.
const PIECE: usize = 256 << 10;

/// What operations moved, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Moved {
    /// Sent with messages, or pulled from other ranks.
    pub(crate) bytes: u64,
    /// Copied within this rank.
    pub(crate) copied: u64,
}

impl Moved {
    /// Adds what was moved.
    pub(crate) fn add(&mut self, more: Self) {
        self.bytes += more.bytes;
        self.copied += more.copied;
    }

    /// Returns what was moved since `earlier`.
    pub(crate) fn since(self, earlier: Self) -> Self {
        Self {
            bytes: self.bytes.saturating_sub(earlier.bytes),
            copied: self.copied.saturating_sub(earlier.copied),
        }
    }
}

/// The communicator of one algorithm.
#[derive(Debug)]
pub(crate) struct Group {
    communicator: Communicator,
    algorithm: Algorithm,
}

impl Group {
    /// Meets the other ranks.
    pub(crate) fn connect(runtime: &Runtime, launch: Launch, algorithm: Algorithm) -> Result<Self, Failure> {
        let rank = launch.rank();
        let mut builder = Communicator::builder().config(config()?).launch(launch);
        if let Some(fixed) = library_algorithm(algorithm) {
            builder = builder.plans(PlanChoice::Fixed { algorithm: fixed, piece_bytes: PIECE });
        }
        let communicator = runtime.block_on(builder.connect()).map_err(|error| {
            Failure::run(format!("rank {rank} can't meet the other ranks")).because(error)
        })?;
        Ok(Self { communicator, algorithm })
    }

    pub(crate) fn communicator(&self) -> &Communicator {
        &self.communicator
    }

    pub(crate) fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// Returns whether the tuner chooses.
    pub(crate) fn is_auto(&self) -> bool {
        self.algorithm == Algorithm::Auto
    }

    pub(crate) fn rank(&self) -> usize {
        self.communicator.rank()
    }

    pub(crate) fn size(&self) -> usize {
        self.communicator.size()
    }

    /// Returns the plans, as the communicator prints them.
    pub(crate) fn plans(&self) -> String {
        self.communicator.plans().to_string()
    }

    /// Allocates registered memory.
    pub(crate) fn allocate<T: Value>(&self, elements: usize) -> Result<Buffer<T>, Failure> {
        self.communicator.allocate::<T>(elements).map_err(|error| self.failure(error))
    }

    /// Waits until all ranks are here.
    pub(crate) fn barrier(&self) -> Result<(), Failure> {
        self.communicator.barrier().wait().map(drop).map_err(|failed| self.failure(failed.into()))
    }

    /// Makes each value the largest of all ranks.
    pub(crate) fn maximum(&self, values: &mut [f64]) -> Result<(), Failure> {
        self.combine(values, Reduction::Max)
    }

    /// Makes each value the sum of all ranks.
    pub(crate) fn sum(&self, values: &mut [f64]) -> Result<(), Failure> {
        self.combine(values, Reduction::Sum)
    }

    fn combine(&self, values: &mut [f64], reduction: Reduction) -> Result<(), Failure> {
        let operation = self.communicator.all_reduce(values, library_reduction(reduction));
        operation.wait().map(drop).map_err(|failed| self.failure(failed.into()))
    }

    /// Returns what the operations of this rank have moved.
    pub(crate) fn moved(&self) -> Moved {
        let statistics = self.communicator.statistics();
        Moved { bytes: statistics.inline_bytes + statistics.pulled_bytes, copied: statistics.copied_bytes }
    }

    /// Makes the failure of an operation.
    pub(crate) fn failure(&self, error: CollectiveError) -> Failure {
        Failure::run("an operation failed").because(error)
    }
}

/// Returns the settings of connections: the variables `RDMA_*` change them.
pub(crate) fn config() -> Result<Config, Failure> {
    Config::from_env().map_err(|error| Failure::usage(error.to_string()))
}

/// Returns the library's name of a reduction.
pub(crate) fn library_reduction(reduction: Reduction) -> tonic_rdma_collective::Reduction {
    match reduction {
        Reduction::Sum => tonic_rdma_collective::Reduction::Sum,
        Reduction::Mean => tonic_rdma_collective::Reduction::Mean,
        Reduction::Min => tonic_rdma_collective::Reduction::Min,
        Reduction::Max => tonic_rdma_collective::Reduction::Max,
    }
}

fn library_algorithm(algorithm: Algorithm) -> Option<tonic_rdma_collective::Algorithm> {
    match algorithm {
        Algorithm::Auto => None,
        Algorithm::OneShot => Some(tonic_rdma_collective::Algorithm::OneShot),
        Algorithm::HalvingDoubling => Some(tonic_rdma_collective::Algorithm::HalvingDoubling),
        Algorithm::Ring => Some(tonic_rdma_collective::Algorithm::Ring),
    }
}
