//! Fusion of many small tensors into buckets, and reduction of the first buckets while the caller still computes the others.
//!
//! ```text
//!   put c, b    ──► bucket 0 = [c b]  full ──► all_reduce under way ──┐
//!   compute a                                                         │ hidden
//!   put a       ──► bucket 1 = [a]    full ──► all_reduce under way ──┤
//!   finish      waits for both                                        ▼ means of a, b, c
//! ```
//!
//! The order of the gradients in the first step of rank 0 is the order on all ranks. In back-propagation, the last layer comes
//! first. Other ranks, and later steps, may have another order: a bucket starts when all of its gradients are there, and buckets
//! start in one order on all ranks, because operations must. This module moves no bytes itself and has no threads: a
//! [`Group`](steps::Group), in use a communicator, does.
//!
//! ```text
//!   mod, step   the public face            steps    a step over any group
//!   first       the first step's gradients, and what differs between ranks
//!   layout      places of gradients        flight   times of an operation
//!   overlap     what was hidden
//! ```

mod error;
mod first;
mod flight;
mod layout;
mod overlap;
mod ranks;
mod step;
mod steps;
#[cfg(test)]
mod tests;

use std::fmt;
use std::marker::PhantomData;

pub use self::error::{FusionError, Names};
pub use self::overlap::Overlap;
use self::ranks::Ranks;
pub use self::step::{Finish, Means, Slot, Step};
use self::steps::Steps;
use crate::communicator::Communicator;
use crate::reduce::{Kernel, Number, Reduction};

/// The size of a bucket in bytes, unless the program sets one.
const BUCKET: usize = 4 << 20;

/// Means of gradients over all ranks, of many gradients at once, while the caller still computes.
///
/// Small tensors share a bucket, so that there are few operations. A bucket is reduced as soon as it is full, so its communication
/// runs while the caller computes the gradients of the next bucket.
///
/// All ranks carry out the same steps. They must not start other operations on this communicator between the begin of a step and
/// its end, because all ranks must start the same operations in the same order. A second fusion needs a communicator of its own.
/// The deadline of an operation runs from its start, so it must allow for the time by which the computation of some ranks takes
/// longer than that of others. After a failure of a rank, build a new fusion over the communicator that
/// [`Communicator::shrink`] gives.
///
/// ```
/// use tonic_rdma_collective::{Communicator, Fusion, Launch};
///
/// # #[tokio::main]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let launch = Launch::new(0, 1, "127.0.0.1:0");
/// let communicator = Communicator::builder().launch(launch).connect().await?;
/// let mut fusion = Fusion::<f32>::builder(&communicator).build()?;
///
/// for _ in 0..3 {
///     let mut step = fusion.step()?;
///     // A gradient that is computed elsewhere is copied.
///     step.put("layer2/bias", &[0.5; 10])?;
///     // A gradient that is computed in its bucket is not.
///     let mut weights = step.slot("layer1/weights", 1_000)?;
///     weights.fill(0.25);
///     weights.ready()?;
///     let means = step.finish().await?;
///     assert_eq!(means.get("layer2/bias"), Some(&[0.5; 10][..]));
///     println!("{}", means.overlap());
/// }
/// # Ok(())
/// # }
/// ```
pub struct Fusion<T: Number> {
    steps: Steps<T, Ranks>,
}

/// The settings of a [`Fusion`].
///
/// ```
/// # use tonic_rdma_collective::{Communicator, Fusion, FusionError};
/// # fn example(communicator: &Communicator) -> Result<(), FusionError> {
/// let fusion = Fusion::<f32>::builder(communicator).bucket_bytes(4 << 20).build()?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "`build` makes the fusion"]
pub struct FusionBuilder<'c, T: Number> {
    communicator: &'c Communicator,
    bucket_bytes: usize,
    elements: PhantomData<fn() -> T>,
}

impl<T: Number> Fusion<T> {
    /// Returns a builder with the default settings.
    pub fn builder(communicator: &Communicator) -> FusionBuilder<'_, T> {
        FusionBuilder { communicator, bucket_bytes: BUCKET, elements: PhantomData }
    }

    /// Begins a step. A step before this one that started no bucket is forgotten.
    ///
    /// # Errors
    /// [`Unfinished`](FusionError::Unfinished): an earlier step started a bucket and was not driven to its end.
    pub fn step(&mut self) -> Result<Step<'_, T>, FusionError> {
        self.steps.begin()?;
        Ok(Step { fusion: self })
    }

    /// Returns the size of a bucket in bytes: that of rank 0, once the first step has ended.
    pub fn bucket_bytes(&self) -> usize {
        self.steps.bucket_bytes()
    }

    /// Returns how much of the communication of all steps so far was hidden, the first step included.
    pub fn overlap(&self) -> Overlap {
        self.steps.total()
    }
}

impl<T: Number> FusionBuilder<'_, T> {
    /// Sets the size of a bucket, in bytes. A gradient that is longer has a bucket of its own. Rank 0's setting counts on all
    /// ranks. The default is 4 MiB: small buckets start early, and large ones have fewer operations.
    pub fn bucket_bytes(mut self, bytes: usize) -> Self {
        self.bucket_bytes = bytes;
        self
    }

    /// Builds the fusion. This starts no operation.
    ///
    /// # Errors
    /// [`Collective`](FusionError::Collective): elements of this type have no mean.
    pub fn build(self) -> Result<Fusion<T>, FusionError> {
        Kernel::of(T::DTYPE, Reduction::Mean)?;
        Ok(Fusion { steps: Steps::new(Ranks(self.communicator.clone()), self.bucket_bytes) })
    }
}

impl<T: Number> fmt::Debug for Fusion<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fusion").field("bucket_bytes", &self.bucket_bytes()).finish_non_exhaustive()
    }
}
