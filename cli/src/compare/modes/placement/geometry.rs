//! What both ends of a mode that places tensors know: the offsets and seeds of an operation's buffers, and
//! the record of a trial. And the timer by which a thread that polls yields.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tonic_rdma_commands::payload::content::{VARIANTS, begins, variant_seed};
use tonic_rdma_commands::payload::reduce::Reduced;
use tonic_rdma_commands::payload::seeded::mix;
use tonic_rdma_proto::placement::{EndReply, Mismatch};
use tonic_rdma_tensor::{Dtype, Shape, TensorError, TensorSpec};

use crate::compare::modes::mode::Mode;
use crate::compare::operations::{self, DESTINATION_SEED, Layout};
use crate::workload::Workload;

/// The largest number of operations in flight: a slot has no more buffers.
pub(crate) const MAX_DEPTH: usize = 1024;

/// The kind of slots that a load's operations have.
#[derive(Clone, Debug)]
pub(crate) enum Geometry {
    /// A static slot for each buffer. It is used if all operations are alike and have few buffers.
    Slots(Arc<[u64]>),
    /// One region for all buffers, and a static slot for a header that arrives after them.
    Batch(Batch),
}

/// The slots of [`Geometry::Batch`].
#[derive(Clone, Debug)]
pub(crate) struct Batch {
    /// Bytes of an operation, at either end.
    pub(crate) room: u64,
    source: Layout,
    destination: Layout,
    /// Number of buffers of an operation.
    count: usize,
    /// Lengths of the buffers, if all operations have equal lengths. The header has no lengths then.
    lengths: Option<Arc<[u64]>>,
}

impl Geometry {
    /// Returns the geometry of `load`, whose content begins with `seed`.
    pub(crate) fn of(load: Workload, seed: u64) -> Self {
        let operation = load.operations().into_iter().next().unwrap_or_default();
        let lengths: Arc<[u64]> = operation.into_iter().flatten().collect();
        match load {
            Workload::Size(_) | Workload::Model(_) | Workload::Shard(_) => Self::Slots(lengths),
            Workload::Mix(_) | Workload::Blocks => Self::Batch(Batch {
                room: operations::room(load),
                source: Layout::of(load, seed),
                destination: Layout::of(load, DESTINATION_SEED),
                count: lengths.len(),
                lengths: matches!(load, Workload::Blocks).then_some(lengths),
            }),
        }
    }
}

impl Batch {
    /// Returns the number of words of the header: the seed of the first buffer, and the lengths of all
    /// buffers if those vary.
    pub(crate) fn words(&self) -> usize {
        if self.lengths.is_some() { 1 } else { 1 + self.count }
    }

    /// Returns the lengths of the buffers from the words of a header, or `None` if the buffers don't fit into
    /// the room. A correct sender never sends such lengths.
    pub(crate) fn lengths(&self, words: &[u64]) -> Option<Arc<[u64]>> {
        if let Some(lengths) = &self.lengths {
            return Some(Arc::clone(lengths));
        }
        let lengths = words.get(1..)?;
        let end = lengths.iter().try_fold(0u64, |end, length| {
            end.checked_add(length.checked_next_multiple_of(64)?).filter(|end| *end <= self.room)
        });
        end.map(|_| lengths.into())
    }

    /// Returns the offset of each buffer at the destination.
    pub(crate) fn offsets(&self, lengths: &[u64]) -> impl Iterator<Item = u64> {
        self.destination.offsets(lengths.to_vec())
    }

    /// Returns the seeds of the buffers. The first buffer has the seed `first`.
    pub(crate) fn seeds(&self, first: u64, lengths: &[u64]) -> impl Iterator<Item = u64> {
        seeds(&self.source, first, lengths)
    }
}

/// Returns the seeds of buffers that lie one after the other.
pub(crate) fn seeds_in_order(first: u64, lengths: &[u64]) -> impl Iterator<Item = u64> {
    seeds(&Layout::InOrder, first, lengths)
}

fn seeds(layout: &Layout, first: u64, lengths: &[u64]) -> impl Iterator<Item = u64> {
    let mut seeds = BufferSeeds::new(layout.clone());
    seeds.begin(first);
    lengths.iter().map(move |length| seeds.next(*length))
}

