use bytemuck::{cast_slice, cast_slice_mut};
use proptest::prelude::*;

use super::*;
use crate::error::CollectiveErrorKind;

/// Plain arithmetic, written without the code under test.
trait Oracle: Number {
    /// Zeros, extremes, and, for floats, infinities, NaNs and subnormals.
    const SPECIAL: &[Self];

    fn sum(self, other: Self) -> Self;
    fn min(self, other: Self) -> Self;
    fn max(self, other: Self) -> Self;
    fn mean(self, _ranks: usize) -> Option<Self> {
        None
    }
}

macro_rules! integers {
    ($($integer:ty),*) => {$(
        impl Oracle for $integer {
            const SPECIAL: &[Self] = &[0, 1, Self::MAX, Self::MIN, Self::MAX - 1, Self::MIN + 1, Self::MAX / 2];

            fn sum(self, other: Self) -> Self {
                (i128::from(self) + i128::from(other)) as Self
            }

            fn min(self, other: Self) -> Self {
                Ord::min(self, other)
            }

            fn max(self, other: Self) -> Self {
                Ord::max(self, other)
            }
        }
    )*};
}

integers!(i8, i16, i32, i64, u8, u16, u32, u64);

macro_rules! floats {
    ($($float:ty, $nan:literal, $special:expr, |$one:ident, $two:ident| $sum:expr, |$of:ident, $ranks:ident| $mean:expr);* $(;)?) => {$(
        impl Oracle for $float {
            const SPECIAL: &[Self] = &$special;

            fn sum(self, other: Self) -> Self {
                let ($one, $two) = (self, other);
                let sum: Self = $sum;
                if sum.is_nan() { Self::from_bits($nan) } else { sum }
            }

            fn min(self, other: Self) -> Self {
                match self.is_nan() || other.is_nan() {
                    true => Self::from_bits($nan),
                    false => if self.total_cmp(&other).is_le() { self } else { other },
                }
            }

            fn max(self, other: Self) -> Self {
                match self.is_nan() || other.is_nan() {
                    true => Self::from_bits($nan),
                    false => if self.total_cmp(&other).is_ge() { self } else { other },
                }
            }

            fn mean(self, $ranks: usize) -> Option<Self> {
                let $of = self;
                let mean: Self = $mean;
                Some(if mean.is_nan() { Self::from_bits($nan) } else { mean })
            }
        }
    )*};
}

macro_rules! specials {
    ($float:ty, $signalling:literal, $bits:ty) => {
        [
            <$float>::from_bits(0),
            <$float>::from_bits(1 << (<$bits>::BITS - 1)),
            <$float>::from_bits(1),
            <$float>::from_bits((1 << (<$bits>::BITS - 1)) + 1),
            <$float>::MIN_POSITIVE,
            <$float>::from_bits(<$float>::MIN_POSITIVE.to_bits() - 1),
            <$float>::MAX,
            <$float>::MIN,
            <$float>::EPSILON,
            <$float>::INFINITY,
            <$float>::NEG_INFINITY,
            <$float>::NAN,
            // NaNs with payloads: all ones, negative; and a signalling one.
            <$float>::from_bits(<$bits>::MAX),
            <$float>::from_bits($signalling),
        ]
    };
}

floats! {
    f32, 0x7fc0_0000, specials!(f32, 0x7f80_0001, u32), |one, two| one + two, |of, ranks| (f64::from(of) / ranks as f64) as f32;
    f64, 0x7ff8_0000_0000_0000, specials!(f64, 0xfff0_0000_0000_0001, u64), |one, two| one + two, |of, ranks| of / ranks as f64;
    f16, 0x7e00, specials!(f16, 0x7c01, u16), |one, two| f16::from_f64(one.to_f64() + two.to_f64()),
        |of, ranks| f16::from_f64(of.to_f64() / ranks as f64);
    bf16, 0x7fc0, specials!(bf16, 0xff81, u16), |one, two| bf16::from_f64(one.to_f64() + two.to_f64()),
        |of, ranks| bf16::from_f64(of.to_f64() / ranks as f64);
}

