//! One run: the queue of ready nodes and receives, and what the thread does when nothing is ready.

use std::collections::{BTreeMap, VecDeque};
use std::mem;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use super::executor::{Direction, Executor, Program, ReceiveMode, RunReport, StepTime, Work};
use super::plan::{Flights, PlannedNode, Source};
use super::transfers::{Start, Transport};
use crate::dataflow::{self, Kernel, KernelError, NodeId, Topology, Value};
use crate::error::{GraphError, Problem};
use crate::placement::CrossingId;
use tonic_rdma::unstable::waits::Spinning;
use tonic_rdma_tensor::Tensor;
use tonic_rdma_verbs::unstable::lock;

/// The longest time that the thread sleeps without a poll of the transfers and a reading of the clock.
const LONGEST_SLEEP: Duration = Duration::from_millis(100);

pub(super) struct Run<'a, V> {
    executor: &'a mut Executor<V>,
    program: &'a mut dyn Program<V>,
    work: Work,
    /// The steps that are not in flight yet. Its end is the end of the run.
    steps: Range<u64>,
    flights: Flights<V>,
    queue: Queue,
    /// The number of polls that found nothing since the last progress.
    misses: usize,
    /// The receives of steps in flight that were polled and had not arrived.
    missing: Vec<bool>,
    sends: Sends,
    /// The number of nodes that other threads run now, and what they have run.
    under_way: usize,
    ran: Arc<Mutex<VecDeque<Ran<V>>>>,
    alarm: Arc<Alarm>,
    /// Wakes this thread.
    waker: Waker,
    /// Wakes this thread, and says which receive has arrived. Only in the mode callback.
    arrivals: Vec<Waker>,
    report: RunReport,
    began: Instant,
    /// When the thread first found no progress. `None` while there is progress, because a reading of the
    /// clock for each node costs time.
    quiet_since: Option<Instant>,
    /// The spin of the thread before it sleeps.
    spinning: Spinning,
    /// Whether the last sleep ended without a ring.
    timed_out: bool,
}

impl<'a, V: Value> Run<'a, V> {
    pub(super) fn new(
        executor: &'a mut Executor<V>,
        steps: Range<u64>,
        work: Work,
        program: &'a mut dyn Program<V>,
    ) -> Self {
        let alarm = Alarm::new();
        let waker = Waker::from(Arc::clone(&alarm));
        executor.stop.watched_by(&waker);
        let receives = 0..executor.plan.receives.len();
        let arrival = |receive| Waker::from(Arc::new(Arrival { alarm: Arc::clone(&alarm), receive }));
        let arrivals = match executor.settings.receive {
            ReceiveMode::Callback => receives.clone().map(arrival).collect(),
            ReceiveMode::PollingAsync | ReceiveMode::Blocking => Vec::new(),
        };
        let takes_nodes = executor.settings.receive != ReceiveMode::Blocking;
        executor.pace.resume();
        Self {
            flights: Flights::new(&executor.plan, steps.start),
            missing: vec![false; receives.len()],
            executor,
            program,
            work,
            steps,
            queue: Queue::new(takes_nodes),
            misses: 0,
            sends: Sends::default(),
            under_way: 0,
            ran: Arc::default(),
            alarm,
            waker,
            arrivals,
            report: RunReport::default(),
            began: Instant::now(),
            quiet_since: None,
            spinning: Spinning::default(),
            timed_out: false,
        }
    }

    /// Runs until all steps have ended.
    pub(super) fn drive(mut self) -> Result<RunReport, GraphError> {
        let outcome = self.run();
        // After a failure, kernels may still run.
        while self.under_way > 0 {
            self.alarm.set();
            let Some(Ran { node, kernel, .. }) = self.take_ran() else {
                self.alarm.sleep(LONGEST_SLEEP);
                continue;
            };
            self.executor.kernels[node] = Some(kernel);
        }
        outcome.map(|()| self.report)
    }

