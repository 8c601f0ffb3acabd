//! The address look-up: which buffer does an address lie in?

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Buffers by address, with a value for each.
///
/// Every slice that a connection sends is looked up, so an address that can't be inside is turned away by three loads,
/// and by one as long as there are no buffers. These are relaxed: whoever holds a slice of a buffer got it from the
/// thread that made it, by a way that synchronises, and so sees what [`insert`](Self::insert) stored.
#[derive(Debug)]
pub(crate) struct AddressIndex<V> {
    /// No buffer has begun below since there was none.
    low: AtomicUsize,
    /// No buffer has ended above since there was none; 0 then.
    high: AtomicUsize,
    count: AtomicUsize,
    buffers: Mutex<BTreeMap<usize, IndexedBuffer<V>>>,
}

#[derive(Debug)]
struct IndexedBuffer<V> {
    end: usize,
    value: V,
}

impl<V> AddressIndex<V> {
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

    /// Removes the buffer at `start`, before its memory is given back.
    pub(crate) fn remove(&self, start: usize) -> Option<V> {
        self.remove_from(&mut self.lock(), start)
    }

    /// What `look` makes of the buffer that all of `length` bytes at `address` lie in, given its start and its value.
    pub(crate) fn find<R>(
        &self,
        address: usize,
        length: usize,
        look: impl FnOnce(usize, &V) -> Option<R>,
    ) -> Option<R> {
        let last = self.may_hold(address, length)?;
        let buffers = self.lock();
        let (&start, entry) = buffers.range(..=address).next_back()?;
        if last > entry.end { None } else { look(start, &entry.value) }
    }

    /// Removes the buffer that all of `length` bytes at `address` lie in.
    pub(crate) fn take(&self, address: usize, length: usize) -> Option<V> {
        let last = self.may_hold(address, length)?;
        let mut buffers = self.lock();
        let (&start, entry) = buffers.range(..=address).next_back()?;
        if last > entry.end { None } else { self.remove_from(&mut buffers, start) }
    }

    /// Number of buffers.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// The end of `length` bytes at `address`, if a buffer may hold them all.
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
            // Whose buffer comes after this sees its own bounds, or those of later ones: never these.
            self.low.store(usize::MAX, Ordering::Relaxed);
            self.high.store(0, Ordering::Relaxed);
        }
        Some(entry.value)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<usize, IndexedBuffer<V>>> {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_start_anew_when_it_is_empty() {
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
