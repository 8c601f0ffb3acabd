//! What callers send in a cell, made before the time begins.

use std::sync::Arc;

use bytes::Bytes;

use super::cell::Load;
use super::content::{Content, Payloads, VARIANTS};
use crate::failure::Failure;
use crate::workload::{Message, Workload};

/// One message of several buffers.
#[derive(Clone, Debug)]
pub(crate) struct Push {
    pub(crate) seed: u64,
    pub(crate) buffers: Vec<Bytes>,
}

/// What counts as one: a call, or a set of them.
#[derive(Clone, Debug)]
pub(crate) enum Operation {
    /// A payload and its seed.
    Put(u64, Bytes),
    Push(Push),
    Set(Arc<[Push]>),
}

/// The operations of a cell, which callers take in turn. Taking one costs reference counts.
#[derive(Clone, Debug)]
pub(crate) struct Operations {
    turns: Arc<[Operation]>,
}

impl Operation {
    /// Bytes of payload.
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Self::Put(_, payload) => payload.len() as u64,
            Self::Push(push) => push.bytes(),
            Self::Set(set) => set.iter().map(Push::bytes).sum(),
        }
    }

    /// Messages that it sends.
    pub(crate) fn messages(&self) -> u64 {
        match self {
            Self::Put(..) | Self::Push(_) => 1,
            Self::Set(set) => set.len() as u64,
        }
    }
}

impl Push {
    fn bytes(&self) -> u64 {
        self.buffers.iter().map(|buffer| buffer.len() as u64).sum()
    }
}

impl Operations {
    /// The operations of `load`, with content after `seed`.
    pub(crate) fn new(load: Load, seed: u64) -> Result<Self, Failure> {
        let turns = match load {
            Load::Size(bytes) => {
                let payloads = Payloads::new(addressable(bytes, load)?, seed);
                let put = |turn| {
                    let (seed, payload) = payloads.take(turn);
                    Operation::Put(seed, payload)
                };
                (0..VARIANTS).map(put).collect()
            }
            Load::Workload(workload) => of_workload(workload, seed)?,
        };
        Ok(Self { turns })
    }

    /// The operation whose turn is `turn`.
    pub(crate) fn take(&self, turn: usize) -> Operation {
        self.turns[turn % self.turns.len()].clone()
    }
}

/// Each operation of the cycle at least once, and as many as there are variants of the content.
fn of_workload(workload: Workload, seed: u64) -> Result<Arc<[Operation]>, Failure> {
    let cycle = workload.operations();
    let load = Load::Workload(workload);
    let room = |messages: &Vec<Message>| messages.iter().flatten().map(|len| Content::room(*len)).sum();
    let most: u64 = cycle.iter().map(room).max().unwrap_or(0);
    let content = Content::new(addressable(most, load)?, seed);
    let turns = cycle.len().max(VARIANTS);
    let operation = |(turn, messages): (usize, &Vec<Message>)| {
        let mut content = content.variant(turn);
        let mut pushes: Vec<Push> = messages
            .iter()
            .map(|message| {
                let seed = content.seed();
                // It fits: the content was made for the longest.
                Push { seed, buffers: message.iter().map(|len| content.cut(*len as usize)).collect() }
            })
            .collect();
        match (workload, pushes.pop()) {
            (Workload::Mix(_), Some(push)) => Operation::Push(push),
            (_, last) => Operation::Set(pushes.into_iter().chain(last).collect()),
        }
    };
    Ok(cycle.iter().cycle().take(turns).enumerate().map(operation).collect())
}

fn addressable(bytes: u64, load: Load) -> Result<usize, Failure> {
    usize::try_from(bytes)
        .map_err(|_| Failure::usage(format!("{} does not fit this machine's addresses", load.label())))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use super::super::content::check_buffers;
    use super::*;
    use crate::workload::{Mix, Model};

    fn pushes(operation: &Operation) -> Vec<Push> {
        match operation {
            Operation::Put(..) => Vec::new(),
            Operation::Push(push) => vec![push.clone()],
            Operation::Set(set) => set.to_vec(),
        }
    }

    #[test]
    fn operations_are_what_the_workload_says_with_content_to_its_seed() {
        for workload in [Workload::Mix(Mix::Random), Workload::Model(Model::Gru)] {
            let operations = Operations::new(Load::Workload(workload), 11).unwrap();
            let cycle = workload.operations();
            for turn in 0..6 {
                let messages = &cycle[turn % cycle.len()];
                let operation = operations.take(turn);
                let pushes = pushes(&operation);
                assert_eq!(operation.messages(), messages.len() as u64);
                assert_eq!(operation.bytes(), messages.iter().flatten().sum::<u64>());
                for (push, message) in pushes.iter().zip(messages) {
                    let lengths: Vec<u64> = push.buffers.iter().map(|buffer| buffer.len() as u64).collect();
                    assert_eq!(&lengths, message);
                    assert_eq!(check_buffers(push.seed, &push.buffers, None), None);
                }
            }
            let seeds = [0, 1].map(|turn| pushes(&operations.take(turn))[0].seed);
            assert_ne!(seeds[0], seeds[1], "two in a row have the same content");
        }
    }

    #[test]
    fn a_set_s_variables_lie_apart() {
        let operations = Operations::new(Load::Workload(Workload::Model(Model::Gru)), 1).unwrap();
        let mut ranges: Vec<_> = pushes(&operations.take(0))
            .iter()
            .map(|push| push.buffers[0].as_ptr_range())
            .map(|range| (range.start.addr(), range.end.addr()))
            .collect();
        ranges.sort_unstable();
        assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0));
    }
}
