//! The region table of a device, in memory that peers can read and only the owner can write. A peer looks up a key here before
//! it accesses the memory (`queue_pair/transfer` and `queue_pair/place`).
//!
//! ```text
//!  entry (64 bytes), at the index that is the lower 18 bits of its key; the other bits are random:
//!    key │ rights << 32 │ 1 << 63      address      length      segment (0: not shared)      protection domain
//!    offset in the segment
//! ```
//! An entry is valid while its first word holds the key. To take a region away, its owner invalidates the entry,
//! waits for every section (see [`link`](super::link)) that may have seen it valid, and only then frees the memory.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU64, fence};

use super::mapping::{Mapping, Writers};
use crate::Access;

/// Regions of one device.
pub(crate) const REGIONS: u32 = 1 << 18;

const ENTRY: usize = 8;
const VALID: u64 = 1 << 63;

/// Bytes of a table.
const LENGTH: u64 = REGIONS as u64 * ENTRY as u64 * 8;

/// A region table: our own, or a peer's.
#[derive(Debug)]
pub(crate) struct RegionTable {
    mapping: Mapping,
}

/// The entry of a region in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) access: Access,
    pub(crate) address: u64,
    pub(crate) length: u64,
    pub(crate) segment: u64,
    pub(crate) domain: u64,
    /// Offset of the region in the segment.
    pub(crate) start: u64,
}

impl Entry {
    /// Returns the offset in the segment of `length` bytes at `address`; `None` if they do not lie within the region.
    pub(crate) fn offset(&self, address: u64, length: u64) -> Option<u64> {
        let offset = address.checked_sub(self.address)?;
        if offset.checked_add(length)? > self.length {
            return None;
        }
        // The sum may overflow, because `start` is a value that a peer wrote.
        self.start.checked_add(offset)
    }
}

impl RegionTable {
    /// Creates our own table.
    pub(crate) fn create() -> io::Result<(Self, OwnedFd)> {
        let (mapping, fd) = Mapping::create(LENGTH as usize, Writers::Maker)?;
        Ok((Self { mapping }, fd))
    }

    /// Maps a peer's table for reading.
    pub(crate) fn import(fd: &impl AsFd) -> io::Result<Self> {
        Ok(Self { mapping: Mapping::import(fd, LENGTH, Writers::Maker)? })
    }

    fn entry(&self, key: u32) -> &[AtomicU64] {
        let start = (key % REGIONS) as usize * ENTRY;
        &self.mapping.words()[start..start + ENTRY]
    }

    /// Looks up `key`. The caller must be in a section. The entry is valid until the section ends.
    pub(crate) fn find(&self, key: u32) -> Option<Entry> {
        let words = self.entry(key);
        // SYNC: loads after the section began, which has a SeqCst fence. Relaxed loads and a fence, because the memory may
        // be mapped for reading only.
        let first = words[0].load(Relaxed);
        if first & VALID == 0 || first as u32 != key {
            return None;
        }
        fence(Acquire);
        Some(Entry {
            access: Access::from_bits_truncate((first >> 32) as u8),
            address: words[1].load(Relaxed),
            length: words[2].load(Relaxed),
            segment: words[3].load(Relaxed),
            domain: words[4].load(Relaxed),
            start: words[5].load(Relaxed),
        })
    }

    /// Returns whether `key` is still valid.
    pub(crate) fn holds(&self, key: u32) -> bool {
        let first = self.entry(key)[0].load(Relaxed);
        first & VALID != 0 && first as u32 == key
    }

    /// Makes `key` valid. Called by the owner.
    pub(crate) fn insert(&self, key: u32, entry: &Entry) {
        let words = self.entry(key);
        words[1].store(entry.address, Relaxed);
        words[2].store(entry.length, Relaxed);
        words[3].store(entry.segment, Relaxed);
        words[4].store(entry.domain, Relaxed);
        words[5].store(entry.start, Relaxed);
        // SYNC: pairs with `find`: a reader that sees the key sees its entry.
        words[0].store(VALID | u64::from(entry.access.bits()) << 32 | u64::from(key), Release);
    }

    /// Makes `key` invalid. Sections that saw the key as valid may still be running. Called by the owner.
    pub(crate) fn remove(&self, key: u32) {
        // SYNC: SeqCst, before the caller looks at the sections.
        self.entry(key)[0].swap(0, SeqCst);
        fence(SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(start: u64) -> Entry {
        Entry { access: Access::REMOTE_READ, address: 5003, length: 100, segment: 1, domain: 2, start }
    }

    #[test]
    fn a_region_begins_and_ends_within_its_segment() {
        let part = entry(907);
        assert_eq!(part.offset(5003, 100), Some(907));
        assert_eq!(part.offset(5102, 1), Some(907 + 99));
        assert_eq!(part.offset(5103, 0), Some(907 + 100));
        for (address, length) in
            [(5002, 1), (5003, 101), (5102, 2), (5103, 1), (u64::MAX, 2), (5003, u64::MAX)]
        {
            assert_eq!(part.offset(address, length), None, "{length} bytes at {address}");
        }
    }

    #[test]
    fn an_impossible_start_gives_no_offset() {
        assert_eq!(entry(u64::MAX).offset(5003, 1), Some(u64::MAX), "no mapping has this offset");
        assert_eq!(entry(u64::MAX).offset(5004, 1), None);
    }
}
