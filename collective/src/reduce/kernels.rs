//! The loops over elements. Each is compiled twice, and the processor's features choose the version at run
//! time: AVX2, or SSE2, which every x86-64 has. AVX-512 needs Rust 1.89. On other architectures there is one
//! version.

use std::ops::{Div, Mul};

use bytemuck::Pod;
use half::{bf16, f16};
use multiversion::multiversion;
use multiversion::target::match_target;

/// A reduction of two elements to one, and its loops.
pub(super) trait BinaryOperator<T: Arithmetic>: Sized {
    fn apply(left: T, right: T) -> T;

    /// Replaces each element of `into` by its reduction with the element of `with` at the same index.
    fn reduce(into: &mut [T], with: &[T]) {
        reduce::<T, Self>(into, with);
    }

    /// Puts the reductions of the elements of `left` and `right` at the same index into `into`.
    fn reduce_into(into: &mut [T], left: &[T], right: &[T]) {
        reduce_into::<T, Self>(into, left, right);
    }
}

pub(super) struct Sum;
pub(super) struct Extreme<const LARGER: bool>;

impl<T: Arithmetic> BinaryOperator<T> for Sum {
    #[inline(always)]
    fn apply(left: T, right: T) -> T {
        left.sum(right)
    }
}

impl<T: Arithmetic, const LARGER: bool> BinaryOperator<T> for Extreme<LARGER> {
    #[inline(always)]
    fn apply(left: T, right: T) -> T {
        left.extreme::<LARGER>(right)
    }
}

#[multiversion(targets("x86_64+avx2"), dispatcher = "direct")]
fn reduce<T: Arithmetic, P: BinaryOperator<T>>(into: &mut [T], with: &[T]) {
    for (into, &with) in into.iter_mut().zip(with) {
        *into = P::apply(*into, with);
    }
}

#[multiversion(targets("x86_64+avx2"), dispatcher = "direct")]
fn reduce_into<T: Arithmetic, P: BinaryOperator<T>>(into: &mut [T], left: &[T], right: &[T]) {
    for ((into, &left), &right) in into.iter_mut().zip(left).zip(right) {
        *into = P::apply(left, right);
    }
}

/// Divides each element by the number of ranks.
#[multiversion(targets("x86_64+avx2"), dispatcher = "direct")]
pub(super) fn divide<T: Divide>(into: &mut [T], ranks: usize) {
    let divisor = T::whole(ranks);
    if ranks.is_power_of_two() {
        // The reciprocal is exact, so a product has the same bits as a quotient, and is faster.
        let reciprocal = T::whole(1) / divisor;
        for element in into {
            *element = T::narrow(element.widen() * reciprocal);
        }
    } else {
        for element in into {
            *element = T::narrow(element.widen() / divisor);
        }
    }
}

/// An element with the arithmetic of the reductions. No method has a branch, so that the loops vectorise.
/// Each operation gives the same bits for (a, b) and for (b, a).
pub(super) trait Arithmetic: Pod {
    fn sum(self, other: Self) -> Self;

    /// Returns the larger of the two, or the smaller.
    fn extreme<const LARGER: bool>(self, other: Self) -> Self;
}

/// An element that a mean divides.
pub(super) trait Divide: Arithmetic {
    /// The type of the computation.
    type Wide: Copy + Mul<Output = Self::Wide> + Div<Output = Self::Wide>;

    fn whole(number: usize) -> Self::Wide;

    fn widen(self) -> Self::Wide;

    /// Rounds to the nearest value, ties to even.
    fn narrow(wide: Self::Wide) -> Self;
}

macro_rules! integers {
    ($($integer:ty),*) => {$(
        impl Arithmetic for $integer {
            #[inline(always)]
            fn sum(self, other: Self) -> Self {
                self.wrapping_add(other)
            }

            #[inline(always)]
            fn extreme<const LARGER: bool>(self, other: Self) -> Self {
                let first = if LARGER { self > other } else { self < other };
                if first { self } else { other }
            }
        }
    )*};
}

integers!(i8, i16, i32, i64, u8, u16, u32, u64);

