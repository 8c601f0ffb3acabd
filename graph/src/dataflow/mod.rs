//! Data-flow graphs: nodes, the tensors between them, and what is known of their shapes before the first step.
//!
//! ```text
//!  Topology   names, edges, facts, work       plain data: the same in all processes
//!  Kernel     computes the outputs of a node  only in the process that runs the node
//!  Value      a tensor of the engine          shared without a copy, or filled with bytes that arrived
//! ```
//!
//! This module never runs a node, and never moves a tensor.

mod fact;
mod kernel;
mod topology;

pub use fact::{Dim, Fact};
pub(crate) use kernel::guarded;
pub use kernel::{Kernel, KernelError, Value};
pub use topology::{Node, NodeId, Outlet, Role, Topology};
