//! The places of an operation's buffers in one stretch of memory, at either end.

use std::sync::Arc;

use crate::compare::plan::cell::Load;
use crate::workload::Workload;
use crate::workload::blocks;
use tonic_rdma_payload::content::Content;

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
            Load::Workload(Workload::Blocks) => Self::Scattered(blocks::scattered(seed).into()),
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
                largest / blocks::BLOCKS as u64 * blocks::PLACES as u64
            } else {
                largest
            }
        }
    }
}

#[cfg(test)]
mod tests {
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
