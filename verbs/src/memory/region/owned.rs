//! A region with one owner.

use std::fmt;
use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;

use super::super::budget::Budget;
use super::super::error::PoolError;
use super::super::pool::slab::advise_huge_pages;
use super::super::settings::Quota;
use super::shared::SharedRegion;
use crate::{HostMemory, VerbsError};

/// Memory with its own mapping. Its owner reads and writes it as a slice.
///
/// The region moves into each operation of the device, and comes back when the device is done. For this reason programs need no
/// `unsafe`. New memory holds zeros. A page uses no memory until its first access.
pub struct MemRegion {
    mapped: Arc<Mapped>,
    range: Range<usize>,
}

/// A mapping. Each region is a mapping or a part of a mapping.
#[derive(Debug)]
pub(crate) struct Mapped {
    memory: Arc<HostMemory>,
}

impl Mapped {
    /// Returns the memory.
    #[inline]
    pub(crate) fn memory(&self) -> &Arc<HostMemory> {
        &self.memory
    }
}

impl MemRegion {
    /// Bytes of a huge page. Memory of this length or more is aligned to huge pages, and the kernel is asked for them.
    const HUGE_PAGE: usize = 2 << 20;

    /// Maps `length` bytes, at least one page, within `budget`.
    ///
    /// ```
    /// use tonic_rdma_verbs::memory::{Budget, MemRegion};
    ///
    /// let mut region = MemRegion::allocate(4096, &Budget::new(1 << 20))?;
    /// region[..3].copy_from_slice(b"abc");
    /// # Ok::<(), tonic_rdma_verbs::memory::PoolError>(())
    /// ```
    ///
    /// # Errors
    /// The length exceeds the address space, the budget is used up, or the system can't map the memory.
    pub fn allocate(length: usize, budget: &Arc<Budget>) -> Result<Self, PoolError> {
        let page = rustix::param::page_size();
        let limit = isize::MAX as u64 / 2;
        if length as u64 > limit {
            let (asked, quota) = (length as u64, Quota::Send);
            return Err(PoolError::TooLarge { quota, asked, limit });
        }
        let bytes = length.max(1).next_multiple_of(page);
        let reservation = budget.reserve(bytes as u64)?;
        let alignment = if bytes >= Self::HUGE_PAGE { Self::HUGE_PAGE } else { page };
        let memory = HostMemory::shared(bytes, alignment).map_err(|error| PoolError::Verbs {
            bytes: bytes as u64,
            cause: VerbsError::os(format!("mapping {bytes} bytes of shared memory"), error),
        })?;
        if bytes >= Self::HUGE_PAGE {
            advise_huge_pages(&memory);
        }
        memory.set_charge(Arc::new(reservation));
        let mapped = Arc::new(Mapped { memory: Arc::new(memory) });
        Ok(Self { mapped, range: 0..length })
    }

    /// Splits the region at byte `at`, and returns the part from there on. `self` keeps the first part. Both parts are
    /// independent.
    ///
    /// # Panics
    /// If `at` is beyond the end.
    #[must_use]
    pub fn split_off(&mut self, at: usize) -> Self {
        assert!(at <= self.len(), "split at {at}, but there are {} bytes", self.len());
        let middle = self.range.start + at;
        let back = Self { mapped: Arc::clone(&self.mapped), range: middle..self.range.end };
        self.range.end = middle;
        back
    }

    /// Turns the region into memory that peers may get rights to. This process then reads and writes it by copying.
    pub fn share(self) -> SharedRegion {
        SharedRegion::new(self)
    }

    /// Returns the length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Returns whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// Returns the address of the first byte.
    #[inline]
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.mapped.memory.as_ptr().as_ptr().wrapping_add(self.range.start)
    }

    /// Returns the mapping.
    #[inline]
    pub(crate) fn mapped(&self) -> &Arc<Mapped> {
        &self.mapped
    }

    /// Returns the range of the region in its mapping.
    #[inline]
    pub(crate) fn range(&self) -> Range<usize> {
        self.range.clone()
    }
}

impl Deref for MemRegion {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY:
        // - The range lies in the mapping, which `mapped` keeps alive, and the memory is initialised: the kernel zeroes it.
        // - No device writes to the memory: only `InFlight` posts requests over a region, and it owns the region until the
        //   requests have completed.
        // - No peer writes to the memory: grants are made from a `SharedRegion`, which owns the region until the last grant
        //   is dropped.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len()) }
    }
}

impl DerefMut for MemRegion {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY:
        // - As in `deref`.
        // - The owner is borrowed mutably. Other regions of the mapping are disjoint, because `split_off` makes them so.
        unsafe { std::slice::from_raw_parts_mut(self.as_ptr(), self.len()) }
    }
}

impl AsRef<[u8]> for MemRegion {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl AsMut<[u8]> for MemRegion {
    fn as_mut(&mut self) -> &mut [u8] {
        self
    }
}

impl fmt::Debug for MemRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MemRegion({:p}, {} bytes)", self.as_ptr(), self.len())
    }
}
