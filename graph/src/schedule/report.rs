//! What a run reports.

use std::time::Duration;

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
pub struct Report {
    /// The steps, in the order in which they ended.
    pub steps: Vec<StepTime>,
    /// The time from the beginning of the run until the last send has ended, and the parts have agreed on the steps.
    pub elapsed: Duration,
    /// Nodes that ran, fed inputs included.
    pub ran: u64,
    /// Nodes that ran while at least one receive of a step in flight had not arrived.
    pub ran_while_outstanding: u64,
    /// Tensors that were received.
    pub received: u64,
    /// Looks for a receive that found nothing.
    pub missed: u64,
    /// Sends that had to be tried again because all buffers were in use.
    pub busy: u64,
    /// How often the thread slept because nothing was ready.
    pub slept: u64,
    /// How often a timer ended such a sleep although something had arrived, or a send could begin. It is 0 if the transfers wake their
    /// wakers.
    pub late: u64,
}
