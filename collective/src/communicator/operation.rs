//! An operation as its caller sees it, and its memory: buffers, memory of the caller's own, and slices.

use std::any::Any;
use std::fmt;
use std::future::Future;
use std::ops::{Deref, DerefMut};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use super::shared::{Backoff, EngineKind, Polling, SharedState};
use crate::engine::{CallerMemory, ForeignMemory, LentSlices, OperationId, Request, ShortResult};
use crate::error::{CollectiveError, argument};
use crate::memory::{Buffer, Memory};
use crate::reduce::Number;
use tonic_rdma_tensor::Dtype;

/// How often a start of few elements polls for the messages of the other ranks, which come at about the same
/// time where the ranks work step by step. That takes some microseconds.
const START_POLLS: u32 = 64;

/// An operation. It starts with the first poll, with [`start`](Self::start), or with [`wait`](Self::wait);
/// its place in the order of operations is that of its start.
///
/// Dropping an operation that has started does not end it. One on buffers or on [`Owned`] memory goes on. One
/// on slices can't, because its elements go back to their owner, so dropping it ends the group: all ranks get
/// an error that says so.
#[must_use = "an operation starts when it is awaited, or with `start` or `wait`"]
pub struct Operation<X: Operand> {
    shared: Arc<SharedState>,
    kind: EngineKind,
    request: Request,
    lengths: Lengths,
    operand: Option<X>,
    state: Phase,
    /// The outcome of an operation that has ended in `start`.
    outcome: Option<Outcome<X>>,
}

enum Phase {
    New,
    /// The arguments do not fit.
    Refused(CollectiveError),
    UnderWay(OperationId),
    Done,
}

/// An operation failed. Owned elements come back, with any content. The error of an operation on slices is
/// `Failed<()>`.
///
/// It is an error of its own beside [`CollectiveError`], because it gives the elements back.
pub struct Failed<X> {
    error: CollectiveError,
    operand: Option<X>,
}

impl<X> Failed<X> {
    /// Returns the error.
    pub fn error(&self) -> &CollectiveError {
        &self.error
    }

    /// Returns the error and the elements. An input out of place is as it was. The elements are missing if
    /// other ranks may still read their memory, and there was no memory for a copy.
    pub fn into_parts(self) -> (CollectiveError, Option<X>) {
        (self.error, self.operand)
    }
}

impl<X> fmt::Debug for Failed<X> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Failed").field("error", &self.error).finish_non_exhaustive()
    }
}

impl<X> fmt::Display for Failed<X> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.error, f)
    }
}

impl<X> std::error::Error for Failed<X> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}

impl<X> From<Failed<X>> for CollectiveError {
    fn from(failed: Failed<X>) -> Self {
        failed.error
    }
}

type Outcome<X> = Result<X, Failed<<X as sealed::Operand>::Kept>>;

impl<X: Operand> Operation<X> {
    pub(super) fn new(shared: &Arc<SharedState>, kind: EngineKind, request: Request, operand: X) -> Self {
        let lengths = operand.lengths();
        let shared = Arc::clone(shared);
        Self { shared, kind, request, lengths, operand: Some(operand), state: Phase::New, outcome: None }
    }

    pub(super) fn refused(mut self, error: Option<CollectiveError>) -> Self {
        if let Some(error) = error {
            self.state = Phase::Refused(error);
        }
        self
    }

    /// Sets the deadline of this operation, also of one that has started. It counts from the start; the
    /// default is that of the communicator.
    pub fn deadline(mut self, limit: Duration) -> Self {
        self.request.limit = limit;
        if let Phase::UnderWay(id) = self.state {
            self.shared.engine(self.kind).set_limit(id, limit);
        }
        self
    }