/// Calls a function with each type.
macro_rules! each_type {
    ($function:ident $arguments:tt) => {
        each_type!($function $arguments f32 f64 f16 bf16 i8 i16 i32 i64 u8 u16 u32 u64)
    };
    ($function:ident $arguments:tt $($number:ty)*) => { $($function::<$number>$arguments;)* };
}

fn kernel<T: Number>(reduction: Reduction) -> Kernel {
    Kernel::of(T::DTYPE, reduction).unwrap()
}

fn random<T: Number>(seed: u64, length: usize) -> Vec<T> {
    let mut random = fastrand::Rng::with_seed(seed);
    (0..length).map(|_| pod_read_unaligned(&random.u64(..).to_le_bytes()[..size_of::<T>()])).collect()
}

const PAIRS: [Reduction; 3] = [Reduction::Sum, Reduction::Min, Reduction::Max];

fn expected<T: Oracle>(reduction: Reduction, one: &[T], two: &[T]) -> Vec<T> {
    let pair = match reduction {
        Reduction::Sum | Reduction::Mean => T::sum,
        Reduction::Min => T::min,
        Reduction::Max => T::max,
    };
    one.iter().zip(two).map(|(&one, &two)| pair(one, two)).collect()
}

/// Compares bits, so that zeros of different signs and different NaNs differ.
#[track_caller]
fn same<T: Number + std::fmt::Debug>(actual: &[T], expected: &[T], context: &str) {
    assert_eq!(actual.len(), expected.len());
    for (at, (actual, expected)) in actual.iter().zip(expected).enumerate() {
        assert!(
            bytes_of(actual) == bytes_of(expected),
            "{context}, {}, element {at}: {actual:?} in place of {expected:?}",
            T::DTYPE
        );
    }
}

fn pairs_equal_the_oracle<T: Oracle + std::fmt::Debug>(one: &[T], two: &[T]) {
    for reduction in PAIRS {
        let expected = expected(reduction, one, two);
        let mut into = one.to_vec();
        kernel::<T>(reduction).reduce(cast_slice_mut(&mut into), cast_slice(two));
        same(&into, &expected, &reduction.to_string());
        let mut into = vec![T::zeroed(); one.len()];
        kernel::<T>(reduction).reduce_into(cast_slice_mut(&mut into), cast_slice(one), cast_slice(two));
        same(&into, &expected, &format!("{reduction} out of place"));
    }
}

fn pairs_of_special_values<T: Oracle + std::fmt::Debug>() {
    let values = [T::SPECIAL, &random(1, 30)].concat();
    let (one, two): (Vec<T>, Vec<T>) =
        values.iter().flat_map(|&one| values.iter().map(move |&two| (one, two))).unzip();
    pairs_equal_the_oracle(&one, &two);
}

fn random_pairs<T: Oracle + std::fmt::Debug>() {
    pairs_equal_the_oracle::<T>(&random(2, 20_011), &random(3, 20_011));
}

fn means<T: Oracle + std::fmt::Debug>(ranks: usize) {
    let values = [T::SPECIAL, &random(4, 3_001)].concat();
    let mut actual = values.clone();
    kernel::<T>(Reduction::Mean).finish(cast_slice_mut(&mut actual), ranks);
    let expected: Vec<T> = values.iter().map(|value| value.mean(ranks).unwrap()).collect();
    same(&actual, &expected, &format!("mean of {ranks}"));
}

