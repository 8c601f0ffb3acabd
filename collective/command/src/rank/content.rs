//! The content of operands, and the check of results.

use tonic_rdma_collective::Number;

use crate::choices::{Reduction, Type};
use crate::options;

/// How many different beginnings of the pattern there are.
const SHIFTS: usize = 128;
/// Results are checked in blocks of this many elements.
const BLOCK: usize = 4096;

/// A type whose operations the check repeats.
pub(crate) trait Value: Number + PartialEq {
    const TYPE: Type;

    /// Converts a whole number that the type holds exactly.
    fn of(number: u64) -> Self;
    fn plus(self, other: Self) -> Self;
    fn least(self, other: Self) -> Self;
    fn most(self, other: Self) -> Self;
}

macro_rules! values {
    ($($type:ty: $name:ident, $of:expr, $plus:expr;)+) => {$(
        impl Value for $type {
            const TYPE: Type = Type::$name;

            fn of(number: u64) -> Self {
                $of(number)
            }

            fn plus(self, other: Self) -> Self {
                $plus(self, other)
            }

            // The content has no NaN and no negative zero.
            fn least(self, other: Self) -> Self {
                if other < self { other } else { self }
            }

            fn most(self, other: Self) -> Self {
                if other > self { other } else { self }
            }
        }
    )+};
}

values! {
    f32: F32, |number| number as f32, |one: f32, other| one + other;
    f64: F64, |number| number as f64, |one: f64, other| one + other;
    half::f16: F16, |number| half::f16::from_f32(number as f32), |one: half::f16, other| one + other;
    half::bf16: Bf16, |number| half::bf16::from_f32(number as f32), |one: half::bf16, other| one + other;
    i8: I8, |number| number as i8, i8::wrapping_add;
    i16: I16, |number| number as i16, i16::wrapping_add;
    i32: I32, |number| number as i32, i32::wrapping_add;
    i64: I64, |number| number as i64, i64::wrapping_add;
    u8: U8, |number| number as u8, u8::wrapping_add;
    u16: U16, |number| number as u16, u16::wrapping_add;
    u32: U32, |number| number as u32, u32::wrapping_add;
    u64: U64, |number| number, u64::wrapping_add;
}

/// The pattern from which each rank takes its content: another part for each rank and for each iteration. All values are whole
/// numbers so small that each result is exact.
#[derive(Debug)]
pub(crate) struct Pattern<T> {
    elements: Vec<T>,
    /// For a mean, the content is a multiple of the number of ranks, and the results are sums of this content undivided.
    undivided: Option<Vec<T>>,
    ranks: usize,
    reduction: Reduction,
}

impl<T: Value> Pattern<T> {
    /// Makes the pattern for operands of this many elements.
    pub(crate) fn new(elements: usize, reduction: Reduction, ranks: usize) -> Self {
        let values = options::values(T::TYPE, reduction, ranks).max(1);
        let scaled = |factor: u64| {
            let value = move |index| T::of(u64::from(scatter(index)) % values * factor);
            (0..elements + SHIFTS).map(value).collect::<Vec<T>>()
        };
        match reduction {
            Reduction::Mean => {
                Self { elements: scaled(ranks as u64), undivided: Some(scaled(1)), ranks, reduction }
            }
            _ => Self { elements: scaled(1), undivided: None, ranks, reduction },
        }
    }

    /// Writes the content of `rank` in an iteration.
    pub(crate) fn fill(&self, rank: usize, iteration: u64, operand: &mut [T]) {
        operand.copy_from_slice(&self.elements[shift(rank, iteration)..][..operand.len()]);
    }

    /// Returns how many elements of a result are wrong.
    pub(crate) fn wrong(&self, iteration: u64, result: &[T]) -> u64 {
        let source = self.undivided.as_ref().unwrap_or(&self.elements);
        let combine = match self.reduction {
            Reduction::Sum | Reduction::Mean => combine::<T, Plus>,
            Reduction::Min => combine::<T, Least>,
            Reduction::Max => combine::<T, Most>,
        };
        let mut expected = [T::of(0); BLOCK];
        let mut wrong = 0;
        for (index, block) in result.chunks(BLOCK).enumerate() {
            let expected = &mut expected[..block.len()];
            for rank in 0..self.ranks {
                let content = &source[shift(rank, iteration) + index * BLOCK..][..block.len()];
                match rank {
                    0 => expected.copy_from_slice(content),
                    _ => combine(expected, content),
                }
            }
            wrong += block.iter().zip(expected.iter()).filter(|(found, expected)| found != expected).count()
                as u64;
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

/// An operation on two elements. These types make the compiler build one loop for each, which it can vectorise.
trait Combine<T> {
    fn of(one: T, other: T) -> T;
}

struct Plus;
struct Least;
struct Most;

impl<T: Value> Combine<T> for Plus {
    fn of(one: T, other: T) -> T {
        one.plus(other)
    }
}

impl<T: Value> Combine<T> for Least {
    fn of(one: T, other: T) -> T {
        one.least(other)
    }
}

impl<T: Value> Combine<T> for Most {
    fn of(one: T, other: T) -> T {
        one.most(other)
    }
}

fn combine<T: Copy, C: Combine<T>>(expected: &mut [T], content: &[T]) {
    for (expected, content) in expected.iter_mut().zip(content) {
        *expected = C::of(*expected, *content);
    }
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
                Reduction::Max => column(index).fold(f64::MIN, f64::max),
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
                        reduced(&contents, *reduction).into_iter().map(|value| T::of(value as u64)).collect();
                    assert_eq!(pattern.wrong(iteration, &result), 0, "{:?} {reduction:?} {ranks}", T::TYPE);
                    // The result of the next iteration is another one.
                    assert!(pattern.wrong(iteration + 1, &result) > ELEMENTS as u64 / 8);
                    result[ELEMENTS - 1] = result[ELEMENTS - 1].plus(T::of(1));
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