    /// Starts the operation, which then goes on while the caller does something else. An operation on slices
    /// goes on only while it is awaited.
    ///
    /// ```
    /// # use tonic_rdma_collective::{CollectiveError, Communicator, Launch, Reduction};
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), CollectiveError> {
    /// # let communicator = Communicator::connect(Launch::new(0, 1, "127.0.0.1:0")).await?;
    /// let buffer = communicator.allocate::<f32>(1 << 20)?;
    /// let operation = communicator.all_reduce(buffer, Reduction::Sum).start();
    /// // Compute something else, while the operation is under way.
    /// let buffer = operation.await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn start(mut self) -> Self {
        let mut polls = if self.shared.crowded { 0 } else { START_POLLS };
        self.outcome = self.begin(|| {
            polls = polls.saturating_sub(1);
            polls > 0
        });
        if let Phase::UnderWay(id) = self.state
            && !self.shared.engine(self.kind).has_sent(id)
        {
            // The progress thread carries it out: a caller that starts an operation has other work. It is not
            // woken for one that no other rank waits for any more, because most callers soon wait for its end.
            self.shared.wake_thread();
        }
        self
    }

    /// Waits for the end on this thread, and polls meanwhile. Not for a thread of an async runtime.
    ///
    /// ```
    /// # use tonic_rdma_collective::{CollectiveError, Communicator, Launch, Reduction};
    /// # fn main() -> Result<(), CollectiveError> {
    /// # let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    /// # let launch = Launch::new(0, 1, "127.0.0.1:0");
    /// # let communicator = runtime.block_on(Communicator::builder().launch(launch).connect())?;
    /// let mut loss = [0.25];
    /// communicator.all_reduce(&mut loss[..], Reduction::Mean).wait()?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// See [`CollectiveError`].
    #[inline]
    pub fn wait(mut self) -> Result<X, Failed<X::Kept>> {
        loop {
            if let Some(outcome) = self.wait_until(None) {
                return outcome;
            }
        }
    }

    /// Waits as [`wait`](Self::wait) does, for about `limit`. Returns `None` if the operation is then still
    /// under way: it goes on, and can be waited for again.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tonic_rdma_collective::{CollectiveError, Communicator, Launch};
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), CollectiveError> {
    /// # let communicator = Communicator::connect(Launch::new(0, 1, "127.0.0.1:0")).await?;
    /// let mut operation = communicator.barrier();
    /// while operation.wait_timeout(Duration::from_millis(100)).transpose()?.is_none() {
    ///     println!("not all ranks have come yet");
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn wait_timeout(&mut self, limit: Duration) -> Option<Result<X, Failed<X::Kept>>> {
        self.wait_until(Instant::now().checked_add(limit))
    }

    #[inline]
    fn wait_until(&mut self, until: Option<Instant>) -> Option<Outcome<X>> {
        let shared = Arc::clone(&self.shared);
        let mut backoff = Backoff::new(&shared.paces[1], shared.crowded);
        if let Some(outcome) = self.begin(|| backoff.spins()) {
            backoff.moved();
            return Some(outcome);
        }
        let polling = Polling::new(&shared, self.kind);
        let mut now = None;
        loop {
            if let Some(outcome) = self.poll_once(now, &mut backoff) {
                drop(polling);
                return Some(outcome);
            }
            now = backoff.wait();
            if now.zip(until).is_some_and(|(now, until)| now >= until) {
                return None;
            }
        }
    }

    /// Starts the operation, if it has not started, and polls the links while `spins` is true. Returns the
    /// outcome if it has ended already.
    #[inline]
    fn begin(&mut self, spins: impl FnMut() -> bool) -> Option<Outcome<X>> {
        match std::mem::replace(&mut self.state, Phase::Done) {
            Phase::New => {}
            Phase::Refused(error) => {
                return Some(Err(failed(error, self.operand.take())));
            }
            other => {
                self.state = other;
                return self.outcome.take();
            }
        }
        let mut engine = self.shared.engine(self.kind);
        if self.kind == EngineKind::Group
            && let Some(operand) = &mut self.operand
        {
            let lent = operand.lend();
            match engine.short(&self.request, lent.input, lent.out, spins) {
                Some(ShortResult::Done) => return self.operand.take().map(Ok),
                Some(ShortResult::UnderWay(id)) => {
                    let operand = self.operand.take()?;
                    match operand.into_memory(self.lengths) {
                        Ok(memory) => engine.adopt(id, memory),
                        Err(borrowed) => self.operand = Some(borrowed),
                    }
                    self.state = Phase::UnderWay(id);
                    return None;
                }
                None => {}
            }
        }
        let memory = self.operand.take()?.into_memory(self.lengths).unwrap_or_else(|borrowed| {
            self.operand = Some(borrowed);
            CallerMemory::Borrowed
        });
        match engine.start(&self.request, memory) {
            Ok(id) => self.state = Phase::UnderWay(id),
            Err((error, memory)) => {
                drop(engine);
                self.give_back(memory);
                self.state = Phase::Refused(error);
            }
        }
        None
    }

    /// Polls the links once.
    fn poll_once(&mut self, now: Option<Instant>, backoff: &mut Backoff<'_>) -> Option<Outcome<X>> {
        let id = match &self.state {
            Phase::UnderWay(id) => *id,
            Phase::Refused(error) => {
                let error = error.clone();
                self.state = Phase::Done;
                return Some(Err(failed(error, self.operand.take())));
            }
            Phase::New | Phase::Done => {
                let error = argument("this operation has returned its result already");
                return Some(Err(failed::<X>(error, None)));
            }
        };
        let lent = self.operand.as_mut().map(|operand| (id, operand.lend()));
        if self.shared.progress(self.kind, now, lent) {
            backoff.moved();
        }
        let (result, memory) = self.shared.engine(self.kind).take(id)?;
        // Another thread may have moved it.
        backoff.moved();
        self.state = Phase::Done;
        self.give_back(memory);
        Some(match (result, self.operand.take()) {
            (Ok(()), Some(operand)) => Ok(operand),
            (Ok(()), None) => Err(failed::<X>(argument("the memory of the operation is gone"), None)),
            (Err(error), operand) => Err(failed(error, operand)),
        })
    }

    fn give_back(&mut self, memory: CallerMemory<Memory>) {
        if !matches!(memory, CallerMemory::Borrowed) {
            self.operand = X::from_memory(memory, self.lengths);
        }
    }
}