    fn run(&mut self) -> Result<(), GraphError> {
        loop {
            self.check_stop()?;
            self.admit();
            if self.flights.flights.is_empty() {
                break;
            }
            let ran = self.go_on()?;
            self.retry_sends()?;
            let more = match self.executor.settings.receive {
                ReceiveMode::Blocking => self.run_next_in_order()?,
                ReceiveMode::PollingAsync | ReceiveMode::Callback => self.take_entry()?,
            };
            let ended = self.end_steps()?;
            if !more && !ended && !ran {
                self.idle()?;
            }
        }
        self.wait(|transfers, waker| transfers.is_flushed(waker))?;
        self.check_late();
        // The parts that send to this one have said which steps they run when their run began.
        self.wait(|transfers, waker| transfers.is_agreed(waker))?;
        self.report.elapsed = self.began.elapsed();
        Ok(())
    }

    /// Takes a node that another thread has run.
    fn take_ran(&mut self) -> Option<Ran<V>> {
        let ran = lock(&self.ran).pop_front();
        self.under_way -= usize::from(ran.is_some());
        ran
    }

    /// Goes on with the outputs of nodes that other threads have run. Returns whether there were some.
    fn go_on(&mut self) -> Result<bool, GraphError> {
        let mut some = false;
        while self.under_way > 0
            && let Some(Ran { step, node, kernel, outputs }) = self.take_ran()
        {
            self.executor.kernels[node] = Some(kernel);
            let outputs = run_of_node(&self.executor.plan.nodes[node], || outputs)?;
            self.give(step, node, outputs)?;
            some = true;
        }
        Ok(some)
    }

    fn check_stop(&self) -> Result<(), GraphError> {
        if self.executor.stop.is_stopped() { Err(Problem::Stopped.into()) } else { Ok(()) }
    }

    /// Fills the window with steps.
    fn admit(&mut self) {
        while self.flights.flights.len() < self.executor.settings.window && !self.steps.is_empty() {
            let step = self.steps.start;
            self.steps.start += 1;
            self.executor.transfers.recycle();
            let (nodes, receives) = self.flights.admit(&self.executor.plan, step, self.began.elapsed());
            for receive in receives {
                self.due(receive);
            }
            nodes.into_iter().for_each(|node| self.queue.ready(step, node));
        }
    }

    fn retry_sends(&mut self) -> Result<(), GraphError> {
        if self.sends.oldest().is_some() {
            for step in self.sends.retry(&mut *self.executor.transfers)? {
                self.flights.began(step);
                self.check_late();
                self.note_progress();
            }
        }
        Ok(())
    }

    /// Removes steps that have ended. Returns whether there were some.
    fn end_steps(&mut self) -> Result<bool, GraphError> {
        let mut some = false;
        while let Some(flight) = self.flights.ended() {
            some = true;
            if self.work != Work::Replay {
                for (constant, outlet) in &self.executor.plan.constant_results {
                    let Some(value) = self.executor.constants[*constant].get(outlet.output) else { continue };
                    let result = guarded(|| self.program.result(flight.step, *outlet, value.clone()));
                    let name = self.executor.graph.outlet_name(*outlet);
                    result.map_err(|source| node_failed(&name, "result", source))?;
                }
            }
            let (step, began, ended) = (flight.step, flight.began, self.began.elapsed());
            self.report.steps.push(StepTime { step, began, ended });
        }
        Ok(some)
    }

    /// Notes that a receive belongs to a step in flight.
    fn due(&mut self, receive: usize) {
        match self.executor.settings.receive {
            ReceiveMode::PollingAsync => self.queue.poll_later(receive),
            ReceiveMode::Callback => self.alarm.note_arrival(receive),
            ReceiveMode::Blocking => {}
        }
    }

    /// Takes one entry of the queue. Returns whether it is worthwhile to take another one at once.
    fn take_entry(&mut self) -> Result<bool, GraphError> {
        if self.executor.settings.receive == ReceiveMode::Callback {
            self.take_arrivals()?;
        }
        match self.queue.pop() {
            Some(Entry::Node(step, node)) => {
                self.run_node(step, node)?;
                Ok(true)
            }
            Some(Entry::Receive(receive)) => {
                if !self.take(receive, None)? {
                    self.queue.poll_later(receive);
                    self.misses += 1;
                }
                Ok(self.queue.nodes > 0 || self.misses < self.queue.entries.len())
            }
            None => Ok(false),
        }
    }

