//! Transfers between executors of one process.
//!
//! A tensor waits in the queue of its crossing until the receiver takes it, and is copied then. With delays,
//! a thread of its own (the courier) puts each tensor into its queue when its time has come: this simulates a
//! network.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex};
use std::task::Waker;
use std::thread;
use std::time::{Duration, Instant};

use crate::dataflow::Value;
use crate::error::{GraphError, Problem};
use crate::placement::{Crossing, CrossingId, Part, Placements};
use crate::schedule::transfers::{CrossingCounts, Start, Transfers, Transport, Unfinished};
use crate::sites::NodeSites;
use tonic_rdma_tensor::Tensor;
use tonic_rdma_verbs::unstable::{lock, wake_all};

/// The transfers of one part.
struct InMemory {
    part: Part,
    network: Arc<Network>,
    placements: Arc<Placements>,
    counts: Vec<CrossingCounts>,
}

impl<V: Value> Transfers<V> {
    /// Makes the transfers between executors of one process, for tests and for graphs that are not split:
    /// those of all parts, in the order of the parts. `depth` is the number of tensors of each crossing that
    /// may be under way.
    ///
    /// ```
    /// use std::sync::Arc;
    ///
    /// use tonic_rdma_graph::dataflow::{Topology, Value};
    /// use tonic_rdma_graph::placement::{Partition, Placements};
    /// use tonic_rdma_graph::schedule::Transfers;
    ///
    /// fn two_parts<V: Value>() -> Result<Vec<Transfers<V>>, tonic_rdma_graph::GraphError> {
    ///     let graph = Topology::new();
    ///     let partition = Partition::new(&graph, 2, vec![])?;
    ///     Transfers::in_memory(&Arc::new(Placements::new(&graph, &partition)?), 1)
    /// }
    /// ```
    ///
    /// # Errors
    /// `depth` is 0.
    pub fn in_memory(placements: &Arc<Placements>, depth: usize) -> Result<Vec<Self>, GraphError> {
        Self::of_network(placements, depth, None)
    }

    /// Makes transfers as [`in_memory`](Self::in_memory) does. Each tensor arrives when the delay of its
    /// crossing tensor and step is over, but not before earlier tensors of this crossing.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use std::time::Duration;
    ///
    /// use tonic_rdma_graph::GraphError;
    /// use tonic_rdma_graph::dataflow::Value;
    /// use tonic_rdma_graph::placement::Placements;
    /// use tonic_rdma_graph::schedule::Transfers;
    ///
    /// /// Crossing tensors with higher numbers take longer.
    /// fn slow<V: Value>(placements: &Arc<Placements>) -> Result<Vec<Transfers<V>>, GraphError> {
    ///     Transfers::delayed(placements, 2, |crossing, _step| Duration::from_micros(100 * crossing.0 as u64))
    /// }
    /// ```
    ///
    /// # Errors
    /// `depth` is 0, or the system has no thread left.
    pub fn delayed(
        placements: &Arc<Placements>,
        depth: usize,
        delay: impl Fn(CrossingId, u64) -> Duration + Send + Sync + 'static,
    ) -> Result<Vec<Self>, GraphError> {
        Self::of_network(placements, depth, Some(Box::new(delay)))
    }

    fn of_network(
        placements: &Arc<Placements>,
        depth: usize,
        delay: Option<Delay>,
    ) -> Result<Vec<Self>, GraphError> {
        if depth == 0 {
            let reason = "it is 0; at least 1 tensor of each crossing must be under way".to_owned();
            return Err(GraphError::of_setting("depth", reason));
        }
        let parts = placements.partition().count();
        let crossings = placements.crossings().len();
        let network = Arc::new(Network::new(parts, crossings, depth, delay));
        if network.delay.is_some() {
            network.start_courier()?;
        }
        let transfers = |part| {
            Self(Box::new(InMemory {
                part: Part(part),
                network: Arc::clone(&network),
                placements: Arc::clone(placements),
                counts: vec![CrossingCounts::default(); crossings],
            }))
        };
        Ok((0..parts).map(transfers).collect())
    }
}

impl InMemory {
    fn crossing(&self, id: CrossingId) -> &Crossing {
        &self.placements.crossings()[id.0]
    }
}

impl<V: Value> Transport<V> for InMemory {
    fn start(&mut self, crossing: CrossingId, step: u64, tensor: &Tensor) -> Result<Start, GraphError> {
        let peer = self.crossing(crossing).to;
        let start = self.network.put(self.part, peer, crossing, step, tensor)?;
        if start == Start::Begun {
            let counts = &mut self.counts[crossing.0];
            counts.sent += 1;
            counts.bytes += tensor.spec().bytes().unwrap_or_default();
        }
        Ok(start)
    }

