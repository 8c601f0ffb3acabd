//! Reductions of elements: which there are, and the loops that carry them out.
//!
//! A reduction takes two elements at a time. It gives the same bits for (a, b) and for (b, a), so all ranks
//! get the same bits if they reduce in the same tree. This module does not decide on the tree: the plan does.
//!
//! ```text
//!   mod      Reduction, Number, Kernel: a reduction of bytes, chosen at run time
//!   kernels  the loops over elements, compiled for several sets of vector instructions, and the arithmetic of two elements
//! ```

mod kernels;
#[cfg(test)]
mod tests;

use std::fmt;

use bytemuck::{bytes_of, cast_slice, pod_read_unaligned, try_cast_slice, try_cast_slice_mut};
use half::{bf16, f16};
use tonic_rdma_tensor::{Dtype, Element};

use self::kernels::{Arithmetic, BinaryOperator, Divide, Extreme, Sum, SumF16};
use crate::error::{CollectiveError, argument};

/// How the elements of all ranks become one.
///
/// Floating-point sums of more than two ranks depend on the order in which the ranks are added. This order is
/// part of the plan, so one plan always gives the same bits. A NaN in a result is always the same quiet NaN.
/// Sums and means of `f16` and `bf16` are computed in `f32` and rounded to 16 bits after each addition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reduction {
    /// The sum. Integers wrap around.
    Sum,
    /// The sum, divided by the number of ranks. Only for floating-point types. The division comes last, so a
    /// sum that is too large for the type gives infinity (an `f16` holds up to 65504).
    Mean,
    /// The smallest. A NaN of any rank gives NaN, and −0 is smaller than +0 (`minimum` of IEEE 754-2019, §
    /// 9.6).
    Min,
    /// The largest. A NaN of any rank gives NaN, and +0 is larger than −0 (`maximum` of IEEE 754-2019, §
    /// 9.6).
    Max,
}

impl Reduction {
    /// Returns all reductions.
    ///
    /// ```
    /// use tonic_rdma_collective::Reduction;
    ///
    /// assert!(Reduction::all().any(|reduction| reduction.to_string() == "sum"));
    /// ```
    pub fn all() -> impl Iterator<Item = Self> {
        [Self::Sum, Self::Mean, Self::Min, Self::Max].into_iter()
    }
}

impl fmt::Display for Reduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sum => "sum",
            Self::Mean => "mean",
            Self::Min => "min",
            Self::Max => "max",
        })
    }
}

/// A type of elements that collective operations reduce: `f32`, `f64`, `f16`, `bf16`, and the integers of 8
/// to 64 bits.
pub trait Number: Element + Copy + fmt::Debug + Unpin + bytemuck::Pod {}

macro_rules! numbers {
    ($($number:ty),*) => { $(impl Number for $number {})* };
}

numbers!(f32, f64, f16, bf16, i8, i16, i32, i64, u8, u16, u32, u64);

/// A reduction of elements of one type, on their bytes.
///
/// Bytes may lie at any address. At one that does not suit the type each element is copied, which is slower.
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    reduce: fn(&mut [u8], &[u8]),
    reduce_into: fn(&mut [u8], &[u8], &[u8]),
    /// Only for a mean.
    divide: Option<fn(&mut [u8], usize)>,
}

