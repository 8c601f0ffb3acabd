//! What the coordinator and the parts say to each other. Each message is a line of JSON. Each command is answered by one report. In between, a process
//! says that it runs.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::step::Shape;

/// What the coordinator tells a part, and what the part's report has then: a value for each mode, if the command names none. Modes are
/// called by their places in the options.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Command {
    /// Listen for the other parts of the next connection. Report: the address.
    Listen,
    /// Connect to the other parts, and make the trainers of all modes. The variables that this process has go on with `version`.
    Connect { shape: Shape, part: usize, peers: Vec<String>, version: u64 },
    /// Run these steps in a mode. Report: [`Ran`].
    Run { mode: usize, from: u64, to: u64 },
    /// Drop the connection and the graphs. Report: the number of steps that are complete in all modes.
    Complete,
    /// Report the hash of the weights.
    Hash,
    /// Test the weights of the first mode. Report: the loss and the accuracy.
    Test,
    /// Report how each crossing tensor of this part was sent: many [`SentTensor`].
    Sent,
}

/// What a part answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Report {
    /// The command is carried out.
    Done(Value),
    /// The part can't go on with the command.
    Failed(String),
    /// The process runs. It says so now and then, also while it carries out a command. This answers no command.
    Alive,
}

/// What a part did in a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Ran {
    /// This worker's part of the loss of each step. A parameter server has none.
    pub(crate) losses: Vec<f32>,
    /// The duration of each step, in seconds.
    pub(crate) steps: Vec<f64>,
    /// The duration of the run, in seconds.
    pub(crate) elapsed: f64,
    pub(crate) sent: Sent,
}

/// How tensors were sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Sent {
    pub(crate) tensors: u64,
    pub(crate) bytes: u64,
    /// Tensors that the sender copied.
    pub(crate) copied: u64,
    /// Tensors so small that they went in the request itself.
    pub(crate) inline: u64,
}

/// How a crossing tensor was sent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct SentTensor {
    pub(crate) name: String,
    /// `static` or `dynamic`.
    pub(crate) placement: String,
    /// What allocated the latest tensor: the node or the receive, and the number of allocations that it had made before.
    pub(crate) site: Option<(String, u32)>,
    pub(crate) sent: Sent,
}

impl Sent {
    /// Combines each count with that of `other`.
    pub(crate) fn combined(self, other: Self, combine: fn(u64, u64) -> u64) -> Self {
        Self {
            tensors: combine(self.tensors, other.tensors),
            bytes: combine(self.bytes, other.bytes),
            copied: combine(self.copied, other.copied),
            inline: combine(self.inline, other.inline),
        }
    }
}