fn failed<X: Operand>(error: CollectiveError, operand: Option<X>) -> Failed<X::Kept> {
    Failed { error, operand: operand.and_then(X::keep) }
}

impl<X: Operand + Unpin> Future for Operation<X> {
    type Output = Result<X, Failed<X::Kept>>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        // A later poll comes because something has happened.
        let fresh = matches!(this.state, Phase::New);
        let shared = Arc::clone(&this.shared);
        let mut backoff = Backoff::new(&shared.paces[0], shared.crowded);
        if let Some(outcome) = this.begin(|| backoff.spins()) {
            backoff.moved();
            return Poll::Ready(outcome);
        }
        loop {
            if let Some(outcome) = this.poll_once(None, &mut backoff) {
                return Poll::Ready(outcome);
            }
            // A long operation moves one chunk in a poll. The progress thread continues, so that this thread
            // gets to other tasks.
            if backoff.has_moved() || !fresh || !backoff.spins() {
                break;
            }
        }
        if let Phase::UnderWay(id) = this.state {
            this.shared.engine(this.kind).wake(id, context.waker());
        }
        // It may have ended before the waker was there.
        if let Some(outcome) = this.poll_once(None, &mut backoff) {
            return Poll::Ready(outcome);
        }
        this.shared.wake_thread();
        Poll::Pending
    }
}

impl<X: Operand> Drop for Operation<X> {
    fn drop(&mut self) {
        let Phase::UnderWay(id) = self.state else { return };
        let (failure, ended) = {
            let mut engine = self.shared.engine(self.kind);
            let before = engine.failure().is_some();
            let ended = engine.forget(id);
            (engine.failure().filter(|_| !before).cloned(), ended)
        };
        drop(ended);
        if let Some(failure) = failure {
            self.shared.report_failure(&failure);
        }
        self.shared.wake_thread();
    }
}

impl<X: Operand> fmt::Debug for Operation<X> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Operation").field("request", &self.request).finish_non_exhaustive()
    }
}