/// The seeds of an operation's buffers, whose lengths become known one after the other.
#[derive(Debug)]
pub(crate) struct BufferSeeds {
    layout: Layout,
    first: u64,
    index: usize,
    /// The bytes that the buffers so far take, if they lie one after the other.
    end: u64,
}

impl BufferSeeds {
    pub(crate) fn new(layout: Layout) -> Self {
        Self { layout, first: 0, index: 0, end: 0 }
    }

    /// Returns the distance of the first buffer from the content of the operation, in words.
    pub(crate) fn origin(&self) -> u64 {
        self.layout.offset(0, 0) / 8
    }

    /// Begins an operation, whose first buffer has the seed `first`.
    pub(crate) fn begin(&mut self, first: u64) {
        (self.first, self.index, self.end) = (first, 0, 0);
    }

    /// Returns the seed of the next buffer, which has `length` bytes.
    pub(crate) fn next(&mut self, length: u64) -> u64 {
        let word = self.layout.offset(self.index, self.end) / 8;
        self.index += 1;
        self.end = self.end.saturating_add(length.next_multiple_of(64));
        self.first.wrapping_add(word.wrapping_sub(self.origin()))
    }
}

/// Returns the number of buffers of an operation of `load`.
pub(crate) fn buffers(load: Workload) -> usize {
    load.operations().first().map_or(0, |operation| operation.iter().flatten().count())
}

/// The bytes of the tensor that acknowledges an operation, and the name of its slot at the sender, in modes whose
/// tensors have no place beforehand.
pub(crate) const ACKNOWLEDGEMENT: u64 = 8;

/// Returns the names of the tensors of an operation in a mode by names.
pub(crate) fn names(mode: Mode, count: usize) -> Vec<String> {
    (0..count).map(|index| format!("{mode} {index}")).collect()
}

pub(crate) fn acknowledgements(mode: Mode) -> String {
    format!("{mode} acknowledgement")
}

/// Returns the seed of the operation that begins with `start`: its first eight bytes, or all bytes of a
/// shorter operation. `seed` is the seed of the first variant. Very short payloads of several variants may be
/// equal; the first variant counts then.
pub(crate) fn identify(seed: u64, start: &[u8]) -> Option<u64> {
    (0..VARIANTS).map(|variant| variant_seed(seed, variant)).find(|seed| begins(*seed, start))
}

/// Returns the type and shape of a tensor of `bytes` bytes.
pub(crate) fn spec(bytes: u64) -> Result<TensorSpec, TensorError> {
    TensorSpec::new(Dtype::U8, Shape::new(&[bytes])?)
}

/// The operations of a trial: their number, identity and order, and the result of consuming them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) operations: u64,
    identities: u64,
    consumed: u64,
    /// Buffer and offset of the first wrong byte.
    pub(crate) mismatch: Option<(u64, u64)>,
}

/// The reason why the records of both sides differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Discrepancy {
    /// The number of operations differs.
    #[error("{sent} operations were sent and {arrived} arrived")]
    Count { sent: u64, arrived: u64 },
    /// Other operations arrived, or the operations arrived in another order.
    #[error("other operations arrived than were sent, or in another order")]
    Identity,
    /// The receiver found other content in the operations.
    #[error("the receiver found something else in what arrived than was sent")]
    Consumed,
}

impl Record {
    /// Adds an operation: the seed of its content, and the result of consuming it if it is consumed.
    pub(crate) fn add(&mut self, identity: Option<u64>, reduced: Option<Reduced>) {
        self.operations += 1;
        // An unknown operation counts as a seed that almost surely no operation has, because seeds are spread
        // over all 64 bits.
        self.identities = mix(self.identities ^ identity.unwrap_or(u64::MAX));
        // The sign of zero does not count.
        let maximum = reduced.map_or(u64::MAX, |it| (it.maximum + 0.0).to_bits().into());
        self.consumed = mix(mix(self.consumed ^ maximum) ^ reduced.map_or(0, |it| it.digest));
    }

