//! The address index, which finds the buffer that an address lies in. Pools look up the slices of a `Bytes`
//! here.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

use crate::panics::lock;

/// Buffers by address, with a value for each buffer.
///
/// A connection looks up every slice that it sends, so a failed lookup must be cheap. One load is enough
/// while there are no buffers, and three loads reject an address below or above all buffers. Other lookups
/// take a lock. The loads are relaxed: a thread that holds a slice of a buffer got it from the thread that
/// made the buffer, through some synchronisation, and so sees the values that [`insert`](Self::insert)
/// stored.
#[derive(Debug)]
pub(crate) struct AddressIndex<V> {
    /// The lowest start of a buffer since the index was last empty.
    low: AtomicUsize,
    /// The highest end of a buffer since the index was last empty; 0 while it is empty.
    high: AtomicUsize,
    /// Number of buffers.
    count: AtomicUsize,
    buffers: Mutex<BTreeMap<usize, IndexedBuffer<V>>>,
}

#[derive(Debug)]
struct IndexedBuffer<V> {
    end: usize,
    value: V,
}

impl<V> AddressIndex<V> {
    /// Makes an empty index.
    pub(crate) const fn new() -> Self {
        Self {
            low: AtomicUsize::new(usize::MAX),
            high: AtomicUsize::new(0),
            count: AtomicUsize::new(0),
            buffers: Mutex::new(BTreeMap::new()),
        }
    }

    /// Adds a buffer of `length` bytes at `start`.
    pub(crate) fn insert(&self, start: usize, length: usize, value: V) {
        let mut buffers = self.lock();
        let end = start + length;
        buffers.insert(start, IndexedBuffer { end, value });
        self.low.fetch_min(start, Ordering::Relaxed);
        self.high.fetch_max(end, Ordering::Relaxed);
        self.count.store(buffers.len(), Ordering::Relaxed);
    }

    /// Removes the buffer at `start`, and returns its value. Callers do this before they free the memory.
    pub(crate) fn remove(&self, start: usize) -> Option<V> {
        self.remove_from(&mut self.lock(), start)
    }

    /// Finds the buffer that holds all `length` bytes at `address`, and returns the result of `then`, which
    /// gets the start and the value of the buffer.
    pub(crate) fn find<R>(
        &self,
        address: usize,
        length: usize,
        then: impl FnOnce(usize, &V) -> Option<R>,
    ) -> Option<R> {
        let last = self.may_hold(address, length)?;
        let buffers = self.lock();
        let (&start, entry) = buffers.range(..=address).next_back()?;
        if last > entry.end { None } else { then(start, &entry.value) }
    }

    /// Removes the buffer that holds all `length` bytes at `address`, and returns its value.
    pub(crate) fn take(&self, address: usize, length: usize) -> Option<V> {
        let last = self.may_hold(address, length)?;
        let mut buffers = self.lock();
        let (&start, entry) = buffers.range(..=address).next_back()?;
        if last > entry.end { None } else { self.remove_from(&mut buffers, start) }
    }

    /// Returns the number of buffers.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// Returns the end of `length` bytes at `address`, if a buffer may hold all of them.
    #[inline]
    fn may_hold(&self, address: usize, length: usize) -> Option<usize> {
        let last = address.checked_add(length)?;
        let may = length > 0
            && self.len() > 0
            && address >= self.low.load(Ordering::Relaxed)
            && last <= self.high.load(Ordering::Relaxed);
        may.then_some(last)
    }

    fn remove_from(&self, buffers: &mut BTreeMap<usize, IndexedBuffer<V>>, start: usize) -> Option<V> {
        let entry = buffers.remove(&start)?;
        self.count.store(buffers.len(), Ordering::Relaxed);
        if buffers.is_empty() {
            // A thread that inserts a buffer later sees the bounds of its own buffer or of a later one, and
            // never the values stored here.
            self.low.store(usize::MAX, Ordering::Relaxed);
            self.high.store(0, Ordering::Relaxed);
        }
        Some(entry.value)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<usize, IndexedBuffer<V>>> {
        lock(&self.buffers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bounds_are_reset_when_the_index_becomes_empty() {
        let index = AddressIndex::new();
        let find = |address, length| index.find(address, length, |start, &value| Some((start, value)));
        index.insert(1000, 100, 'a');
        index.insert(2000, 100, 'b');
        assert_eq!(
            (find(1050, 50), find(2000, 101), index.may_hold(1500, 1)),
            (Some((1000, 'a')), None, Some(1501))
        );
        assert_eq!(
            (index.take(1050, 51), index.take(1050, 50), index.take(1050, 50)),
            (None, Some('a'), None)
        );
        assert_eq!(find(2099, 1), Some((2000, 'b')));
        assert_eq!((index.remove(2001), index.remove(2000), index.len()), (None, Some('b'), 0));
        index.insert(5000, 100, 'c');
        assert_eq!((index.may_hold(1000, 1), index.may_hold(5000, 101)), (None, None));
        assert_eq!((find(5000, 100), find(5000, 0), find(usize::MAX, 2)), (Some((5000, 'c')), None, None));
    }
}
