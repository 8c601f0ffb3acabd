//! A buffer for encoding that copies small parts and keeps large parts by reference.

use bytes::buf::UninitSlice;
use bytes::{Buf, BufMut, Bytes};

/// A part of an encoded message that was not copied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LargePart {
    /// Number of copied bytes before this part.
    pub at: usize,
    /// The bytes of the part.
    pub bytes: Bytes,
}

/// A buffer that passes all writes to another buffer, except for each contiguous [`Buf`] of `threshold` bytes
/// or more. Such a `Buf` is kept as a [`LargePart`]. Keeping a `Bytes` costs a reference count. Keeping any
/// other `Buf` costs one copy, which is the cost of a write, too.
#[derive(Debug)]
pub struct GatherBuf<'a, B> {
    buffer: &'a mut B,
    threshold: usize,
    copied: usize,
    parts: Vec<LargePart>,
}

impl<'a, B: BufMut> GatherBuf<'a, B> {
    /// Makes a buffer that writes to `buffer` and keeps parts of `threshold` bytes or more.
    pub fn new(buffer: &'a mut B, threshold: usize) -> Self {
        Self { buffer, threshold, copied: 0, parts: Vec::new() }
    }

    /// Returns the number of copied bytes, and the large parts in order.
    pub fn finish(self) -> (usize, Vec<LargePart>) {
        (self.copied, self.parts)
    }
}

// SAFETY:
// - `remaining_mut`, `chunk_mut` and `advance_mut` are those of `buffer`, which upholds the contract.
// - The other methods write only through `buffer`, or write nothing.
unsafe impl<B: BufMut> BufMut for GatherBuf<'_, B> {
    fn remaining_mut(&self) -> usize {
        self.buffer.remaining_mut()
    }

    unsafe fn advance_mut(&mut self, count: usize) {
        // SAFETY: the caller's promise about this buffer holds for `buffer`, because the chunk is that of
        // `buffer`.
        unsafe { self.buffer.advance_mut(count) };
        self.copied += count;
    }

    fn chunk_mut(&mut self) -> &mut UninitSlice {
        self.buffer.chunk_mut()
    }

    fn put<T: Buf>(&mut self, mut source: T) {
        let length = source.remaining();
        if length >= self.threshold && source.chunk().len() == length {
            self.parts.push(LargePart { at: self.copied, bytes: source.copy_to_bytes(length) });
        } else {
            self.buffer.put(source);
            self.copied += length;
        }
    }

    fn put_slice(&mut self, source: &[u8]) {
        self.buffer.put_slice(source);
        self.copied += source.len();
    }

    fn put_bytes(&mut self, value: u8, count: usize) {
        self.buffer.put_bytes(value, count);
        self.copied += count;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use bytes::BytesMut;

    use super::*;

    #[test]
    fn large_bytes_are_kept_by_reference_and_the_rest_is_copied() {
        let large = Bytes::from(vec![7; 100]);
        let mut buffer = BytesMut::new();
        let mut gather = GatherBuf::new(&mut buffer, 100);
        gather.put_u32(1);
        gather.put(large.clone());
        gather.put(large.slice(..99));
        gather.put_bytes(9, 2);
        gather.put_slice(&[1; 200]);
        gather.put(large.slice(..).chain(&b"x"[..]));
        gather.put(large.clone());
        let (copied, parts) = gather.finish();
        assert_eq!(copied, buffer.len());
        assert_eq!(copied, 4 + 99 + 2 + 200 + 101);
        assert_eq!(parts.iter().map(|extent| extent.at).collect::<Vec<_>>(), [4, copied]);
        assert!(
            parts.iter().all(|extent| extent.bytes.as_ptr() == large.as_ptr() && extent.bytes.len() == 100)
        );
    }

    #[test]
    fn writing_by_chunk_is_counted() {
        let mut buffer = BytesMut::with_capacity(64);
        let mut gather = GatherBuf::new(&mut buffer, 10);
        gather.chunk_mut()[..3].copy_from_slice(b"abc");
        // SAFETY: the three bytes were written just now.
        unsafe { gather.advance_mut(3) };
        assert_eq!(gather.finish(), (3, Vec::new()));
        assert_eq!(&buffer[..], b"abc");
    }
}
