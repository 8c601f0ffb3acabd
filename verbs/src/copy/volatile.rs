//! Copies by volatile accesses, for processors without a copy in assembly, and for interpreters of Rust.

/// Copies `length` bytes: words of 8 bytes where both ranges are aligned alike, otherwise single bytes.
///
/// # Safety
/// Those of [`copy_bytes`](super::copy_bytes).
pub(super) unsafe fn copy_bytes(from: *const u8, to: *mut u8, length: usize) {
    const WORD: usize = size_of::<u64>();
    let alike = (from as usize).wrapping_sub(to as usize).is_multiple_of(WORD);
    let head = if alike { (to as usize).wrapping_neg() % WORD } else { length }.min(length);
    let words = (length - head) / WORD;
    let tail = head + words * WORD;
    // SAFETY:
    // - all accesses lie within the first `length` bytes of `from` or `to`, which the caller promises; and
    // - words are aligned in both ranges, because both have the same distance to the next multiple of 8.
    unsafe {
        for at in (0..head).chain(tail..length) {
            to.add(at).write_volatile(from.add(at).read_volatile());
        }
        for word in 0..words {
            let at = head + word * WORD;
            to.add(at).cast::<u64>().write_volatile(from.add(at).cast::<u64>().read_volatile());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::at_every_alignment;
    use super::*;

    #[test]
    fn every_alignment() {
        at_every_alignment(0, copy_bytes);
    }
}