/// Elements that an operation takes and gives back.
///
/// | type | the result is in | copies at this rank |
/// |---|---|---|
/// | [`Buffer<T>`] | the same buffer | none |
/// | `(Buffer<T>, Buffer<T>)` | the second buffer; the first stays as it is | none |
/// | [`Owned<M>`](Owned), such as `Owned(vec)` | the same memory | one |
/// | `(Owned<M>, Owned<N>)` | the second memory; the first stays as it is | one |
/// | `&mut [T]` | the same slice | one |
/// | `(&[T], &mut [T])` | the second slice | one |
/// | `&[T]` | none: only [`send`](crate::Communicator::send) takes it | one |
///
/// A buffer of another communicator is copied as a slice is.
///
/// An operation on buffers or owned memory goes on also while nothing awaits it. An operation on slices needs
/// its future to be polled, or [`wait`](crate::Operation::wait): drive it to its end, because other ranks wait
/// for it.
pub trait Operand: sealed::Operand {}

impl<X: sealed::Operand> Operand for X {}

/// Lengths in elements. Without an input, the operand is in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lengths {
    pub(crate) input: Option<usize>,
    pub(crate) out: usize,
}

pub(crate) mod sealed {
    use super::{CallerMemory, Dtype, Lengths, LentSlices, Memory, Number};

    /// What the operations need of an operand. The default methods are those of borrowed elements.
    #[allow(private_interfaces, reason = "the trait can't be named outside this crate")]
    #[expect(unnameable_types, reason = "so only this crate implements it")]
    pub trait Operand: Sized {
        type Element: Number;

        /// What an error gives back: owned elements. Slices were lent only.
        type Kept: Unpin;

        /// Returns what an error gives back.
        fn keep(self) -> Option<Self::Kept> {
            None
        }

        /// Returns the type of the elements.
        fn dtype(&self) -> Dtype {
            <Self::Element as tonic_rdma_tensor::Element>::DTYPE
        }

        fn lengths(&self) -> Lengths;

        /// Returns the bytes.
        fn lend(&mut self) -> LentSlices<'_>;

        /// Returns the memory of an owned operand, or the operand itself if it is borrowed.
        fn into_memory(self, _: Lengths) -> Result<CallerMemory<Memory>, Self> {
            Err(self)
        }

        /// Puts an owned operand together again; `None` if its memory did not come back.
        fn from_memory(_: CallerMemory<Memory>, _: Lengths) -> Option<Self> {
            None
        }
    }
}

#[allow(private_interfaces, reason = "the trait can't be named outside this crate")]
impl<T: Number> sealed::Operand for Buffer<T> {
    type Element = T;
    type Kept = Self;

    fn keep(self) -> Option<Self> {
        Some(self)
    }

    fn lengths(&self) -> Lengths {
        Lengths { input: None, out: self.len() }
    }

    fn lend(&mut self) -> LentSlices<'_> {
        LentSlices { input: None, out: bytemuck::cast_slice_mut(&mut self[..]) }
    }

    fn into_memory(self, _: Lengths) -> Result<CallerMemory<Memory>, Self> {
        Ok(CallerMemory::Owned { input: None, out: Some(self.memory) })
    }

    fn from_memory(memory: CallerMemory<Memory>, lengths: Lengths) -> Option<Self> {
        let CallerMemory::Owned { out, .. } = memory else { return None };
        Some(Self::of(out?, lengths.out))
    }
}

#[allow(private_interfaces, reason = "the trait can't be named outside this crate")]
impl<T: Number> sealed::Operand for (Buffer<T>, Buffer<T>) {
    type Element = T;
    type Kept = Self;

    fn keep(self) -> Option<Self> {
        Some(self)
    }

    fn lengths(&self) -> Lengths {
        Lengths { input: Some(self.0.len()), out: self.1.len() }
    }

