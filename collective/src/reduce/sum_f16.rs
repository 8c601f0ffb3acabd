//! The sum of `f16`, by the processor's own conversions between `f16` and `f32`, where it has them. The loops that the compiler
//! vectorises convert by integer arithmetic, at a fraction of the speed: on an EPYC with AVX2, 3.5 GB/s against 20 GB/s.

use half::f16;
use multiversion::multiversion;
use multiversion::target::match_target;

use super::kernels::{Pair, Sum};

/// As [`Sum`], with the same results.
pub(super) struct SumF16;

impl Pair<f16> for SumF16 {
    #[inline(always)]
    fn apply(left: f16, right: f16) -> f16 {
        Sum::apply(left, right)
    }

    fn reduce(into: &mut [f16], with: &[f16]) {
        reduce(into, with);
    }

    fn reduce_into(into: &mut [f16], left: &[f16], right: &[f16]) {
        reduce_into(into, left, right);
    }
}

#[multiversion(targets("x86_64+avx2+f16c"), dispatcher = "direct")]
fn reduce(into: &mut [f16], with: &[f16]) {
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
fn reduce_into(into: &mut [f16], left: &[f16], right: &[f16]) {
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
