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
    /// A crossing tensor could not be sent, received or made a value.
    #[error("crossing tensor {crossing}, step {step}, between this part and part {peer}")]
    Transfer {
        /// The name of the crossing tensor.
        crossing: String,
        /// The step.
        step: u64,
        /// The number of the other part.
        peer: usize,
        /// What happened.
        source: Box<dyn Error + Send + Sync>,
    },
    /// Nothing went on for longer than the deadline.
    #[error(
        "{waits_for}, and nothing went on in this part for {seconds} s; part {peer} may have stopped, or the deadline of the executor is too \
         short for its work"
    )]
    Deadline {
        /// The tensor that this part waited for, and the step.
        waits_for: String,
        /// The number of the other part.
        peer: usize,
        /// The deadline, in seconds.
        seconds: f64,
    },
    /// The connection to another part has ended.
    #[error("part {peer} is gone")]
    PeerLost {
        /// The number of the other part.
        peer: usize,
        /// How the end of the connection was seen.
        source: Box<dyn Error + Send + Sync>,
    },
    /// Another part has failed.
    #[error("part {peer} has failed: {reason}")]
    PeerFailed {
        /// The number of the part that failed.
        peer: usize,
        /// The error of that part.
        reason: String,
    },
    /// The program stopped the run.
    #[error("the run was stopped")]
    Stopped,
    /// An executor whose run failed was used again.
    #[error("an earlier run of this executor failed; make a new one with new transfers")]
    Failed,
    /// A setting has a value that makes no sense.
    #[error("{setting}: {reason}")]
    Setting {
        /// The setting.
        setting: &'static str,
        /// What is wrong, and which values are right.
        reason: String,
    },
}
