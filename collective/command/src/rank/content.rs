//! The content of operands, and the check of results.

use tonic_rdma_collective::{Number, Reduction};

use crate::options;
use crate::options::Type;

/// How many different beginnings of the pattern there are.
const SHIFTS: usize = 128;
/// Results are checked in blocks of this many elements.
const BLOCK: usize = 4096;

/// A type of elements.
pub(crate) trait Value: Number + PartialEq {
    const TYPE: Type;

    /// Converts a whole number that the type holds exactly.
    fn of(number: u32) -> Self;
}

macro_rules! values {
    ($($type:ty: $name:ident, $of:expr;)+) => {$(
        impl Value for $type {
            const TYPE: Type = Type::$name;

            fn of(number: u32) -> Self {
                $of(number)
            }
        }
    )+};
}

values! {
    f32: F32, |number| number as f32;
    f64: F64, f64::from;
    half::f16: F16, |number| half::f16::from_f32(number as f32);
    half::bf16: Bf16, |number| half::bf16::from_f32(number as f32);
    i8: I8, |number| number as i8;
    i16: I16, |number| number as i16;
    i32: I32, |number| number as i32;
    i64: I64, i64::from;
    u8: U8, |number| number as u8;
    u16: U16, |number| number as u16;
    u32: U32, |number| number;
    u64: U64, u64::from;
}

/// The pattern from which each rank takes its content: another part for each rank and for each iteration. All
/// values are whole numbers so small that each result is exact.
#[derive(Debug)]
pub(crate) struct Pattern<T> {
    numbers: Vec<u16>,
    /// The numbers; for a mean, each of them times the number of ranks, so that the results are whole.
    elements: Vec<T>,
    ranks: usize,
    reduction: Reduction,
}

impl<T: Value> Pattern<T> {
    /// Makes the pattern for operands of this many elements.
    pub(crate) fn new(elements: usize, reduction: Reduction, ranks: usize) -> Self {
        // At most 1024.
        let values = options::values(T::TYPE, reduction, ranks).max(1) as u32;
        let numbers: Vec<u16> =
            (0..elements + SHIFTS).map(|index| (scatter(index) % values) as u16).collect();
        let factor = if reduction == Reduction::Mean { ranks as u32 } else { 1 };
        let elements = numbers.iter().map(|number| T::of(u32::from(*number) * factor)).collect();
        Self { numbers, elements, ranks, reduction }
    }

    /// Writes the content of `rank` in an iteration.
    pub(crate) fn fill(&self, rank: usize, iteration: u64, operand: &mut [T]) {
        operand.copy_from_slice(&self.elements[shift(rank, iteration)..][..operand.len()]);
    }

    /// Returns how many elements of a result are wrong.
    pub(crate) fn wrong(&self, iteration: u64, result: &[T]) -> u64 {
        match self.reduction {
            Reduction::Min => self.differing(iteration, result, u32::MAX, u32::min),
            Reduction::Max => self.differing(iteration, result, 0, u32::max),
            _ => self.differing(iteration, result, 0, |one, other| one + other),
        }
    }

    /// Returns how many elements differ from what `combine` makes of the numbers of all ranks.
    fn differing(&self, iteration: u64, result: &[T], first: u32, combine: impl Fn(u32, u32) -> u32) -> u64 {
        let mut expected = [0; BLOCK];
        let mut wrong = 0;
        for (index, block) in result.chunks(BLOCK).enumerate() {
            let expected = &mut expected[..block.len()];
            expected.fill(first);
            for rank in 0..self.ranks {
                let numbers = &self.numbers[shift(rank, iteration) + index * BLOCK..][..block.len()];
                for (expected, number) in expected.iter_mut().zip(numbers) {
                    *expected = combine(*expected, u32::from(*number));
                }
            }
            let differs = |(found, expected): &(&T, &u32)| **found != T::of(**expected);
            wrong += block.iter().zip(expected.iter()).filter(differs).count() as u64;
        }
        wrong
    }
}

/// Returns a number that looks random.
fn scatter(index: usize) -> u32 {
    ((index as u32).wrapping_mul(2_654_435_761) >> 7) & 1023
}

fn shift(rank: usize, iteration: u64) -> usize {
    (rank * 17 + (iteration % SHIFTS as u64) as usize * 29) % SHIFTS
}

#[cfg(test)]
mod tests {
    use super::*;

    const ELEMENTS: usize = BLOCK + 100;

    /// Reduces element by element in `u64`, or in `f64` for a mean.
    fn reduced<T: Value + Into<f64>>(contents: &[Vec<T>], reduction: Reduction) -> Vec<f64> {
        let column = |index: usize| contents.iter().map(move |content| content[index].into());
        (0..contents[0].len())
            .map(|index| match reduction {
                Reduction::Sum => column(index).sum(),
                Reduction::Mean => column(index).sum::<f64>() / contents.len() as f64,
                Reduction::Min => column(index).fold(f64::MAX, f64::min),
                _ => column(index).fold(f64::MIN, f64::max),
            })
            .collect()
    }

    fn check<T: Value + Into<f64>>(reductions: &[Reduction]) {
        for reduction in reductions {
            for ranks in [1, 2, 5] {
                let pattern = Pattern::<T>::new(ELEMENTS, *reduction, ranks);
                for iteration in [0, 1, 127, 128, 1_000_003] {
                    let contents: Vec<Vec<T>> = (0..ranks)
                        .map(|rank| {
                            let mut content = vec![T::of(0); ELEMENTS];
                            pattern.fill(rank, iteration, &mut content);
                            content
                        })
                        .collect();
                    let mut result: Vec<T> =
                        reduced(&contents, *reduction).into_iter().map(|value| T::of(value as u32)).collect();
                    assert_eq!(pattern.wrong(iteration, &result), 0, "{:?} {reduction:?} {ranks}", T::TYPE);
                    // The result of the next iteration is another one.
                    assert!(pattern.wrong(iteration + 1, &result) > ELEMENTS as u64 / 8);
                    result[ELEMENTS - 1] = T::of(if result[ELEMENTS - 1] == T::of(1) { 2 } else { 1 });
                    assert_eq!(pattern.wrong(iteration, &result), 1);
                }
            }
        }
    }

    #[test]
    fn right_results_are_right_and_a_wrong_element_is_found() {
        check::<f32>(&[Reduction::Sum, Reduction::Mean, Reduction::Min, Reduction::Max]);
        check::<half::bf16>(&[Reduction::Sum, Reduction::Mean]);
        check::<half::f16>(&[Reduction::Sum, Reduction::Max]);
        check::<i8>(&[Reduction::Sum]);
        check::<u16>(&[Reduction::Min]);
    }

    #[test]
    fn ranks_have_different_contents() {
        let pattern = Pattern::<f32>::new(64, Reduction::Sum, 8);
        let mut contents = vec![vec![0.0; 64]; 8];
        for (rank, content) in contents.iter_mut().enumerate() {
            pattern.fill(rank, 3, content);
        }
        for (rank, content) in contents.iter().enumerate() {
            assert!(contents[..rank].iter().all(|other| other != content), "{rank}");
        }
    }
}