    fn lend(&mut self) -> LentSlices<'_> {
        LentSlices {
            input: Some(bytemuck::cast_slice(&self.0[..])),
            out: bytemuck::cast_slice_mut(&mut self.1[..]),
        }
    }

    fn into_memory(self, _: Lengths) -> Result<CallerMemory<Memory>, Self> {
        Ok(CallerMemory::Owned { input: Some(self.0.memory), out: Some(self.1.memory) })
    }

    fn from_memory(memory: CallerMemory<Memory>, lengths: Lengths) -> Option<Self> {
        let CallerMemory::Owned { input, out } = memory else { return None };
        Some((Buffer::of(input?, lengths.input?), Buffer::of(out?, lengths.out)))
    }
}

/// Elements in memory of the caller's own: `Owned(memory)` with a `Vec<T>`, a `Box<[T]>`, a mapped file, an
/// array of another language, or whatever else is a `&mut [T]`.
///
/// The memory moves into the operation, which goes on in the background after
/// [`start`](crate::Operation::start), as with a [`Buffer`]. It comes back with the result, or with the error.
/// It is not registered, so its elements are copied once, as those of a slice are.
///
/// ```
/// # use tonic_rdma_collective::{CollectiveError, Communicator, Launch, Owned, Reduction};
/// # #[tokio::main]
/// # async fn main() -> Result<(), CollectiveError> {
/// # let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
/// # let address = &*format!("127.0.0.1:{port}");
/// # let rank = async |rank| {
/// # let communicator = Communicator::connect(Launch::new(rank, 2, address)).await?;
/// let operation = communicator.all_reduce(Owned(vec![0.5_f32; 1000]), Reduction::Sum).start();
/// // Compute something else, while the operation is under way.
/// let Owned(sums) = operation.await?;
/// assert_eq!(sums, [1.0; 1000]);
///
/// // Out of place. The input may be memory that can only be read.
/// let gradients: std::sync::Arc<[f32]> = vec![1.0; 1000].into();
/// let pair = (Owned(gradients), Owned(sums));
/// let (Owned(gradients), Owned(sums)) = communicator.all_reduce(pair, Reduction::Sum).await?;
/// assert_eq!((gradients[999], sums[999]), (1.0, 2.0));
/// # communicator.barrier().await?;
/// # Ok::<_, CollectiveError>(())
/// # };
/// # tokio::try_join!(rank(0), rank(1))?;
/// # Ok(())
/// # }
/// ```
///
/// The operation asks for the slice again and again, from any thread. An operation whose memory has another
/// length then fails, and so does the group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Owned<M>(pub M);

// An operation never pins the memory.
impl<M> Unpin for Owned<M> {}

/// An operand that the engine has until the operation ends.
pub(super) struct Foreign<X> {
    operand: X,
    lengths: Lengths,
    is_lent: bool,
}

impl<X: sealed::Operand + Send + 'static> ForeignMemory for Foreign<X> {
    fn lend(&mut self) -> Option<LentSlices<'_>> {
        let size = self.operand.dtype().size()?;
        // A panic of the memory's owner must not end the thread that carries on all operations.
        let operand = AssertUnwindSafe(&mut self.operand);
        let lend = move || {
            let operand = operand;
            operand.0.lend()
        };
        let lent = catch_unwind(lend).ok()?;
        let bytes = |elements: usize| elements.checked_mul(size);
        let fits = bytes(self.lengths.out) == Some(lent.out.len())
            && self.lengths.input.and_then(bytes) == lent.input.map(<[u8]>::len);
        fits.then_some(lent)
    }

    fn is_lent(&self) -> bool {
        self.is_lent
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

impl<X: sealed::Operand + Send + 'static> Foreign<X> {
    pub(super) fn memory(operand: X, lengths: Lengths, is_lent: bool) -> CallerMemory<Memory> {
        CallerMemory::Foreign(Box::new(Self { operand, lengths, is_lent }))
    }

    pub(super) fn operand(memory: CallerMemory<Memory>) -> Option<X> {
        let CallerMemory::Foreign(memory) = memory else { return None };
        memory.into_any().downcast().ok().map(|foreign: Box<Self>| foreign.operand)
    }
}

