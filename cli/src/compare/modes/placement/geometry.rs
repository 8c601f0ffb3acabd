//! The places of an operation's buffers, as both ends know them.

use std::sync::Arc;

use tonic_rdma_tensor::{Dtype, Shape, ShapeError, TensorSpec};

use crate::compare::modes::mode::Mode;
use crate::compare::operations::layout::{self, DESTINATION_SEED, Layout};
use crate::compare::plan::cell::Load;
use crate::workload::Workload;
use tonic_rdma_payload::content::{VARIANTS, begins, variant_seed};

/// The largest number of operations in flight: a slot has no more buffers.
pub(super) const MAX_DEPTH: usize = 1024;

/// The kind of places that a load's operations have.
#[derive(Clone, Debug)]
pub(super) enum Geometry {
    /// A static slot for each buffer. It is used if all operations are alike and have few buffers.
    Slots(Arc<[u64]>),
    /// One region for all buffers, and a static slot for a header that arrives after them.
    Batch(Batch),
}

/// The places of [`Geometry::Batch`].
#[derive(Clone, Debug)]
pub(super) struct Batch {
    /// Bytes of an operation, at either end.
    pub(super) room: u64,
    source: Layout,
    destination: Layout,
    /// Number of buffers of an operation.
    count: usize,
    /// Lengths of the buffers, if all operations have equal lengths. The header has no lengths then.
    lengths: Option<Arc<[u64]>>,
}

impl Geometry {
    /// Returns the geometry of `load`, whose content begins with `seed`.
    pub(super) fn of(load: Load, seed: u64) -> Self {
        let operation = |workload: Workload| workload.operations().into_iter().next().unwrap_or_default();
        match load {
            Load::Size(bytes) => Self::Slots([bytes].into()),
            Load::Workload(workload @ Workload::Model(_)) => {
                Self::Slots(operation(workload).into_iter().flatten().collect())
            }
            Load::Workload(workload) => {
                let lengths: Arc<[u64]> = operation(workload).into_iter().flatten().collect();
                Self::Batch(Batch {
                    room: layout::room(load),
                    source: Layout::of(load, seed),
                    destination: Layout::of(load, DESTINATION_SEED),
                    count: lengths.len(),
                    lengths: matches!(workload, Workload::Blocks).then_some(lengths),
                })
            }
        }
    }
}

impl Batch {
    /// Returns the number of words of the header: the seed of the first buffer, and the lengths of all buffers if those
    /// vary.
    pub(super) fn words(&self) -> usize {
        if self.lengths.is_some() { 1 } else { 1 + self.count }
    }

    /// Returns the lengths of the buffers from the words of a header, or `None` if the buffers don't fit into the room.
    /// A correct sender never sends such lengths.
    pub(super) fn lengths(&self, words: &[u64]) -> Option<Arc<[u64]>> {
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
    pub(super) fn places(&self, lengths: &[u64]) -> impl Iterator<Item = u64> {
        self.destination.offsets(lengths.to_vec())
    }

    /// Returns the seeds of the buffers. The first buffer has the seed `first`.
    pub(super) fn seeds(&self, first: u64, lengths: &[u64]) -> impl Iterator<Item = u64> {
        seeds(&self.source, first, lengths)
    }
}

/// Returns the seeds of buffers that lie one after the other.
pub(super) fn seeds_in_order(first: u64, lengths: &[u64]) -> impl Iterator<Item = u64> {
    seeds(&Layout::InOrder, first, lengths)
}

fn seeds(layout: &Layout, first: u64, lengths: &[u64]) -> impl Iterator<Item = u64> {
    let mut origin = None;
    layout.offsets(lengths.to_vec()).map(move |offset| {
        let word = offset / 8;
        first.wrapping_add(word.wrapping_sub(*origin.get_or_insert(word)))
    })
}

/// Returns the seed of the operation that begins with `start`: its first eight bytes, or all bytes of a shorter
/// operation. `seed` is the seed of the first variant. Very short payloads of several variants may be equal; the first
/// variant counts then.
pub(super) fn identify(seed: u64, start: &[u8]) -> Option<u64> {
    (0..VARIANTS).map(|variant| variant_seed(seed, variant)).find(|seed| begins(*seed, start))
}

/// Returns the name of a mode's slot.
pub(super) fn slot_name(mode: Mode, index: usize) -> String {
    format!("{mode} {index}")
}

pub(super) fn header_name(mode: Mode) -> String {
    format!("{mode} header")
}

pub(super) fn region_name(mode: Mode) -> String {
    format!("{mode} region")
}

/// Returns the type and shape of a tensor of `bytes` bytes.
pub(super) fn spec(bytes: u64) -> Result<TensorSpec, ShapeError> {
    TensorSpec::new(Dtype::U8, Shape::new(&[bytes])?)
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
            let load = Load::Workload(workload);
            let operations = Operations::new(load, seed, false).unwrap();
            for turn in 0..5 {
                let operation = operations.take(turn);
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
                        let ends = batch.places(&lengths).zip(&lengths).map(|(place, len)| place + len);
                        assert!(ends.max().unwrap() <= batch.room);
                    }
                }
            }
        }
    }

    #[test]
    fn lengths_beyond_the_room_are_refused() {
        let Geometry::Batch(batch) = Geometry::of(Load::Workload(Workload::Mix(Mix::Skew)), 1) else {
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
        let operations = Operations::new(Load::Size(100), 5, false).unwrap();
        for turn in 0..8 {
            let operation = operations.take(turn);
            let (seed, buffer) = operation.buffers().next().unwrap();
            assert_eq!(identify(5, &buffer[..8]), Some(seed));
        }
        assert_eq!(identify(5, &[0; 8]), None);
        assert_eq!(identify(5, &[]), Some(5));
    }
}