    /// Takes the receives whose wakers were woken.
    fn take_arrivals(&mut self) -> Result<(), GraphError> {
        for receive in self.alarm.arrivals() {
            // A waker may be woken twice, so that the receive is now that of a step that is not in flight.
            if self.flights.receive_steps[receive] < self.steps.start {
                let waker = self.arrivals[receive].clone();
                self.take(receive, Some(&waker))?;
            }
        }
        Ok(())
    }

    /// Runs the next node in topological order if its inputs are there. Returns false to wait for one of
    /// them.
    fn run_next_in_order(&mut self) -> Result<bool, GraphError> {
        let Some((step, node)) = self.flights.first_node() else { return Ok(false) };
        for input in 0..self.executor.plan.nodes[node].inputs.len() {
            let Source::Value(value) = self.executor.plan.nodes[node].inputs[input] else { continue };
            let Some(receive) = self.executor.plan.values[value].receive else { continue };
            if self.flights.receive_steps[receive] == step && !self.take(receive, None)? {
                return Ok(false);
            }
        }
        self.run_node(step, node)?;
        Ok(true)
    }

    /// Polls a receive. If it has not arrived, the waker is woken when it has.
    fn take(&mut self, receive: usize, waker: Option<&Waker>) -> Result<bool, GraphError> {
        let step = self.flights.receive_steps[receive];
        let Executor { transfers, sites, plan, .. } = &mut *self.executor;
        let crossing = plan.receives[receive].crossing;
        let taken = guarded(|| Ok(transfers.take(crossing, step, sites, waker)));
        let Some(value) = taken.map_err(|source| self.transfer_error(crossing, step, source))?? else {
            self.missing[receive] = true;
            self.report.missed += 1;
            return Ok(false);
        };
        if waker.is_some() {
            // In the mode polling-async, the receive is in the queue while the thread sleeps.
            self.queue.remove(receive);
        }
        self.arrived(receive, step, value).map(|()| true)
    }

    fn arrived(&mut self, receive: usize, step: u64, value: V) -> Result<(), GraphError> {
        self.check_late();
        self.note_progress();
        self.report.received += 1;
        self.missing[receive] = false;
        let planned = &self.executor.plan.receives[receive];
        let (crossing, index) = (planned.crossing, planned.value);
        let value = if self.work == Work::Replay {
            None
        } else {
            let seen = guarded(|| self.program.crossed(Direction::Received, crossing, step, &value));
            seen.map_err(|source| self.transfer_error(crossing, step, source))?;
            Some(value)
        };
        let Self { flights, executor, queue, .. } = self;
        flights.put(&executor.plan, step, index, value, |step, node| queue.ready(step, node));
        if self.flights.arrived(step, receive) {
            self.due(receive);
        }
        Ok(())
    }

    fn run_node(&mut self, step: u64, node: usize) -> Result<(), GraphError> {
        self.report.ran += 1;
        self.report.ran_while_outstanding += u64::from(self.missing.contains(&true));
        if self.work == Work::Replay {
            self.replay_sends(step, node)?;
            return self.give(step, node, Vec::new());
        }
        if self.hand_over(step, node) {
            return Ok(());
        }
        let outputs = self.compute(step, node)?;
        self.give(step, node, outputs)
    }

    /// Has another thread run a node, if there are threads for that, and it is no input. Each node runs in
    /// one step at a time.
    fn hand_over(&mut self, step: u64, node: usize) -> bool {
        let Executor { plan, kernels, constants, sites, pool, .. } = &mut *self.executor;
        let Some(pool) = pool else { return false };
        let Some(mut kernel) = kernels[node].take() else { return false };
        let inputs = self.flights.inputs(plan, step, node, constants);
        let (id, sites) = (plan.nodes[node].id, Arc::clone(sites));
        let (ran, waker) = (Arc::clone(&self.ran), self.waker.clone());
        self.under_way += 1;
        pool.spawn(move || {
            let outputs = guarded(|| {
                let _scope = sites.enter(id);
                kernel.run(step, inputs)
            });
            lock(&ran).push_back(Ran { step, node, kernel, outputs });
            waker.wake();
        });
        true
    }

