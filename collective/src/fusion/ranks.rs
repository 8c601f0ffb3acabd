//! Fusion over a communicator.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use super::steps::Group;
use crate::communicator::{Communicator, Operation};
use crate::error::CollectiveError;
use crate::memory::Buffer;
use crate::reduce::{Number, Reduction};

/// The longest list of gradients that a rank takes from rank 0, in bytes.
const LONGEST: u64 = 64 << 20;

#[derive(Debug)]
pub(super) struct Ranks(pub(super) Communicator);

/// A mean under way.
pub(super) struct Flight<T: Number>(Operation<Buffer<T>>);

impl<T: Number> Future for Flight<T> {
    type Output = Result<Buffer<T>, CollectiveError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.0).poll(context).map_err(CollectiveError::from)
    }
}

impl<T: Number> Group<T> for Ranks {
    type Memory = Buffer<T>;
    type Flight = Flight<T>;

    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn allocate(&self, elements: usize) -> Result<Buffer<T>, CollectiveError> {
        self.0.allocate(elements)
    }

    fn mean(&self, memory: Buffer<T>) -> Self::Flight {
        Flight(self.0.all_reduce(memory, Reduction::Mean).start())
    }

    async fn share(&self, bytes: Vec<u8>) -> Result<Vec<u8>, CollectiveError> {
        let mut length = self.0.allocate::<u64>(1)?;
        length[0] = bytes.len() as u64;
        let length = self.0.broadcast(length, 0).await?[0];
        if length > LONGEST {
            return Err(CollectiveError::Argument(Arc::from(format!(
                "rank 0 shares {length} bytes about the gradients; {LONGEST} is the most"
            ))));
        }
        let mut shared = self.0.allocate::<u8>(length as usize)?;
        if shared.len() == bytes.len() {
            shared.copy_from_slice(&bytes);
        }
        Ok(self.0.broadcast(shared, 0).await?.to_vec())
    }

    async fn gather(&self, number: u64) -> Result<Vec<u64>, CollectiveError> {
        let mut numbers = self.0.allocate::<u64>(self.0.size())?;
        numbers[self.0.rank()] = number;
        Ok(self.0.all_gather(numbers).await?.to_vec())
    }
}