impl Kernel {
    /// Returns the kernel of a reduction of elements of type `dtype`.
    ///
    /// ```
    /// use tonic_rdma_collective::{Reduction, unstable::Kernel};
    /// use tonic_rdma_tensor::Dtype;
    ///
    /// let mut sums = [1_u8, 2];
    /// Kernel::of(Dtype::U8, Reduction::Sum)?.reduce(&mut sums, &[10, 20]);
    /// assert_eq!(sums, [11, 22]);
    /// # Ok::<(), tonic_rdma_collective::CollectiveError>(())
    /// ```
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::CollectiveErrorKind::InvalidArgument) if elements of this type have no such
    /// reduction.
    pub fn of(dtype: Dtype, reduction: Reduction) -> Result<Self, CollectiveError> {
        let kernel = match dtype {
            Dtype::F32 => Self::of_float::<f32, Sum>(reduction),
            Dtype::F64 => Self::of_float::<f64, Sum>(reduction),
            Dtype::F16 => Self::of_float::<f16, SumF16>(reduction),
            Dtype::Bf16 => Self::of_float::<bf16, Sum>(reduction),
            Dtype::I8 => Self::of_integer::<i8>(reduction),
            Dtype::I16 => Self::of_integer::<i16>(reduction),
            Dtype::I32 => Self::of_integer::<i32>(reduction),
            Dtype::I64 => Self::of_integer::<i64>(reduction),
            Dtype::U8 => Self::of_integer::<u8>(reduction),
            Dtype::U16 => Self::of_integer::<u16>(reduction),
            Dtype::U32 => Self::of_integer::<u32>(reduction),
            Dtype::U64 => Self::of_integer::<u64>(reduction),
            _ => None,
        };
        kernel.ok_or_else(|| {
            argument(match reduction {
                Reduction::Mean => format!(
                    "elements of type {dtype} have no mean; use float32, float64, float16 or bfloat16, or the sum"
                ),
                _ => format!(
                    "elements of type {dtype} have no reduction {reduction}; use a floating-point type of 16 to 64 \
                     bits or an integer type"
                ),
            })
        })
    }

    /// Replaces each element of `into` by its reduction with the element of `with` at the same index.
    ///
    /// Both have the same length, a whole number of elements. Otherwise the elements that only one of them
    /// has, and the bytes behind the last whole element, stay as they are (debug builds panic).
    pub fn reduce(&self, into: &mut [u8], with: &[u8]) {
        debug_assert_eq!(into.len(), with.len());
        (self.reduce)(into, with);
    }

    /// Puts the reductions of the elements of `left` and `right` at the same index into `into`. Lengths as
    /// for [`reduce`](Self::reduce).
    pub fn reduce_into(&self, into: &mut [u8], left: &[u8], right: &[u8]) {
        debug_assert!(into.len() == left.len() && into.len() == right.len());
        (self.reduce_into)(into, left, right);
    }

    /// Divides each element by the number of ranks, rounded to the nearest value (ties to even), if this is a
    /// mean. Other reductions, and means of one rank, leave the elements as they are.
    pub fn finish(&self, into: &mut [u8], ranks: usize) {
        if let Some(divide) = self.divide
            && ranks > 1
        {
            divide(into, ranks);
        }
    }

    fn of_float<T: Divide, S: BinaryOperator<T>>(reduction: Reduction) -> Option<Self> {
        let divide = (reduction == Reduction::Mean).then_some(divide_bytes::<T> as fn(&mut [u8], usize));
        Some(Self { divide, ..Self::of_type::<T, S>(reduction) })
    }

    fn of_integer<T: Arithmetic>(reduction: Reduction) -> Option<Self> {
        (reduction != Reduction::Mean).then(|| Self::of_type::<T, Sum>(reduction))
    }

    fn of_type<T: Arithmetic, S: BinaryOperator<T>>(reduction: Reduction) -> Self {
        match reduction {
            Reduction::Sum | Reduction::Mean => Self::of_operator::<T, S>(),
            Reduction::Min => Self::of_operator::<T, Extreme<false>>(),
            Reduction::Max => Self::of_operator::<T, Extreme<true>>(),
        }
    }

    fn of_operator<T: Arithmetic, P: BinaryOperator<T>>() -> Self {
        Self { reduce: reduce_bytes::<T, P>, reduce_into: reduce_bytes_into::<T, P>, divide: None }
    }
}

fn reduce_bytes<T: Arithmetic, P: BinaryOperator<T>>(into: &mut [u8], with: &[u8]) {
    let length = whole::<T>(into.len().min(with.len()));
    let (into, with) = (&mut into[..length], &with[..length]);
    if let (Ok(into), Ok(with)) = (try_cast_slice_mut::<u8, T>(into), try_cast_slice::<u8, T>(with)) {
        return P::reduce(into, with);
    }
    // The address does not suit the type.
    for (into, with) in into.chunks_exact_mut(size_of::<T>()).zip(with.chunks_exact(size_of::<T>())) {
        let reduced = P::apply(pod_read_unaligned(into), pod_read_unaligned(with));
        into.copy_from_slice(bytes_of(&reduced));
    }
}

fn reduce_bytes_into<T: Arithmetic, P: BinaryOperator<T>>(into: &mut [u8], left: &[u8], right: &[u8]) {
    let length = whole::<T>(into.len().min(left.len()).min(right.len()));
    let (into, left, right) = (&mut into[..length], &left[..length], &right[..length]);
    if let (Ok(into), Ok(left), Ok(right)) =
        (try_cast_slice_mut::<u8, T>(into), try_cast_slice::<u8, T>(left), try_cast_slice::<u8, T>(right))
    {
        return P::reduce_into(into, left, right);
    }
    into.copy_from_slice(left);
    reduce_bytes::<T, P>(into, right);
}

fn divide_bytes<T: Divide>(into: &mut [u8], ranks: usize) {
    let length = whole::<T>(into.len());
    let into = &mut into[..length];
    if let Ok(into) = try_cast_slice_mut::<u8, T>(into) {
        return kernels::divide(into, ranks);
    }
    for into in into.chunks_exact_mut(size_of::<T>()) {
        let mut element = [pod_read_unaligned::<T>(into)];
        kernels::divide(&mut element, ranks);
        into.copy_from_slice(cast_slice(&element));
    }
}

/// Returns the number of bytes of the whole elements in `bytes` bytes.
fn whole<T>(bytes: usize) -> usize {
    bytes - bytes % size_of::<T>()
}
