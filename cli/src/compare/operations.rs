//! The operations of a cell: made before the measured time begins, and sent by callers.

use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use tonic_rdma::VerbsError;
use tonic_rdma::memory::Pool;
use tonic_rdma_commands::payload::content::{self, Content, VARIANTS};
use tonic_rdma_commands::payload::reduce::{Reduced, reduce_all};
use tonic_rdma_commands::{Context as _, Failure};

use crate::workload::{self, Message, Workload};

/// The payload of a call: one or several buffers.
#[derive(Clone, Debug)]
pub(crate) struct CallPayload {
    pub(crate) seed: u64,
    pub(crate) buffers: Vec<Bytes>,
    /// The result of consuming all buffers, if receivers consume.
    pub(crate) reduced: Option<Reduced>,
    /// The length of the payload in bytes, if the caller pulls it. Then `buffers` is empty.
    pub(crate) pulls: Option<u64>,
}

/// How the calls of an operation are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// One call with a payload of one buffer.
    Put,
    /// One call with several buffers.
    Push,
    /// Many calls.
    Set,
}

/// An operation: a call, or a set of calls.
#[derive(Clone, Debug)]
pub(crate) struct Operation {
    pub(crate) form: Form,
    pub(crate) calls: Arc<[CallPayload]>,
}

/// The operations of a cell, which callers take one after the other. Taking one costs reference counts.
///
/// All buffers of all operations lie in one stretch of memory. The distance of a buffer from the first one in
/// bytes is eight times the difference of their seeds. So the content takes the size of one operation,
/// whatever the number of operations.
#[derive(Clone, Debug)]
pub(crate) struct Operations {
    /// The load that the operations carry.
    pub(crate) load: Workload,
    /// The stretch of memory that all buffers lie in.
    pub(crate) content: Content,
    /// The content in registered memory, once a mode has asked for it.
    registered: Arc<OnceLock<Content>>,
    items: Arc<[Operation]>,
}

impl Operation {
    /// Returns the bytes of payload.
    pub(crate) fn bytes(&self) -> u64 {
        self.buffers().map(|(_, buffer)| buffer.len() as u64).sum()
    }

    /// Returns the number of messages that the operation sends.
    pub(crate) fn messages(&self) -> u64 {
        self.calls.len() as u64
    }

    /// Returns every buffer, with the seed of its content.
    pub(crate) fn buffers(&self) -> impl Iterator<Item = (u64, &Bytes)> {
        self.calls.iter().flat_map(CallPayload::seeded)
    }

    /// Returns the result of consuming all buffers, if receivers consume.
    pub(crate) fn reduced(&self) -> Option<Reduced> {
        self.calls.iter().try_fold(Reduced::NOTHING, |all, call| call.reduced.map(|each| all.and(each)))
    }
}

impl CallPayload {
    /// Returns the bytes of payload.
    pub(crate) fn bytes(&self) -> u64 {
        self.lengths().iter().sum()
    }

    /// Returns the bytes of each buffer.
    pub(crate) fn lengths(&self) -> Vec<u64> {
        let lengths = || self.buffers.iter().map(|buffer| buffer.len() as u64).collect();
        self.pulls.map_or_else(lengths, |bytes| vec![bytes])
    }

    /// Returns every buffer, with the seed of its content.
    pub(crate) fn seeded(&self) -> impl Iterator<Item = (u64, &Bytes)> {
        let mut next = Content::follow(self.seed);
        self.buffers.iter().map(move |buffer| (next(buffer.len() as u64), buffer))
    }
}

impl Operations {
    /// Makes the operations of `load`, with content that begins with `seed`, and the results of consuming
    /// them if `consumed`.
    pub(crate) fn new(load: Workload, seed: u64, consumed: bool) -> Result<Self, Failure> {
        let no_memory = || Failure::usage(format!("{}: there is no memory for it", load));
        let bytes = usize::try_from(room(load)).map_err(|error| no_memory().because(error))?;
        let content = Content::new(bytes, seed).map_err(|error| no_memory().because(error))?;
        Ok(Self::over(load, content, consumed))
    }

    /// Makes operations as [`new`](Self::new) does, with content in registered memory.
    pub(crate) fn in_registered_memory(load: Workload, seed: u64, consumed: bool) -> Result<Self, Failure> {
        let bytes = Content::with_variants(room(load));
        let content = registered(bytes as usize, seed)
            .context(format!("{}: there is no registered memory for it", load))?;
        let operations = Self::over(load, content.clone(), consumed);
        Ok(Self { registered: Arc::new(content.into()), ..operations })
    }

    fn over(load: Workload, content: Content, consumed: bool) -> Self {
        let cycle = load.operations();
        let layout = Layout::of(load, content.seed());
        let form = match load {
            Workload::Size(_) => Form::Put,
            load if load.is_set() => Form::Set,
            _ => Form::Push,
        };
        let operation = |(index, messages): (usize, &Vec<Message>)| {
            let content = content.variant(index);
            let mut offsets = layout.offsets(messages.iter().flatten().copied());
            let call = |message: &Message| push(&content, message, &mut offsets, consumed);
            Operation { form, calls: messages.iter().map(call).collect() }
        };
        // At least one of each operation of the cycle, and of each variant of the content.
        let count = cycle.len().max(VARIANTS);
        let items = cycle.iter().cycle().take(count).enumerate().map(operation).collect();
        Self { load, content, registered: Arc::default(), items }
    }