/// `minimum` and `maximum` of IEEE 754-2019, § 9.6. If one of the two is smaller, both orders of the
/// comparison pick this one. If they are equal, they differ at most in the sign of a zero: the union of their
/// bits is the smaller zero, the intersection the larger one.
macro_rules! floats {
    ($($float:ty, $nan:literal);*) => {$(
        impl Arithmetic for $float {
            #[inline(always)]
            fn sum(self, other: Self) -> Self {
                Self::narrow(self + other)
            }

            #[inline(always)]
            fn extreme<const LARGER: bool>(self, other: Self) -> Self {
                let (first, second) = if LARGER { (self > other, other > self) } else { (self < other, other < self) };
                let one = if first { self } else { other }.to_bits();
                let two = if second { other } else { self }.to_bits();
                let bits = if LARGER { one & two } else { one | two };
                Self::from_bits(if self.is_nan() || other.is_nan() { $nan } else { bits })
            }
        }

        impl Divide for $float {
            type Wide = Self;

            fn whole(number: usize) -> Self {
                number as Self
            }

            #[inline(always)]
            fn widen(self) -> Self {
                self
            }

            #[inline(always)]
            fn narrow(wide: Self) -> Self {
                Self::from_bits(if wide.is_nan() { $nan } else { wide.to_bits() })
            }
        }
    )*};
}

floats!(f32, 0x7fc0_0000; f64, 0x7ff8_0000_0000_0000);

/// Sums and quotients of 16-bit floats are computed in `f32` and rounded once more to 16 bits. This gives the
/// same as one rounding of the exact result, because an `f32` has more than twice the digits of an `f16` or a
/// `bf16` (Figueroa, *When is double rounding innocuous?*, 1995). For a quotient, the divisor must have few
/// digits too: at most 2048 ranks.
///
/// Minimum and maximum compare integers: the bits of a negative value count downwards, so all but its sign is
/// inverted.
macro_rules! halves {
    ($($half:ty, $infinity:literal, $nan:literal, $widen:path, $narrow:path);*) => {$(
        impl Arithmetic for $half {
            #[inline(always)]
            fn sum(self, other: Self) -> Self {
                Self::narrow(self.widen() + other.widen())
            }

            #[inline(always)]
            fn extreme<const LARGER: bool>(self, other: Self) -> Self {
                let (one, two) = (ordered(self.to_bits()), ordered(other.to_bits()));
                let bits = ordered(one.extreme::<LARGER>(two) as u16) as u16;
                let nan = is_nan(self.to_bits(), $infinity) | is_nan(other.to_bits(), $infinity);
                Self::from_bits(if nan { $nan } else { bits })
            }
        }

        impl Divide for $half {
            type Wide = f32;

            fn whole(number: usize) -> f32 {
                number as f32
            }

            #[inline(always)]
            fn widen(self) -> f32 {
                $widen(self.to_bits())
            }

            #[inline(always)]
            fn narrow(wide: f32) -> Self {
                Self::from_bits($narrow(wide))
            }
        }
    )*};
}

halves!(
    f16, 0x7c00, 0x7e00, widen_f16, narrow_f16;
    bf16, 0x7f80, 0x7fc0, widen_bf16, narrow_bf16
);

/// Converts the bits of a 16-bit float to an integer with the order of the floats, −0 before +0. A second
/// call converts back.
#[inline(always)]
fn ordered(bits: u16) -> i16 {
    let bits = bits as i16;
    bits ^ ((bits >> 15) & 0x7fff)
}

#[inline(always)]
fn is_nan(bits: u16, infinity: i16) -> bool {
    (bits & 0x7fff) as i16 > infinity
}

#[inline(always)]
fn widen_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Rounds to the nearest `bf16`, ties to even. A carry out of the fraction is the next power of two, or
/// infinity.
#[inline(always)]
fn narrow_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
    let result = if value.is_nan() { 0x7fc0_0000 } else { rounded };
    (result >> 16) as u16
}

/// Moves exponent and fraction to their places in an `f32`, and corrects the bias of the exponent. No step
/// computes with a subnormal `f32`, because some processors are slow at that.
#[inline(always)]
fn widen_f16(bits: u16) -> f32 {
    let magnitude = u32::from(bits & 0x7fff) << 13;
    // 112 is the difference of the biases, 127 and 15. Infinity and NaN need it twice, because their exponent
    // is 255.
    let special = if magnitude >= 0x7c00 << 13 { 112 << 23 } else { 0 };
    let normal = magnitude + (112 << 23) + special;
    // With the exponent 1, a subnormal value has a leading one too many, 2^-14.
    let subnormal = (f32::from_bits(magnitude + (113 << 23)) - f32::from_bits(113 << 23)).to_bits();
    let widened = if magnitude < 1 << 23 { subnormal } else { normal };
    f32::from_bits(widened | (u32::from(bits & 0x8000) << 16))
}

