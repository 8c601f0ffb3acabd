//! The free ranges of one slab.

use std::collections::BTreeMap;

/// Lengths of the free ranges, by offset. Neighbours are always joined.
#[derive(Debug)]
pub(crate) struct FreeRanges {
    free: BTreeMap<usize, usize>,
}

impl FreeRanges {
    /// Makes the free ranges of a slab of `length` bytes, all of them free.
    pub(crate) fn new(length: usize) -> Self {
        Self { free: BTreeMap::from([(0, length)]) }
    }

    /// Cuts `length` bytes from the first range that is long enough, and returns their offset.
    pub(crate) fn take(&mut self, length: usize) -> Option<usize> {
        let (&offset, &available) = self.free.iter().find(|&(_, &available)| available >= length)?;
        self.free.remove(&offset);
        if available > length {
            self.free.insert(offset + length, available - length);
        }
        Some(offset)
    }

    /// Returns a range that [`take`](Self::take) has cut.
    pub(crate) fn give(&mut self, offset: usize, length: usize) {
        let (mut start, mut end) = (offset, offset + length);
        if let Some((&before, &bytes)) = self.free.range(..offset).next_back() {
            debug_assert!(before + bytes <= offset, "given back twice");
            if before + bytes == offset {
                start = before;
            }
        }
        if let Some(bytes) = self.free.remove(&end) {
            end += bytes;
        }
        self.free.insert(start, end - start);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_the_first_range_that_fits() {
        let mut ranges = FreeRanges::new(100);
        assert_eq!(ranges.take(60), Some(0));
        assert_eq!(ranges.take(60), None);
        assert_eq!(ranges.take(40), Some(60));
        assert_eq!(ranges.take(1), None);
    }

    #[test]
    fn joins_neighbours_on_either_side() {
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            let mut ranges = FreeRanges::new(90);
            let offsets = [(); 3].map(|()| ranges.take(30).expect("room for three"));
            for which in order {
                ranges.give(offsets[which], 30);
            }
            assert_eq!(ranges.free, BTreeMap::from([(0, 90)]), "given back in order {order:?}");
        }
    }
}
