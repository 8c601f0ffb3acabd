//! Operands whose sums depend on the order of additions, and fingerprints of results.

/// Returns the element of a rank: of many magnitudes, so that another order of additions gives another sum.
fn element(rank: usize, index: usize) -> f32 {
    let mixed = (index as u32 + 1).wrapping_mul(2_654_435_761) ^ (rank as u32 + 1).wrapping_mul(0x9e37_79b1);
    let mixed = (mixed ^ (mixed >> 15)).wrapping_mul(0x85eb_ca6b);
    let magnitude = f32::from(1_u16 << (mixed >> 28));
    ((mixed & 0xffff) as f32 - 32_000.0) / 7.0 / magnitude
}

/// Writes the operand of a rank.
pub(crate) fn fill(rank: usize, operand: &mut [f32]) {
    for (index, value) in operand.iter_mut().enumerate() {
        *value = element(rank, index);
    }
}

/// Returns how many elements are no sum of the operands of so many ranks. The order of additions may change a sum by rounding.
pub(crate) fn wrong(size: usize, result: &[f32]) -> u64 {
    let is_wrong = |(index, value): (usize, &f32)| {
        let terms = (0..size).map(|rank| f64::from(element(rank, index)));
        let (sum, magnitude) = terms.fold((0.0, 0.0), |(sum, all), term| (sum + term, all + term.abs()));
        let close = (f64::from(*value) - sum).abs() <= magnitude * 1e-5;
        !close
    };
    result.iter().enumerate().filter(|each| is_wrong(*each)).count() as u64
}

/// Returns a fingerprint of all bits of a result (FNV-1a over words).
pub(crate) fn fingerprint(result: &[f32]) -> u64 {
    let step = |hash: u64, value: &f32| (hash ^ u64::from(value.to_bits())).wrapping_mul(0x0100_0000_01b3);
    result.iter().fold(0xcbf2_9ce4_8422_2325, step)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(ranks: &[usize], length: usize) -> Vec<f32> {
        let mut all = vec![0.0; length];
        for rank in ranks {
            let mut operand = vec![0.0; length];
            fill(*rank, &mut operand);
            all.iter_mut().zip(operand).for_each(|(sum, value)| *sum += value);
        }
        all
    }

    #[test]
    fn another_order_of_additions_has_another_fingerprint_and_is_not_wrong() {
        let (one, other) = (sum(&[0, 1, 2], 500), sum(&[2, 1, 0], 500));
        assert_ne!(fingerprint(&one), fingerprint(&other));
        assert_eq!((wrong(3, &one), wrong(3, &other)), (0, 0));
    }

    #[test]
    fn sums_of_other_ranks_are_wrong() {
        assert!(wrong(3, &sum(&[0, 1], 500)) > 400);
        assert!(wrong(3, &sum(&[0, 1, 3], 500)) > 400);
    }
}
