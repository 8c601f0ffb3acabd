//! Errors of graphs.

use std::error::Error;
use std::fmt;
use std::ops::Range;
use std::path::PathBuf;

/// What a [`GraphError`] is about, for programs that decide by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GraphErrorKind {
    /// A graph contradicts itself, or a file is no model that can run. An operator that the engine does not
    /// know is such an error.
    InvalidGraph,
    /// A partition is written wrongly, or the graph can't be split so.
    InvalidPartition,
    /// A list names a node that the graph does not have.
    UnknownNode,
    /// A setting, an address or an argument has a value that can't be used.
    InvalidSetting,
    /// A kernel, the engine or the program failed.
    Kernel,
    /// A crossing tensor could not be sent, received or made a value.
    Transfer,
    /// Another part did not come in time, or nothing went on for longer than the deadline.
    Timeout,
    /// Another part has another graph, version, setting or range of steps.
    Mismatch,
    /// A mode needs RDMA, and there is none to another part.
    NoDevice,
    /// The connection to another part has ended.
    PeerLost,
    /// Another part has failed, and has said why.
    PeerFailed,
    /// The run was stopped, or an earlier run of the executor failed. A new executor can run.
    Stopped,
}

/// An error about a graph, a part of it, or a run of it. Its text is one line; [`source`](Error::source) has
/// the cause.
#[derive(Debug)]
pub struct GraphError {
    problem: Problem,
    reason: Box<str>,
}

impl GraphError {
    /// Returns what the error is about.
    pub fn kind(&self) -> GraphErrorKind {
        match &self.problem {
            Problem::Node { .. } | Problem::Model { .. } | Problem::Operator { .. } => {
                GraphErrorKind::InvalidGraph
            }
            Problem::Parts { .. }
            | Problem::Partition(_)
            | Problem::Stays { .. }
            | Problem::Backward { .. } => GraphErrorKind::InvalidPartition,
            Problem::UnknownNode { .. } => GraphErrorKind::UnknownNode,
            Problem::Setting { .. } | Problem::Listen { .. } | Problem::Value(_) => {
                GraphErrorKind::InvalidSetting
            }
            Problem::Kernel { .. } => GraphErrorKind::Kernel,
            Problem::Transfer { .. } => GraphErrorKind::Transfer,
            Problem::Deadline { .. } | Problem::Unreachable { .. } => GraphErrorKind::Timeout,
            Problem::Differs { .. } | Problem::Version { .. } | Problem::OtherSteps { .. } => {
                GraphErrorKind::Mismatch
            }
            Problem::NoRdma { .. } => GraphErrorKind::NoDevice,
            Problem::PeerLost { .. } => GraphErrorKind::PeerLost,
            Problem::PeerFailed { .. } => GraphErrorKind::PeerFailed,
            Problem::Stopped | Problem::Failed => GraphErrorKind::Stopped,
        }
    }

    /// Returns what happened, to whom, and what to do: one line, without the cause.
    pub fn reason(&self) -> &str {
        &self.reason
    }

    /// Returns the number of the other part, if the error is about one.
    pub fn peer(&self) -> Option<usize> {
        match &self.problem {
            Problem::Transfer { peer, .. }
            | Problem::Deadline { peer, .. }
            | Problem::Unreachable { peer, .. }
            | Problem::Differs { peer, .. }
            | Problem::Version { peer, .. }
            | Problem::OtherSteps { peer, .. }
            | Problem::NoRdma { peer, .. }
            | Problem::PeerLost { peer, .. }
            | Problem::PeerFailed { peer, .. } => Some(*peer),
            _ => None,
        }
    }

    /// Makes the error of a node.
    pub(crate) fn of_node(node: impl Into<String>, reason: impl Into<String>) -> Self {
        Problem::Node { node: node.into(), reason: reason.into() }.into()
    }

    /// Makes the error of a setting.
    pub(crate) fn of_setting(setting: &'static str, reason: impl Into<String>) -> Self {
        Problem::Setting { setting, reason: reason.into() }.into()
    }

    /// Returns the variant, for tests.
    #[cfg(test)]
    pub(crate) fn problem(&self) -> &Problem {
        &self.problem
    }
}

impl fmt::Display for GraphError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)
    }
}

impl Error for GraphError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.problem.source()
    }
}

impl From<Problem> for GraphError {
    fn from(problem: Problem) -> Self {
        Self { reason: problem.to_string().into(), problem }
    }
}

