//! A region in the hands of one owner.

use std::fmt;
use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;

use super::super::budget::{Budget, Reservation};
use super::super::error::PoolError;
use super::super::pool::advise_huge_pages;
use super::super::settings::Quota;
use super::shared::SharedRegion;
use crate::{HostMemory, VerbsError};

/// Memory of a mapping of its own, whose one owner may read and write it as a slice.
///
/// It moves into every operation that the device carries out on it, and comes back when the device is done: that is why
/// nothing here needs `unsafe`. Zeroed at first; pages cost nothing until they are touched.
pub struct MemRegion {
    mapped: Arc<Mapped>,
    range: Range<usize>,
}

/// A mapping, of which regions are parts.
#[derive(Debug)]
pub(crate) struct Mapped {
    memory: Arc<HostMemory>,
    _reservation: Reservation,
}

impl Mapped {
    /// The memory itself.
    pub(crate) fn memory(&self) -> &Arc<HostMemory> {
        &self.memory
    }
}

impl MemRegion {
    /// From here on memory is aligned to 2 MiB, and the kernel asked for huge pages.
    const HUGE_PAGE: usize = 2 << 20;

    /// Maps `length` bytes, at least one page, within `budget`.
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
            source: VerbsError::os(format!("mapping {bytes} bytes of shared memory"), error),
        })?;
        if bytes >= Self::HUGE_PAGE {
            advise_huge_pages(&memory);
        }
        let mapped = Arc::new(Mapped { memory: Arc::new(memory), _reservation: reservation });
        Ok(Self { mapped, range: 0..length })
    }

    /// Splits it in two at `at`, in bytes. Both may be in use independently; `self` keeps the front.
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

    /// Makes it memory that peers may get rights to. It is then read and written by copying alone.
    pub fn share(self) -> SharedRegion {
        SharedRegion::new(self)
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Returns whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// First byte.
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.mapped.memory.as_ptr().as_ptr().wrapping_add(self.range.start)
    }

    pub(crate) fn mapped(&self) -> &Arc<Mapped> {
        &self.mapped
    }

    /// Where it lies in its mapping.
    pub(crate) fn range(&self) -> Range<usize> {
        self.range.clone()
    }
}

impl Deref for MemRegion {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY:
        // - the range lies in the mapping, which `mapped` keeps alive, and its memory is initialised: the kernel hands it
        //   out zeroed;
        // - no device writes to it: requests over a region are posted by `InFlight` alone, which owns the region until they
        //   are over; and
        // - no peer does: grants are made from a `SharedRegion`, which owns the region until they are gone.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len()) }
    }
}

impl DerefMut for MemRegion {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY:
        // - as in `deref`, and
        // - the owner is borrowed mutably; other regions of the mapping are disjoint, as `split_off` makes them.
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
