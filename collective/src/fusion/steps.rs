//! The steps of a fusion: gradients come in, buckets start, means come back.

use std::future::poll_fn;
use std::task::{Poll, Waker};
use std::time::Instant;

use prost::Message;

use super::layout::{Given, Layout, List, Problem};
use super::overlap::{Overlap, Timed, covered};
use super::{Fusion, unfinished};
use crate::communicator::{Communicator, Operation};
use crate::error::{CollectiveError, CollectiveErrorKind, argument};
use crate::memory::Buffer;
use crate::reduce::{Number, Reduction};

/// The longest list of gradients that a rank takes from rank 0, in bytes.
const LONGEST: u64 = 64 << 20;

pub(super) struct Buckets<T: Number> {
    pub(super) layout: Layout,
    content: Vec<Bucket<T>>,
    pub(super) given: Given,
    /// Start and end of each bucket's operation in this step, in the order in which this rank learnt of the
    /// ends.
    times: Vec<(Instant, Instant)>,
}

enum Bucket<T: Number> {
    /// One gradient of the first step.
    First(Vec<T>),
    Idle(Buffer<T>),
    UnderWay(Box<Timed<Operation<Buffer<T>>>>),
    /// The operation failed.
    Failed,
}

impl<T: Number> Fusion<T> {
    /// Returns the memory for a gradient, to be filled before [`ready`](Self::ready).
    pub(super) fn slot(&mut self, name: &str, length: usize) -> Result<(usize, &mut [T]), CollectiveError> {
        if !self.agreed && self.buckets.layout.index(name).is_none() {
            self.buckets.add(name, length);
        }
        self.buckets.slot(name, length)
    }

    /// Takes a gradient as given, and starts the buckets that are full and next.
    pub(super) fn ready(&mut self, index: usize) -> Result<(), CollectiveError> {
        if self.agreed {
            return self.buckets.give(index, &self.communicator, &mut self.committed);
        }
        let Buckets { given, layout, .. } = &mut self.buckets;
        if given.check(layout, index).is_ok() {
            given.give(layout, index);
            self.order.push(index);
        }
        Ok(())
    }

    /// Waits for all buckets.
    pub(super) async fn finish(&mut self) -> Result<(), CollectiveError> {
        let asked = Instant::now();
        self.buckets.given.complete(&self.buckets.layout)?;
        let is_first = !self.agreed;
        if is_first {
            self.committed = true;
            self.agree().await?;
        }
        self.buckets.wait_until_reduced().await?;
        if self.buckets.has_failed() {
            return Err(unfinished());
        }
        let ended = Instant::now();
        let mut step = self.buckets.overlap();
        step.step = ended.saturating_duration_since(self.begun);
        step.waited = ended.saturating_duration_since(asked);
        if is_first {
            // All of the first step's communication is in `finish`, the agreement included.
            step.communication = step.waited;
        }
        self.latest = step;
        self.total += step;
        self.committed = false;
        Ok(())
    }

    /// Agrees with the other ranks on the gradients and their order, and starts the first step's buckets.
    async fn agree(&mut self) -> Result<(), CollectiveError> {
        let bytes = match self.communicator.rank() {
            0 => self.buckets.layout.list(&self.order, self.bucket_bytes as u64).encode_to_vec(),
            _ => Vec::new(),
        };
        let list = List::decode(&*self.share(bytes).await?);
        let problem = match &list {
            Ok(list) => self.buckets.layout.compare(list),
            Err(_) => Some(Problem::Unreadable),
        };
        let problems = self.gather(problem.as_ref().map_or(0, Problem::code)).await?;
        let list = list.unwrap_or_default();
        if let Some((rank, code)) = problems.into_iter().enumerate().find(|&(_, code)| code != 0) {
            // Every rank knows of the problem, so all may begin the first step again.
            self.committed = false;
            let problem = if rank == self.communicator.rank() { problem } else { None };
            let problem = problem.unwrap_or_else(|| Problem::from_code(code));
            let problem = problem.describe(rank, &list);
            let reason = format!("{problem}; all ranks must give the same gradients in the first step");
            return Err(CollectiveError::new(CollectiveErrorKind::Mismatch, Some(rank), reason));
        }
        self.bucket_bytes = usize::try_from(list.bucket_bytes).unwrap_or(usize::MAX);
        let mut agreed = Buckets::new(&list, self.bucket_bytes, &self.communicator)?;
        for (index, entry) in list.entries.iter().enumerate() {
            let first = self.buckets.layout.index(&entry.name).and_then(|index| self.buckets.elements(index));
            let (Some(first), Some(elements)) = (first, agreed.elements_mut(index)) else { continue };
            elements.copy_from_slice(first);
            agreed.give(index, &self.communicator, &mut self.committed)?;
        }
        (self.buckets, self.agreed) = (agreed, true);
        Ok(())
    }

    /// Returns rank 0's bytes, on all ranks.
    async fn share(&self, bytes: Vec<u8>) -> Result<Buffer<u8>, CollectiveError> {
        let mut length = self.communicator.allocate::<u64>(1)?;
        length[0] = bytes.len() as u64;
        let length = self.communicator.broadcast(length, 0).await?[0];
        if length > LONGEST {
            return Err(argument(format!(
                "rank 0 shares {length} bytes about the gradients; {LONGEST} is the most"
            )));
        }
        let mut shared = self.communicator.allocate::<u8>(length as usize)?;
        if shared.len() == bytes.len() {
            shared.copy_from_slice(&bytes);
        }
        Ok(self.communicator.broadcast(shared, 0).await?)
    }