    fn take(
        &mut self,
        crossing: CrossingId,
        step: u64,
        sites: &NodeSites,
        waker: Option<&Waker>,
    ) -> Result<Option<V>, GraphError> {
        let placements = Arc::clone(&self.placements);
        let crossing = &placements.crossings()[crossing.0];
        let peer = crossing.from;
        let Some(tensor) = self.network.take(self.part, peer, crossing.id, step, waker)? else {
            return Ok(None);
        };
        let value = sites.filled(crossing, tensor.spec(), &mut |bytes| Ok(tensor.copy_to(bytes)?));
        let value = value.map_err(|source| crossing.failed(peer, step, source))?;
        let counts = &mut self.counts[crossing.id.0];
        counts.received += 1;
        counts.received_copied += u64::from(tensor.spec().bytes() != Some(0));
        Ok(Some(value))
    }

    fn can_start(&mut self, crossing: CrossingId, waker: &Waker) -> Result<bool, GraphError> {
        let peer = self.crossing(crossing).to;
        self.network.is_below(self.network.depth, self.part, peer, crossing, waker)
    }

    fn is_flushed(&mut self, waker: &Waker) -> Result<bool, GraphError> {
        for crossing in self.placements.leaving(self.part) {
            if !self.network.is_below(1, self.part, crossing.to, crossing.id, waker)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn unfinished(&self) -> Option<Unfinished> {
        let leaving = self.placements.leaving(self.part);
        Unfinished::of(leaving.map(|crossing| (crossing.id, self.network.not_taken(crossing.id) as u64)))
    }

    fn counts(&self, crossing: CrossingId) -> CrossingCounts {
        self.counts.get(crossing.0).copied().unwrap_or_default()
    }

    fn abort(&mut self, reason: &str) {
        self.network.fail(self.part, reason);
    }
}

impl Drop for InMemory {
    fn drop(&mut self) {
        self.network.leave(self.part);
    }
}

/// The delay of a crossing tensor in a step.
type Delay = Box<dyn Fn(CrossingId, u64) -> Duration + Send + Sync>;

struct Network {
    state: Mutex<NetworkState>,
    /// Tells the courier of a new parcel, and of the end.
    changed: Condvar,
    depth: usize,
    delay: Option<Delay>,
}

struct NetworkState {
    queues: Vec<CrossingQueue>,
    /// The parts that have failed, the first one first, and why.
    failed: Vec<(Part, String)>,
    /// Whether each part has dropped its transfers.
    left: Vec<bool>,
    /// Tensors under way, by the time at which they are due and their number: the queue, the step and the
    /// tensor.
    parcels: BTreeMap<(Instant, u64), (usize, u64, Tensor)>,
    /// The number of the next parcel.
    number: u64,
}

/// The tensors of one crossing. Wakers are woken while the state is locked. Otherwise a thread that a timer
/// has woken could see the change before its waker is woken, and would count a late wake-up
/// ([`RunReport::late`](crate::schedule::RunReport::late)).
#[derive(Default)]
struct CrossingQueue {
    arrived: VecDeque<(u64, Tensor)>,
    /// Tensors that were sent and have not arrived.
    under_way: usize,
    /// When the last tensor arrives.
    last: Option<Instant>,
    receiver: Option<Waker>,
    sender: Option<Waker>,
}

impl Network {
    fn new(parts: usize, crossings: usize, depth: usize, delay: Option<Delay>) -> Self {
        let state = NetworkState {
            queues: (0..crossings).map(|_| CrossingQueue::default()).collect(),
            failed: Vec::new(),
            left: vec![false; parts],
            parcels: BTreeMap::new(),
            number: 0,
        };
        Self { state: Mutex::new(state), changed: Condvar::new(), depth, delay }
    }

    /// Puts a tensor into a queue, or gives it to the courier.
    fn put(
        &self,
        part: Part,
        peer: Part,
        crossing: CrossingId,
        step: u64,
        tensor: &Tensor,
    ) -> Result<Start, GraphError> {
        let mut state = lock(&self.state);
        state.check(part, Some(peer))?;
        let queue = &mut state.queues[crossing.0];
        if queue.arrived.len() + queue.under_way >= self.depth {
            return Ok(Start::Busy);
        }
        let Some(delay) = &self.delay else {
            queue.arrived.push_back((step, tensor.clone()));
            wake_all(queue.receiver.take());
            return Ok(Start::Begun);
        };
        let due = Instant::now() + delay(crossing, step);
        let due = queue.last.map_or(due, |last| due.max(last));
        queue.last = Some(due);
        queue.under_way += 1;
        let number = state.number;
        state.number += 1;
        state.parcels.insert((due, number), (crossing.0, step, tensor.clone()));
        self.changed.notify_one();
        Ok(Start::Begun)
    }

    /// Starts the thread that delivers delayed tensors, the courier. It ends when all parts have dropped
    /// their transfers.
    fn start_courier(self: &Arc<Self>) -> Result<(), GraphError> {
        let network = Arc::clone(self);
        let spawned =
            thread::Builder::new().name("courier".to_owned()).spawn(move || while network.deliver() {});
        spawned.map(drop).map_err(|error| {
            let reason = format!("delayed transfers need a thread, and the system gave none: {error}");
            GraphError::of_setting("delay", reason)
        })
    }

    /// Takes a tensor out of a queue, or keeps the waker.
    fn take(
        &self,
        part: Part,
        peer: Part,
        crossing: CrossingId,
        step: u64,
        waker: Option<&Waker>,
    ) -> Result<Option<Tensor>, GraphError> {
        let mut state = lock(&self.state);
        let queue = &mut state.queues[crossing.0];
        match queue.arrived.front() {
            Some((arrived, _)) if *arrived != step => {
                let source = format!("the tensor of step {arrived} came instead").into();
                let crossing = crossing.0.to_string();
                Err(Problem::Transfer { crossing, step, peer: peer.0, source }.into())
            }
            Some(_) => {
                let tensor = queue.arrived.pop_front().map(|(_, tensor)| tensor);
                wake_all(queue.sender.take());
                Ok(tensor)
            }
            None => {
                queue.receiver = waker.cloned();
                let peer = (queue.under_way == 0).then_some(peer);
                state.check(part, peer)?;
                Ok(None)
            }
        }
    }

    /// Returns the number of tensors of a crossing that were sent and are not taken.
    fn not_taken(&self, crossing: CrossingId) -> usize {
        let state = lock(&self.state);
        let queue = &state.queues[crossing.0];
        queue.arrived.len() + queue.under_way
    }

    /// Returns whether fewer than `limit` tensors of a crossing are not taken. Otherwise keeps the waker.
    fn is_below(
        &self,
        limit: usize,
        part: Part,
        peer: Part,
        crossing: CrossingId,
        waker: &Waker,
    ) -> Result<bool, GraphError> {
        let mut state = lock(&self.state);
        let queue = &mut state.queues[crossing.0];
        if queue.arrived.len() + queue.under_way < limit {
            return Ok(true);
        }
        queue.sender = Some(waker.clone());
        state.check(part, Some(peer)).map(|()| false)
    }

    /// Notes that a part has failed.
    fn fail(&self, part: Part, reason: &str) {
        let mut state = lock(&self.state);
        state.failed.push((part, reason.to_owned()));
        let wakers = state.wakers();
        drop(state);
        wake_all(wakers);
    }

    /// Notes that a part has dropped its transfers.
    fn leave(&self, part: Part) {
        let mut state = lock(&self.state);
        state.left[part.0] = true;
        let wakers = state.wakers();
        drop(state);
        self.changed.notify_one();
        wake_all(wakers);
    }

    /// Puts tensors that are due into their queues. Returns false when all parts have left.
    fn deliver(&self) -> bool {
        let mut state = lock(&self.state);
        if state.left.iter().all(|left| *left) {
            return false;
        }
        let now = Instant::now();
        let mut delivered = false;
        while let Some(parcel) = state.parcels.first_entry().filter(|parcel| parcel.key().0 <= now) {
            let (queue, step, tensor) = parcel.remove();
            let queue = &mut state.queues[queue];
            queue.under_way -= 1;
            queue.arrived.push_back((step, tensor));
            wake_all(queue.receiver.take());
            delivered = true;
        }
        if delivered {
            return true;
        }
        match state.parcels.keys().next().map(|(due, _)| due.saturating_duration_since(now)) {
            Some(left) => drop(self.changed.wait_timeout(state, left)),
            None => drop(self.changed.wait(state)),
        }
        true
    }
}

impl NetworkState {
    /// Checks that no other part has failed, and that the peer is there.
    fn check(&self, part: Part, peer: Option<Part>) -> Result<(), GraphError> {
        if let Some((failed, reason)) = self.failed.iter().find(|(failed, _)| *failed != part) {
            return Err(Problem::PeerFailed { peer: failed.0, reason: reason.clone() }.into());
        }
        match peer {
            Some(peer) if self.left[peer.0] => {
                Err(Problem::PeerLost { peer: peer.0, source: "it has dropped its transfers".into() }.into())
            }
            _ => Ok(()),
        }
    }

    fn wakers(&mut self) -> Vec<Waker> {
        let wakers = self.queues.iter_mut().flat_map(|queue| [queue.receiver.take(), queue.sender.take()]);
        wakers.flatten().collect()
    }
}