#[allow(private_interfaces, reason = "the trait can't be named outside this crate")]
impl<T: Number, M: DerefMut<Target = [T]> + Send + 'static> sealed::Operand for Owned<M> {
    type Element = T;
    type Kept = Self;

    fn keep(self) -> Option<Self> {
        Some(self)
    }

    fn lengths(&self) -> Lengths {
        Lengths { input: None, out: self.0.len() }
    }

    fn lend(&mut self) -> LentSlices<'_> {
        LentSlices { input: None, out: bytemuck::cast_slice_mut(&mut self.0) }
    }

    fn into_memory(self, lengths: Lengths) -> Result<CallerMemory<Memory>, Self> {
        Ok(Foreign::memory(self, lengths, false))
    }

    fn from_memory(memory: CallerMemory<Memory>, _: Lengths) -> Option<Self> {
        Foreign::operand(memory)
    }
}

#[allow(private_interfaces, reason = "the trait can't be named outside this crate")]
impl<T: Number, M, N> sealed::Operand for (Owned<M>, Owned<N>)
where
    M: Deref<Target = [T]> + Send + 'static,
    N: DerefMut<Target = [T]> + Send + 'static,
{
    type Element = T;
    type Kept = Self;

    fn keep(self) -> Option<Self> {
        Some(self)
    }

    fn lengths(&self) -> Lengths {
        Lengths { input: Some(self.0.0.len()), out: self.1.0.len() }
    }

    fn lend(&mut self) -> LentSlices<'_> {
        LentSlices {
            input: Some(bytemuck::cast_slice(&self.0.0)),
            out: bytemuck::cast_slice_mut(&mut self.1.0),
        }
    }

    fn into_memory(self, lengths: Lengths) -> Result<CallerMemory<Memory>, Self> {
        Ok(Foreign::memory(self, lengths, false))
    }

    fn from_memory(memory: CallerMemory<Memory>, _: Lengths) -> Option<Self> {
        Foreign::operand(memory)
    }
}

#[allow(private_interfaces, reason = "the trait can't be named outside this crate")]
impl<T: Number> sealed::Operand for &mut [T] {
    type Element = T;
    type Kept = ();

    fn lengths(&self) -> Lengths {
        Lengths { input: None, out: self.len() }
    }

    fn lend(&mut self) -> LentSlices<'_> {
        LentSlices { input: None, out: bytemuck::cast_slice_mut(self) }
    }
}

#[allow(private_interfaces, reason = "the trait can't be named outside this crate")]
impl<T: Number> sealed::Operand for (&[T], &mut [T]) {
    type Element = T;
    type Kept = ();

    fn lengths(&self) -> Lengths {
        Lengths { input: Some(self.0.len()), out: self.1.len() }
    }

    fn lend(&mut self) -> LentSlices<'_> {
        LentSlices { input: Some(bytemuck::cast_slice(self.0)), out: bytemuck::cast_slice_mut(self.1) }
    }
}

/// The operand of a `send`. It has no output, so all other operations refuse it, unless it is empty.
#[allow(private_interfaces, reason = "the trait can't be named outside this crate")]
impl<T: Number> sealed::Operand for &[T] {
    type Element = T;
    type Kept = ();

    fn lengths(&self) -> Lengths {
        Lengths { input: Some(self.len()), out: 0 }
    }

    fn lend(&mut self) -> LentSlices<'_> {
        LentSlices { input: Some(bytemuck::cast_slice(self)), out: &mut [] }
    }
}

/// The operand of a barrier, which has no elements.
#[allow(private_interfaces, reason = "the trait can't be named outside this crate")]
impl sealed::Operand for () {
    type Element = u8;
    type Kept = ();

    fn lengths(&self) -> Lengths {
        Lengths { input: None, out: 0 }
    }

    fn lend(&mut self) -> LentSlices<'_> {
        LentSlices { input: None, out: &mut [] }
    }

    fn into_memory(self, _: Lengths) -> Result<CallerMemory<Memory>, Self> {
        Ok(CallerMemory::Owned { input: None, out: None })
    }

    fn from_memory(_: CallerMemory<Memory>, _: Lengths) -> Option<Self> {
        Some(())
    }
}
