//! Fusion of many small tensors into buckets, and reduction of the first buckets while the caller still
//! computes the others.
//!
//! ```text
//!   put c, b    ──► bucket 0 = [c b]  full ──► all_reduce under way ──┐
//!   compute a                                                         │ hidden
//!   put a       ──► bucket 1 = [a]    full ──► all_reduce under way ──┤
//!   finish      waits for both                                        ▼ means of a, b, c
//! ```
//!
//! The order of the gradients in the first step of rank 0 is the order on all ranks. In back-propagation, the
//! last layer comes first. Other ranks, and later steps, may have another order: a bucket starts when all of
//! its gradients are there, and buckets start in one order on all ranks, because operations must. This module
//! moves no bytes itself and has no threads: the communicator does.
//!
//! ```text
//!   mod      the public face               steps    a step
//!   layout   where gradients lie           overlap  times of operations, and what was hidden
//! ```

mod layout;
mod overlap;
mod steps;
#[cfg(test)]
mod tests;

use std::fmt;
use std::future::{Future, IntoFuture};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::Instant;

use self::layout::Given;
use self::steps::Buckets;
use crate::communicator::Communicator;
use crate::error::{CollectiveError, CollectiveErrorKind, argument};
use crate::reduce::{Kernel, Number, Reduction};

pub use self::overlap::Overlap;

/// The size of a bucket in bytes, unless the program sets one.
const BUCKET: usize = 4 << 20;

/// Means of gradients over all ranks, of many gradients at once, while the caller still computes.
///
/// Small tensors share a bucket, so that there are few operations. A bucket is reduced as soon as it is full,
/// so its communication runs while the caller computes the gradients of the next bucket.
///
/// All ranks carry out the same steps. They must not start other operations on this communicator between the
/// start of a step and its end, because all ranks must start the same operations in the same order. A second
/// fusion needs a communicator of its own. The deadline of an operation counts from its start, so it must
/// allow for ranks whose computation takes longer. After a failure of a rank, build a new fusion over the
/// communicator that [`Communicator::shrink`] gives.
///
/// ```
/// use tonic_rdma_collective::{Communicator, Fusion, Launch};
///
/// # #[tokio::main]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let launch = Launch::new(0, 1, "127.0.0.1:0");
/// let communicator = Communicator::connect(launch).await?;
/// let mut fusion = Fusion::<f32>::new(&communicator)?;
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
    communicator: Communicator,
    /// The size of a bucket. Rank 0's counts, and is here once the first step has agreed on it.
    bucket_bytes: usize,
    buckets: Buckets<T>,
    /// Whether the ranks have agreed on the buckets. Until then, no bucket starts.
    agreed: bool,
    /// The order of the gradients of the first step.
    order: Vec<usize>,
    begun: Instant,
    /// Whether this step has started an operation.
    committed: bool,
    total: Overlap,
    latest: Overlap,
}

/// The settings of a [`Fusion`].
///
/// ```
/// # use tonic_rdma_collective::{CollectiveError, Communicator, Fusion};
/// # fn example(communicator: &Communicator) -> Result<(), CollectiveError> {
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
    /// Makes a fusion with the default settings over `communicator`. This starts no operation.
    ///
    /// ```
    /// # use tonic_rdma_collective::{CollectiveError, Communicator, Fusion};
    /// # fn example(communicator: &Communicator) -> Result<(), CollectiveError> {
    /// let fusion: Fusion<f32> = Fusion::new(communicator)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Those of [`FusionBuilder::build`].
    pub fn new(communicator: &Communicator) -> Result<Self, CollectiveError> {
        Self::builder(communicator).build()
    }

    /// Returns a builder with the default settings.
    pub fn builder(communicator: &Communicator) -> FusionBuilder<'_, T> {
        FusionBuilder { communicator, bucket_bytes: BUCKET, elements: PhantomData }
    }

    /// Begins a step. A step before this one that started no bucket is forgotten.
    ///
    /// # Errors
    /// [`Revoked`](CollectiveErrorKind::Revoked): an earlier step started a bucket and was not driven to its
    /// end.
    pub fn step(&mut self) -> Result<Step<'_, T>, CollectiveError> {
        if self.committed {
            return Err(unfinished());
        }
        match self.agreed {
            true => self.buckets.given = Given::new(&self.buckets.layout),
            false => (self.buckets, self.order) = (Buckets::empty(), Vec::new()),
        }
        self.begun = Instant::now();
        Ok(Step { fusion: self })
    }

    /// Returns the size of a bucket in bytes: that of rank 0, once the first step has ended.
    pub fn bucket_bytes(&self) -> usize {
        self.bucket_bytes
    }

    /// Returns how much of the communication of all steps so far was hidden, the first step included.
    pub fn overlap(&self) -> Overlap {
        self.total
    }
}

