//! The parts of a split graph, the tensors that cross from part to part, and how each of them is placed (§3.4).
//!
//! A tensor whose shape is known gets a buffer at the receiver before the first step (static placement, §3.2). Any other tensor is read
//! by the receiver once its shape is known (dynamic allocation, §3.3).
//!
//! ```text
//!  Topology ─┐
//!            ├─ analyse ─▶ Placements: for each part its nodes, and the crossing tensors
//!  Partition ┘
//! ```
//!
//! This module never moves a tensor, and never decides which node belongs to which part: `partition` does.

mod analysis;
mod assigned;
#[cfg(test)]
mod tests;

use std::fmt;

use tonic_rdma_tensor::TensorSpec;

use crate::dataflow::{NodeId, Outlet};

pub use analysis::{Placements, analyse};
pub use assigned::Partition;

/// The number of a part of a split graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Part(pub usize);

/// The number of a crossing tensor. All parts number them alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CrossingId(pub usize);

/// A tensor that crosses from one part to another. A tensor with consumers in several other parts crosses once to each of these parts.
#[derive(Clone, Debug)]
pub struct Crossing {
    /// The number of this crossing tensor.
    pub id: CrossingId,
    /// A name that no other crossing tensor has.
    pub name: String,
    /// The output that crosses.
    pub outlet: Outlet,
    /// The part of the producer.
    pub from: Part,
    /// The part of the consumers.
    pub to: Part,
    /// The consumers in the part `to`.
    pub consumers: Vec<NodeId>,
    /// How the tensor is placed.
    pub placement: Placement,
}

/// How a crossing tensor is placed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Placement {
    /// The shape is known: a slot at the receiver, whose address the sender learns before the first step; one WRITE (§3.2).
    Static(TensorSpec),
    /// The shape is not known: metadata, and a READ by the receiver (§3.3).
    Dynamic {
        /// Why the shape is not known, for people to read.
        why: String,
    },
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Placement {
    /// Returns whether the shape is known before the first step.
    pub fn is_static(&self) -> bool {
        matches!(self, Self::Static(_))
    }
}