    /// Sends the outputs of a node, gives its results to the program, and hands the outputs to the
    /// consumers. A replay has no outputs.
    fn give(&mut self, step: u64, node: usize, outputs: Vec<V>) -> Result<(), GraphError> {
        if self.work != Work::Replay {
            self.begin_sends(step, node, &outputs)?;
            self.give_results(step, node, &outputs)?;
        }
        let planned = &self.executor.plan.nodes[node];
        let (first, count) = (planned.first_value, planned.outputs);
        let mut outputs = outputs.into_iter();
        let Self { flights, executor, queue, .. } = self;
        for value in first..first + count {
            flights.put(&executor.plan, step, value, outputs.next(), |step, node| queue.ready(step, node));
        }
        if let Some((step, node)) = flights.ran(step, node) {
            queue.ready(step, node);
        }
        self.note_progress();
        Ok(())
    }

    fn compute(&mut self, step: u64, node: usize) -> Result<Vec<V>, GraphError> {
        let Executor { plan, kernels, constants, sites, .. } = &mut *self.executor;
        let inputs = self.flights.inputs(plan, step, node, constants);
        let planned = &plan.nodes[node];
        run_of_node(planned, || {
            let _scope = sites.enter(planned.id);
            match &mut kernels[node] {
                Some(kernel) => kernel.run(step, inputs),
                None => self.program.feed(step, planned.id).map(|value| vec![value]),
            }
        })
    }

    /// Begins the sends of a node.
    fn begin_sends(&mut self, step: u64, node: usize, outputs: &[V]) -> Result<(), GraphError> {
        let mut shared: Option<(usize, Tensor)> = None;
        for send in 0..self.executor.plan.nodes[node].sends.len() {
            let (output, crossing) = self.executor.plan.nodes[node].sends[send];
            let seen = guarded(|| self.program.crossed(Direction::Sent, crossing, step, &outputs[output]));
            seen.map_err(|source| self.transfer_error(crossing, step, source))?;
            let tensor = match shared.take() {
                Some((of, tensor)) if of == output => tensor,
                _ => guarded(|| outputs[output].share())
                    .map_err(|source| self.transfer_error(crossing, step, source))?,
            };
            self.executor.sites.crossed(crossing, &tensor);
            if self.work == Work::ComputeAndKeep && step + 1 == self.steps.end {
                self.executor.kept[crossing.0] = Some(tensor.clone());
            }
            self.begin(crossing, step, tensor.clone())?;
            shared = Some((output, tensor));
        }
        Ok(())
    }

    /// Begins the sends of a node with the tensors of an earlier run.
    fn replay_sends(&mut self, step: u64, node: usize) -> Result<(), GraphError> {
        for send in 0..self.executor.plan.nodes[node].sends.len() {
            let (_, crossing) = self.executor.plan.nodes[node].sends[send];
            let Some(tensor) = self.executor.kept[crossing.0].clone() else {
                let reason = "`replay` needs a call of `run_and_keep` before it".to_owned();
                return Err(GraphError::of_setting("work", reason));
            };
            self.begin(crossing, step, tensor)?;
        }
        Ok(())
    }

    fn begin(&mut self, crossing: CrossingId, step: u64, tensor: Tensor) -> Result<(), GraphError> {
        if self.sends.start(&mut *self.executor.transfers, crossing, step, tensor)? {
            self.flights.began(step);
        } else {
            self.report.busy += 1;
        }
        Ok(())
    }

    fn give_results(&mut self, step: u64, node: usize, outputs: &[V]) -> Result<(), GraphError> {
        let planned = &self.executor.plan.nodes[node];
        for (output, outlet) in &planned.results {
            let result = guarded(|| self.program.result(step, *outlet, outputs[*output].clone()));
            result.map_err(|source| node_failed(&planned.name, "result", source))?;
        }
        Ok(())
    }

    fn note_progress(&mut self) {
        self.executor.pace.arrived_now();
        (self.quiet_since, self.spinning, self.misses) = (None, Spinning::default(), 0);
    }

