//! The region table of a device, in memory that peers of this user can read and only the owner can write. A
//! peer looks up a key here before it reads the memory, and once more afterwards (`queue_pair/pulls`). A
//! key's index in the table is its lower 18 bits; the other bits are random.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::mapping::Mapping;
use super::platform::{Native, Orders, Platform, Shipping, Word, fence_of};
use crate::Access;

/// Regions of one device.
pub(crate) const REGIONS: u32 = 1 << 18;

/// Bytes of a table.
const LENGTH: u64 = REGIONS as u64 * ENTRY as u64 * 8;

/// A region table: our own, or a peer's.
#[derive(Debug)]
pub(crate) struct RegionTable {
    mapping: Mapping,
}

impl RegionTable {
    /// Creates our own table.
    pub(crate) fn create() -> io::Result<(Self, OwnedFd)> {
        let (mapping, fd) = Mapping::create(LENGTH as usize)?;
        Ok((Self { mapping }, fd))
    }

    /// Maps a peer's table for reading.
    pub(crate) fn import(fd: &impl AsFd) -> io::Result<Self> {
        Ok(Self { mapping: Mapping::import(fd, LENGTH)? })
    }

    fn entry(&self, key: u32) -> &[AtomicU64] {
        let start = (key % REGIONS) as usize * ENTRY;
        &self.mapping.words()[start..start + ENTRY]
    }

    /// Looks up `key`. The owner may revoke the entry at any time.
    pub(crate) fn find(&self, key: u32) -> Option<Entry> {
        Entry::find::<Native, Shipping>(self.entry(key), key)
    }

    /// Returns whether `key` is still valid.
    pub(crate) fn holds(&self, key: u32) -> bool {
        holds::<Native>(self.entry(key), key)
    }

    /// Makes `key` valid. Called by the owner.
    pub(crate) fn insert(&self, key: u32, entry: &Entry) {
        entry.insert::<Native, Shipping>(self.entry(key), key);
    }

    /// Makes `key` invalid. A thread of a peer that saw the key as valid may still be reading the memory.
    /// Called by the owner.
    pub(crate) fn remove(&self, key: u32) {
        remove::<Native, Shipping>(self.entry(key));
    }
}

/// Words of an entry.
pub const ENTRY: usize = 8;

const VALID: u64 = 1 << 63;

/// The entry of a region in the table.
///
/// ```text
///  entry (64 bytes):
///    key │ rights << 32 │ 1 << 63      address      length      segment (0: not shared)      protection domain
///    offset in the segment      queue pair (0: all of the domain)
/// ```
/// An entry is valid while its first word holds the key. To take a region away, its owner makes the entry
/// invalid. A peer that is copying from the memory meanwhile finds that, and discards the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The rights of peers.
    pub access: Access,
    /// Address of the first byte in the owner's process.
    pub address: u64,
    /// Number of bytes.
    pub length: u64,
    /// Number of the segment that has the bytes; 0 if they are not shared.
    pub segment: u64,
    /// Number of the protection domain.
    pub domain: u64,
    /// Offset of the region in the segment.
    pub start: u64,
    /// Number of the queue pair whose peer alone may use the entry, which is that of a window; 0 for a region.
    pub queue_pair: u64,
}

impl Entry {
    /// Returns whether the peer of queue pair `number` may use the entry. The number 0 stands for requests of
    /// the owner.
    #[inline]
    pub fn serves(&self, number: u32) -> bool {
        self.queue_pair == 0 || self.queue_pair == u64::from(number)
    }

    /// Returns the offset in the segment of `length` bytes at `address`; `None` if they do not lie within the
    /// region.
    pub fn offset(&self, address: u64, length: u64) -> Option<u64> {
        let offset = address.checked_sub(self.address)?;
        if offset.checked_add(length)? > self.length {
            return None;
        }
        // The sum may overflow, because `start` is a value that a peer wrote.
        self.start.checked_add(offset)
    }
    /// Returns the entry of `key`, if `words` has it. The values may be of two entries, if the owner changes
    /// the entry meanwhile; then [`holds`] returns false afterwards.
    pub fn find<P: Platform, O: Orders>(words: &[P::Word], key: u32) -> Option<Self> {
        let first = words[0].load(Relaxed);
        if !is_key(first, key) {
            return None;
        }
        // SYNC: pairs with `insert`. A fence, because the memory may be mapped only for reading.
        fence_of::<P>(O::FIND_FENCE);
        Some(Self {
            access: Access::from_bits_truncate((first >> 32) as u8),
            address: words[1].load(Relaxed),
            length: words[2].load(Relaxed),
            segment: words[3].load(Relaxed),
            domain: words[4].load(Relaxed),
            start: words[5].load(Relaxed),
            queue_pair: words[6].load(Relaxed),
        })
    }

    /// Makes `key` valid. Called by the owner.
    pub fn insert<P: Platform, O: Orders>(&self, words: &[P::Word], key: u32) {
        words[1].store(self.address, Relaxed);
        words[2].store(self.length, Relaxed);
        words[3].store(self.segment, Relaxed);
        words[4].store(self.domain, Relaxed);
        words[5].store(self.start, Relaxed);
        words[6].store(self.queue_pair, Relaxed);
        // SYNC: pairs with `find`: a reader that sees the key sees its entry.
        words[0].store(VALID | u64::from(self.access.bits()) << 32 | u64::from(key), O::INSERT);
    }
}

/// Returns whether `key` is valid.
pub fn holds<P: Platform>(words: &[P::Word], key: u32) -> bool {
    is_key(words[0].load(Relaxed), key)
}

fn is_key(first: u64, key: u32) -> bool {
    first & VALID != 0 && first as u32 == key
}

/// Makes the key of an entry invalid. Called by the owner, which may use the memory again afterwards.
pub fn remove<P: Platform, O: Orders>(words: &[P::Word]) {
    words[0].store(0, Relaxed);
    // SYNC: pairs with the fence of `unless_revoked`: a peer that has read what the owner stores from now on
    // finds the key invalid.
    fence_of::<P>(O::REVOKE_FENCE);
}

#[cfg(test)]
mod entry_tests {
    use super::*;

    fn entry(start: u64) -> Entry {
        let access = Access::REMOTE_READ;
        Entry { access, address: 5003, length: 100, segment: 1, domain: 2, start, queue_pair: 0 }
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
    fn a_window_serves_the_peer_of_its_queue_pair() {
        let window = Entry { queue_pair: 7, ..entry(0) };
        assert_eq!([0, 6, 7, 8].map(|number| window.serves(number)), [false, false, true, false]);
        assert!([0, 6, 7].into_iter().all(|number| entry(0).serves(number)), "a region serves all");
    }

    #[test]
    fn an_impossible_start_gives_no_offset() {
        assert_eq!(entry(u64::MAX).offset(5003, 1), Some(u64::MAX), "no mapping has this offset");
        assert_eq!(entry(u64::MAX).offset(5004, 1), None);
    }
}
