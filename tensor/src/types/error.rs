//! Errors of tensors.

use std::error::Error;
use std::fmt;
use std::sync::Arc;

use super::{Dtype, ShapeError, Strides, TensorSpec, UnknownDtype};

/// An error of a tensor, or of an operation on it. Specs are boxed because a shape is large and an error is rare.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TensorError {
    /// The type is unknown.
    #[error(transparent)]
    Dtype(#[from] UnknownDtype),
    /// No tensor has the shape.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// The number of bytes is not the number that the spec needs.
    #[error("{spec} has {expected} bytes, not {bytes}")]
    Length {
        /// Type and shape of the tensor.
        spec: Box<TensorSpec>,
        /// Number of bytes that the spec needs.
        expected: u64,
        /// Number of bytes that were given.
        bytes: u64,
    },
    /// The memory is not aligned for the elements.
    #[error("elements of {dtype} at address {address:#x}, which is no multiple of {align}", align = dtype.align())]
    Misaligned {
        /// Type of the elements.
        dtype: Dtype,
        /// Address of the first element.
        address: usize,
    },
    /// The strides lead out of the memory, or their number is not the number of dimensions.
    #[error("{spec} with strides {strides:?} does not fit into memory of {available} elements")]
    Strides {
        /// Type and shape of the tensor.
        spec: Box<TensorSpec>,
        /// Steps in elements.
        strides: Box<Strides>,
        /// Number of elements that the memory holds.
        available: u64,
    },
    /// The elements have another type.
    #[error("the elements of the tensor are {actual}, not {asked}")]
    WrongDtype {
        /// Type of the tensor's elements.
        actual: Dtype,
        /// Type that the caller asked for.
        asked: Dtype,
    },
    /// The elements do not lie one after the other.
    #[error("{0} does not lie in one piece: copy it with `to_contiguous`")]
    NotContiguous(Box<TensorSpec>),
    /// The elements have a variable length where a fixed one is needed, or a fixed length where a variable one is needed.
    #[error("{0} where {expected} was needed", expected = if matches!(.0, Dtype::String) { "a type of fixed size" } else { "a type of variable length" })]
    Variable(Dtype),
    /// An element has a value that its type does not have, such as a bool of 2.
    #[error("element {index} of {dtype} has no valid value")]
    Value {
        /// Type of the elements.
        dtype: Dtype,
        /// Index of the element, in the order of the memory.
        index: usize,
    },
    /// There are no such rows.
    #[error("{spec} has no rows {start}..{end}")]
    Slice {
        /// Type and shape of the tensor.
        spec: Box<TensorSpec>,
        /// First row.
        start: u64,
        /// Row after the last one.
        end: u64,
    },
    /// The axes do not name each dimension once.
    #[error("axes {axes:?} do not name each dimension of {spec} once")]
    Axes {
        /// Type and shape of the tensor.
        spec: Box<TensorSpec>,
        /// The axes, cut to the maximum number of dimensions.
        axes: Vec<usize>,
    },
    /// The number of bytes in metadata does not belong to type and shape.
    #[error("the {layout} form of {spec} does not have {bytes} bytes")]
    Metadata {
        /// Type and shape in the metadata.
        spec: Box<TensorSpec>,
        /// `dense` or `serialised`.
        layout: &'static str,
        /// Number of bytes in the metadata.
        bytes: u64,
    },
    /// A serialised form is too short, or too long.
    #[error("serialised {spec}: {fault} at element {element}")]
    Serialized {
        /// Type and shape of the tensor.
        spec: Box<TensorSpec>,
        /// Element with the fault.
        element: u64,
        /// The fault.
        fault: &'static str,
    },
    /// The system has no memory.
    #[error("the system has no memory for {0} bytes")]
    Memory(u64),
    /// A tensor can't be converted from or to the form of another library.
    #[error("{library}: {fault}")]
    Foreign {
        /// Name of the library or format.
        library: &'static str,
        /// Description of the fault.
        fault: String,
        /// The other library's error, if it returned one.
        #[source]
        source: Option<ForeignError>,
    },
}

/// An error of another library. Two of them are equal if their texts are equal.
#[derive(Clone, Debug)]
pub struct ForeignError(Arc<dyn Error + Send + Sync>);

impl ForeignError {
    pub(crate) fn new(error: impl Error + Send + Sync + 'static) -> Self {
        Self(Arc::new(error))
    }
}

impl fmt::Display for ForeignError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Error for ForeignError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.0.source()
    }
}

impl PartialEq for ForeignError {
    fn eq(&self, other: &Self) -> bool {
        self.to_string() == other.to_string()
    }
}

impl Eq for ForeignError {}
