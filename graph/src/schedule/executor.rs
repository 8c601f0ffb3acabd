//! The executor of one part: its settings, what a run asks of the program, and what it reports.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Waker;
use std::time::Duration;
use std::{fmt, mem};

use rayon_core::{ThreadPool, ThreadPoolBuilder};
use serde::{Deserialize, Serialize};

use super::plan::Plan;
use super::run::{Run, run_constant};
use super::transfers::{CrossingCounts, Transfers, Transport};
use crate::dataflow::{Kernel, KernelError, NodeId, Outlet, Topology, Value};
use crate::error::{GraphError, Problem};
use crate::placement::{CrossingId, Part, Placements};
use crate::sites::NodeSites;
use tonic_rdma::unstable::Pace;
use tonic_rdma_tensor::Tensor;
use tonic_rdma_verbs::unstable::{chain, lock};

/// Runs the nodes of one part. One thread uses it at a time, and it may have [threads](Executor::threads)
/// of its own.
pub struct Executor<V> {
    pub(super) graph: Arc<Topology>,
    pub(super) placements: Arc<Placements>,
    part: Part,
    pub(super) plan: Plan,
    /// The kernels of the planned nodes. An input has none.
    pub(super) kernels: Vec<Option<Box<dyn Kernel<V>>>>,
    /// The outputs of the planned constants.
    pub(super) constants: Vec<Vec<V>>,
    pub(super) transfers: Box<dyn Transport<V>>,
    pub(super) sites: Arc<NodeSites>,
    pub(super) settings: ExecutorSettings,
    /// How long the thread spins, by the waits of all runs.
    pub(super) pace: Pace,
    pub(super) stop: StopHandle,
    /// The threads that run nodes, if there are several. Made at the first run.
    pub(super) pool: Option<ThreadPool>,
    /// What was sent in the last step of [`run_and_keep`](Self::run_and_keep), by crossing tensor.
    pub(super) kept: Vec<Option<Tensor>>,
    /// The first step that has not run.
    next: u64,
    failed: bool,
}

impl<V: Value> Executor<V> {
    /// Makes the executor of a part, with the default settings. `kernels` has a kernel for each node of this
    /// part, and for each constant that this part uses, but none for inputs. Kernels of other nodes are
    /// dropped. Constants are computed here, once.
    ///
    /// ```
    /// use std::collections::HashMap;
    /// use std::sync::Arc;
    ///
    /// use tonic_rdma_graph::dataflow::{Kernel, KernelError, NodeId, Topology, Value};
    /// use tonic_rdma_graph::placement::{Part, Placements};
    /// use tonic_rdma_graph::schedule::{Executor, ReceiveMode, RunReport, Transfers};
    ///
    /// /// Runs ten steps of a graph that is not split.
    /// fn unsplit<V: Value>(
    ///     graph: Arc<Topology>,
    ///     placements: Arc<Placements>,
    ///     kernels: HashMap<NodeId, Box<dyn Kernel<V>>>,
    ///     mut feed: impl FnMut(u64, NodeId) -> Result<V, KernelError>,
    /// ) -> Result<RunReport, Box<dyn std::error::Error>> {
    ///     let transfers = Transfers::in_memory(&placements, 1)?.remove(0);
    ///     let executor = Executor::new(graph, placements, Part(0), kernels, transfers)?;
    ///     Ok(executor.receive(ReceiveMode::Callback).run(0..10, &mut feed)?)
    /// }
    /// ```
    ///
    /// # Errors
    /// A kernel is missing, a constant fails, or a crossing tensor is missing.
    pub fn new(
        graph: Arc<Topology>,
        placements: Arc<Placements>,
        part: Part,
        kernels: impl IntoIterator<Item = (NodeId, Box<dyn Kernel<V>>)>,
        transfers: Transfers<V>,
    ) -> Result<Self, GraphError> {
        let mut kernels: HashMap<_, _> = kernels.into_iter().collect();
        let plan = Plan::new(&graph, &placements, part)?;
        let mut of_nodes = Vec::with_capacity(plan.nodes.len());
        for node in &plan.nodes {
            let kernel = kernels.remove(&node.id);
            if kernel.is_none() && !node.is_input {
                return Err(missing(&graph, node.id, part));
            }
            of_nodes.push(kernel.filter(|_| !node.is_input));
        }
        let mut constants = Vec::with_capacity(plan.constants.len());
        for id in &plan.constants {
            let mut kernel = kernels.remove(id).ok_or_else(|| missing(&graph, *id, part))?;
            constants.push(run_constant(&graph, *id, &mut *kernel)?);
        }
        let kept = vec![None; placements.crossings().len()];
        Ok(Self {
            sites: Arc::new(NodeSites::untraced(&graph)),
            graph,
            placements,
            part,
            plan,
            kernels: of_nodes,
            constants,
            settings: ExecutorSettings::default(),
            pace: Pace::new(transfers.0.spin()),
            transfers: transfers.0,
            stop: StopHandle::default(),
            pool: None,
            kept,
            next: 0,
            failed: false,
        })
    }