    /// Polls for a moment, then sleeps until something arrives, a send can begin, or it is time to read the
    /// clock.
    fn idle(&mut self) -> Result<(), GraphError> {
        self.misses = 0;
        let quiet = self.check_deadline()?;
        if self.spinning.again_at(&mut self.executor.pace, Instant::now()).is_ok() {
            return Ok(());
        }
        self.alarm.set();
        if self.under_way > 0 && !lock(&self.ran).is_empty() {
            return Ok(());
        }
        let waker = self.waker.clone();
        if self.executor.settings.receive == ReceiveMode::Callback {
            if !lock(&self.alarm.arrivals).is_empty() {
                return Ok(());
            }
        } else {
            for receive in 0..self.missing.len() {
                if self.missing[receive] && self.take(receive, Some(&waker))? {
                    return Ok(());
                }
            }
        }
        if !self.sends.can_begin(&mut *self.executor.transfers, &waker)? {
            self.sleep(quiet);
        }
        Ok(())
    }

    /// Returns the time since the last progress.
    ///
    /// # Errors
    /// It is longer than the deadline.
    fn check_deadline(&mut self) -> Result<Duration, GraphError> {
        if self.under_way > 0 {
            // A kernel may run for long.
            self.quiet_since = None;
        }
        let quiet = self.quiet_since.get_or_insert_with(Instant::now).elapsed();
        let deadline = self.executor.settings.deadline;
        if quiet < deadline {
            return Ok(quiet);
        }
        let late = self.flights.outstanding().into_iter().find(|(_, receive)| self.missing[*receive]);
        let crossings = self.executor.placements.crossings();
        let (waits_for, peer) = match (late, self.sends.oldest()) {
            (Some((step, receive)), _) => {
                let crossing = &crossings[self.executor.plan.receives[receive].crossing.0];
                (format!("crossing tensor {} of step {step} has not arrived", crossing.name), crossing.from)
            }
            (None, Some((step, crossing))) => {
                let crossing = &crossings[crossing.0];
                let text = format!("crossing tensor {} of step {step} finds no free buffer", crossing.name);
                (text, crossing.to)
            }
            (None, None) => match self.executor.transfers.unfinished() {
                Some(unfinished) => {
                    let crossing = &crossings[unfinished.crossing.0];
                    let text = format!("crossing tensor {} has been sent and is not taken", crossing.name);
                    (text, crossing.to)
                }
                None => match self.executor.transfers.unheard() {
                    Some(part) => (format!("part {} has not said which steps it runs", part.0), part),
                    None => ("sends are not over".to_owned(), self.executor.part()),
                },
            },
        };
        Err(Problem::Deadline { waits_for, peer: peer.0, seconds: deadline.as_secs_f64() }.into())
    }

    fn sleep(&mut self, quiet: Duration) {
        self.report.slept += 1;
        let left = self.executor.settings.deadline.saturating_sub(quiet);
        self.timed_out = !self.alarm.sleep(left.min(LONGEST_SLEEP));
    }

    /// Counts progress after a sleep that a timer ended, if no waker has been woken since: such a wake-up is
    /// late or lost.
    fn check_late(&mut self) {
        self.report.late += u64::from(self.timed_out && !self.alarm.has_rung());
        self.timed_out = false;
    }

    /// Waits until `is_done`. The deadline begins anew whenever a send of this part has ended.
    fn wait(
        &mut self,
        is_done: impl Fn(&mut dyn Transport<V>, &Waker) -> Result<bool, GraphError>,
    ) -> Result<(), GraphError> {
        self.note_progress();
        let waker = self.waker.clone();
        let mut least = u64::MAX;
        loop {
            self.check_stop()?;
            self.alarm.set();
            if is_done(&mut *self.executor.transfers, &waker)? {
                return Ok(());
            }
            let left = self.executor.transfers.unfinished().map_or(0, |unfinished| unfinished.sends);
            if left < least {
                least = left;
                self.note_progress();
            }
            let quiet = self.check_deadline()?;
            self.sleep(quiet);
        }
    }

