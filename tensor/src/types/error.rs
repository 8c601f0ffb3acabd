//! What is wrong with a tensor.

use super::{Dtype, ShapeError, Strides, TensorSpec, UnknownDtype};

/// What is wrong with a tensor, or with what is asked of it. Specs are boxed because a shape is large, and an error rare.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TensorError {
    /// A type that is not known.
    #[error(transparent)]
    Dtype(#[from] UnknownDtype),
    /// A shape that no tensor has.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// Another number of bytes than the spec has.
    #[error("{spec} has {expected} bytes, not {bytes}")]
    Length {
        /// What was to be made of them.
        spec: Box<TensorSpec>,
        /// Bytes that it has.
        expected: u64,
        /// Bytes that there are.
        bytes: u64,
    },
    /// The memory does not begin where such an element can be.
    #[error("elements of {dtype} at address {address:#x}, which is no multiple of {align}", align = dtype.align())]
    Misaligned {
        /// Type of the elements.
        dtype: Dtype,
        /// Address of the first.
        address: usize,
    },
    /// Strides that lead out of the memory, or are not as many as there are dimensions.
    #[error("{spec} with strides {strides:?} in memory of {available} elements")]
    Strides {
        /// What was to be made.
        spec: Box<TensorSpec>,
        /// Steps in elements.
        strides: Box<Strides>,
        /// Elements that there are.
        available: u64,
    },
    /// The elements have another type.
    #[error("a tensor of {actual} asked for elements of {asked}")]
    WrongDtype {
        /// Type of the tensor's elements.
        actual: Dtype,
        /// Type asked for.
        asked: Dtype,
    },
    /// The elements do not lie one after the other.
    #[error("{0} does not lie in one piece: copy it with `to_contiguous`")]
    NotContiguous(Box<TensorSpec>),
    /// Elements of variable length, where their bytes were asked for, or the other way round.
    #[error("{0} where {expected} was needed", expected = if matches!(.0, Dtype::String) { "a type of fixed size" } else { "a type of variable length" })]
    Variable(Dtype),
    /// A value that the type does not have, such as a bool of 2.
    #[error("element {index} of {dtype} has no valid value")]
    Value {
        /// Type of the elements.
        dtype: Dtype,
        /// Which one, in the order of the memory.
        index: usize,
    },
    /// No such part.
    #[error("rows {start}..{end} of {spec}")]
    Slice {
        /// What was to be sliced.
        spec: Box<TensorSpec>,
        /// First row.
        start: u64,
        /// Row after the last.
        end: u64,
    },
    /// The axes are not each dimension once.
    #[error("axes {axes:?} of {spec}, not each dimension once")]
    Axes {
        /// What was to be permuted.
        spec: Box<TensorSpec>,
        /// The axes; only so many as a tensor may have.
        axes: Vec<usize>,
    },
    /// Metadata that says two things.
    #[error("metadata of {spec} with {bytes} bytes {layout}, which can't be")]
    Metadata {
        /// What it says there is.
        spec: Box<TensorSpec>,
        /// `dense` or `serialised`.
        layout: &'static str,
        /// Bytes.
        bytes: u64,
    },
    /// A serialised form that breaks off, or goes on beyond its end.
    #[error("serialised {spec}: {fault} at element {element}")]
    Serialized {
        /// What was to be read.
        spec: Box<TensorSpec>,
        /// Element at which it was found.
        element: u64,
        /// What was found.
        fault: &'static str,
    },
    /// The system has no memory for it.
    #[error("no memory for {0} bytes")]
    Memory(u64),
    /// Another library's form of it can't be taken over.
    #[error("{library}: {fault}")]
    Foreign {
        /// Whose.
        library: &'static str,
        /// What is wrong.
        fault: String,
    },
}
