//! Errors of graphs.

use std::error::Error;
use std::ops::Range;
use std::path::PathBuf;

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
    /// A file is no model that can be loaded, or a model can't run as asked.
    #[error("the model {}: {reason}", path.display())]
    Model {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// The engine of ONNX models does not know an operator.
    #[error("the model {}: node {node}: the engine (tract) has no operator {operator}; only models without it can run", path.display())]
    Operator {
        /// The file.
        path: PathBuf,
        /// The name of the node.
        node: String,
        /// The operator.
        operator: String,
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
    /// A partition names a node that the graph does not have.
    #[error("the graph has no node {node}{}", suggestion(.near))]
    UnknownNode {
        /// The name that was given.
        node: String,
        /// The name of a node that looks like it.
        near: Option<String>,
    },
    /// A graph can't be split into as many parts.
    #[error("a split into {parts} parts was asked for: this graph can be split into 1 to {most} parts")]
    Parts {
        /// The number of parts that was asked for.
        parts: usize,
        /// The largest possible number of parts.
        most: usize,
    },
    /// A partition is written wrongly, or does not fit the graph.
    #[error("the partition is wrong: {0}")]
    Partition(String),
    /// A partition would send an output that can't cross.
    #[error(
        "node {producer} is in part {from}, and its consumer {consumer} in part {to}: the output can't cross, because it is in a \
         form that is private to the engine; put both nodes into one part"
    )]
    Stays {
        /// The node whose output can't cross.
        producer: String,
        /// The part of this node.
        from: usize,
        /// The consumer in another part.
        consumer: String,
        /// The part of the consumer.
        to: usize,
    },
    /// An edge leads from a higher part to a lower part, and a pipeline was asked for.
    #[error(
        "node {producer} is in part {from}, and its consumer {consumer} in part {to}: in a pipeline, tensors go from lower to \
         higher parts only"
    )]
    Backward {
        /// The node whose output goes backward.
        producer: String,
        /// The part of this node.
        from: usize,
        /// The consumer in a lower part.
        consumer: String,
        /// The part of the consumer.
        to: usize,
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
    /// A process can't listen for other parts.
    #[error(
        "can't listen on {address} for the other parts; no other program may use the port, and this host must have the address"
    )]
    Listen {
        /// The address.
        address: String,
        /// The error of the system.
        source: Box<dyn Error + Send + Sync>,
    },
    /// Another part runs something else.
    #[error(
        "part {peer} at {address} runs something else, these differ: {what}; start all parts with the same model, partition and settings"
    )]
    Differs {
        /// The number of the other part.
        peer: usize,
        /// Where the part listens.
        address: String,
        /// What differs.
        what: String,
    },
    /// Another part speaks another version of the calls between parts.
    #[error(
        "part {peer} at {address} speaks version {theirs} of the calls between parts, and this part version {ours}; start the same program on all hosts"
    )]
    Version {
        /// The number of the other part.
        peer: usize,
        /// Where the part listens.
        address: String,
        /// The version of this part.
        ours: u32,
        /// The version of the other part.
        theirs: u32,
    },
    /// Another part did not come in time.
    #[error(
        "part {peer} at {address} is not connected after {seconds} s: {reason}; start all parts, and check that the address is right"
    )]
    Unreachable {
        /// The number of the other part.
        peer: usize,
        /// Where the part was called.
        address: String,
        /// The time limit, in seconds.
        seconds: f64,
        /// What was seen last.
        reason: String,
    },
    /// A mode needs RDMA, and there is none to another part.
    #[error(
        "mode {mode} needs RDMA to part {peer} at {address}, and there is none; use grpc-tcp, or see `tonic-rdma devices` on both hosts"
    )]
    NoRdma {
        /// The mode.
        mode: String,
        /// The number of the other part.
        peer: usize,
        /// Where the part listens.
        address: String,
        /// The reason.
        source: Box<dyn Error + Send + Sync>,
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
    /// Another part runs other steps.
    #[error(
        "part {peer} runs the steps {theirs:?} in mode {mode} where this part runs the steps {ours:?}; all parts have to call `run` with the same steps"
    )]
    OtherSteps {
        /// The number of the other part.
        peer: usize,
        /// The mode.
        mode: String,
        /// The steps of the run of this part.
        ours: Range<u64>,
        /// The steps of the run of the other part.
        theirs: Range<u64>,
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

/// Returns the part of a message that names a node with a similar name.
fn suggestion(near: &Option<String>) -> String {
    near.as_ref().map(|near| format!("; a node with a similar name: {near}")).unwrap_or_default()
}
