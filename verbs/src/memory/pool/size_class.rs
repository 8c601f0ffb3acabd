//! Size classes: the powers of two from 256 bytes on, and the size halfway between each two of them.

/// Size of class 0, in bytes.
const SMALLEST: usize = 256;

/// Returns the smallest class that holds `length` bytes.
pub(crate) fn index(length: usize) -> usize {
    if length <= SMALLEST {
        return 0;
    }
    let power = length.next_power_of_two();
    let doublings = (power.trailing_zeros() - SMALLEST.trailing_zeros()) as usize;
    if length <= power / 4 * 3 { 2 * doublings - 1 } else { 2 * doublings }
}

/// Returns the bytes of a piece of class `index`: a multiple of 128.
pub(crate) fn size(index: usize) -> usize {
    let power = SMALLEST << (index / 2);
    if index.is_multiple_of(2) { power } else { power / 2 * 3 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_go_up_by_at_most_a_half() {
        let sizes: Vec<_> = (0..7).map(size).collect();
        assert_eq!(sizes, [256, 384, 512, 768, 1024, 1536, 2048]);
    }

    #[test]
    fn a_length_gets_the_smallest_class_that_holds_it() {
        for length in 0..70_000 {
            let class = index(length);
            assert!(size(class) >= length, "{length} in class {class}");
            assert!(class == 0 || size(class - 1) < length, "{length} in class {class}");
        }
    }
}
