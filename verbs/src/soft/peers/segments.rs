//! The segments of a peer that this process has mapped for reading, within bounds.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, Weak};

use crate::soft::shared::mapping::Mapping;
use crate::sync::lock;

/// Most segments of one peer that this process maps.
const MOST: usize = 1024;
/// Most segments of all peers that this process maps. Linux allows 65530 mappings by default.
const MOST_OF_ALL: usize = 16384;
/// Most bytes of one peer that this process maps. Address space has 128 TiB.
const MOST_BYTES: u64 = 256 << 30;

/// Segments of all peers.
static MAPPED: AtomicUsize = AtomicUsize::new(0);

/// The segments of a peer.
#[derive(Debug, Default)]
pub(crate) struct Segments {
    mapped: Mutex<HashMap<u64, Counted>>,
    bytes: AtomicU64,
}

/// A mapping that counts against the limit of all peers.
#[derive(Debug)]
struct Counted(Arc<Mapping>);

impl Drop for Counted {
    fn drop(&mut self) {
        MAPPED.fetch_sub(1, Relaxed);
    }
}

impl Segments {
    /// Maps a segment that the peer offers. Returns whether it is mapped.
    pub(crate) fn map(&self, id: u64, length: u64, fd: &impl AsFd) -> bool {
        let mut mapped = lock(&self.mapped);
        if mapped.contains_key(&id) {
            return true;
        }
        let bytes = self.bytes.load(Relaxed).saturating_add(length);
        if mapped.len() >= MOST || bytes > MOST_BYTES || MAPPED.load(Relaxed) >= MOST_OF_ALL {
            crate::throttled!(
                warn,
                segments = mapped.len(),
                bytes,
                "a peer offers more memory than this process maps: its data goes through the ring"
            );
            return false;
        }
        match Mapping::import(fd, length) {
            Ok(mapping) => {
                MAPPED.fetch_add(1, Relaxed);
                self.bytes.store(bytes, Relaxed);
                mapped.insert(id, Counted(Arc::new(mapping)));
                true
            }
            Err(error) => {
                crate::throttled!(warn, %error, "memory that a peer offers can't be mapped: its data goes through the ring");
                false
            }
        }
    }

    /// Unmaps segment `id`, as soon as no thread copies from it.
    pub(crate) fn unmap(&self, id: u64) {
        let mut mapped = lock(&self.mapped);
        if let Some(gone) = mapped.remove(&id) {
            self.bytes.fetch_sub(gone.0.length(), Relaxed);
        }
    }

    /// Unmaps all segments.
    pub(crate) fn unmap_all(&self) {
        let mut mapped = lock(&self.mapped);
        mapped.clear();
        self.bytes.store(0, Relaxed);
    }

    /// Returns segment `id`, if it is mapped.
    pub(crate) fn find(&self, id: u64) -> Option<Weak<Mapping>> {
        lock(&self.mapped).get(&id).map(|mapping| Arc::downgrade(&mapping.0))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;
    use crate::HostMemory;
    use crate::soft::peers::received::Received;
    use std::os::fd::AsFd;

    /// Returns the descriptor of a page of shared memory. All segments of a test may use one.
    fn page() -> Received {
        let memory = HostMemory::shared(4096, 4096).unwrap();
        Received::new(memory.shared_fd().unwrap().as_fd().try_clone_to_owned().unwrap())
    }

    #[test]
    fn a_peer_has_a_limited_number_of_segments() {
        let (segments, other, fd) = (Segments::default(), Segments::default(), page());
        assert!((0..MOST as u64).all(|id| segments.map(id, 4096, &fd)));
        assert!(!segments.map(MOST as u64, 4096, &fd), "one too many");
        assert!(segments.map(0, 4096, &fd), "mapped already");
        assert!(other.map(MOST as u64, 4096, &fd), "another peer");
        segments.unmap(7);
        assert!(segments.find(7).is_none());
        // A refusal is not permanent.
        assert!(segments.map(MOST as u64, 4096, &fd));
        segments.unmap_all();
        assert!(segments.find(8).is_none());
        assert!((0..MOST as u64).all(|id| segments.map(id, 4096, &fd)));
    }

    #[test]
    fn a_peer_has_a_limited_number_of_bytes() {
        let (segments, fd) = (Segments::default(), page());
        assert!(segments.map(1, 4096, &fd));
        assert!(!segments.map(2, MOST_BYTES, &fd), "more than the peer may have");
        assert!(!segments.map(2, u64::MAX, &fd), "more than any memory has");
        segments.bytes.store(MOST_BYTES - 8191, Relaxed);
        assert!(segments.map(2, 4096, &fd) && !segments.map(3, 4096, &fd));
        segments.unmap(1);
        assert!(segments.map(3, 4096, &fd));
    }

    #[test]
    fn a_number_that_is_not_mapped_changes_no_count() {
        let (segments, fd) = (Segments::default(), page());
        assert!(segments.map(1, 4096, &fd));
        for _ in 0..3 {
            segments.unmap(2);
        }
        assert_eq!(segments.bytes.load(Relaxed), 4096);
        segments.unmap(1);
        segments.unmap(1);
        assert_eq!(segments.bytes.load(Relaxed), 0);
    }
}
