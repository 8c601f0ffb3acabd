//! Errors of graphs.

use std::error::Error;

/// An error about a graph, a part of it, or a run of it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GraphError {
    /// The description of a graph contradicts itself.
    #[error("node {node}: {reason}")]
    Node {
        /// The name of the node.
        node: String,
        /// What is wrong.
        reason: String,
    },
    /// A kernel failed.
    #[error("node {node} ({kind}) failed")]
    Kernel {
        /// The name of the node.
        node: String,
        /// The operation of the node.
        kind: String,
        /// The error of the engine.
        source: Box<dyn Error + Send + Sync>,
    },
}
