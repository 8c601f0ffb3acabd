//! The operations of a cell: made before the measured time begins, and sent by callers.

use std::slice;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use bytes::Bytes;
use tonic_rdma::memory::{Pool, PoolError};
use tonic_rdma_commands::Failure;
use tonic_rdma_payload::content::{self, Content, VARIANTS};
use tonic_rdma_payload::reduce::{Reduced, reduce, reduce_all};

use crate::compare::plan::cell::Load;
use crate::workload::{self, Message, Workload};

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
    registered: bool,
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
        let bytes = usize::try_from(room(load)).map_err(|error| no_memory().because(error))?;
        let content = Content::new(bytes, seed).map_err(|error| no_memory().because(error))?;
        Ok(Self::over(load, content, false, consumed))
    }

    /// Makes operations as [`new`](Self::new) does, with content in registered memory.
    pub(crate) fn in_registered_memory(load: Load, seed: u64, consumed: bool) -> Result<Self, Failure> {
        let bytes = Content::with_variants(room(load));
        let content = registered(bytes as usize, seed).map_err(|error| {
            Failure::run(format!("{}: there is no registered memory for it", load.label())).because(error)
        })?;
        Ok(Self::over(load, content, true, consumed))
    }

    fn over(load: Load, content: Content, registered: bool, consumed: bool) -> Self {
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
        Self { load, content, registered, items }
    }

    /// Returns whether the content lies in registered memory.
    pub(crate) const fn is_registered(&self) -> bool {
        self.registered
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
        Self { load: self.load, content, registered: false, items }
    }
}

/// Makes `bytes` of the content of `seed` in registered memory, from which a device sends without a copy: as many as
/// [`Content::with_variants`] returns, or [`Content::all`] has.
pub(crate) fn registered(bytes: usize, seed: u64) -> Result<Content, PoolError> {
    in_pool(bytes, seed, |memory| content::fill(seed, memory))
}

/// Copies `content` to registered memory.
pub(crate) fn registered_copy(content: &Content) -> Result<Content, PoolError> {
    in_pool(content.all().len(), content.seed(), |memory| memory.copy_from_slice(content.all()))
}

fn in_pool(bytes: usize, seed: u64, write: impl FnOnce(&mut [u8])) -> Result<Content, PoolError> {
    /// Granularity of a pool, in bytes.
    const GRANULE: u64 = 2 << 20;
    let pool = Pool::for_sending((bytes as u64).next_multiple_of(GRANULE));
    let mut memory = pool.allocate(bytes)?;
    write(&mut memory);
    Ok(Content::over(memory.freeze(), seed))
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

/// Seed of the places of blocks at the destination. It differs from the seeds of the source.
pub(crate) const DESTINATION_SEED: u64 = 0x0de5_71a7;

/// Places of buffers, as offsets in bytes.
#[derive(Clone, Debug, Default)]
pub(crate) enum Layout {
    /// One after the other, each on a cache line of its own.
    #[default]
    InOrder,
    /// Each at a place of its own, found by the buffer's index in the operation.
    Scattered(Arc<[u64]>),
}

impl Layout {
    /// Returns the layout of `load`'s operations. `seed` determines the places of scattered buffers.
    pub(crate) fn of(load: Load, seed: u64) -> Self {
        match load {
            Load::Workload(Workload::Blocks) => Self::Scattered(workload::scattered(seed).into()),
            Load::Size(_) | Load::Workload(_) => Self::InOrder,
        }
    }

    /// Returns the offset of each buffer of these lengths.
    pub(crate) fn offsets(&self, lengths: impl IntoIterator<Item = u64>) -> impl Iterator<Item = u64> {
        let mut end = 0;
        lengths.into_iter().enumerate().map(move |(index, len)| match self {
            Self::InOrder => {
                let offset = end;
                end += Content::room(len);
                offset
            }
            // All operations with this layout have as many blocks as `places`.
            Self::Scattered(places) => places.get(index).copied().unwrap_or(0),
        })
    }
}

/// Returns the bytes of memory that any operation of `load` fits into.
pub(crate) fn room(load: Load) -> u64 {
    match load {
        Load::Size(bytes) => Content::room(bytes),
        Load::Workload(workload) => {
            let operations = workload.operations();
            let largest = operations
                .iter()
                .map(|messages| messages.iter().flatten().map(|len| Content::room(*len)).sum());
            let largest: u64 = largest.max().unwrap_or(0);
            // Half of the places for blocks are empty.
            if workload == Workload::Blocks {
                largest / workload::BLOCKS as u64 * workload::PLACES as u64
            } else {
                largest
            }
        }
    }
}

/// Index of the next operation. All callers of a mode share it during all turns in a cell, so all modes send equal
/// sequences.
pub(crate) type Position = Arc<AtomicUsize>;

/// Latency, bytes and messages of an operation that is done.
pub(crate) type Done = (Duration, u64, u64);

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
    fn every_buffer_of_every_operation_has_its_content_in_registered_memory() {
        for load in [
            Load::Size(100_001),
            Load::Workload(Workload::Mix(Mix::Random)),
            Load::Workload(Workload::Blocks),
        ] {
            let operations = Operations::new(load, 7, false).unwrap();
            let content = operations.content();
            let registered = registered_copy(content).unwrap();
            for turn in 0..6 {
                for (seed, buffer) in operations.take(turn).buffers() {
                    assert_eq!(registered.buffer(seed, buffer.len()).as_ref(), Some(buffer));
                }
            }
            assert_eq!(registered.buffer(7 + 1, content.all().len()), None);
        }
    }

    #[test]
    fn operations_beyond_the_memory_are_refused() {
        let refusal = Operations::new(Load::Size(1 << 62), 1, false).unwrap_err().to_string();
        assert!(refusal.contains("4096 PiB"), "{refusal}");
    }
}

#[cfg(test)]
mod layout_tests {
    use super::*;

    #[test]
    fn every_operation_fits_into_the_room_and_no_two_buffers_overlap() {
        for workload in Workload::all() {
            let load = Load::Workload(workload);
            let layout = Layout::of(load, 7);
            for messages in workload.operations() {
                let lengths: Vec<u64> = messages.into_iter().flatten().collect();
                let mut ranges: Vec<_> = layout
                    .offsets(lengths.iter().copied())
                    .zip(&lengths)
                    .map(|(offset, len)| (offset, offset + len))
                    .collect();
                assert_eq!(ranges.len(), lengths.len());
                ranges.sort_unstable();
                assert!(
                    ranges.iter().all(|(offset, end)| offset % 64 == 0 && *end <= room(load)),
                    "{workload}"
                );
                assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{workload}");
            }
        }
    }

    #[test]
    fn a_payload_takes_whole_cache_lines() {
        assert_eq!([1, 64, 65, 3 << 30].map(|bytes| room(Load::Size(bytes))), [64, 64, 128, 3 << 30]);
    }
}