    /// Returns the content in registered memory, from which a device sends without a copy. The first call copies it
    /// there, for all modes.
    pub(crate) fn registered(&self) -> Result<Content, VerbsError> {
        if let Some(content) = self.registered.get() {
            return Ok(content.clone());
        }
        let all = self.content.all();
        let copy = in_pool(all.len(), self.content.seed(), |memory| memory.copy_from_slice(all))?;
        Ok(self.registered.get_or_init(|| copy).clone())
    }

    /// Returns the operation at `index`. The operations repeat after the last one.
    pub(crate) fn take(&self, index: usize) -> Operation {
        self.items[index % self.items.len()].clone()
    }
}

/// Makes `bytes` of the content of `seed` in registered memory, from which a device sends without a copy: as
/// many as [`Content::with_variants`] returns, or [`Content::all`] has.
pub(crate) fn registered(bytes: usize, seed: u64) -> Result<Content, VerbsError> {
    in_pool(bytes, seed, |memory| content::fill(seed, memory))
}

fn in_pool(bytes: usize, seed: u64, write: impl FnOnce(&mut [u8])) -> Result<Content, VerbsError> {
    /// Granularity of a pool, in bytes.
    const GRANULE: u64 = 2 << 20;
    let pool = Pool::for_sending((bytes as u64).next_multiple_of(GRANULE));
    let mut memory = pool.allocate(bytes)?;
    write(&mut memory);
    Ok(Content::over(memory.freeze(), seed))
}

/// Makes a message of buffers of `content` that begin at `offsets`.
fn push(
    content: &Content,
    message: &Message,
    offsets: &mut impl Iterator<Item = u64>,
    consumed: bool,
) -> CallPayload {
    let mut seed = None;
    let mut buffer = |len: &u64| {
        // The buffer fits, because the content was made for the longest operation.
        let mut source = content.at(offsets.next().unwrap_or(0) as usize);
        seed.get_or_insert(source.seed());
        source.cut(*len as usize)
    };
    let buffers: Vec<Bytes> = message.iter().map(&mut buffer).collect();
    let reduced = consumed.then(|| reduce_all(buffers.iter().map(|buffer| &buffer[..])));
    CallPayload { seed: seed.unwrap_or_else(|| content.seed()), buffers, reduced, pulls: None }
}

/// Seed of the offsets of blocks at the destination. It differs from the seeds of the source.
pub(crate) const DESTINATION_SEED: u64 = 0x0de5_71a7;

/// Offsets of buffers, in bytes.
#[derive(Clone, Debug, Default)]
pub(crate) enum Layout {
    /// One after the other, each on a cache line of its own.
    #[default]
    InOrder,
    /// Each at an offset of its own, found by the buffer's index in the operation.
    Scattered(Arc<[u64]>),
}

impl Layout {
    /// Returns the layout of `load`'s operations. `seed` determines the offsets of scattered buffers.
    pub(crate) fn of(load: Workload, seed: u64) -> Self {
        match load {
            Workload::Blocks => Self::Scattered(workload::scattered(seed).into()),
            _ => Self::InOrder,
        }
    }

    /// Returns the offset of each buffer of these lengths.
    pub(crate) fn offsets(&self, lengths: impl IntoIterator<Item = u64>) -> impl Iterator<Item = u64> {
        let mut end = 0;
        lengths.into_iter().enumerate().map(move |(index, len)| {
            let offset = self.offset(index, end);
            end += Content::room(len);
            offset
        })
    }

    /// Returns the offset of the buffer at `index`, if those before it take `end` bytes.
    pub(crate) fn offset(&self, index: usize, end: u64) -> u64 {
        match self {
            Self::InOrder => end,
            // All operations with this layout have as many blocks as `offsets`.
            Self::Scattered(offsets) => offsets.get(index).copied().unwrap_or(0),
        }
    }
}

/// Returns the bytes of memory that any operation of `load` fits into.
pub(crate) fn room(load: Workload) -> u64 {
    let operations = load.operations();
    let room = |messages: &Vec<Message>| messages.iter().flatten().map(|len| Content::room(*len)).sum();
    let largest: u64 = operations.iter().map(room).max().unwrap_or(0);
    match load {
        // Half of the slots for blocks are empty.
        Workload::Blocks => largest / workload::BLOCKS as u64 * workload::SLOTS as u64,
        _ => largest,
    }
}

/// Index of the next operation. All callers of a mode share it during all trials in a cell, so all modes send
/// equal sequences.
pub(crate) type Position = Arc<AtomicUsize>;

