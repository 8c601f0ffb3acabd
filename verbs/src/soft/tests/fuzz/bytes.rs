//! The input of the fuzzer, as a source of numbers.

/// Bytes that are taken one after another. After the last byte there are zeros.
#[derive(Debug)]
pub(super) struct Bytes<'a>(pub(super) &'a [u8]);

impl Bytes<'_> {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    /// Returns a number below `limit`, which is at most 256.
    pub(super) fn below(&mut self, limit: usize) -> usize {
        usize::from(self.byte()) % limit
    }

    fn short(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    /// Returns an index below `limit`, which is at most 65536.
    pub(super) fn index(&mut self, limit: usize) -> usize {
        usize::from(self.short()) % limit
    }

    /// Returns a number that is often small, close to a power of two, or of the form of a tag.
    pub(super) fn number(&mut self) -> u64 {
        match self.below(8) {
            0 => 0,
            1 => u64::from(self.byte()),
            2 => u64::from(self.byte()) * 64,
            3 => (1u64 << self.below(64)).wrapping_add(u64::from(self.byte())).wrapping_sub(128),
            4 => u64::MAX - u64::from(self.byte()),
            5 => {
                let [sequence, kind, flags, lines] = [(); 4].map(|()| u64::from(self.byte()));
                (sequence << 32) | ((kind % 8) << 24) | ((flags % 32) << 16) | lines
            }
            6 => u64::from(self.short()),
            _ => u64::from_le_bytes([(); 8].map(|()| self.byte())),
        }
    }
}
