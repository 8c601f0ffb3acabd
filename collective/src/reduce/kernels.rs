//! The loops over elements. Each is compiled twice, and the processor's features choose the version at run time: AVX2, or SSE2,
//! which every x86-64 has. AVX-512 needs Rust 1.89. On other architectures there is one version.

use multiversion::multiversion;

use super::number::{Arithmetic, Divide};

/// A reduction of two elements, and its loops.
pub(super) trait Pair<T: Arithmetic>: Sized {
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

impl<T: Arithmetic> Pair<T> for Sum {
    #[inline(always)]
    fn apply(left: T, right: T) -> T {
        left.sum(right)
    }
}

impl<T: Arithmetic, const LARGER: bool> Pair<T> for Extreme<LARGER> {
    #[inline(always)]
    fn apply(left: T, right: T) -> T {
        left.extreme::<LARGER>(right)
    }
}

#[multiversion(targets("x86_64+avx2"), dispatcher = "direct")]
fn reduce<T: Arithmetic, P: Pair<T>>(into: &mut [T], with: &[T]) {
    for (into, &with) in into.iter_mut().zip(with) {
        *into = P::apply(*into, with);
    }
}

#[multiversion(targets("x86_64+avx2"), dispatcher = "direct")]
fn reduce_into<T: Arithmetic, P: Pair<T>>(into: &mut [T], left: &[T], right: &[T]) {
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
