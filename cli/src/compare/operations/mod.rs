//! The operations of a cell: made before the measured time begins, and sent by callers.

pub(crate) mod layout;
pub(crate) mod sequence;

use std::slice;
use std::sync::Arc;

use bytes::Bytes;

use self::layout::Layout;
use crate::compare::plan::cell::Load;
use crate::workload::{Message, Workload};
use tonic_rdma_commands::Failure;
use tonic_rdma_payload::content::{Content, VARIANTS};
use tonic_rdma_payload::reduce::{Reduced, reduce, reduce_all};

/// A message of one payload.
#[derive(Clone, Debug)]
pub(crate) struct Put {
    pub(crate) seed: u64,
    pub(crate) payload: Bytes,
    /// The result of consuming the payload, if receivers consume.
    pub(crate) reduced: Option<Reduced>,
}

/// A message of several buffers.
#[derive(Clone, Debug)]
pub(crate) struct Push {
    pub(crate) seed: u64,
    pub(crate) buffers: Vec<Bytes>,
    /// The result of consuming all buffers, if receivers consume.
    pub(crate) reduced: Option<Reduced>,
}

/// An operation: a call, or a set of calls.
#[derive(Clone, Debug)]
pub(crate) enum Operation {
    Put(Put),
    Push(Push),
    Set(Arc<[Push]>),
}

/// The operations of a cell, which callers take one after the other. Taking one costs reference counts.
///
/// All buffers of all operations lie in one stretch of memory. The distance of a buffer from the first one in bytes is
/// eight times the difference of their seeds. So the content takes the size of one operation, whatever the number of
/// operations.
#[derive(Clone, Debug)]
pub(crate) struct Operations {
    load: Load,
    content: Content,
    items: Arc<[Operation]>,
}

impl Operation {
    /// Returns the bytes of payload.
    pub(crate) fn bytes(&self) -> u64 {
        self.buffers().map(|(_, buffer)| buffer.len() as u64).sum()
    }

    /// Returns the number of messages that the operation sends.
    pub(crate) fn messages(&self) -> u64 {
        match self {
            Self::Put(_) | Self::Push(_) => 1,
            Self::Set(set) => set.len() as u64,
        }
    }

    /// Returns every buffer, with the seed of its content.
    pub(crate) fn buffers(&self) -> impl Iterator<Item = (u64, &Bytes)> {
        let (put, pushes) = match self {
            Self::Put(put) => (Some((put.seed, &put.payload)), &[][..]),
            Self::Push(push) => (None, slice::from_ref(push)),
            Self::Set(set) => (None, &set[..]),
        };
        put.into_iter().chain(pushes.iter().flat_map(Push::seeded))
    }

    /// Returns the result of consuming all buffers, if receivers consume.
    pub(crate) fn reduced(&self) -> Option<Reduced> {
        match self {
            Self::Put(put) => put.reduced,
            Self::Push(push) => push.reduced,
            Self::Set(set) => {
                set.iter().try_fold(Reduced::NOTHING, |all, push| push.reduced.map(|each| all.and(each)))
            }
        }
    }
}

impl Push {
    /// Returns every buffer, with the seed of its content.
    pub(crate) fn seeded(&self) -> impl Iterator<Item = (u64, &Bytes)> {
        let mut next = Content::follow(self.seed);
        self.buffers.iter().map(move |buffer| (next(buffer.len() as u64), buffer))
    }
}

impl Operations {
    /// Makes the operations of `load`, with content that begins with `seed`, and the results of consuming them if
    /// `consumed`.
    pub(crate) fn new(load: Load, seed: u64, consumed: bool) -> Result<Self, Failure> {
        let no_memory = || Failure::usage(format!("{}: there is no memory for it", load.label()));
        let bytes = usize::try_from(layout::room(load)).map_err(|error| no_memory().because(error))?;
        let content = Content::new(bytes, seed).map_err(|error| no_memory().because(error))?;
        let items = match load {
            Load::Size(bytes) => {
                let put = |index| {
                    let mut content = content.variant(index);
                    // The payload fits, because the content was made for it.
                    let (seed, payload) = (content.seed(), content.cut(bytes as usize));
                    let reduced = consumed.then(|| reduce(&payload));
                    Operation::Put(Put { seed, payload, reduced })
                };
                (0..VARIANTS).map(put).collect()
            }
            Load::Workload(workload) => of_workload(workload, &content, consumed),
        };
        Ok(Self { load, content, items })
    }

    /// Returns the load that the operations carry.
    pub(crate) const fn load(&self) -> Load {
        self.load
    }

    /// Returns the stretch of memory that all buffers lie in.
    pub(crate) const fn content(&self) -> &Content {
        &self.content
    }

    /// Returns the operation at `index`. The operations repeat after the last one.
    pub(crate) fn take(&self, index: usize) -> Operation {
        self.items[index % self.items.len()].clone()
    }
}

#[cfg(test)]
impl Operations {
    /// Returns a copy of these operations, which must have single payloads. In the range `torn` the copy has content of
    /// another variant. Stamps seldom read this range, and the largest element lies elsewhere. The expected results
    /// stay those of the right content.
    pub(crate) fn torn(&self, torn: std::ops::Range<usize>) -> Self {
        let mut memory = self.content.all().to_vec();
        memory.copy_within(torn.start + 64..torn.end + 64, torn.start);
        let content = Content::over(memory.into(), self.content.seed());
        let tear = |(index, operation): (usize, &Operation)| {
            let Operation::Put(put) = operation else { panic!("not a single payload") };
            let payload = content.variant(index).cut(put.payload.len());
            assert_eq!(put.reduced.map(|it| it.maximum), put.reduced.map(|_| reduce(&payload).maximum));
            Operation::Put(Put { payload, ..put.clone() })
        };
        let items = self.items.iter().enumerate().map(tear).collect();
        Self { load: self.load, content, items }
    }
}