/// What happened. The text is that of the error, and code of this crate decides by the variant.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Problem {
    #[error("node {node}: {reason}")]
    Node { node: String, reason: String },
    #[error("the model {}: {reason}", path.display())]
    Model { path: PathBuf, reason: String },
    #[error("the model {}: node {node}: the engine (tract) has no operator {operator}; only models without it can run", path.display())]
    Operator { path: PathBuf, node: String, operator: String },
    #[error("node {node} ({kind}) failed")]
    Kernel { node: String, kind: String, source: Box<dyn Error + Send + Sync> },
    #[error("the graph has no node {node}{}", suggestion(.near))]
    UnknownNode { node: String, near: Option<String> },
    #[error("a split into {parts} parts was asked for: this graph can be split into 1 to {most} parts")]
    Parts { parts: usize, most: usize },
    #[error("the partition is wrong: {0}")]
    Partition(String),
    #[error(
        "node {producer} is in part {from}, and its consumer {consumer} in part {to}: the output can't cross, because it is \
         strings, or in a form that is private to the engine; put both nodes into one part"
    )]
    Stays { producer: String, from: usize, consumer: String, to: usize },
    #[error(
        "node {producer} is in part {from}, and its consumer {consumer} in part {to}: in a pipeline, tensors go from lower to \
         higher parts only"
    )]
    Backward { producer: String, from: usize, consumer: String, to: usize },
    #[error("crossing tensor {crossing}, step {step}, between this part and part {peer}")]
    Transfer { crossing: String, step: u64, peer: usize, source: Box<dyn Error + Send + Sync> },
    #[error(
        "{waits_for}, and nothing went on in this part for {seconds} s; part {peer} may have stopped, or the deadline of the executor is too \
         short for its work"
    )]
    Deadline { waits_for: String, peer: usize, seconds: f64 },
    #[error(
        "can't listen on {address} for the other parts; no other program may use the port, and this host must have the address"
    )]
    Listen { address: String, source: Box<dyn Error + Send + Sync> },
    #[error(
        "part {peer} at {address} runs something else, these differ: {what}; start all parts with the same model, partition and settings"
    )]
    Differs { peer: usize, address: String, what: String },
    #[error(
        "part {peer} at {address} speaks version {theirs} of the calls between parts, and this part version {ours}; start the same program on all hosts"
    )]
    Version { peer: usize, address: String, ours: u32, theirs: u32 },
    #[error(
        "part {peer} at {address} is not connected after {seconds} s: {reason}; start all parts, and check that the address is right"
    )]
    Unreachable { peer: usize, address: String, seconds: f64, reason: String },
    #[error(
        "mode {mode} needs RDMA to part {peer} at {address}, and there is none; use grpc-tcp, or see `tonic-rdma devices` on both hosts"
    )]
    NoRdma { mode: String, peer: usize, address: String, source: Box<dyn Error + Send + Sync> },
    #[error("part {peer} is gone")]
    PeerLost { peer: usize, source: Box<dyn Error + Send + Sync> },
    #[error("part {peer} has failed: {reason}")]
    PeerFailed { peer: usize, reason: String },
    #[error(
        "part {peer} runs the steps {theirs:?} in mode {mode} where this part runs the steps {ours:?}; all parts have to call `run` with the same steps"
    )]
    OtherSteps { peer: usize, mode: String, ours: Range<u64>, theirs: Range<u64> },
    #[error("the run was stopped")]
    Stopped,
    #[error("an earlier run of this executor failed; make a new one with new transfers")]
    Failed,
    #[error("{setting}: {reason}")]
    Setting { setting: &'static str, reason: String },
    #[error("{0}")]
    Value(String),
}

/// Returns the part of a message that names a node with a similar name.
fn suggestion(near: &Option<String>) -> String {
    near.as_ref().map(|near| format!("; a node with a similar name: {near}")).unwrap_or_default()
}

/// Reads and writes the names that serde gives the values of a type. An error says what a name is of, and
/// which names there are.
macro_rules! named {
    ($type:ty, $what:literal, $names:literal) => {
        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                serde::Serialize::serialize(self, f)
            }
        }

        impl std::str::FromStr for $type {
            type Err = $crate::GraphError;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                let name = serde::de::IntoDeserializer::<serde::de::value::Error>::into_deserializer(text);
                let unknown = |_| format!(concat!("{:?} is no ", $what, "; use ", $names), text);
                serde::Deserialize::deserialize(name)
                    .map_err(|error| $crate::error::Problem::Value(unknown(error)).into())
            }
        }
    };
}
pub(crate) use named;
