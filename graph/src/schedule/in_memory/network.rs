//! The lanes between the parts, and which parts are left.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex};
use std::task::{Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use tonic_rdma_tensor::Tensor;
use tonic_rdma_verbs::internal::{lock, wake_all};

use crate::error::GraphError;
use crate::placement::{CrossingId, Part};
use crate::schedule::transfers::Start;

/// The delay of a crossing tensor in a step.
pub(super) type Delay = Box<dyn Fn(CrossingId, u64) -> Duration + Send + Sync>;

pub(super) struct Network {
    state: Mutex<State>,
    /// Tells the courier of a new parcel, and of the end.
    changed: Condvar,
    depth: usize,
    delay: Option<Delay>,
}

struct State {
    lanes: Vec<Lane>,
    /// The parts that have failed, the first one first, and why.
    failed: Vec<(Part, String)>,
    /// Whether each part has dropped its transfers.
    left: Vec<bool>,
    /// Tensors under way, by the time at which they are due and their number: the lane, the step and the tensor.
    parcels: BTreeMap<(Instant, u64), (usize, u64, Tensor)>,
    /// The number of the next parcel.
    number: u64,
}

/// The tensors of one crossing.
#[derive(Default)]
struct Lane {
    arrived: VecDeque<(u64, Tensor)>,
    /// Tensors that were sent and have not arrived.
    under_way: usize,
    /// When the last tensor arrives.
    last: Option<Instant>,
    receiver: Option<Waker>,
    sender: Option<Waker>,
}

impl Network {
    pub(super) fn new(parts: usize, crossings: usize, depth: usize, delay: Option<Delay>) -> Self {
        let state = State {
            lanes: (0..crossings).map(|_| Lane::default()).collect(),
            failed: Vec::new(),
            left: vec![false; parts],
            parcels: BTreeMap::new(),
            number: 0,
        };
        Self { state: Mutex::new(state), changed: Condvar::new(), depth, delay }
    }

    /// Puts a tensor into a lane, or gives it to the courier.
    pub(super) fn put(
        &self,
        part: Part,
        peer: Part,
        crossing: CrossingId,
        step: u64,
        tensor: &Tensor,
    ) -> Result<Start, GraphError> {
        let mut state = lock(&self.state);
        state.check(part, Some(peer))?;
        let lane = &mut state.lanes[crossing.0];
        if lane.arrived.len() + lane.under_way >= self.depth {
            return Ok(Start::Busy);
        }
        let Some(delay) = &self.delay else {
            lane.arrived.push_back((step, tensor.clone()));
            wake(lane.receiver.take());
            return Ok(Start::Begun);
        };
        let due = Instant::now() + delay(crossing, step);
        let due = lane.last.map_or(due, |last| due.max(last));
        lane.last = Some(due);
        lane.under_way += 1;
        let number = state.number;
        state.number += 1;
        state.parcels.insert((due, number), (crossing.0, step, tensor.clone()));
        self.changed.notify_one();
        Ok(Start::Begun)
    }

    /// Starts the thread that delivers delayed tensors, the courier. It ends when all parts have dropped their transfers.
    pub(super) fn start_courier(self: &Arc<Self>) -> Result<(), GraphError> {
        let network = Arc::clone(self);
        let spawned =
            thread::Builder::new().name("courier".to_owned()).spawn(move || while network.deliver() {});
        spawned.map(drop).map_err(|error| GraphError::Setting {
            setting: "delay",
            reason: format!("delayed transfers need a thread, and the system gave none: {error}"),
        })
    }

    /// Takes a tensor out of a lane, or keeps the waker.
    pub(super) fn take(
        &self,
        part: Part,
        peer: Part,
        crossing: CrossingId,
        step: u64,
        waker: Option<&Waker>,
    ) -> Result<Option<Tensor>, GraphError> {
        let mut state = lock(&self.state);
        let lane = &mut state.lanes[crossing.0];
        match lane.arrived.front() {
            Some((arrived, _)) if *arrived != step => {
                let source = format!("the tensor of step {arrived} came instead").into();
                let crossing = crossing.0.to_string();
                Err(GraphError::Transfer { crossing, step, peer: peer.0, source })
            }
            Some(_) => {
                let tensor = lane.arrived.pop_front().map(|(_, tensor)| tensor);
                wake(lane.sender.take());
                Ok(tensor)
            }
            None => {
                lane.receiver = waker.cloned();
                let peer = (lane.under_way == 0).then_some(peer);
                state.check(part, peer)?;
                Ok(None)
            }
        }
    }

    /// Returns the number of tensors of a crossing that were sent and are not taken.
    pub(super) fn not_taken(&self, crossing: CrossingId) -> usize {
        let state = lock(&self.state);
        let lane = &state.lanes[crossing.0];
        lane.arrived.len() + lane.under_way
    }

    /// Waits until fewer than `below` tensors of a crossing are not taken, by default until there is room for another one.
    pub(super) fn poll_below(
        &self,
        part: Part,
        peer: Part,
        crossing: CrossingId,
        waker: &Waker,
        below: Option<usize>,
    ) -> Poll<Result<(), GraphError>> {
        let mut state = lock(&self.state);
        let lane = &mut state.lanes[crossing.0];
        if lane.arrived.len() + lane.under_way < below.unwrap_or(self.depth) {
            return Poll::Ready(Ok(()));
        }
        lane.sender = Some(waker.clone());
        state.check(part, Some(peer))?;
        Poll::Pending
    }

    /// Notes that a part has failed.
    pub(super) fn fail(&self, part: Part, reason: &str) {
        let mut state = lock(&self.state);
        state.failed.push((part, reason.to_owned()));
        let wakers = state.wakers();
        drop(state);
        wake_all(wakers);
    }

    /// Notes that a part has dropped its transfers.
    pub(super) fn leave(&self, part: Part) {
        let mut state = lock(&self.state);
        state.left[part.0] = true;
        let wakers = state.wakers();
        drop(state);
        self.changed.notify_one();
        wake_all(wakers);
    }

    /// Puts tensors that are due into their lanes. Returns false when all parts have left.
    fn deliver(&self) -> bool {
        let mut state = lock(&self.state);
        if state.left.iter().all(|left| *left) {
            return false;
        }
        let now = Instant::now();
        let mut delivered = false;
        while let Some(parcel) = state.parcels.first_entry().filter(|parcel| parcel.key().0 <= now) {
            let (lane, step, tensor) = parcel.remove();
            let lane = &mut state.lanes[lane];
            lane.under_way -= 1;
            lane.arrived.push_back((step, tensor));
            wake(lane.receiver.take());
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

impl State {
    /// Checks that no other part has failed, and that the peer is there.
    fn check(&self, part: Part, peer: Option<Part>) -> Result<(), GraphError> {
        if let Some((failed, reason)) = self.failed.iter().find(|(failed, _)| *failed != part) {
            return Err(GraphError::PeerFailed { peer: failed.0, reason: reason.clone() });
        }
        match peer {
            Some(peer) if self.left[peer.0] => {
                Err(GraphError::PeerLost { peer: peer.0, source: "it has dropped its transfers".into() })
            }
            _ => Ok(()),
        }
    }

    fn wakers(&mut self) -> Vec<Waker> {
        let wakers = self.lanes.iter_mut().flat_map(|lane| [lane.receiver.take(), lane.sender.take()]);
        wakers.flatten().collect()
    }
}

/// Wakes a thread for a change of a lane. The state is locked, so that a thread which a timer has woken does not see the change before its
/// waker is woken. Such a thread would count a late wake ([`Report::late`](crate::schedule::Report::late)).
fn wake(waker: Option<Waker>) {
    wake_all(waker);
}
