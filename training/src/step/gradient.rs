//! What the workers hand in for a variable.

use tonic_rdma_graph::dataflow::{KernelError, Outlet};

use crate::array::Array;
use crate::variables::Gradient;

/// What a worker computes for a variable.
#[derive(Clone, Copy, Debug)]
pub(super) enum WorkerGradient {
    /// The gradient of all elements.
    Dense(Outlet),
    /// The numbers of rows, and their gradients.
    Rows { rows: Outlet, gradients: Outlet },
}

impl WorkerGradient {
    /// Returns the outputs that the gradient consists of.
    pub(super) fn outlets(&self) -> Vec<Outlet> {
        match *self {
            Self::Dense(gradient) => vec![gradient],
            Self::Rows { rows, gradients } => vec![rows, gradients],
        }
    }
}

/// Makes the gradient of a variable from the arrays of all workers, in their order.
pub(super) fn gradient_of(workers: &[WorkerGradient], arrays: &[Array]) -> Result<Gradient, KernelError> {
    match workers.first() {
        Some(WorkerGradient::Rows { .. }) => {
            let pairs = arrays.chunks_exact(2).map(|pair| match pair {
                [rows, gradients] => Ok((rows.as_words()?.clone(), gradients.as_floats()?.clone())),
                _ => Err("rows come with their gradients".into()),
            });
            Ok(Gradient::Rows(pairs.collect::<Result<_, KernelError>>()?))
        }
        _ => Ok(Gradient::Sum(
            arrays.iter().map(|array| Ok(array.as_floats()?.clone())).collect::<Result<_, KernelError>>()?,
        )),
    }
}
