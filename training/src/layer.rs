//! The layers of a network: their forward passes, and their backward passes one by one.
//!
//! candle returns all gradients of a computation at once. So each layer is a computation of its own here: the
//! backward pass goes from the last layer to the first, and hands each layer's gradients over before it
//! computes those of the layer below. This lets a gradient be sent while later ones are computed.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::ops::log_softmax;
use candle_nn::rnn::{LSTMConfig, RNN as _};
use candle_nn::{VarBuilder, lstm};

/// What a layer computes from its input and its variables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A convolution without padding, the largest of each 2 × 2 values, then ReLU. Weight: (outputs, inputs,
    /// side, side).
    Convolution,
    /// A product with the weight, then ReLU if asked. Weight: (outputs, inputs).
    Linear { relu: bool },
    /// The states of an LSTM. Input: (samples, length, inputs). Output: (samples · length, states).
    Lstm,
}

/// candle's names of the variables of an LSTM, in their order.
const LSTM_VARIABLES: [&str; 4] = ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"];

/// A layer of a network.
#[derive(Clone, Debug)]
pub(crate) struct Layer {
    pub(crate) kind: Kind,
    pub(crate) name: String,
    /// Names and shapes.
    pub(crate) variables: Vec<(String, Vec<usize>)>,
}

/// Which gradients a backward pass will compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gradients {
    None,
    /// Those of the variables.
    Variables,
    /// Those of the variables, then that of the input.
    All,
}

/// What a backward pass needs.
#[derive(Debug)]
pub(crate) enum Tape {
    /// candle's own backward pass would also fill two tensors of the size of the weight with zeros and sums.
    Linear {
        input: Tensor,
        weight: Tensor,
        /// The output, if ReLU follows.
        output: Option<Tensor>,
        /// The shape of the input before it was made flat, if its gradient is needed.
        dims: Option<Vec<usize>>,
    },
    /// A pass that candle has recorded. The input is `variables[own..]`, in one piece or in time steps.
    Recorded { variables: Vec<Var>, own: usize, steps: bool, output: Tensor },
}

impl Layer {
    /// Computes the output, and keeps what the backward pass needs for `gradients`.
    pub(crate) fn forward(
        &self,
        input: &Tensor,
        variables: Vec<Tensor>,
        gradients: Gradients,
    ) -> Result<(Tensor, Tape)> {
        if let (Kind::Linear { relu }, [weight, bias]) = (self.kind, variables.as_slice()) {
            let dims = (gradients == Gradients::All).then(|| input.dims().to_vec());
            let input = input.flatten_from(1)?;
            let output = input.matmul(&weight.t()?)?.broadcast_add(bias)?;
            let output = if relu { output.relu()? } else { output };
            let kept = relu.then(|| output.clone());
            return Ok((output, Tape::Linear { input, weight: weight.clone(), output: kept, dims }));
        }
        let steps = self.kind == Kind::Lstm;
        let mut inputs = if steps { time_steps(input)? } else { vec![input.clone()] };
        let (own, mut variables, mut recorded) = (variables.len(), variables, Vec::new());
        // candle records what is computed from a `Var`.
        let mut record = |tensors: &mut [Tensor]| -> Result<()> {
            for tensor in tensors {
                let variable = Var::from_tensor(tensor)?;
                *tensor = variable.as_tensor().clone();
                recorded.push(variable);
            }
            Ok(())
        };
        if gradients != Gradients::None {
            record(&mut variables)?;
        }
        if gradients == Gradients::All {
            record(&mut inputs)?;
        }
        let output = match (variables.as_slice(), inputs.as_slice()) {
            ([weight, bias], [input]) => convolve(input, weight, bias)?,
            (variables, inputs) => run_lstm(variables, inputs)?,
        };
        Ok((output.detach(), Tape::Recorded { variables: recorded, own, steps, output }))
    }
}

fn convolve(input: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<Tensor> {
    let bias = bias.reshape((1, (), 1, 1))?;
    input.conv2d(weight, 0, 1, 1, 1)?.broadcast_add(&bias)?.max_pool2d(2)?.relu()
}

/// Returns the input of each time step.
fn time_steps(input: &Tensor) -> Result<Vec<Tensor>> {
    (0..input.dim(1)?).map(|step| input.narrow(1, step, 1)?.squeeze(1)?.contiguous()).collect()
}

/// Runs an LSTM over all time steps.
fn run_lstm(variables: &[Tensor], steps: &[Tensor]) -> Result<Tensor> {
    let named = LSTM_VARIABLES.iter().map(|name| (*name).to_owned()).zip(variables.iter().cloned());
    let (inputs, states) = match variables {
        [input, state, ..] => (input.dim(1)?, state.dim(1)?),
        _ => (0, 0),
    };
    let variables = VarBuilder::from_tensors(named.collect(), DType::F32, &Device::Cpu);
    let network = lstm(inputs, states, LSTMConfig::default(), variables)?;
    let samples = steps.first().map_or(Ok(0), |step| step.dim(0))?;
    let mut state = network.zero_state(samples)?;
    let mut all = Vec::with_capacity(steps.len());
    for step in steps {
        state = network.step(step, &state)?;
        all.push(state.h.clone());
    }
    Tensor::stack(&all, 1)?.reshape((samples * steps.len(), states))
}

impl Tape {
    /// Returns the gradients of the variables and that of the input, if it is needed, from that of the
    /// output.
    pub(crate) fn backward(&self, gradient: &Tensor) -> Result<Vec<Tensor>> {
        match self {
            Self::Linear { input, weight, output, dims } => {
                let gradient = match output {
                    Some(output) => {
                        (gradient.reshape(output.shape())? * output.gt(0.0)?.to_dtype(gradient.dtype())?)?
                    }
                    None => gradient.clone(),
                };
                let mut gradients = vec![gradient.t()?.matmul(input)?, gradient.sum(0)?];
                if let Some(dims) = dims {
                    gradients.push(gradient.matmul(weight)?.reshape(dims.as_slice())?);
                }
                Ok(gradients)
            }
            Self::Recorded { variables, own, steps, output } => {
                // The gradient of this sum is the product of `gradient` and the derivative of the pass.
                let gradient = gradient.reshape(output.shape())?;
                let mut found = (output * gradient)?.sum_all()?.backward()?;
                let of = |variable: &Var| found.remove(variable).map_or_else(|| variable.zeros_like(), Ok);
                let mut gradients = variables.iter().map(of).collect::<Result<Vec<_>>>()?;
                if *steps && gradients.len() > *own {
                    let steps = gradients.split_off(*own);
                    gradients.push(Tensor::stack(&steps, 1)?);
                }
                Ok(gradients)
            }
        }
    }
}

/// Computes the cross entropy of each row of `logits`, multiplied by its weight, and the gradient of the sum.
pub(crate) fn cross_entropy(logits: &Tensor, targets: &Tensor, weights: &Tensor) -> Result<(f32, Tensor)> {
    let logarithms = log_softmax(logits, 1)?;
    let targets = targets.unsqueeze(1)?;
    let of_rows = logarithms.gather(&targets, 1)?.squeeze(1)?.neg()?;
    let loss = (of_rows * weights)?.sum_all()?.to_scalar::<f32>()?;
    // softmax − 1 at the target.
    let ones = targets.zeros_like()?.to_dtype(logits.dtype())?.affine(0.0, -1.0)?;
    let gradient = logarithms.exp()?.scatter_add(&targets, &ones, 1)?;
    Ok((loss, gradient.broadcast_mul(&weights.unsqueeze(1)?)?))
}
