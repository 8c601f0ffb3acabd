//! The ranges of bytes that a transfer copies.

/// One range of bytes to copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyRange {
    /// Offset in the local memory, in bytes.
    pub local: u64,
    /// Offset in the remote memory, in bytes.
    pub remote: u64,
    /// Length in bytes.
    pub length: u64,
}

/// The ranges of a transfer, in the order of copying.
#[derive(Debug)]
pub enum CopyRanges {
    /// One range.
    One(CopyRange),
    /// Several ranges.
    Many(Vec<CopyRange>),
}

/// The progress of a transfer: a range, and an offset in that range.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cursor {
    range: usize,
    offset: u64,
}

impl CopyRanges {
    /// Returns the range at `index`.
    fn get(&self, index: usize) -> Option<&CopyRange> {
        match self {
            Self::One(range) => (index == 0).then_some(range),
            Self::Many(ranges) => ranges.get(index),
        }
    }

    /// Returns the next range of at most `most` bytes, or `None` at the end. Ranges that are adjacent in both memories are
    /// joined.
    pub fn next(&self, cursor: &mut Cursor, most: u64) -> Option<CopyRange> {
        let mut found: Option<CopyRange> = None;
        while let Some(range) = self.get(cursor.range) {
            let left = range.length - cursor.offset;
            if left == 0 {
                *cursor = Cursor { range: cursor.range + 1, offset: 0 };
                continue;
            }
            let (local, remote) = (range.local + cursor.offset, range.remote + cursor.offset);
            let room = match &found {
                None => most,
                Some(it) if it.local + it.length == local && it.remote + it.length == remote => {
                    most - it.length
                }
                Some(_) => 0,
            };
            if room == 0 {
                break;
            }
            let length = left.min(room);
            cursor.offset += length;
            found = Some(match found {
                None => CopyRange { local, remote, length },
                Some(it) => CopyRange { length: it.length + length, ..it },
            });
        }
        found
    }

    /// Returns the local bytes from the first range to the last; an empty range if there are none.
    pub(super) fn local_bytes(&self) -> std::ops::Range<u64> {
        let ranges = match self {
            Self::One(range) => std::slice::from_ref(range),
            Self::Many(ranges) => ranges,
        };
        let ranges = ranges.iter().filter(|range| range.length > 0);
        let start = ranges.clone().map(|range| range.local).min().unwrap_or(0);
        start..ranges.map(|range| range.local + range.length).max().unwrap_or(start)
    }

    /// Returns whether `cursor` is at the end.
    pub fn is_over(&self, cursor: &Cursor) -> bool {
        let mut rest = *cursor;
        self.next(&mut rest, 1).is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(ranges: &CopyRanges, most: u64) -> Vec<(u64, u64, u64)> {
        let mut cursor = Cursor::default();
        let next = || ranges.next(&mut cursor, most).map(|it| (it.local, it.remote, it.length));
        std::iter::from_fn(next).collect()
    }

    #[test]
    fn long_ranges_are_cut_and_neighbours_are_joined() {
        let one = CopyRanges::One(CopyRange { local: 5, remote: 100, length: 10 });
        assert_eq!(all(&one, 4), [(5, 100, 4), (9, 104, 4), (13, 108, 2)]);
        let range = |local, remote, length| CopyRange { local, remote, length };
        let many = CopyRanges::Many(vec![
            range(0, 50, 3),
            range(3, 53, 3),
            range(6, 60, 0),
            range(6, 70, 2),
            range(20, 72, 1),
        ]);
        assert_eq!(all(&many, 100), [(0, 50, 6), (6, 70, 2), (20, 72, 1)]);
        assert_eq!(all(&many, 4), [(0, 50, 4), (4, 54, 2), (6, 70, 2), (20, 72, 1)]);
        assert_eq!(all(&CopyRanges::Many(Vec::new()), 4), []);
        assert_eq!(all(&CopyRanges::One(range(1, 1, 0)), 4), []);
        assert_eq!(one.local_bytes(), 5..15);
        assert_eq!(many.local_bytes(), 0..21);
        let out_of_order = CopyRanges::Many(vec![range(30, 0, 0), range(20, 0, 2), range(7, 9, 1)]);
        assert_eq!(out_of_order.local_bytes(), 7..22);
        assert!(CopyRanges::Many(Vec::new()).local_bytes().is_empty());
    }
}
