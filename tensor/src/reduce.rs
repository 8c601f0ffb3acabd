//! Functions that return the largest element.

use super::Element;

/// Number of independent accumulators, so that no maximum waits for the previous one. For `f32` this is half
/// the vector registers that every x86-64 has.
const ACCUMULATORS: usize = 32;

/// Returns the largest of `values`, or negative infinity if `values` is empty. Ignores NaNs. Treats 0.0 and
/// -0.0 as equal, and returns either of them.
///
/// The compiler vectorises the loop, so that most of the time goes into reading the memory
/// (`cargo bench --bench tensor` also measures a plain read). Receivers in measurements apply this function
/// to the tensors that arrive, as in *Fast Distributed Deep Learning over RDMA* (section 5.1).
///
/// ```
/// use tonic_rdma_tensor::reduce_max_f32;
///
/// assert_eq!(reduce_max_f32(&[1.0, f32::NAN, 3.0, 2.0]), 3.0);
/// ```
pub fn reduce_max_f32(values: &[f32]) -> f32 {
    fold(values, f32::NEG_INFINITY, |best, value| if value > best { value } else { best })
}

/// Returns the largest of `values`, as [`reduce_max_f32`] does.
///
/// ```
/// use tonic_rdma_tensor::reduce_max_f64;
///
/// assert_eq!(reduce_max_f64(&[]), f64::NEG_INFINITY);
/// ```
pub fn reduce_max_f64(values: &[f64]) -> f64 {
    fold(values, f64::NEG_INFINITY, |best, value| if value > best { value } else { best })
}

/// Returns the largest of `values`, which have a total order, or `None` if `values` is empty.
///
/// ```
/// use tonic_rdma_tensor::reduce_max;
///
/// assert_eq!(reduce_max(&[3_i32, 7, 5]), Some(7));
/// ```
pub fn reduce_max<T: Element + Ord>(values: &[T]) -> Option<T> {
    let first = *values.first()?;
    Some(fold(values, first, |best, value| if value > best { value } else { best }))
}

fn fold<T: Copy>(values: &[T], start: T, pick: impl Fn(T, T) -> T) -> T {
    let (chunks, rest) = values.as_chunks::<ACCUMULATORS>();
    let mut best = [start; ACCUMULATORS];
    for chunk in chunks {
        for (best, &value) in best.iter_mut().zip(chunk) {
            *best = pick(*best, value);
        }
    }
    best.iter().chain(rest).fold(start, |best, &value| pick(best, value))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_largest_is_found_at_any_place(
            length in 1..400_usize,
            place in any::<prop::sample::Index>(),
            seed in any::<i32>(),
        ) {
            let mut values: Vec<i32> = (0..length as i32).map(|at| at.wrapping_mul(seed) >> 1).collect();
            let floats: Vec<f32> = values.iter().map(|&value| value as f32).collect();
            let expected = floats.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            prop_assert_eq!(reduce_max_f32(&floats), expected);
            values[place.index(length)] = i32::MAX;
            prop_assert_eq!(reduce_max(&values), Some(i32::MAX));
        }

        #[test]
        fn nans_are_ignored(mut values in prop::collection::vec(any::<f32>(), 0..300), nans in prop::collection::vec(any::<prop::sample::Index>(), 0..10)) {
            if !values.is_empty() {
                for at in nans {
                    let at = at.index(values.len());
                    values[at] = f32::NAN;
                }
            }
            let expected = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            prop_assert_eq!(reduce_max_f32(&values), expected);
        }
    }

    #[test]
    fn an_empty_slice_and_nans_have_no_largest_element() {
        assert_eq!(reduce_max_f32(&[]), f32::NEG_INFINITY);
        assert_eq!(reduce_max_f32(&[f32::NAN; 200]), f32::NEG_INFINITY);
        assert_eq!(reduce_max_f64(&[f64::NAN, -3.5, f64::NAN]), -3.5);
        assert_eq!(reduce_max::<u8>(&[]), None);
        assert_eq!(reduce_max(&[false, true]), Some(true));
    }
}