/// Every length up to some vectors, every misalignment, and longer ones.
fn lengths_and_addresses<T: Oracle + std::fmt::Debug>() {
    let size = size_of::<T>();
    let lengths = (0..70).chain([255, 256, 257, 515]);
    for (length, shift) in lengths.flat_map(|length| (0..9).map(move |shift| (length, shift))) {
        let (one, two) = (random::<T>(5, length), random::<T>(6, length));
        let (begin, end) = (shift, shift + length * size);
        // The bytes around the elements must stay.
        let mut into = vec![0xa5_u8; end + 9];
        into[begin..end].copy_from_slice(cast_slice(&one));
        let mut with = vec![0; 3 * shift];
        with.extend_from_slice(cast_slice(&two));
        for reduction in PAIRS {
            let expected = expected(reduction, &one, &two);
            let mut actual = into.clone();
            kernel::<T>(reduction).reduce(&mut actual[begin..end], &with[3 * shift..]);
            assert!(
                actual[begin..end] == *cast_slice::<T, u8>(&expected),
                "{reduction} of {length} at {shift}"
            );
            assert!(actual[..begin].iter().chain(&actual[end..]).all(|&byte| byte == 0xa5));
            let mut actual = vec![0xa5_u8; end + 9];
            kernel::<T>(reduction).reduce_into(
                &mut actual[begin..end],
                &into[begin..end],
                &with[3 * shift..],
            );
            assert!(
                actual[begin..end] == *cast_slice::<T, u8>(&expected),
                "{reduction} of {length} at {shift}"
            );
            assert!(actual[..begin].iter().chain(&actual[end..]).all(|&byte| byte == 0xa5));
        }
    }
}

fn misaligned_means<T: Oracle + std::fmt::Debug>() {
    for length in [0, 1, 5, 256, 263] {
        let values = random::<T>(7, length);
        let expected: Vec<T> = values.iter().map(|value| value.mean(3).unwrap()).collect();
        let mut bytes = vec![0xa5; 1];
        bytes.extend_from_slice(cast_slice(&values));
        kernel::<T>(Reduction::Mean).finish(&mut bytes[1..], 3);
        assert!(bytes[0] == 0xa5 && bytes[1..] == *cast_slice::<T, u8>(&expected));
    }
}

fn part_of_an_element<T: Oracle + std::fmt::Debug>() {
    let (one, two) = (random::<T>(8, 3), random::<T>(9, 3));
    let expected = expected(Reduction::Sum, &one[..2], &two[..2]);
    let end = 3 * size_of::<T>() - 1;
    let mut into = cast_slice::<T, u8>(&one)[..end].to_vec();
    kernel::<T>(Reduction::Sum).reduce(&mut into, &cast_slice(&two)[..end]);
    assert_eq!(into[..2 * size_of::<T>()], *cast_slice::<T, u8>(&expected));
    assert_eq!(into[2 * size_of::<T>()..], cast_slice::<T, u8>(&one)[2 * size_of::<T>()..end]);
}

#[test]
fn each_type_and_reduction_equals_plain_arithmetic() {
    each_type!(pairs_of_special_values());
    each_type!(random_pairs());
}

#[test]
fn means_are_rounded_once() {
    for ranks in [2, 3, 5, 7, 8, 10, 64, 1000, 2047, 2048] {
        each_type!(means (ranks) f32 f64 f16 bf16);
    }
    each_type!(misaligned_means () f32 f64 f16 bf16);
}

#[test]
fn a_mean_of_one_rank_leaves_all_bits() {
    let values = [f32::from_bits(0xffff_ffff), -0.0, 1.5];
    let mut actual = values;
    kernel::<f32>(Reduction::Mean).finish(cast_slice_mut(&mut actual), 1);
    same(&actual, &values, "mean of 1");
}

#[test]
fn only_a_mean_divides() {
    for reduction in PAIRS {
        let mut values = [3.0_f32, 5.0];
        kernel::<f32>(reduction).finish(cast_slice_mut(&mut values), 2);
        assert_eq!(values, [3.0, 5.0]);
    }
}

#[test]
fn any_length_and_any_address_do() {
    each_type!(lengths_and_addresses());
}

#[test]
fn bytes_behind_the_last_whole_element_stay() {
    // An element of one byte has no part.
    each_type!(part_of_an_element () f32 f64 f16 bf16 i16 i32 i64 u16 u32 u64);
}