    /// Sets the table of allocation sites. By default the executor counts crossing tensors, and knows no
    /// sites.
    pub fn sites(mut self, sites: Arc<NodeSites>) -> Self {
        self.sites = sites;
        self
    }

    /// Sets what becomes of a receive that has not arrived. The default is [`ReceiveMode::PollingAsync`].
    pub fn receive(mut self, receive: ReceiveMode) -> Self {
        self.settings.receive = receive;
        self
    }

    /// Sets the largest number of steps in flight. The default, 1, ends each step before the next one begins.
    pub fn window(mut self, steps: usize) -> Self {
        self.settings.window = steps;
        self
    }

    /// Sets how many threads run nodes. With 1, the default, the thread that calls [`run`](Self::run) does
    /// everything. With more, the executor has so many threads for kernels, and the calling thread feeds
    /// inputs, sends, receives and decides what runs next. The values are the same. An engine that would
    /// work in place may find a tensor in use by another node, and then allocates one. The mode
    /// [`Blocking`](ReceiveMode::Blocking) runs nodes in order, so it takes 1.
    pub fn threads(mut self, threads: usize) -> Self {
        (self.settings.threads, self.pool) = (threads, None);
        self
    }

    /// Sets the longest time without any progress of this part: no node runs, nothing arrives, and no send
    /// begins. The default is 60 s.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.settings.deadline = deadline;
        self
    }

    /// Sets how long an executor that has nothing to do polls for arrivals, at most, before its thread sleeps.
    /// It gives its core to other threads now and then, and does not poll if arrivals are rarer. The default
    /// is 300 µs if tensors move through slots, whose content this thread moves itself, and otherwise 100 µs,
    /// because other threads need the core.
    pub fn spin(mut self, spin: Duration) -> Self {
        self.pace = Pace::new(spin);
        self
    }

    /// Runs steps. Steps of later calls are higher. Returns when all nodes of this part have run in all
    /// steps, and all sends are over. All parts call this with the same steps.
    ///
    /// # Errors
    /// A kernel or the program failed, a peer is gone, has failed or runs other steps, nothing went on for
    /// longer than the deadline, or the run was stopped. The peers are notified. After such an error the
    /// executor runs no more.
    pub fn run(&mut self, steps: Range<u64>, program: &mut dyn Program<V>) -> Result<RunReport, GraphError> {
        self.work(steps, Work::Compute, program)
    }

    /// Runs steps as [`run`](Self::run) does, and keeps the values that this part sends in the last step, for
    /// [`replay`](Self::replay).
    ///
    /// # Errors
    /// As for [`run`](Self::run).
    pub fn run_and_keep(
        &mut self,
        steps: Range<u64>,
        program: &mut dyn Program<V>,
    ) -> Result<RunReport, GraphError> {
        self.work(steps, Work::ComputeAndKeep, program)
    }

    /// Runs steps whose nodes don't compute: the values that [`run_and_keep`](Self::run_and_keep) kept are
    /// sent again, so that only the transfers and the scheduling take time. No inputs are fed, and no results
    /// come out. All parts call this with the same steps.
    ///
    /// # Errors
    /// As for [`run`](Self::run), or nothing was kept.
    pub fn replay(&mut self, steps: Range<u64>) -> Result<RunReport, GraphError> {
        self.work(steps, Work::Replay, &mut |_: u64, _: NodeId| Err("a replay feeds no inputs".into()))
    }

    fn work(
        &mut self,
        steps: Range<u64>,
        work: Work,
        program: &mut dyn Program<V>,
    ) -> Result<RunReport, GraphError> {
        if self.failed {
            return Err(Problem::Failed.into());
        }
        if steps.start < self.next {
            let reason = format!("{steps:?}: this executor has run all steps before {}", self.next);
            return Err(GraphError::of_setting("steps", reason));
        }
        if self.settings.window == 0 {
            let reason = "it is 0; at least 1 step must be in flight".to_owned();
            return Err(GraphError::of_setting("window", reason));
        }
        self.start_threads()?;
        self.next = self.next.max(steps.end);
        if work == Work::ComputeAndKeep && !steps.is_empty() {
            // So that the tensors of an earlier run take no memory in this one.
            self.kept.fill(None);
        }
        let _span = tracing::debug_span!("graph_run", part = self.part.0, ?steps, ?work).entered();
        self.transfers.begin(&steps);
        let report = Run::new(self, steps, work, program).drive();
        if let Err(error) = &report {
            tracing::debug!(error = chain(error), "a run of a graph has failed");
            self.failed = true;
            self.transfers.abort(&chain(error));
        }
        report
    }

    /// Starts the threads that run nodes, if there are to be several.
    fn start_threads(&mut self) -> Result<(), GraphError> {
        let threads = self.settings.threads;
        let reason = match threads {
            0 => "it is 0; at least 1 thread must run nodes".to_owned(),
            2.. if self.settings.receive == ReceiveMode::Blocking => {
                format!("{threads}: the receive mode blocking runs nodes in order, so it takes 1")
            }
            2.. if self.pool.is_none() => {
                let builder = ThreadPoolBuilder::new().num_threads(threads);
                match builder.thread_name(|number| format!("graph-nodes-{number}")).build() {
                    Ok(pool) => {
                        self.pool = Some(pool);
                        return Ok(());
                    }
                    Err(error) => format!("the system gives no {threads} threads: {error}"),
                }
            }
            _ => return Ok(()),
        };
        Err(GraphError::of_setting("threads", reason))
    }

    /// Returns a handle that stops the run from another thread.
    pub fn stop_handle(&self) -> StopHandle {
        self.stop.clone()
    }

    /// Returns the part that this executor runs.
    pub fn part(&self) -> Part {
        self.part
    }

    /// Returns how often and how a crossing tensor was sent or received by this part.
    pub fn counts(&self, crossing: CrossingId) -> CrossingCounts {
        self.transfers.counts(crossing)
    }

    /// Runs the next steps with other transfers, and returns those of the last ones. All parts do so at the
    /// same step.
    pub fn replace_transfers(&mut self, transfers: Transfers<V>) -> Transfers<V> {
        Transfers(mem::replace(&mut self.transfers, transfers.0))
    }
}

