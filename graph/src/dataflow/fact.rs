//! What is known of a tensor before the first step.

use std::fmt;
use std::sync::Arc;

use tonic_rdma_tensor::{Dtype, Shape, TensorSpec};

/// The length of a dimension.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Dim {
    /// The same length in each step.
    Known(u64),
    /// A length that differs from step to step, such as `N` or `2*N+1`.
    Symbolic(Arc<str>),
}

/// Type and shape of a tensor, as far as the graph determines them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Fact {
    /// The type of the elements.
    pub dtype: Dtype,
    /// The dimensions, the slowest first.
    pub dims: Vec<Dim>,
}

impl Fact {
    /// Makes the fact of a tensor whose shape is known.
    ///
    /// ```
    /// use tonic_rdma_graph::dataflow::Fact;
    /// use tonic_rdma_tensor::Dtype;
    ///
    /// let fact = Fact::known(Dtype::F32, &[1, 3]);
    /// assert_eq!(fact.to_string(), "float32[1, 3]");
    /// assert_eq!(fact.bytes(1), 12);
    /// ```
    pub fn known(dtype: Dtype, dims: &[u64]) -> Self {
        Self { dtype, dims: dims.iter().map(|length| Dim::Known(*length)).collect() }
    }

    /// Returns the spec of the tensor if its shape is known.
    pub fn spec(&self) -> Option<TensorSpec> {
        let dims: Option<Vec<u64>> = self.dims.iter().map(Dim::known).collect();
        TensorSpec::new(self.dtype, Shape::new(&dims?).ok()?).ok()
    }

    /// Returns whether a tensor has the type, the number of dimensions and the known lengths of this fact.
    pub fn fits(&self, spec: &TensorSpec) -> bool {
        let dims = spec.shape().dims();
        let known = |(dim, length): (&Dim, &u64)| dim.known().is_none_or(|known| known == *length);
        self.dtype == spec.dtype() && self.dims.len() == dims.len() && self.dims.iter().zip(dims).all(known)
    }

    /// Returns the number of bytes, with `symbolic` in place of each dimension that is not known.
    pub fn bytes(&self, symbolic: u64) -> u64 {
        let elements = self.dims.iter().map(|dim| dim.known().unwrap_or(symbolic));
        elements.fold(self.dtype.size().unwrap_or(1) as u64, u64::saturating_mul)
    }
}

impl Dim {
    /// Returns the length if it is known.
    pub fn known(&self) -> Option<u64> {
        match self {
            Self::Known(length) => Some(*length),
            Self::Symbolic(_) => None,
        }
    }
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Known(length) => length.fmt(f),
            Self::Symbolic(expression) => expression.fmt(f),
        }
    }
}

impl fmt::Display for Fact {
    /// Writes type and shape, such as `float32[N, 3]`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[", self.dtype)?;
        for (index, dim) in self.dims.iter().enumerate() {
            if index > 0 {
                f.write_str(", ")?;
            }
            dim.fmt(f)?;
        }
        f.write_str("]")
    }
}