impl<T: Number> FusionBuilder<'_, T> {
    /// Sets the size of a bucket, in bytes. A gradient that is longer has a bucket of its own. Rank 0's
    /// setting counts on all ranks. The default is 4 MiB: small buckets start early, and large ones have
    /// fewer operations.
    pub fn bucket_bytes(mut self, bytes: usize) -> Self {
        self.bucket_bytes = bytes;
        self
    }

    /// Builds the fusion. This starts no operation.
    ///
    /// # Errors
    /// [`InvalidArgument`](CollectiveErrorKind::InvalidArgument): elements of this type have no mean.
    pub fn build(self) -> Result<Fusion<T>, CollectiveError> {
        Kernel::of(T::DTYPE, Reduction::Mean)?;
        Ok(Fusion {
            communicator: self.communicator.clone(),
            bucket_bytes: self.bucket_bytes,
            buckets: Buckets::empty(),
            agreed: false,
            order: Vec::new(),
            begun: Instant::now(),
            committed: false,
            total: Overlap::default(),
            latest: Overlap::default(),
        })
    }
}

impl<T: Number> fmt::Debug for Fusion<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fusion").field("bucket_bytes", &self.bucket_bytes).finish_non_exhaustive()
    }
}

/// One step: takes each gradient once, in any order, and starts each bucket as soon as it is full and the
/// buckets before it have started. Made by [`Fusion::step`].
///
/// A step that has started a bucket must be driven to the end of [`finish`](Self::finish); otherwise the next
/// one fails with [`Revoked`](CollectiveErrorKind::Revoked).
#[derive(Debug)]
pub struct Step<'f, T: Number> {
    fusion: &'f mut Fusion<T>,
}

impl<'f, T: Number> Step<'f, T> {
    /// Takes a gradient, with one copy into its bucket.
    ///
    /// # Errors
    /// - [`InvalidArgument`](CollectiveErrorKind::InvalidArgument): the first step had no gradient of this
    ///   name or of this length, or this step has it already.
    /// - A bucket could not start.
    pub fn put(&mut self, name: &str, gradient: &[T]) -> Result<(), CollectiveError> {
        let (index, slot) = self.fusion.slot(name, gradient.len())?;
        slot.copy_from_slice(gradient);
        self.fusion.ready(index)
    }

    /// Returns the memory of a gradient of `length` elements, to be computed there, so that there is no copy.
    /// It holds values of an earlier step. The gradient counts as given with [`Slot::ready`].
    ///
    /// # Errors
    /// As [`put`](Self::put).
    pub fn slot(&mut self, name: &str, length: usize) -> Result<Slot<'_, T>, CollectiveError> {
        let (index, _) = self.fusion.slot(name, length)?;
        Ok(Slot { fusion: &mut *self.fusion, index })
    }

    /// Ends the step: `.await` or [`wait`](Finish::wait) waits until all buckets are reduced, and gives the
    /// means.
    ///
    /// In the first step, the ranks also agree on the gradients, their order and the size of the buckets. All
    /// communication of the first step is here.
    pub fn finish(self) -> Finish<'f, T> {
        Finish { fusion: self.fusion }
    }
}

/// The memory of one gradient, from [`Step::slot`]. Dereferences to the elements.
#[derive(Debug)]
pub struct Slot<'s, T: Number> {
    fusion: &'s mut Fusion<T>,
    index: usize,
}

impl<T: Number> Slot<'_, T> {
    /// Takes the gradient as computed.
    ///
    /// # Errors
    /// A bucket could not start.
    pub fn ready(self) -> Result<(), CollectiveError> {
        self.fusion.ready(self.index)
    }
}

