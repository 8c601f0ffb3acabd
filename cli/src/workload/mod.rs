//! The traffic of deep learning: the messages that a training job sends, as lengths.
//!
//! ```text
//!  Workload ─┬─ Mix    uniform, random, skew:  an operation is one message of ten buffers
//!            ├─ Model  resnet50, vgg16, …:     an operation is one set, a message of one buffer for each variable
//!            └─ Blocks                         an operation is one set, a message for each of 4096 scattered blocks
//! ```
//!
//! This module owns the tables and their arithmetic. It does not make content and does not send messages.

pub(crate) mod blocks;
mod compute_times;
mod mixes;
mod models;

use std::fmt;

pub(crate) use self::mixes::Mix;
pub(crate) use self::models::{Model, Variable};

/// Lengths of a message's buffers in bytes, in their order.
pub(crate) type Message = Vec<u64>;

/// A workload: a kind of traffic with a name on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Workload {
    /// Messages of buffers of mixed lengths.
    Mix(Mix),
    /// Sets of variables: a worker's messages to its parameter servers after a mini-batch.
    Model(Model),
    /// Sets of blocks of one length, at any places in memory.
    Blocks,
}

impl Workload {
    /// Returns all workloads.
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        let mixes = Mix::ALL.into_iter().map(Self::Mix);
        mixes.chain(Model::ALL.into_iter().map(Self::Model)).chain([Self::Blocks])
    }

    /// Returns the name on the command line and in the JSON.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Mix(mix) => mix.name(),
            Self::Model(model) => model.name(),
            Self::Blocks => "blocks",
        }
    }

    /// Returns the workload called `name`.
    pub(crate) fn from_name(name: &str) -> Option<Self> {
        Self::all().find(|workload| workload.name() == name)
    }

    /// Returns the operations of one cycle, which repeats. Each operation is a list of messages.
    pub(crate) fn operations(self) -> Vec<Vec<Message>> {
        match self {
            Self::Mix(mix) => mix.messages().into_iter().map(|message| vec![message]).collect(),
            Self::Model(model) => {
                vec![model.variables().iter().map(|variable| vec![variable.bytes()]).collect()]
            }
            Self::Blocks => vec![blocks::operation()],
        }
    }

    /// Returns the bytes of an operation: the average over a cycle, rounded.
    pub(crate) fn bytes(self) -> u64 {
        let operations = self.operations();
        let bytes: u64 = operations.iter().flatten().flatten().sum();
        let count = operations.len().max(1) as u64;
        (bytes + count / 2) / count
    }

    /// Returns the number of messages of the operation that has most.
    pub(crate) fn most_messages(self) -> u64 {
        self.operations().iter().map(|messages| messages.len() as u64).max().unwrap_or(0)
    }

    /// Returns the bytes of the largest message.
    pub(crate) fn largest_message(self) -> u64 {
        self.operations().iter().flatten().map(|message| message.iter().sum()).max().unwrap_or(0)
    }

    /// Returns the bytes of the largest operation.
    pub(crate) fn largest_operation(self) -> u64 {
        self.operations().iter().map(|operation| operation.iter().flatten().sum()).max().unwrap_or(0)
    }

    /// Returns whether an operation is a set of many messages.
    pub(crate) const fn is_set(self) -> bool {
        matches!(self, Self::Model(_) | Self::Blocks)
    }

    /// Describes an operation, for people.
    pub(crate) fn describe(self) -> String {
        match self {
            Self::Mix(mix) => format!("{}: {}", self.name(), mix.describe()),
            Self::Model(model) => {
                format!("{}: a set of {} variables, a message each", self.name(), model.variables().len())
            }
            Self::Blocks => {
                format!(
                    "{}: a set of {} blocks, a message each, scattered in memory",
                    self.name(),
                    blocks::BLOCKS
                )
            }
        }
    }
}

impl fmt::Display for Workload {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_distinct_and_read_back() {
        for workload in Workload::all() {
            assert_eq!(Workload::from_name(workload.name()), Some(workload));
        }
        assert_eq!(Workload::from_name("resnet"), None);
    }

    #[test]
    fn every_operation_has_messages_and_every_message_bytes() {
        for workload in Workload::all() {
            let operations = workload.operations();
            assert!(!operations.is_empty());
            for message in operations.iter().flatten() {
                assert!(!message.is_empty() && message.iter().all(|bytes| *bytes > 0), "{workload}");
            }
            assert!(operations.iter().all(|messages| !messages.is_empty()));
            assert!(workload.largest_message() <= workload.largest_operation());
            assert!(workload.largest_message() < 2047 << 20, "{workload} would not fit a message");
            assert!(workload.bytes() <= workload.largest_operation());
        }
    }

    #[test]
    fn an_operation_has_one_message_for_a_mix_for_each_variable_or_for_each_block() {
        for mix in Mix::ALL {
            assert!(Workload::Mix(mix).operations().iter().all(|messages| messages.len() == 1));
        }
        for model in Model::ALL {
            let operations = Workload::Model(model).operations();
            assert_eq!(operations.len(), 1);
            assert_eq!(operations[0].len(), model.variables().len());
            assert!(operations[0].iter().all(|message| message.len() == 1));
        }
        let blocks = Workload::Blocks.operations();
        assert_eq!((blocks.len(), Workload::Blocks.most_messages()), (1, 4096));
        assert!(blocks[0].iter().all(|message| message == &[16 << 10]));
        assert!(Workload::Blocks.is_set() && !Workload::Mix(Mix::Skew).is_set());
    }
}