    /// Notes a wrong byte: the buffer, and the offset in the buffer. Only the first wrong byte is kept.
    pub(crate) fn wrong(&mut self, buffer: u64, offset: u64) {
        self.mismatch.get_or_insert((buffer, offset));
    }

    /// Compares this record, made by the sender, with `arrived`, made by the receiver.
    pub(crate) fn compare(&self, arrived: &Self) -> Result<(), Discrepancy> {
        if self.operations != arrived.operations {
            Err(Discrepancy::Count { sent: self.operations, arrived: arrived.operations })
        } else if self.identities != arrived.identities {
            Err(Discrepancy::Identity)
        } else if self.consumed != arrived.consumed {
            Err(Discrepancy::Consumed)
        } else {
            Ok(())
        }
    }
}

impl From<Record> for EndReply {
    fn from(record: Record) -> Self {
        let Record { operations, identities, consumed, mismatch } = record;
        let mismatch = mismatch.map(|(buffer, offset)| Mismatch { buffer, offset });
        Self { operations, identities, consumed, mismatch }
    }
}

impl From<EndReply> for Record {
    fn from(reply: EndReply) -> Self {
        let EndReply { operations, identities, consumed, mismatch } = reply;
        let mismatch = mismatch.map(|it| (it.buffer, it.offset));
        Self { operations, identities, consumed, mismatch }
    }
}

/// Longest time between two yields.
const MAX_HOLD: Duration = Duration::from_micros(100);

/// Number of polls without a result between two readings of the clock.
const POLLS: u32 = 256;

/// Time without a result after which nothing is expected soon. The thread sleeps between polls from then on.
const IDLE: Duration = Duration::from_secs(1);
const IDLE_SLEEP: Duration = Duration::from_millis(1);

/// Counts polls without a result, and decides when the thread yields.
#[derive(Debug)]
pub(crate) struct YieldTimer {
    polls: u32,
    yielded: Instant,
    found: Instant,
}

impl YieldTimer {
    pub(crate) fn new() -> Self {
        let now = Instant::now();
        Self { polls: 0, yielded: now, found: now }
    }

    /// Notes a result at `now`.
    pub(crate) fn found(&mut self, now: Instant) {
        (self.polls, self.found) = (0, now);
    }

    /// Notes a poll without a result.
    pub(crate) fn missed(&mut self) {
        self.polls += 1;
        std::hint::spin_loop();
    }

    /// Returns whether it is time to yield.
    pub(crate) fn is_due(&mut self) -> bool {
        if self.polls == 0 {
            return self.found - self.yielded > MAX_HOLD;
        }
        self.polls.is_multiple_of(POLLS) && self.yielded.elapsed() > MAX_HOLD
    }

    /// Yields to other tasks of this runtime, and to other processes where there are more of them than cores.
    pub(crate) async fn yield_now(&mut self) {
        if self.found.elapsed() > IDLE {
            tokio::time::sleep(IDLE_SLEEP).await;
        } else {
            std::thread::yield_now();
            tokio::task::yield_now().await;
        }
        self.yielded = Instant::now();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use super::*;
    use crate::compare::operations::Operations;
    use crate::workload::{Mix, Model};

    #[test]
    fn both_ends_agree_on_seeds_and_lengths() {
        let seed = 77;
        for workload in [
            Workload::Mix(Mix::Random),
            Workload::Mix(Mix::Skew),
            Workload::Blocks,
            Workload::Model(Model::Gru),
        ] {
            let load = workload;
            let operations = Operations::new(load, seed, false).unwrap();
            for trial in 0..5 {
                let operation = operations.take(trial);
                let sent: Vec<u64> = operation.buffers().map(|(seed, _)| seed).collect();
                let lengths: Vec<u64> = operation.buffers().map(|(_, buffer)| buffer.len() as u64).collect();
                match Geometry::of(load, seed) {
                    Geometry::Slots(expected) => {
                        assert_eq!(*expected, lengths[..]);
                        assert!(seeds_in_order(sent[0], &lengths).eq(sent.iter().copied()));
                    }
                    Geometry::Batch(batch) => {
                        let words: Vec<u64> = [sent[0]].into_iter().chain(lengths.iter().copied()).collect();
                        assert_eq!(*batch.lengths(&words[..batch.words()]).unwrap(), lengths[..]);
                        assert!(batch.seeds(sent[0], &lengths).eq(sent.iter().copied()));
                        let ends = batch.offsets(&lengths).zip(&lengths).map(|(offset, len)| offset + len);
                        assert!(ends.max().unwrap() <= batch.room);
                    }
                }
            }
        }
    }

    #[test]
    fn lengths_beyond_the_room_are_refused() {
        let Geometry::Batch(batch) = Geometry::of(Workload::Mix(Mix::Skew), 1) else {
            panic!("a mix is a batch")
        };
        let mut words = vec![0; batch.words()];
        assert!(batch.lengths(&words).is_some());
        for bad in [batch.room + 1, u64::MAX, u64::MAX - 63] {
            words[4] = bad;
            assert!(batch.lengths(&words).is_none(), "{bad}");
        }
        words[4] = batch.room;
        assert!(batch.lengths(&words).is_some());
        words[9] = 1;
        assert!(batch.lengths(&words).is_none());
        assert!(batch.lengths(&[]).is_none());
    }

    #[test]
    fn an_operation_is_identified_by_its_first_bytes() {
        let operations = Operations::new(Workload::Size(100), 5, false).unwrap();
        for trial in 0..8 {
            let operation = operations.take(trial);
            let (seed, buffer) = operation.buffers().next().unwrap();
            assert_eq!(identify(5, &buffer[..8]), Some(seed));
        }
        assert_eq!(identify(5, &[0; 8]), None);
        assert_eq!(identify(5, &[]), Some(5));
    }
}

#[cfg(test)]
mod record_tests {
    use super::*;

