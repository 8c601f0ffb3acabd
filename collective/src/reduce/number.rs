//! The arithmetic of two elements. Each method has no branch, so that the loops in [`kernels`](super::kernels) vectorise.

use std::ops::{Div, Mul};

use bytemuck::Pod;
use half::{bf16, f16};

/// An element with the arithmetic of the reductions. Each operation gives the same bits for (a, b) and for (b, a).
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
                if (if LARGER { self > other } else { self < other }) { self } else { other }
            }
        }
    )*};
}

integers!(i8, i16, i32, i64, u8, u16, u32, u64);

/// `minimum` and `maximum` of IEEE 754-2019, § 9.6. If one of the two is smaller, both orders of the comparison pick this one. If
/// they are equal, they differ at most in the sign of a zero: the union of their bits is the smaller zero, the intersection the
/// larger one.
macro_rules! floats {
    ($($float:ty, $nan:literal);*) => {$(
        impl Arithmetic for $float {
            #[inline(always)]
            fn sum(self, other: Self) -> Self {
                Self::narrow(self + other)
            }

            #[inline(always)]
            fn extreme<const LARGER: bool>(self, other: Self) -> Self {
                let before = |one: Self, two: Self| if LARGER { one > two } else { one < two };
                let one = if before(self, other) { self } else { other }.to_bits();
                let two = if before(other, self) { other } else { self }.to_bits();
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

/// Sums and quotients of 16-bit floats are computed in `f32` and rounded once more to 16 bits. This gives the same as one
/// rounding of the exact result, because an `f32` has more than twice the digits of an `f16` or a `bf16` (Figueroa, *When is
/// double rounding innocuous?*, 1995). For a quotient, the divisor must have few digits too: at most 2048 ranks.
///
/// Minimum and maximum compare integers: the bits of a negative value count downwards, so all but its sign is inverted.
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

/// Converts the bits of a 16-bit float to an integer with the order of the floats, −0 before +0. A second call converts back.
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

/// Rounds to the nearest `bf16`, ties to even. A carry out of the fraction is the next power of two, or infinity.
#[inline(always)]
fn narrow_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
    let result = if value.is_nan() { 0x7fc0_0000 } else { rounded };
    (result >> 16) as u16
}

/// Moves exponent and fraction to their places in an `f32`, and corrects the bias of the exponent. No step computes with a
/// subnormal `f32`, because some processors are slow at that.
#[inline(always)]
fn widen_f16(bits: u16) -> f32 {
    let magnitude = u32::from(bits & 0x7fff) << 13;
    // 112 is the difference of the biases, 127 and 15. Infinity and NaN need it twice, because their exponent is 255.
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
    // The new bias, and the rounding: a little less than half, and the last digit that stays. A carry is the next power of two.
    let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(0xfff + ((magnitude >> 13) & 1)) >> 13;
    // The sum with 1/2 has the digits of a subnormal f16 (multiples of 2^-24) at its end, rounded by the addition.
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5_f32.to_bits());
    let finite = if magnitude < 113 << 23 { subnormal } else { normal };
    // 65536.0 and more. Values from 65520 on carry into infinity in `normal`.
    let special = if magnitude > 0xff << 23 { 0x7e00 } else { 0x7c00 };
    let result = if magnitude >= 143 << 23 { special } else { finite };
    // One NaN, without a sign.
    let sign = if magnitude > 0xff << 23 { 0 } else { sign };
    (result | sign) as u16
}
