//! Reductions of elements.

use tonic_rdma_tensor::{Dtype, Element};

/// How the elements of all ranks become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reduction {
    /// The sum. Integers wrap around.
    Sum,
    /// The sum, divided by the number of ranks. Only for floating-point types.
    Mean,
    /// The smallest. A NaN of any rank gives NaN, and −0 is smaller than +0.
    Min,
    /// The largest. A NaN of any rank gives NaN, and +0 is larger than −0.
    Max,
}

/// A type of elements that collective operations reduce.
pub trait Number: Element + Copy + bytemuck::Pod {}
