//! One step of a fusion: the gradients go in, the means come out.

use std::fmt;
use std::future::{Future, IntoFuture};
use std::ops::{Deref, DerefMut};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;

use super::Fusion;
use super::error::FusionError;
use super::overlap::Overlap;
use crate::reduce::Number;

/// One step: takes each gradient once, in any order, and starts each bucket as soon as it is full and the buckets before it have
/// started. Made by [`Fusion::step`].
///
/// A step that has started a bucket must be driven to the end of [`finish`](Self::finish); otherwise the next one fails with
/// [`FusionError::Unfinished`].
pub struct Step<'f, T: Number> {
    pub(super) fusion: &'f mut Fusion<T>,
}

impl<'f, T: Number> Step<'f, T> {
    /// Takes a gradient, with one copy into its bucket.
    ///
    /// # Errors
    /// - [`Unknown`](FusionError::Unknown), [`Length`](FusionError::Length): the first step had no such gradient.
    /// - [`Twice`](FusionError::Twice): this step has it already.
    /// - [`Collective`](FusionError::Collective): a bucket could not start.
    pub fn put(&mut self, name: &str, gradient: &[T]) -> Result<(), FusionError> {
        let (index, slot) = self.fusion.steps.slot(name, gradient.len())?;
        slot.copy_from_slice(gradient);
        self.fusion.steps.ready(index)
    }

    /// Returns the memory of a gradient of `length` elements, to be computed there, so that there is no copy. It holds values of
    /// an earlier step. The gradient counts as given with [`Slot::ready`].
    ///
    /// # Errors
    /// As [`put`](Self::put).
    pub fn slot(&mut self, name: &str, length: usize) -> Result<Slot<'_, T>, FusionError> {
        let (index, _) = self.fusion.steps.slot(name, length)?;
        Ok(Slot { fusion: &mut *self.fusion, index })
    }

    /// Ends the step: `.await` or [`wait`](Finish::wait) waits until all buckets are reduced, and gives the means.
    ///
    /// In the first step, the ranks also agree on the gradients, their order and the size of the buckets. All communication of the
    /// first step is here.
    pub fn finish(self) -> Finish<'f, T> {
        Finish { fusion: self.fusion }
    }
}

impl<T: Number> fmt::Debug for Step<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Step").finish_non_exhaustive()
    }
}

/// The memory of one gradient, from [`Step::slot`]. Dereferences to the elements.
pub struct Slot<'s, T: Number> {
    fusion: &'s mut Fusion<T>,
    index: usize,
}

impl<T: Number> Slot<'_, T> {
    /// Takes the gradient as computed.
    ///
    /// # Errors
    /// [`Collective`](FusionError::Collective): a bucket could not start.
    pub fn ready(self) -> Result<(), FusionError> {
        self.fusion.steps.ready(self.index)
    }
}

impl<T: Number> Deref for Slot<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        self.fusion.steps.elements(self.index)
    }
}

impl<T: Number> DerefMut for Slot<'_, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        self.fusion.steps.elements_mut(self.index)
    }
}

impl<T: Number> fmt::Debug for Slot<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slot").field("length", &self.len()).finish_non_exhaustive()
    }
}

/// The end of a step, from [`Step::finish`]. It must be driven to its end, by `.await` or by [`wait`](Self::wait).
#[must_use = "the step ends by `.await` or `wait`"]
pub struct Finish<'f, T: Number> {
    fusion: &'f mut Fusion<T>,
}

impl<'f, T: Number> Finish<'f, T> {
    /// Waits on this thread until all buckets are reduced. Not for threads of an asynchronous runtime, which `.await`.
    ///
    /// # Errors
    /// As `.await`:
    /// - [`Missing`](FusionError::Missing): a gradient of the first step was not given. The other ranks wait for it until the
    ///   deadline of their operation.
    /// - [`Ranks`](FusionError::Ranks): the gradients of the first step differ between the ranks.
    /// - [`Collective`](FusionError::Collective): an operation failed.
    pub fn wait(self) -> Result<Means<'f, T>, FusionError> {
        block_on(self.fusion.steps.finish())?;
        Ok(Means { fusion: self.fusion })
    }
}

impl<'f, T: Number> IntoFuture for Finish<'f, T> {
    type Output = Result<Means<'f, T>, FusionError>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send + 'f>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move {
            self.fusion.steps.finish().await?;
            Ok(Means { fusion: self.fusion })
        })
    }
}

impl<T: Number> fmt::Debug for Finish<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Finish").finish_non_exhaustive()
    }
}

/// The means of all ranks. They lie in the buckets until the next step.
pub struct Means<'f, T: Number> {
    fusion: &'f Fusion<T>,
}

impl<'f, T: Number> Means<'f, T> {
    /// Returns the mean of a gradient, or `None` if there is no gradient of this name.
    pub fn get(&self, name: &str) -> Option<&'f [T]> {
        self.fusion.steps.mean(name)
    }

    /// Returns all names and means, in the order of the buckets.
    pub fn iter(&self) -> impl Iterator<Item = (&'f str, &'f [T])> + use<'f, T> {
        self.fusion.steps.means()
    }

    /// Returns how much of this step's communication was hidden.
    pub fn overlap(&self) -> Overlap {
        self.fusion.steps.latest()
    }
}

impl<T: Number> fmt::Debug for Means<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Means").field("overlap", &self.overlap()).finish_non_exhaustive()
    }
}

/// Drives a future to its end on this thread, which sleeps while there is nothing to do.
pub(super) fn block_on<F: Future>(future: F) -> F::Output {
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