    /// Returns the number of each rank, on all ranks.
    async fn gather(&self, number: u64) -> Result<Vec<u64>, CollectiveError> {
        let mut numbers = self.communicator.allocate::<u64>(self.communicator.size())?;
        numbers[self.communicator.rank()] = number;
        Ok(self.communicator.all_gather(numbers).await?.to_vec())
    }
}

impl<T: Number> Buckets<T> {
    pub(super) fn empty() -> Self {
        Self { layout: Layout::default(), content: Vec::new(), given: Given::default(), times: Vec::new() }
    }

    fn new(list: &List, bytes: usize, communicator: &Communicator) -> Result<Self, CollectiveError> {
        let layout = Layout::new(list, bytes / size_of::<T>());
        let content =
            layout.buckets.iter().map(|&elements| Ok(Bucket::Idle(communicator.allocate(elements)?)));
        let content = content.collect::<Result<_, CollectiveError>>()?;
        let given = Given::new(&layout);
        Ok(Self { layout, content, given, times: Vec::new() })
    }

    /// Adds a gradient of the first step.
    fn add(&mut self, name: &str, length: usize) {
        self.layout.add(name, length);
        self.given.add();
        self.content.push(Bucket::First(bytemuck::zeroed_vec(length)));
    }

    /// Takes a gradient as given, and starts the buckets that are full and next. Notes in `committed` if it
    /// starts one.
    fn give(
        &mut self,
        index: usize,
        communicator: &Communicator,
        committed: &mut bool,
    ) -> Result<(), CollectiveError> {
        for bucket in self.given.give(&self.layout, index) {
            *committed = true;
            self.start(bucket, communicator)?;
        }
        Ok(())
    }

    fn slot(&mut self, name: &str, length: usize) -> Result<(usize, &mut [T]), CollectiveError> {
        let index = self.layout.find(name, length)?;
        self.given.check(&self.layout, index)?;
        let elements = self.elements_mut(index).ok_or_else(unfinished)?;
        Ok((index, elements))
    }

    fn start(&mut self, bucket: usize, communicator: &Communicator) -> Result<(), CollectiveError> {
        let started = Instant::now();
        let state = std::mem::replace(&mut self.content[bucket], Bucket::Failed);
        self.content[bucket] = match state {
            Bucket::Idle(memory) => {
                let mean = communicator.all_reduce(memory, Reduction::Mean).start();
                Bucket::UnderWay(Box::new(Timed::new(mean, started)))
            }
            other => other,
        };
        // The first poll leaves a waker with the operation, so that the time of its end is known.
        match self.poll_bucket(bucket, None) {
            Poll::Ready(result) => result,
            Poll::Pending => Ok(()),
        }
    }

    /// Polls the operation of a bucket.
    fn poll_bucket(&mut self, bucket: usize, task: Option<&Waker>) -> Poll<Result<(), CollectiveError>> {
        let Bucket::UnderWay(flight) = &mut self.content[bucket] else { return Poll::Ready(Ok(())) };
        let Poll::Ready((result, times)) = flight.poll(task) else { return Poll::Pending };
        self.times.push(times);
        let (state, result) = match result {
            Ok(memory) => (Bucket::Idle(memory), Ok(())),
            Err(failed) => (Bucket::Failed, Err(failed.into())),
        };
        self.content[bucket] = state;
        Poll::Ready(result)
    }

    /// Waits for all buckets, one after the other. They end in this order, more or less.
    async fn wait_until_reduced(&mut self) -> Result<(), CollectiveError> {
        for bucket in 0..self.content.len() {
            poll_fn(|context| self.poll_bucket(bucket, Some(context.waker()))).await?;
        }
        Ok(())
    }

    /// Returns whether the operation of a bucket has failed.
    fn has_failed(&self) -> bool {
        self.content.iter().any(|bucket| matches!(bucket, Bucket::Failed))
    }

    /// Returns the number, bytes and times of the buckets. The caller adds the times of the step itself.
    fn overlap(&mut self) -> Overlap {
        let mut times = std::mem::take(&mut self.times);
        times.sort_unstable();
        let elements: usize = self.layout.buckets.iter().sum();
        Overlap {
            buckets: self.content.len() as u64,
            bytes: (elements * size_of::<T>()) as u64,
            communication: covered(times),
            ..Overlap::default()
        }
    }

    /// Returns the elements of a gradient, unless an operation has its bucket.
    pub(super) fn elements(&self, index: usize) -> Option<&[T]> {
        let gradient = self.layout.gradients.get(index)?;
        match &self.content[gradient.bucket] {
            Bucket::First(values) => Some(values),
            Bucket::Idle(memory) => memory.get(gradient.range.clone()),
            Bucket::UnderWay(_) | Bucket::Failed => None,
        }
    }

    pub(super) fn elements_mut(&mut self, index: usize) -> Option<&mut [T]> {
        let gradient = self.layout.gradients.get(index)?;
        match &mut self.content[gradient.bucket] {
            Bucket::First(values) => Some(values),
            Bucket::Idle(memory) => memory.get_mut(gradient.range.clone()),
            Bucket::UnderWay(_) | Bucket::Failed => None,
        }
    }
}
