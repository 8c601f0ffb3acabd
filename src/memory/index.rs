//! The address look-up: which frozen buffer does an address lie in?

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::lease::Frozen;

/// Frozen buffers by address.
///
/// Every slice that a connection sends is looked up, so an address that can't be inside is turned away by two loads.
/// These are relaxed: whoever holds a slice of a frozen buffer got it from the thread that froze it, by a way that
/// synchronises, and so sees what [`insert`](Self::insert) stored.
#[derive(Debug)]
pub(super) struct Index {
    /// No frozen buffer ever began below.
    low: AtomicUsize,
    /// No frozen buffer ever ended above; 0 as long as there was none.
    high: AtomicUsize,
    count: AtomicUsize,
    buffers: Mutex<BTreeMap<usize, Entry>>,
}

#[derive(Debug)]
struct Entry {
    end: usize,
    frozen: Weak<Frozen>,
}

impl Default for Index {
    fn default() -> Self {
        Self {
            low: AtomicUsize::new(usize::MAX),
            high: AtomicUsize::new(0),
            count: AtomicUsize::new(0),
            buffers: Mutex::default(),
        }
    }
}

impl Index {
    /// Adds a buffer of `length` bytes at `start`.
    pub(super) fn insert(&self, start: usize, length: usize, frozen: &Arc<Frozen>) {
        let mut buffers = self.lock();
        let end = start + length;
        buffers.insert(start, Entry { end, frozen: Arc::downgrade(frozen) });
        self.low.fetch_min(start, Ordering::Relaxed);
        self.high.fetch_max(end, Ordering::Relaxed);
        self.count.store(buffers.len(), Ordering::Relaxed);
    }

    /// Removes the buffer at `start`, before its memory is given back.
    pub(super) fn remove(&self, start: usize) {
        let mut buffers = self.lock();
        buffers.remove(&start);
        self.count.store(buffers.len(), Ordering::Relaxed);
    }

    /// The buffer that all of `length` bytes at `address` lie in, and where in it they begin.
    pub(super) fn find(&self, address: usize, length: usize) -> Option<(Arc<Frozen>, usize)> {
        let last = address.checked_add(length)?;
        if length == 0
            || self.count.load(Ordering::Relaxed) == 0
            || address < self.low.load(Ordering::Relaxed)
            || last > self.high.load(Ordering::Relaxed)
        {
            return None;
        }
        let buffers = self.lock();
        let (&start, entry) = buffers.range(..=address).next_back()?;
        if last > entry.end {
            return None;
        }
        Some((entry.frozen.upgrade()?, address - start))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<usize, Entry>> {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
