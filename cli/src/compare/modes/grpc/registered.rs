//! The content of a cell in registered memory, from which a device sends without a copy.

use bytes::Bytes;
use tonic_rdma::memory::{Pool, PoolError};

use tonic_rdma_payload::content::{self, Content, offset_of};

/// Granularity of a pool, in bytes.
const GRANULE: u64 = 2 << 20;

/// A cell's content in memory of a pool for sending. Clones share the memory.
#[derive(Clone, Debug)]
pub(super) struct RegisteredContent {
    content: Content,
    /// Accounts for the memory.
    _pool: Pool,
}

impl RegisteredContent {
    /// Makes `bytes` of the content of `seed`: as many as [`Content::with_variants`] returns, or [`Content::all`] has.
    pub(super) fn new(bytes: usize, seed: u64) -> Result<Self, PoolError> {
        let pool = Pool::for_sending((bytes as u64).next_multiple_of(GRANULE));
        let mut memory = pool.allocate(bytes)?;
        content::fill(seed, &mut memory);
        Ok(Self { content: Content::over(memory.freeze(), seed), _pool: pool })
    }

    /// Cuts a buffer of `len` bytes, with the content of `seed`, which must be a part of this content.
    pub(super) fn cut(&self, seed: u64, len: usize) -> Bytes {
        self.content.at(offset_of(seed, self.content.seed()) as usize).cut(len)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;
    use crate::compare::operations::Operations;
    use crate::compare::plan::cell::Load;
    use crate::workload::{Mix, Workload};

    #[test]
    fn every_buffer_of_every_operation_has_its_content_in_registered_memory() {
        for load in [
            Load::Size(100_001),
            Load::Workload(Workload::Mix(Mix::Random)),
            Load::Workload(Workload::Blocks),
        ] {
            let operations = Operations::new(load, 7, false).unwrap();
            let content = operations.content();
            let registered = RegisteredContent::new(content.all().len(), content.seed()).unwrap();
            for turn in 0..6 {
                for (seed, buffer) in operations.take(turn).buffers() {
                    assert_eq!(registered.cut(seed, buffer.len()), buffer);
                }
            }
        }
    }
}