/// Every 16-bit float with itself and with 24 others: each rounding, each subnormal value, each NaN.
#[test]
fn every_16_bit_float_is_reduced_as_by_plain_arithmetic() {
    let all: Vec<u16> = (0..=u16::MAX).collect();
    let (f16s, bf16s): (&[f16], &[bf16]) = (cast_slice(&all), cast_slice(&all));
    pairs_equal_the_oracle(f16s, f16s);
    pairs_equal_the_oracle(bf16s, bf16s);
    for other in [f16::SPECIAL, &random(10, 10)].concat() {
        pairs_equal_the_oracle(f16s, &vec![other; all.len()]);
    }
    for other in [bf16::SPECIAL, &random(11, 10)].concat() {
        pairs_equal_the_oracle(bf16s, &vec![other; all.len()]);
    }
    for ranks in [2, 3, 7, 2047] {
        let (mut actual, divisor) = (f16s.to_vec(), ranks);
        kernel::<f16>(Reduction::Mean).finish(cast_slice_mut(&mut actual), divisor);
        let expected: Vec<f16> = f16s.iter().map(|value| value.mean(ranks).unwrap()).collect();
        same(&actual, &expected, &format!("mean of {ranks}"));
        let mut actual = bf16s.to_vec();
        kernel::<bf16>(Reduction::Mean).finish(cast_slice_mut(&mut actual), divisor);
        let expected: Vec<bf16> = bf16s.iter().map(|value| value.mean(ranks).unwrap()).collect();
        same(&actual, &expected, &format!("mean of {ranks}"));
    }
}

/// [`SumF16`] uses the processor's conversions if there are some; [`Sum`] is what other processors use.
#[test]
fn both_sums_of_f16_are_equal() {
    let all: Vec<u16> = (0..=u16::MAX).collect();
    let all: &[f16] = cast_slice(&all);
    for other in [f16::SPECIAL, &random(12, 10)].concat() {
        let others = vec![other; all.len()];
        let (mut one, mut two) = (all.to_vec(), all.to_vec());
        <Sum as BinaryOperator<f16>>::reduce(&mut one, &others);
        <SumF16 as BinaryOperator<f16>>::reduce(&mut two, &others);
        same(&one, &two, "sum by integer arithmetic");
        same(&one, &expected(Reduction::Sum, all, &others), "sum by integer arithmetic");
    }
}

#[test]
fn a_type_without_the_reduction_is_named() {
    let with_mean = [Dtype::F16, Dtype::Bf16, Dtype::F32, Dtype::F64];
    let without =
        [Dtype::Bool, Dtype::Complex64, Dtype::Complex128, Dtype::String, Dtype::F8E4M3, Dtype::F8E5M2];
    for (dtype, reduction) in
        Dtype::all().flat_map(|dtype| Reduction::all().map(move |reduction| (dtype, reduction)))
    {
        let exists =
            !without.contains(&dtype) && (reduction != Reduction::Mean || with_mean.contains(&dtype));
        match Kernel::of(dtype, reduction) {
            Ok(kernel) => assert!(exists, "{kernel:?} of {dtype}"),
            Err(error) => {
                let message = error.to_string();
                assert!(!exists, "{message}");
                assert_eq!(error.kind(), CollectiveErrorKind::InvalidArgument);
                assert!(
                    message.contains(dtype.name()) && message.contains(&reduction.to_string()),
                    "{message}"
                );
            }
        }
    }
}

fn commutes<T: Number>(one: &[u8], two: &[u8]) {
    for reduction in Reduction::all().filter(|&reduction| Kernel::of(T::DTYPE, reduction).is_ok()) {
        let (mut left, mut right) = (one.to_vec(), two.to_vec());
        kernel::<T>(reduction).reduce(&mut left, two);
        kernel::<T>(reduction).reduce(&mut right, one);
        let whole = whole::<T>(one.len());
        assert_eq!(left[..whole], right[..whole], "{reduction} of {}", T::DTYPE);
    }
}

proptest! {
    #[test]
    fn the_order_of_two_ranks_changes_no_bit(
        bytes in prop::collection::vec((any::<u8>(), any::<u8>()), 0..200),
        // Bytes that make NaNs, infinities and zeros likely.
        filler in prop::option::of(prop::sample::select(vec![0x00_u8, 0x7f, 0x80, 0xff, 0x7c])),
    ) {
        let (mut one, two): (Vec<u8>, Vec<u8>) = bytes.into_iter().unzip();
        if let Some(filler) = filler {
            one.iter_mut().skip(3).step_by(2).for_each(|byte| *byte = filler);
        }
        each_type!(commutes(&one, &two));
    }
}