    fn record(operations: &[(u64, f32)]) -> Record {
        let mut record = Record::default();
        for (identity, maximum) in operations {
            record.add(Some(*identity), Some(Reduced { maximum: *maximum, digest: 7 }));
        }
        record
    }

    #[test]
    fn records_differ_by_count_order_identity_maximum_and_digest() {
        let sent = record(&[(1, 0.5), (2, -0.0), (1, 2.0)]);
        assert_eq!(sent.compare(&record(&[(1, 0.5), (2, 0.0), (1, 2.0)])), Ok(()));
        let (count, other) = (Discrepancy::Count { sent: 3, arrived: 2 }, Discrepancy::Identity);
        assert_eq!(sent.compare(&record(&[(1, 0.5), (2, 0.0)])), Err(count));
        for wrong in [[(2, 0.5), (1, 0.0), (1, 2.0)], [(1, 0.5), (2, 0.0), (2, 2.0)]] {
            assert_eq!(sent.compare(&record(&wrong)), Err(other));
        }
        let wrong = record(&[(1, 0.5), (2, 0.0), (1, 2.5)]);
        assert_eq!(sent.compare(&wrong), Err(Discrepancy::Consumed));
        assert_eq!(Record::from(EndReply::from(wrong)), wrong);
        let with = |digest| {
            let mut record = Record::default();
            record.add(Some(1), Some(Reduced { maximum: 0.5, digest }));
            record
        };
        assert_eq!(with(1).compare(&with(2)), Err(Discrepancy::Consumed));
    }

    #[test]
    fn the_first_wrong_byte_is_kept() {
        let mut record = Record::default();
        record.wrong(3, 4);
        record.wrong(0, 0);
        assert_eq!(record.mismatch, Some((3, 4)));
        let reply: EndReply = record.into();
        assert_eq!(Record::from(reply).mismatch, Some((3, 4)));
    }
}

#[cfg(test)]
mod yield_timer_tests {
    use super::*;

    #[test]
    fn a_yield_is_due_after_a_while_with_and_without_results() {
        let mut yield_timer = YieldTimer::new();
        let start = yield_timer.yielded;
        yield_timer.found(start + MAX_HOLD);
        assert!(!yield_timer.is_due());
        yield_timer.found(start + 2 * MAX_HOLD);
        assert!(yield_timer.is_due());
        std::thread::sleep(2 * MAX_HOLD);
        let polls = (1..=POLLS).map(|_| {
            yield_timer.missed();
            yield_timer.is_due()
        });
        assert_eq!(polls.filter(|due| *due).count(), 1);
    }
}