/// Latency, bytes and messages of an operation that is done.
pub(crate) type Done = (Duration, u64, u64);

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use super::*;
    use crate::workload::{Mix, Model};

    impl Operation {
        /// Returns the operation with the only payload changed.
        pub(crate) fn changed(&self, change: impl FnOnce(&mut CallPayload)) -> Self {
            let mut calls = self.calls.to_vec();
            let [call] = calls.as_mut_slice() else { panic!("not a single payload") };
            change(call);
            Self { form: self.form, calls: calls.into() }
        }
    }

    impl Operations {
        /// Returns a copy of these operations, which must have single payloads. In the range `torn` the copy
        /// has content of another variant. Stamps seldom read this range, and the largest element lies
        /// elsewhere. The expected results stay those of the right content.
        pub(crate) fn torn(&self, torn: std::ops::Range<usize>) -> Self {
            let mut memory = self.content.all().to_vec();
            memory.copy_within(torn.start + 64..torn.end + 64, torn.start);
            let content = Content::over(memory.into(), self.content.seed());
            let tear = |(index, operation): (usize, &Operation)| {
                operation.changed(|put| {
                    let payload = content.variant(index).cut(put.buffers[0].len());
                    assert_eq!(
                        put.reduced.map(|it| it.maximum),
                        put.reduced.map(|_| reduce(&payload).maximum)
                    );
                    put.buffers = vec![payload];
                })
            };
            let items = self.items.iter().enumerate().map(tear).collect();
            Self { load: self.load, content, registered: Arc::default(), items }
        }
    }
    use tonic_rdma_commands::payload::content::{check_all, check_buffers};
    use tonic_rdma_commands::payload::reduce::reduce;

    #[test]
    fn operations_follow_the_workload_and_their_content_follows_its_seed() {
        for workload in [Workload::Mix(Mix::Random), Workload::Model(Model::Gru), Workload::Blocks] {
            let operations = Operations::new(workload, 11, false).unwrap();
            let cycle = workload.operations();
            for index in 0..6 {
                let messages = &cycle[index % cycle.len()];
                let operation = operations.take(index);
                assert_eq!(operation.messages(), messages.len() as u64);
                assert_eq!(operation.bytes(), messages.iter().flatten().sum::<u64>());
                for (push, message) in operation.calls.iter().zip(messages) {
                    let lengths: Vec<u64> = push.buffers.iter().map(|buffer| buffer.len() as u64).collect();
                    assert_eq!(&lengths, message);
                    assert_eq!(check_buffers(push.seed, &push.buffers, None), None);
                }
            }
            let seeds = [0, 1].map(|index| operations.take(index).calls[0].seed);
            assert_ne!(seeds[0], seeds[1], "two in a row have the same content");
        }
    }

    #[test]
    fn the_buffers_of_a_set_do_not_overlap_and_blocks_are_in_no_order() {
        for workload in [Workload::Model(Model::Gru), Workload::Blocks] {
            let operations = Operations::new(workload, 1, false).unwrap();
            let ranges: Vec<_> = operations
                .take(0)
                .calls
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
        for load in [Workload::Size(1000), Workload::Mix(Mix::Skew), Workload::Blocks] {
            let operation = Operations::new(load, 5, true).unwrap().take(2);
            let all = operation.buffers().map(|(_, buffer)| reduce(buffer));
            assert_eq!(operation.reduced(), Some(all.fold(Reduced::NOTHING, Reduced::and)));
            assert_eq!(Operations::new(load, 5, false).unwrap().take(2).reduced(), None);
        }
    }

    #[test]
    fn every_buffer_has_the_seed_of_its_content() {
        for load in [Workload::Size(100), Workload::Mix(Mix::Uniform), Workload::Blocks] {
            let operation = Operations::new(load, 5, false).unwrap().take(1);
            for (seed, buffer) in operation.buffers() {
                assert_eq!(check_all(seed, buffer), None);
            }
        }
    }

    #[test]
    fn every_buffer_of_every_operation_has_its_content_in_registered_memory() {
        for load in [Workload::Size(100_001), Workload::Mix(Mix::Random), Workload::Blocks] {
            let operations = Operations::new(load, 7, false).unwrap();
            let registered = operations.registered().unwrap();
            for trial in 0..6 {
                for (seed, buffer) in operations.take(trial).buffers() {
                    assert_eq!(registered.buffer(seed, buffer.len()).as_ref(), Some(buffer));
                }
            }
            assert_eq!(registered.buffer(7 + 1, operations.content.all().len()), None);
            let again = operations.clone().registered().unwrap();
            assert_eq!(again.all().as_ptr(), registered.all().as_ptr(), "all modes share it");
        }
    }

    #[test]
    fn operations_beyond_the_memory_are_refused() {
        let refusal = Operations::new(Workload::Size(1 << 62), 1, false).unwrap_err().to_string();
        assert!(refusal.contains("4096 PiB"), "{refusal}");
    }
}

#[cfg(test)]
mod layout_tests {
    use super::*;

    #[test]
    fn every_operation_fits_into_the_room_and_no_two_buffers_overlap() {
        for workload in Workload::all() {
            let load = workload;
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
        assert_eq!([1, 64, 65, 3 << 30].map(|bytes| room(Workload::Size(bytes))), [64, 64, 128, 3 << 30]);
    }
}
