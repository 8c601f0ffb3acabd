//! What the coordinator and the parts say to each other. Each message is a line of JSON. Each command is answered by one report. In between, a process
//! says that it runs.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::step::Shape;

/// What does not change during a job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Job {
    /// The folder of the pictures or of the texts.
    pub(crate) data: PathBuf,
    /// Characters after which a text is cut.
    pub(crate) length: usize,
    pub(crate) seed: u64,
    pub(crate) rate: f32,
    pub(crate) momentum: f32,
    /// The largest number of samples that are tested.
    pub(crate) tested: usize,
    /// The modes of transfer. The commands call them by their places.
    pub(crate) modes: Vec<String>,
    /// The longest time without progress, in seconds.
    pub(crate) deadline: f64,
    /// The most registered memory for crossing tensors of a part, in bytes.
    pub(crate) registered: u64,
}

/// What the coordinator tells a part.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Command {
    /// Listen for the other parts of the next connection.
    Listen,
    /// Connect to the other parts, and make the trainers of all modes. The variables that this process has go on with `version`.
    Connect { shape: Shape, part: usize, peers: Vec<String>, version: u64 },
    /// Run these steps in a mode.
    Run { mode: usize, from: u64, to: u64 },
    /// Report the number of complete steps in a mode. Drops the connection and the graphs.
    Complete { mode: usize },
    /// Report the hash of the weights in a mode.
    Hash { mode: usize },
    /// Test the weights in a mode.
    Test { mode: usize },
    /// Report how each crossing tensor of this part was sent in a mode.
    Sent { mode: usize },
}

/// What a part answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Report {
    Listening {
        address: String,
    },
    Connected {
        parameters: usize,
    },
    Ran(Ran),
    Complete {
        version: u64,
    },
    Hash {
        weights: String,
    },
    Tested {
        loss: f64,
        accuracy: f64,
    },
    Sent(Vec<SentTensor>),
    /// The process runs. It says so now and then, also while it carries out a command. This answers no command.
    Alive,
    /// The part can't go on with the command.
    Failed {
        reason: String,
    },
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

impl std::ops::AddAssign for Sent {
    fn add_assign(&mut self, other: Self) {
        self.tensors += other.tensors;
        self.bytes += other.bytes;
        self.copied += other.copied;
        self.inline += other.inline;
    }
}

impl std::ops::Sub for Sent {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self {
            tensors: self.tensors - other.tensors,
            bytes: self.bytes - other.bytes,
            copied: self.copied - other.copied,
            inline: self.inline - other.inline,
        }
    }
}
