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

use crate::dataflow::{Fact, KernelError, NodeId, Outlet};
use crate::error::GraphError;

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

impl Crossing {
    /// Makes the error of a tensor that could not be sent, received or made a value. `peer` is the other part.
    pub(crate) fn failed(&self, peer: Part, step: u64, source: impl Into<KernelError>) -> GraphError {
        GraphError::Transfer { crossing: self.name.clone(), step, peer: peer.0, source: source.into() }
    }
}

/// How a crossing tensor is placed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Placement {
    /// The shape is known: a slot at the receiver, whose address the sender learns before the first step; one WRITE (§3.2).
    Static(TensorSpec),
    /// The shape is not known: metadata, and a READ by the receiver (§3.3).
    Dynamic {
        /// What is known: the type, the number of dimensions, and some of the lengths.
        fact: Fact,
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

    /// Checks that a tensor has the type and the shape of this placement, as far as they are known before the first step.
    ///
    /// ```
    /// use tonic_rdma_graph::dataflow::{Dim, Fact};
    /// use tonic_rdma_graph::placement::Placement;
    /// use tonic_rdma_tensor::Dtype;
    ///
    /// let fact = Fact { dtype: Dtype::F32, dims: vec![Dim::Symbolic("N".into()), Dim::Known(3)] };
    /// let placement = Placement::Dynamic { fact, why: "N is a dimension of the input".to_owned() };
    /// let spec = |dims| Fact::known(Dtype::F32, dims).spec();
    /// assert!(placement.check(&spec(&[8, 3]).ok_or("known")?).is_ok());
    /// let error = placement.check(&spec(&[8, 4]).ok_or("known")?).unwrap_err();
    /// assert_eq!(error.to_string(), "the graph says float32[N, 3], and float32[8, 4] came");
    /// # Ok::<(), &str>(())
    /// ```
    ///
    /// # Errors
    /// The type, the number of dimensions or a known length differs. The error has what was found and what the graph says.
    pub fn check(&self, spec: &TensorSpec) -> Result<(), KernelError> {
        let (fits, says) = match self {
            Self::Static(expected) => (expected == spec, expected.to_string()),
            Self::Dynamic { fact, .. } => (fact.fits(spec), fact.to_string()),
        };
        if fits { Ok(()) } else { Err(format!("the graph says {says}, and {spec} came").into()) }
    }
}
