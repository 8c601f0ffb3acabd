//! The region table of a device, in memory that peers of this user can read and only the owner can write. A peer looks up a key
//! here before it reads the memory, and once more afterwards (`queue_pair/pulls`). A key's index in the table is its lower 18 bits;
//! the other bits are random.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::AtomicU64;

pub(crate) use super::entry::Entry;
use super::entry::{self, ENTRY};
use super::mapping::Mapping;
use super::platform::{Native, Shipping};

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
        entry::holds::<Native>(self.entry(key), key)
    }

    /// Makes `key` valid. Called by the owner.
    pub(crate) fn insert(&self, key: u32, entry: &Entry) {
        entry.insert::<Native, Shipping>(self.entry(key), key);
    }

    /// Makes `key` invalid. A thread of a peer that saw the key as valid may still be reading the memory. Called by the owner.
    pub(crate) fn remove(&self, key: u32) {
        entry::remove::<Native, Shipping>(self.entry(key));
    }
}