    fn transfer_error(&self, crossing: CrossingId, step: u64, source: KernelError) -> GraphError {
        let crossing = &self.executor.placements.crossings()[crossing.0];
        let peer = if crossing.from == self.executor.part() { crossing.to } else { crossing.from };
        crossing.failed(peer, step, source)
    }
}

/// A node that another thread has run in a step.
struct Ran<V> {
    step: u64,
    node: usize,
    kernel: Box<dyn Kernel<V>>,
    outputs: Result<Vec<V>, KernelError>,
}

/// An entry of the queue.
#[derive(Clone, Copy, Debug)]
enum Entry {
    /// A node whose inputs are there, in a step.
    Node(u64, usize),
    /// A receive that may have arrived.
    Receive(usize),
}

/// The queue. In the mode blocking the order of the nodes is the queue, so this one stays empty.
#[derive(Debug)]
struct Queue {
    entries: VecDeque<Entry>,
    takes_nodes: bool,
    /// The number of nodes in the queue.
    nodes: usize,
}

impl Queue {
    fn new(takes_nodes: bool) -> Self {
        Self { entries: VecDeque::new(), takes_nodes, nodes: 0 }
    }

    /// Adds a node that is ready.
    fn ready(&mut self, step: u64, node: usize) {
        if self.takes_nodes {
            self.entries.push_back(Entry::Node(step, node));
            self.nodes += 1;
        }
    }

    /// Puts a receive at the tail.
    fn poll_later(&mut self, receive: usize) {
        self.entries.push_back(Entry::Receive(receive));
    }

    /// Takes the first entry.
    fn pop(&mut self) -> Option<Entry> {
        let first = self.entries.pop_front();
        self.nodes -= usize::from(matches!(first, Some(Entry::Node(..))));
        first
    }

    /// Removes a receive, because it has arrived.
    fn remove(&mut self, receive: usize) {
        self.entries.retain(|entry| !matches!(entry, Entry::Receive(other) if *other == receive));
    }
}

/// Sends that wait for a buffer, by crossing tensor, in the order of the steps.
#[derive(Debug, Default)]
struct Sends {
    waiting: BTreeMap<CrossingId, VecDeque<(u64, Tensor)>>,
}

impl Sends {
    /// Begins a send, or keeps it for later. Returns whether it has begun.
    fn start<V>(
        &mut self,
        transfers: &mut dyn Transport<V>,
        crossing: CrossingId,
        step: u64,
        tensor: Tensor,
    ) -> Result<bool, GraphError> {
        if let Some(waiting) = self.waiting.get_mut(&crossing) {
            waiting.push_back((step, tensor));
            return Ok(false);
        }
        if transfers.start(crossing, step, &tensor)? == Start::Begun {
            return Ok(true);
        }
        self.waiting.insert(crossing, VecDeque::from([(step, tensor)]));
        Ok(false)
    }

    /// Tries each crossing tensor again. Returns the steps of the sends that have begun.
    fn retry<V>(&mut self, transfers: &mut dyn Transport<V>) -> Result<Vec<u64>, GraphError> {
        let mut begun = Vec::new();
        for (crossing, waiting) in &mut self.waiting {
            while let Some((step, tensor)) = waiting.front() {
                if transfers.start(*crossing, *step, tensor)? == Start::Busy {
                    break;
                }
                begun.push(*step);
                waiting.pop_front();
            }
        }
        self.waiting.retain(|_, waiting| !waiting.is_empty());
        Ok(begun)
    }

    /// Returns the send that waits for the oldest step.
    fn oldest(&self) -> Option<(u64, CrossingId)> {
        self.waiting.iter().filter_map(|(crossing, waiting)| Some((waiting.front()?.0, *crossing))).min()
    }

    /// Returns whether one of the sends can begin. Otherwise `waker` is woken when one can.
    fn can_begin<V>(&self, transfers: &mut dyn Transport<V>, waker: &Waker) -> Result<bool, GraphError> {
        let mut can = false;
        for crossing in self.waiting.keys() {
            can |= transfers.can_start(*crossing, waker)?;
        }
        Ok(can)
    }
}