impl<T: Number> Deref for Slot<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        self.fusion.buckets.elements(self.index).unwrap_or_default()
    }
}

impl<T: Number> DerefMut for Slot<'_, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        self.fusion.buckets.elements_mut(self.index).unwrap_or_default()
    }
}

/// The end of a step, from [`Step::finish`]. It must be driven to its end, by `.await` or by
/// [`wait`](Self::wait).
#[derive(Debug)]
#[must_use = "the step ends by `.await` or `wait`"]
pub struct Finish<'f, T: Number> {
    fusion: &'f mut Fusion<T>,
}

impl<'f, T: Number> Finish<'f, T> {
    /// Waits on this thread until all buckets are reduced. Not for threads of an asynchronous runtime, which
    /// `.await`.
    ///
    /// # Errors
    /// As `.await`:
    /// - [`InvalidArgument`](CollectiveErrorKind::InvalidArgument): a gradient of the first step was not
    ///   given. The other ranks wait for it until the deadline of their operation.
    /// - [`Mismatch`](CollectiveErrorKind::Mismatch): the gradients of the first step differ between the
    ///   ranks. All ranks get this error, and may begin the first step again.
    /// - An operation failed.
    pub fn wait(self) -> Result<Means<'f, T>, CollectiveError> {
        block_on(self.fusion.finish())?;
        Ok(Means { fusion: self.fusion })
    }
}

impl<'f, T: Number> IntoFuture for Finish<'f, T> {
    type Output = Result<Means<'f, T>, CollectiveError>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send + 'f>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move {
            self.fusion.finish().await?;
            Ok(Means { fusion: self.fusion })
        })
    }
}

/// The means of all ranks. They lie in the buckets until the next step.
#[derive(Debug)]
pub struct Means<'f, T: Number> {
    fusion: &'f Fusion<T>,
}

impl<'f, T: Number> Means<'f, T> {
    /// Returns the mean of a gradient, or `None` if there is no gradient of this name.
    pub fn get(&self, name: &str) -> Option<&'f [T]> {
        self.fusion.buckets.elements(self.fusion.buckets.layout.index(name)?)
    }

    /// Returns all names and means, in the order of the buckets.
    pub fn iter(&self) -> impl Iterator<Item = (&'f str, &'f [T])> + use<'f, T> {
        let Buckets { layout, .. } = &self.fusion.buckets;
        let gradients = layout.gradients.iter().enumerate();
        gradients
            .filter_map(|(index, gradient)| Some((&*gradient.name, self.fusion.buckets.elements(index)?)))
    }

    /// Returns how much of this step's communication was hidden.
    pub fn overlap(&self) -> Overlap {
        self.fusion.latest
    }
}

/// Drives a future to its end on this thread, which sleeps while there is nothing to do.
fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(output) => return output,
            Poll::Pending => std::thread::park(),
        }
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Fails if a gradient was not given, and names the first few of these.
fn complete<'a>(gradients: impl Iterator<Item = (&'a Arc<str>, &'a bool)>) -> Result<(), CollectiveError> {
    const SHOWN: usize = 5;
    let missing: Vec<String> =
        gradients.filter(|(_, given)| !**given).map(|(name, _)| format!("`{name}`")).collect();
    let shown = missing[..missing.len().min(SHOWN)].join(", ");
    let names = match (missing.len(), missing.len().saturating_sub(SHOWN)) {
        (0, _) => return Ok(()),
        (1, _) => format!("gradient {shown}"),
        (_, 0) => format!("gradients {shown}"),
        (_, more) => format!("gradients {shown} and {more} more"),
    };
    Err(argument(format!(
        "the step ends without {names}; give all gradients of the first step in every step"
    )))
}

/// Makes the error of a step after one that began to reduce and did not end.
fn unfinished() -> CollectiveError {
    CollectiveError::new(
        CollectiveErrorKind::Revoked,
        None,
        "an earlier step of this fusion began to reduce and did not end, so the ranks are out of step; end each step \
         by `finish`, and build a new fusion after an error",
    )
}