/// Rounds to the nearest `f16`, ties to even.
#[inline(always)]
fn narrow_f16(value: f32) -> u16 {
    let bits = value.to_bits();
    let sign = (bits >> 16) & 0x8000;
    let magnitude = bits & 0x7fff_ffff;
    // The new bias, and the rounding: a little less than half, and the last digit that stays. A carry is the
    // next power of two.
    let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(0xfff + ((magnitude >> 13) & 1)) >> 13;
    // The sum with 1/2 has the digits of a subnormal f16 (multiples of 2^-24) at its end, rounded by the
    // addition.
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5_f32.to_bits());
    let finite = if magnitude < 113 << 23 { subnormal } else { normal };
    // 65536.0 and more. Values from 65520 on carry into infinity in `normal`.
    let special = if magnitude > 0xff << 23 { 0x7e00 } else { 0x7c00 };
    let result = if magnitude >= 143 << 23 { special } else { finite };
    // One NaN, without a sign.
    let sign = if magnitude > 0xff << 23 { 0 } else { sign };
    (result | sign) as u16
}

/// The sum of `f16`, by the processor's own conversions between `f16` and `f32`, where it has them. The loops
/// that the compiler vectorises convert by integer arithmetic, at a fraction of the speed: on an EPYC with
/// AVX2, 3.5 GB/s against 20 GB/s.
///
/// As [`Sum`], with the same results.
pub(super) struct SumF16;

impl BinaryOperator<f16> for SumF16 {
    #[inline(always)]
    fn apply(left: f16, right: f16) -> f16 {
        Sum::apply(left, right)
    }

    fn reduce(into: &mut [f16], with: &[f16]) {
        reduce_f16(into, with);
    }

    fn reduce_into(into: &mut [f16], left: &[f16], right: &[f16]) {
        reduce_into_f16(into, left, right);
    }
}

#[multiversion(targets("x86_64+avx2+f16c"), dispatcher = "direct")]
fn reduce_f16(into: &mut [f16], with: &[f16]) {
    let (into, with) = match_target! {
        "x86_64+avx2+f16c" => {
            let ((vectors, into), (with_vectors, with)) = (into.as_chunks_mut(), with.as_chunks());
            for (into, with) in vectors.iter_mut().zip(with_vectors) {
                *into = add(*into, *with);
            }
            (into, with)
        }
        _ => (into, with),
    };
    for (into, &with) in into.iter_mut().zip(with) {
        *into = Sum::apply(*into, with);
    }
}

#[multiversion(targets("x86_64+avx2+f16c"), dispatcher = "direct")]
fn reduce_into_f16(into: &mut [f16], left: &[f16], right: &[f16]) {
    let (into, left, right) = match_target! {
        "x86_64+avx2+f16c" => {
            let ((vectors, into), (left_vectors, left)) = (into.as_chunks_mut(), left.as_chunks());
            let (right_vectors, right) = right.as_chunks();
            for ((into, left), right) in vectors.iter_mut().zip(left_vectors).zip(right_vectors) {
                *into = add(*left, *right);
            }
            (into, left, right)
        }
        _ => (into, left, right),
    };
    for ((into, &left), &right) in into.iter_mut().zip(left).zip(right) {
        *into = Sum::apply(left, right);
    }
}

/// Adds eight elements in `f32`, makes NaNs the one quiet NaN, and rounds to the nearest `f16`, ties to even.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
#[inline]
fn add(left: [f16; 8], right: [f16; 8]) -> [f16; 8] {
    use std::arch::x86_64::{
        _CMP_UNORD_Q, _MM_FROUND_TO_NEAREST_INT, _mm256_add_ps, _mm256_blendv_ps, _mm256_cmp_ps,
        _mm256_cvtph_ps, _mm256_cvtps_ph, _mm256_set1_ps,
    };

    let sum = _mm256_add_ps(_mm256_cvtph_ps(bytemuck::cast(left)), _mm256_cvtph_ps(bytemuck::cast(right)));
    let nan = _mm256_set1_ps(f32::from_bits(0x7fc0_0000));
    let sum = _mm256_blendv_ps(sum, nan, _mm256_cmp_ps::<_CMP_UNORD_Q>(sum, sum));
    bytemuck::cast(_mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(sum))
}