/// Runs the kernel of a constant.
pub(super) fn run_constant<V>(
    graph: &Topology,
    id: NodeId,
    kernel: &mut dyn Kernel<V>,
) -> Result<Vec<V>, GraphError> {
    let Some(node) = graph.node(id) else { return Ok(Vec::new()) };
    let outputs = guarded(|| kernel.run(0, Vec::new()));
    counted(outputs, node.outputs.len()).map_err(|source| node_failed(&node.name, &node.kind, source))
}

/// Runs what computes the outputs of a node.
fn run_of_node<V>(
    node: &PlannedNode,
    run: impl FnOnce() -> Result<Vec<V>, KernelError>,
) -> Result<Vec<V>, GraphError> {
    counted(guarded(run), node.outputs).map_err(|source| node_failed(&node.name, &node.kind, source))
}

/// Makes the error of a node.
fn node_failed(node: &str, kind: &str, source: KernelError) -> GraphError {
    GraphError::from(Problem::Kernel { node: node.to_owned(), kind: kind.to_owned(), source })
}

fn counted<V>(outputs: Result<Vec<V>, KernelError>, expected: usize) -> Result<Vec<V>, KernelError> {
    match outputs {
        Ok(outputs) if outputs.len() != expected => {
            Err(format!("it returned {} outputs instead of {expected}", outputs.len()).into())
        }
        outputs => outputs,
    }
}

/// Calls an engine or the program. After a panic the executor runs no more, so that a kernel in a broken
/// state is not used.
fn guarded<R>(run: impl FnOnce() -> Result<R, KernelError>) -> Result<R, KernelError> {
    dataflow::guarded("it", run)
}

/// Wakes the thread of an executor, and keeps which receives have arrived.
#[derive(Debug)]
struct Alarm {
    thread: Thread,
    rung: AtomicBool,
    arrivals: Mutex<Vec<usize>>,
}

/// The waker of one receive.
#[derive(Debug)]
struct Arrival {
    alarm: Arc<Alarm>,
    receive: usize,
}

impl Alarm {
    /// Makes the alarm of the current thread.
    fn new() -> Arc<Self> {
        Arc::new(Self { thread: thread::current(), rung: AtomicBool::new(false), arrivals: Mutex::default() })
    }

    /// Notes that a receive is to be polled.
    fn note_arrival(&self, receive: usize) {
        lock(&self.arrivals).push(receive);
    }

    /// Takes the receives that are to be polled.
    fn arrivals(&self) -> Vec<usize> {
        mem::take(&mut *lock(&self.arrivals))
    }

    /// Forgets earlier rings. Call this before the wakers are given out.
    fn set(&self) {
        self.rung.store(false, Ordering::SeqCst);
    }

    /// Sleeps until the alarm rings, at most for `longest`. Returns whether it has rung. Only the thread that
    /// made the alarm may call this.
    fn sleep(&self, longest: Duration) -> bool {
        // A ring between `set` and the park is not lost, because it leaves the thread's unpark token. The
        // token may also be of an earlier ring, or of another user of this thread: then the park ends early,
        // and the loop parks again.
        let began = Instant::now();
        while !self.has_rung() {
            let left = longest.saturating_sub(began.elapsed());
            if left.is_zero() {
                return false;
            }
            thread::park_timeout(left);
        }
        true
    }

    /// Returns whether the alarm has rung since it was set.
    fn has_rung(&self) -> bool {
        self.rung.load(Ordering::SeqCst)
    }

    fn ring(&self) {
        if !self.rung.swap(true, Ordering::SeqCst) {
            self.thread.unpark();
        }
    }
}

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        self.ring();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.ring();
    }
}

impl Wake for Arrival {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.alarm.note_arrival(self.receive);
        self.alarm.ring();
    }
}

#[cfg(test)]
mod alarm_tests {
    use super::*;

    #[test]
    fn a_token_of_an_earlier_ring_does_not_end_a_sleep() {
        let alarm = Alarm::new();
        alarm.ring();
        alarm.set();
        let began = Instant::now();
        assert!(!alarm.sleep(Duration::from_millis(30)));
        assert!(began.elapsed() >= Duration::from_millis(30), "the sleep ended early without a ring");
        alarm.ring();
        assert!(alarm.sleep(Duration::from_secs(600)));
    }
}
