//! What a job trains, and how it is split over processes.

use serde::{Deserialize, Serialize};

use crate::data::shards::part;
use crate::model::Architecture;

/// How the workers exchange gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Synchrony {
    /// A further process keeps the variables. It adds the gradients up in the order of the workers.
    ParameterServer,
    /// Each worker keeps all variables. Sums of gradients go round the ring of workers, cut into as many ranges as there are workers.
    Allreduce,
}

/// The model that is trained.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Model {
    Pictures(Architecture),
    Recurrent(Recurrent),
}

/// A job, as far as its graph depends on it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Shape {
    pub(crate) model: Model,
    pub(crate) synchrony: Synchrony,
    pub(crate) workers: usize,
    /// Samples of one step, of all workers together.
    pub(crate) batch: usize,
}

/// What the program feeds into a worker's step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Feed {
    /// Pictures, or the numbers of characters.
    Samples,
    /// The class of each picture, or the number of each next character.
    Targets,
}

/// The size of a recurrent network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Recurrent {
    pub(crate) embedding: usize,
    pub(crate) hidden: usize,
}

impl Shape {
    /// Returns the number of processes.
    pub(crate) fn parts(&self) -> usize {
        match self.synchrony {
            Synchrony::ParameterServer => self.workers + 1,
            Synchrony::Allreduce => self.workers,
        }
    }

    /// Returns the part that tests the model: it has all variables.
    pub(crate) fn chief(&self) -> usize {
        match self.synchrony {
            Synchrony::ParameterServer => self.workers,
            Synchrony::Allreduce => 0,
        }
    }

    /// Returns the place of a worker's samples in a batch.
    pub(crate) fn share(&self, worker: usize) -> std::ops::Range<usize> {
        part(self.batch, self.workers, worker)
    }

    /// Returns the name of a part, for people to read.
    pub(crate) fn name(&self, part: usize) -> String {
        if part >= self.workers { "the parameter server".to_owned() } else { format!("worker {part}") }
    }
}
