//! Runs the nodes of one part of a split graph.
//!
//! An [`Executor`] belongs to one part. One thread runs it, or several run its nodes while that one decides
//! which ([`Executor::threads`]). A node is *ready* when all its inputs are there. Ready nodes wait in a
//! queue. A tensor of another part is a *receive*, and what becomes of a receive that has not arrived is
//! the [`ReceiveMode`]:
//!
//! ```text
//!  polling-async   the receive is in the ready queue; a poll that finds nothing puts it at the tail (§4)
//!  blocking        the thread waits when it gets to a node that needs the tensor
//!  callback        the receive is not in the queue; its arrival puts it there
//! ```
//!
//! A send begins as soon as its node has run. Several steps may be in flight; each node sees its steps in
//! ascending order.
//!
//! This module never moves bytes between processes: the [transfers](Transfers) do. It never decides what
//! crosses: the placement did.

mod executor;
mod in_memory;
mod plan;
mod run;
#[cfg(test)]
mod tests;
mod transfers;

pub use executor::{Direction, Executor, Program, ReceiveMode, RunReport, StepTime, StopHandle};
pub use transfers::{CrossingCounts, Transfers};
pub(crate) use transfers::{Start, Transport, Unfinished};
