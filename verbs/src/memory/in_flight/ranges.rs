//! Which bytes a transfer moves.

/// One stretch of bytes: offsets in the local memory and in the remote one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyRange {
    pub local: u64,
    pub remote: u64,
    pub length: u64,
}

/// The stretches of a transfer, in the order in which they are moved.
#[derive(Debug)]
pub enum CopyRanges {
    One(CopyRange),
    Many(Vec<CopyRange>),
}

/// How far a transfer is.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cursor {
    block: usize,
    offset: u64,
}

impl CopyRanges {
    fn get(&self, index: usize) -> Option<&CopyRange> {
        match self {
            Self::One(block) => (index == 0).then_some(block),
            Self::Many(blocks) => blocks.get(index),
        }
    }

    /// The next stretch of at most `most` bytes; blocks that follow one another at both ends are taken as one. `None` at
    /// the end.
    pub fn next(&self, cursor: &mut Cursor, most: u64) -> Option<CopyRange> {
        let mut found: Option<CopyRange> = None;
        while let Some(block) = self.get(cursor.block) {
            let left = block.length - cursor.offset;
            if left == 0 {
                *cursor = Cursor { block: cursor.block + 1, offset: 0 };
                continue;
            }
            let (local, remote) = (block.local + cursor.offset, block.remote + cursor.offset);
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

    /// Whether nothing is left.
    pub fn is_over(&self, cursor: &Cursor) -> bool {
        let mut rest = *cursor;
        self.next(&mut rest, 1).is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(blocks: &CopyRanges, most: u64) -> Vec<(u64, u64, u64)> {
        let mut cursor = Cursor::default();
        let next = || blocks.next(&mut cursor, most).map(|it| (it.local, it.remote, it.length));
        std::iter::from_fn(next).collect()
    }

    #[test]
    fn long_ones_are_cut_and_neighbours_are_joined() {
        let one = CopyRanges::One(CopyRange { local: 5, remote: 100, length: 10 });
        assert_eq!(all(&one, 4), [(5, 100, 4), (9, 104, 4), (13, 108, 2)]);
        let block = |local, remote, length| CopyRange { local, remote, length };
        let many = CopyRanges::Many(vec![
            block(0, 50, 3),
            block(3, 53, 3),
            block(6, 60, 0),
            block(6, 70, 2),
            block(20, 72, 1),
        ]);
        assert_eq!(all(&many, 100), [(0, 50, 6), (6, 70, 2), (20, 72, 1)]);
        assert_eq!(all(&many, 4), [(0, 50, 4), (4, 54, 2), (6, 70, 2), (20, 72, 1)]);
        assert_eq!(all(&CopyRanges::Many(Vec::new()), 4), []);
        assert_eq!(all(&CopyRanges::One(block(1, 1, 0)), 4), []);
    }
}
