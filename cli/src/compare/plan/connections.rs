//! The numbers of connections that `--connections` measures.

/// The largest number of connections on the command line.
pub(crate) const MAX_CONNECTIONS: usize = 10_000;

/// Returns the numbers of connections to measure: powers of two below `most`, and `most`.
pub(crate) fn counts(most: usize) -> Vec<usize> {
    let powers = std::iter::successors(Some(1_usize), |count| count.checked_mul(2));
    powers.take_while(|count| *count < most).chain([most]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_double_and_end_with_the_largest() {
        assert_eq!(counts(1), [1]);
        assert_eq!(counts(8), [1, 2, 4, 8]);
        assert_eq!(counts(100), [1, 2, 4, 8, 16, 32, 64, 100]);
        assert_eq!(counts(MAX_CONNECTIONS).len(), 15);
    }
}
