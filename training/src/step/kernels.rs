//! What nodes of both kinds of models compute, by candle.

use candle_core::{Tensor, Var};
use candle_nn::ops::log_softmax;
use tonic_rdma_graph::dataflow::KernelError;

use crate::array::{Array, Tape};

/// Returns the inputs of a kernel.
pub(super) fn inputs<const N: usize>(inputs: Vec<Array>) -> Result<[Array; N], KernelError> {
    let found = inputs.len();
    inputs.try_into().map_err(|_| format!("the kernel takes {N} inputs, found {found}").into())
}

/// What the backward pass of a linear layer needs.
#[derive(Debug)]
pub(super) struct LinearTape {
    input: Tensor,
    /// The shape of the input before it was made flat, if its gradient is needed.
    dims: Option<Vec<usize>>,
    weight: Tensor,
    /// The output, if ReLU follows.
    output: Option<Tensor>,
}

/// Computes a linear layer: `y = x · weightᵀ + bias`, then ReLU if asked. Returns the output, and what the backward pass needs.
/// `is_first` says that the gradient of the input is not needed.
pub(super) fn linear(
    input: &Tensor,
    weight: Tensor,
    bias: &Tensor,
    relu: bool,
    is_first: bool,
) -> candle_core::Result<(Tensor, LinearTape)> {
    let dims = (!is_first).then(|| input.dims().to_vec());
    let input = input.flatten_from(1)?;
    let output = input.matmul(&weight.t()?)?.broadcast_add(bias)?;
    let output = if relu { output.relu()? } else { output };
    Ok((output.clone(), LinearTape { input, dims, weight, output: relu.then_some(output) }))
}

impl Tape for LinearTape {
    /// Returns the gradients of the weight, of the bias, and of the input if it is needed.
    fn backward(&self, gradient: &Tensor) -> candle_core::Result<Vec<Tensor>> {
        let gradient = match &self.output {
            Some(output) => {
                (gradient.reshape(output.shape())? * output.gt(0.0)?.to_dtype(gradient.dtype())?)?
            }
            None => gradient.clone(),
        };
        let weight = gradient.t()?.matmul(&self.input)?;
        let bias = gradient.sum(0)?;
        let mut gradients = vec![weight, bias];
        if let Some(dims) = &self.dims {
            gradients.push(gradient.matmul(&self.weight)?.reshape(dims.as_slice())?);
        }
        Ok(gradients)
    }
}

/// A forward pass that candle has recorded.
#[derive(Debug)]
pub(super) struct Recorded {
    /// The variables, in the order of the gradients.
    pub(super) variables: Vec<Var>,
    pub(super) output: Tensor,
}

impl Tape for Recorded {
    /// Returns the gradients of the variables.
    fn backward(&self, gradient: &Tensor) -> candle_core::Result<Vec<Tensor>> {
        // The gradient of this sum is the product of `gradient` and the derivative of the pass.
        let gradient = gradient.reshape(self.output.shape())?;
        let mut gradients = (&self.output * gradient)?.sum_all()?.backward()?;
        let mut of = |variable: &Var| match gradients.remove(variable) {
            Some(gradient) => Ok(gradient),
            None => variable.zeros_like(),
        };
        self.variables.iter().map(&mut of).collect()
    }
}

/// Makes a variable of candle, so that candle records what is computed from it.
pub(super) fn variable(array: Array) -> Result<Var, KernelError> {
    let tensor = array.into_tensor()?;
    Ok(Var::from_tensor(&tensor)?)
}

/// Computes the cross entropy of each row of `logits`, multiplied by its weight, and the gradient of the sum.
pub(super) fn cross_entropy(
    logits: &Tensor,
    targets: &Tensor,
    weights: &Tensor,
) -> candle_core::Result<(f32, Tensor)> {
    let logarithms = log_softmax(logits, 1)?;
    let targets = targets.unsqueeze(1)?;
    let of_rows = logarithms.gather(&targets, 1)?.squeeze(1)?.neg()?;
    let loss = (of_rows * weights)?.sum_all()?.to_scalar::<f32>()?;
    // softmax − 1 at the target.
    let ones = targets.zeros_like()?.to_dtype(logits.dtype())?.affine(0.0, -1.0)?;
    let gradient = logarithms.exp()?.scatter_add(&targets, &ones, 1)?;
    Ok((loss, gradient.broadcast_mul(&weights.unsqueeze(1)?)?))
}
