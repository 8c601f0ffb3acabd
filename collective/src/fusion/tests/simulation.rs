//! A group of threads. An operation ends when the last rank has started it, and a delay has passed.

use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use crate::error::{CollectiveError, argument};
use crate::fusion::steps::{FusionGroup, Steps};

/// One rank of a group.
#[derive(Clone)]
pub(super) struct Rank {
    rank: usize,
    world: Arc<World>,
}

struct World {
    size: usize,
    /// The longest delay of an operation.
    delay: Duration,
    state: Mutex<WorldState>,
}

struct WorldState {
    random: fastrand::Rng,
    /// The number of the next operation of each rank.
    next: Vec<u64>,
    operations: HashMap<u64, Operation>,
    /// The number of the operation that fails, if one shall.
    failing: Option<u64>,
    /// Operations wait until this is false.
    held: bool,
}

#[derive(Default)]
struct Operation {
    /// The call of each rank: the kind and the length. These must be equal.
    calls: Vec<(Kind, usize)>,
    inputs: Vec<(usize, Vec<u8>)>,
    result: Option<Result<Vec<u8>, CollectiveError>>,
    wakers: Vec<Waker>,
    /// Whether all wakers have been called.
    woken: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Mean,
    Share,
    Gather,
}

/// Runs `each` for every rank, in a thread of its own, and returns the results in the order of the ranks.
pub(super) fn ranks<R: Send>(
    size: usize,
    delay: Duration,
    each: impl Fn(Rank, Steps<f32, Rank>) -> R + Sync,
    bucket_bytes: usize,
) -> Vec<R> {
    let group = group(size, delay);
    std::thread::scope(|scope| {
        let each = &each;
        let threads: Vec<_> = group
            .into_iter()
            .map(|rank| scope.spawn(move || each(rank.clone(), Steps::new(rank, bucket_bytes))))
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

pub(super) fn group(size: usize, delay: Duration) -> Vec<Rank> {
    let state = WorldState {
        random: fastrand::Rng::with_seed(17),
        next: vec![0; size],
        operations: HashMap::new(),
        failing: None,
        held: false,
    };
    let world = Arc::new(World { size, delay, state: Mutex::new(state) });
    (0..size).map(|rank| Rank { rank, world: Arc::clone(&world) }).collect()
}

impl Rank {
    pub(super) fn index(&self) -> usize {
        self.rank
    }

    /// Returns how many operations this rank has started.
    pub(super) fn started(&self) -> u64 {
        self.world.state.lock().unwrap().next[self.rank]
    }

    /// Returns whether all operations have ended, and their futures know.
    pub(super) fn idle(&self) -> bool {
        self.world.state.lock().unwrap().operations.values().all(|operation| operation.woken)
    }

    /// Lets an operation fail.
    pub(super) fn fail(&self, operation: u64) {
        self.world.state.lock().unwrap().failing = Some(operation);
    }

    /// Holds all operations back, or lets them end.
    pub(super) fn hold(&self, held: bool) {
        let mut state = self.world.state.lock().unwrap();
        state.held = held;
        let numbers: Vec<u64> = state.operations.keys().copied().collect();
        drop(state);
        for number in numbers {
            self.world.end(number);
        }
    }

    fn start(&self, kind: Kind, input: Vec<u8>) -> SimulatedOperation {
        let mut state = self.world.state.lock().unwrap();
        let number = state.next[self.rank];
        state.next[self.rank] += 1;
        let operation = state.operations.entry(number).or_default();
        // The lengths of the other ranks' inputs do not count when rank 0 shares its bytes.
        operation.calls.push((kind, if kind == Kind::Share { 0 } else { input.len() }));
        operation.inputs.push((self.rank, input));
        let last = operation.inputs.len() == self.world.size;
        let delay = self.world.delay.mul_f64(state.random.f64());
        drop(state);
        if last {
            let world = Arc::clone(&self.world);
            if delay.is_zero() {
                world.end(number);
            } else {
                std::thread::spawn(move || {
                    std::thread::sleep(delay);
                    world.end(number);
                });
            }
        }
        SimulatedOperation { world: Arc::clone(&self.world), number }
    }
}

impl World {
    /// Ends an operation, if it may end now.
    fn end(&self, number: u64) {
        let mut state = self.state.lock().unwrap();
        let (held, failing) = (state.held, state.failing);
        let Some(operation) = state.operations.get_mut(&number) else { return };
        if held || operation.inputs.len() < self.size || operation.result.is_some() {
            return;
        }
        operation.inputs.sort_unstable_by_key(|&(rank, _)| rank);
        let result = match operation.calls[0].0 {
            _ if failing == Some(number) => Err(argument("this operation shall fail")),
            _ if operation.calls.iter().any(|call| *call != operation.calls[0]) => {
                let calls = format!("the ranks' calls differ: {:?}", operation.calls);
                Err(argument(calls))
            }
            Kind::Mean => Ok(mean(&operation.inputs)),
            Kind::Share => Ok(operation.inputs[0].1.clone()),
            Kind::Gather => Ok(operation.inputs.iter().flat_map(|(_, input)| input.clone()).collect()),
        };
        operation.result = Some(result);
        let wakers = std::mem::take(&mut operation.wakers);
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
        let mut state = self.state.lock().unwrap();
        state.operations.entry(number).or_default().woken = true;
    }
}

/// Returns the mean of numbers that are whole and small, so that no order of the ranks rounds.
fn mean(inputs: &[(usize, Vec<u8>)]) -> Vec<u8> {
    let mut sums = vec![0.0_f32; inputs[0].1.len() / 4];
    for (_, input) in inputs {
        for (sum, value) in sums.iter_mut().zip(bytemuck::cast_slice::<u8, [u8; 4]>(input)) {
            *sum += f32::from_ne_bytes(*value);
        }
    }
    sums.iter().flat_map(|sum| (sum / inputs.len() as f32).to_ne_bytes()).collect()
}

/// An operation of one rank.
struct SimulatedOperation {
    world: Arc<World>,
    number: u64,
}

impl Future for SimulatedOperation {
    type Output = Result<Vec<u8>, CollectiveError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.world.state.lock().unwrap();
        let operation = state.operations.get_mut(&self.number).unwrap();
        match &operation.result {
            Some(result) => Poll::Ready(result.clone()),
            None => {
                operation.wakers.push(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

/// A mean under way, which gives the same memory back.
pub(super) struct Flight {
    running: SimulatedOperation,
    memory: Option<Vec<f32>>,
}

impl Future for Flight {
    type Output = Result<Vec<f32>, CollectiveError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let result = std::task::ready!(Pin::new(&mut self.running).poll(context));
        let mut memory = self.memory.take().unwrap();
        Poll::Ready(result.map(|bytes| {
            bytemuck::cast_slice_mut(&mut memory).copy_from_slice(&bytes);
            memory
        }))
    }
}

impl FusionGroup<f32> for Rank {
    type Memory = Vec<f32>;
    type Flight = Flight;

    fn rank(&self) -> usize {
        self.rank
    }

    fn allocate(&self, elements: usize) -> Result<Vec<f32>, CollectiveError> {
        Ok(vec![0.0; elements])
    }

    fn mean(&self, memory: Vec<f32>) -> Flight {
        let running = self.start(Kind::Mean, bytemuck::cast_slice(&memory).to_vec());
        Flight { running, memory: Some(memory) }
    }

    async fn share(&self, bytes: Vec<u8>) -> Result<Vec<u8>, CollectiveError> {
        self.start(Kind::Share, bytes).await
    }

    async fn gather(&self, number: u64) -> Result<Vec<u64>, CollectiveError> {
        let bytes = self.start(Kind::Gather, number.to_ne_bytes().to_vec()).await?;
        Ok(bytes.chunks_exact(8).map(|bytes| u64::from_ne_bytes(bytes.try_into().unwrap())).collect())
    }
}