impl<V> fmt::Debug for Executor<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Executor")
            .field("part", &self.part)
            .field("nodes", &self.plan.nodes.len())
            .field("receives", &self.plan.receives.len())
            .field("sends", &self.plan.sends)
            .field("settings", &self.settings)
            .field("failed", &self.failed)
            .finish_non_exhaustive()
    }
}

fn missing(graph: &Topology, node: NodeId, part: Part) -> GraphError {
    let name = graph.node(node).map_or_else(|| node.0.to_string(), |node| node.name.clone());
    GraphError::of_node(name, format!("it has no kernel in part {}", part.0))
}

/// How a receive waits for a tensor that has not arrived.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReceiveMode {
    /// It goes to the tail of the ready queue (§4).
    #[default]
    PollingAsync,
    /// The thread waits for it when it gets to a node that needs it. Nodes run in topological order, so that
    /// parts that wait for one another always go on.
    Blocking,
    /// Its arrival puts it into the ready queue.
    Callback,
}

impl ReceiveMode {
    /// All modes.
    pub const ALL: [Self; 3] = [Self::PollingAsync, Self::Blocking, Self::Callback];
}

crate::error::named!(ReceiveMode, "receive mode", "polling-async, blocking or callback");

/// What the nodes of a run do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    Compute,
    ComputeAndKeep,
    Replay,
}

/// How an executor runs: see its setters.
#[derive(Clone, Debug)]
pub(super) struct ExecutorSettings {
    pub(super) receive: ReceiveMode,
    pub(super) window: usize,
    pub(super) deadline: Duration,
    pub(super) threads: usize,
}

