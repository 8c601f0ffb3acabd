//! What fusion needs of a communicator.

use std::future::Future;
use std::ops::DerefMut;

use crate::error::CollectiveError;
use crate::reduce::Number;

/// The operations that fusion runs over: of a communicator, and of a simulation in tests.
pub(super) trait Group<T: Number>: Send + Sync {
    /// Memory that is reduced without a copy.
    type Memory: DerefMut<Target = [T]> + Send;
    type Flight: Future<Output = Result<Self::Memory, CollectiveError>> + Send + Unpin;

    fn rank(&self) -> usize;

    /// Returns memory of zeros.
    fn allocate(&self, elements: usize) -> Result<Self::Memory, CollectiveError>;

    /// Starts the mean of all ranks, in place.
    fn mean(&self, memory: Self::Memory) -> Self::Flight;

    /// Returns rank 0's bytes, on all ranks.
    fn share(&self, bytes: Vec<u8>) -> impl Future<Output = Result<Vec<u8>, CollectiveError>> + Send;

    /// Returns the number of each rank, on all ranks.
    fn gather(&self, number: u64) -> impl Future<Output = Result<Vec<u64>, CollectiveError>> + Send;
}