/// Makes each operation of the workload's cycle at least once, and at least one for each variant of the content.
fn of_workload(workload: Workload, content: &Content, consumed: bool) -> Arc<[Operation]> {
    let cycle = workload.operations();
    let layout = Layout::of(Load::Workload(workload), content.seed());
    let count = cycle.len().max(VARIANTS);
    let operation = |(index, messages): (usize, &Vec<Message>)| {
        let content = content.variant(index);
        let mut offsets = layout.offsets(messages.iter().flatten().copied());
        let mut push = |message: &Message| push(&content, message, &mut offsets, consumed);
        let mut pushes: Vec<Push> = messages.iter().map(&mut push).collect();
        match (workload.is_set(), pushes.pop()) {
            (false, Some(push)) => Operation::Push(push),
            (_, last) => Operation::Set(pushes.into_iter().chain(last).collect()),
        }
    };
    cycle.iter().cycle().take(count).enumerate().map(operation).collect()
}

/// Makes a message of buffers of `content` that begin at `offsets`.
fn push(
    content: &Content,
    message: &Message,
    offsets: &mut impl Iterator<Item = u64>,
    consumed: bool,
) -> Push {
    let mut seed = None;
    let mut buffer = |len: &u64| {
        // The buffer fits, because the content was made for the longest operation.
        let mut place = content.at(offsets.next().unwrap_or(0) as usize);
        seed.get_or_insert(place.seed());
        place.cut(*len as usize)
    };
    let buffers: Vec<Bytes> = message.iter().map(&mut buffer).collect();
    let reduced = consumed.then(|| reduce_all(buffers.iter().map(|buffer| &buffer[..])));
    Push { seed: seed.unwrap_or_else(|| content.seed()), buffers, reduced }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use super::*;
    use crate::workload::{Mix, Model};
    use tonic_rdma_payload::content::{check_all, check_buffers};

    fn pushes(operation: &Operation) -> Vec<Push> {
        match operation {
            Operation::Put(_) => Vec::new(),
            Operation::Push(push) => vec![push.clone()],
            Operation::Set(set) => set.to_vec(),
        }
    }

    #[test]
    fn operations_follow_the_workload_and_their_content_follows_its_seed() {
        for workload in [Workload::Mix(Mix::Random), Workload::Model(Model::Gru), Workload::Blocks] {
            let operations = Operations::new(Load::Workload(workload), 11, false).unwrap();
            let cycle = workload.operations();
            for index in 0..6 {
                let messages = &cycle[index % cycle.len()];
                let operation = operations.take(index);
                let pushes = pushes(&operation);
                assert_eq!(operation.messages(), messages.len() as u64);
                assert_eq!(operation.bytes(), messages.iter().flatten().sum::<u64>());
                for (push, message) in pushes.iter().zip(messages) {
                    let lengths: Vec<u64> = push.buffers.iter().map(|buffer| buffer.len() as u64).collect();
                    assert_eq!(&lengths, message);
                    assert_eq!(check_buffers(push.seed, &push.buffers, None), None);
                }
            }
            let seeds = [0, 1].map(|index| pushes(&operations.take(index))[0].seed);
            assert_ne!(seeds[0], seeds[1], "two in a row have the same content");
        }
    }

    #[test]
    fn the_buffers_of_a_set_do_not_overlap_and_blocks_are_in_no_order() {
        for workload in [Workload::Model(Model::Gru), Workload::Blocks] {
            let operations = Operations::new(Load::Workload(workload), 1, false).unwrap();
            let ranges: Vec<_> = pushes(&operations.take(0))
                .iter()
                .map(|push| push.buffers[0].as_ptr_range())
                .map(|range| (range.start.addr(), range.end.addr()))
                .collect();
            let mut sorted = ranges.clone();
            sorted.sort_unstable();
            assert!(sorted.windows(2).all(|pair| pair[0].1 <= pair[1].0));
            assert_eq!(sorted == ranges, workload != Workload::Blocks);
        }
    }

    #[test]
    fn results_of_consuming_are_known_beforehand() {
        for load in
            [Load::Size(1000), Load::Workload(Workload::Mix(Mix::Skew)), Load::Workload(Workload::Blocks)]
        {
            let operation = Operations::new(load, 5, true).unwrap().take(2);
            let all = operation.buffers().map(|(_, buffer)| reduce(buffer));
            assert_eq!(operation.reduced(), Some(all.fold(Reduced::NOTHING, Reduced::and)));
            assert_eq!(Operations::new(load, 5, false).unwrap().take(2).reduced(), None);
        }
    }

    #[test]
    fn every_buffer_has_the_seed_of_its_content() {
        for load in
            [Load::Size(100), Load::Workload(Workload::Mix(Mix::Uniform)), Load::Workload(Workload::Blocks)]
        {
            let operation = Operations::new(load, 5, false).unwrap().take(1);
            for (seed, buffer) in operation.buffers() {
                assert_eq!(check_all(seed, buffer), None);
            }
        }
    }

    #[test]
    fn operations_beyond_the_memory_are_refused() {
        let refusal = Operations::new(Load::Size(1 << 62), 1, false).unwrap_err().to_string();
        assert!(refusal.contains("4096 PiB"), "{refusal}");
    }
}