impl Default for ExecutorSettings {
    fn default() -> Self {
        Self { receive: ReceiveMode::default(), window: 1, deadline: Duration::from_secs(60), threads: 1 }
    }
}

/// Stops a run from another thread. Clones stop the same run.
#[derive(Clone, Debug, Default)]
pub struct StopHandle {
    state: Arc<StopState>,
}

#[derive(Debug, Default)]
struct StopState {
    stopped: AtomicBool,
    waker: Mutex<Option<Waker>>,
}

impl StopHandle {
    /// Stops the run, which returns an error of kind [`Stopped`](crate::GraphErrorKind::Stopped) once the
    /// kernel that runs now has ended. Later runs return it at once.
    pub fn stop(&self) {
        self.state.stopped.store(true, Ordering::SeqCst);
        let waker = lock(&self.state.waker).take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Returns whether the run was stopped.
    pub fn is_stopped(&self) -> bool {
        self.state.stopped.load(Ordering::SeqCst)
    }

    /// Keeps the waker of the thread that runs.
    pub(super) fn watched_by(&self, waker: &Waker) {
        *lock(&self.state.waker) = Some(waker.clone());
    }
}

/// The end of a crossing at which a value is seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// This part sends the value.
    Sent,
    /// This part has received the value.
    Received,
}

/// Feeds inputs into a run, and sees what comes out. Only [`feed`](Self::feed) is required. A closure
/// `FnMut(u64, NodeId) -> Result<V, KernelError>` is a program that only feeds.
///
/// The thread of the executor calls these methods. The time that they take is part of the step.
pub trait Program<V> {
    /// Returns the value of an input of this part in a step. Each input is asked for once in each step, in
    /// ascending order.
    ///
    /// # Errors
    /// There is no such value. The run ends with an error of kind [`Kernel`](crate::GraphErrorKind::Kernel),
    /// which names the input.
    fn feed(&mut self, step: u64, input: NodeId) -> Result<V, KernelError>;

    /// Takes a result of a step, if the node of the result belongs to this part.
    ///
    /// # Errors
    /// Ends the run with an error that names the node.
    fn result(&mut self, step: u64, outlet: Outlet, value: V) -> Result<(), KernelError> {
        let _ = (step, outlet, value);
        Ok(())
    }

    /// Sees each value that crosses, at both ends: before it is sent, and after it was received. A clone that
    /// is kept makes an engine copy the tensor where it would otherwise work in place.
    ///
    /// # Errors
    /// Ends the run with an error that names the crossing tensor.
    fn crossed(
        &mut self,
        direction: Direction,
        crossing: CrossingId,
        step: u64,
        value: &V,
    ) -> Result<(), KernelError> {
        let _ = (direction, crossing, step, value);
        Ok(())
    }
}

impl<V, F> Program<V> for F
where
    F: FnMut(u64, NodeId) -> Result<V, KernelError>,
{
    fn feed(&mut self, step: u64, input: NodeId) -> Result<V, KernelError> {
        self(step, input)
    }
}

/// When a step began and ended, measured from the beginning of the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepTime {
    /// The step.
    pub step: u64,
    /// When the step entered the window.
    pub began: Duration,
    /// When all nodes of this part had run in this step, and all its sends had begun.
    pub ended: Duration,
}

/// What a run did.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct RunReport {
    /// The steps, in the order in which they ended.
    pub steps: Vec<StepTime>,
    /// The time from the beginning of the run until the last send has ended, and the parts have agreed on the
    /// steps.
    pub elapsed: Duration,
    /// Nodes that ran, fed inputs included.
    pub ran: u64,
    /// Nodes that ran while at least one receive of a step in flight had not arrived.
    pub ran_while_outstanding: u64,
    /// Tensors that were received.
    pub received: u64,
    /// Polls of a receive that found nothing.
    pub missed: u64,
    /// Sends that had to be tried again because all buffers were in use.
    pub busy: u64,
    /// How often the thread slept because nothing was ready.
    pub slept: u64,
    /// How often a timer ended such a sleep although something had arrived, or a send could begin. It is 0 if
    /// the transfers wake their wakers.
    pub late: u64,
}
