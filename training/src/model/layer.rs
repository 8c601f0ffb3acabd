//! The layers of a network.

use candle_core::{Device, Result, Tensor, Var};

/// What a layer computes from its input, its weight and its bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A convolution without padding, the largest of each 2 × 2 values, then ReLU. Weight: (outputs, inputs, `kernel`, `kernel`).
    Convolution { kernel: usize },
    /// A product with the weight, then ReLU unless it is the last layer. Weight: (outputs, inputs).
    Linear { last: bool },
}

/// The shape of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) kind: Kind,
    /// Number of channels, or of values, of each sample.
    pub(crate) inputs: usize,
    pub(crate) outputs: usize,
}

/// A layer: its shape and its parameters.
#[derive(Debug)]
pub(crate) struct Layer {
    shape: Shape,
    pub(crate) weight: Var,
    pub(crate) bias: Var,
}

impl Shape {
    /// Returns the shape of the weight.
    pub(crate) fn weight(&self) -> Vec<usize> {
        match self.kind {
            Kind::Convolution { kernel } => vec![self.outputs, self.inputs, kernel, kernel],
            Kind::Linear { .. } => vec![self.outputs, self.inputs],
        }
    }

    /// Returns the shape of a sample's output, from that of its input: channels, height and width, or the number of values.
    pub(crate) fn output(&self, input: &[usize]) -> Vec<usize> {
        match (self.kind, input) {
            (Kind::Convolution { kernel }, [_, height, width]) => {
                let side = |length: &usize| (length + 1).saturating_sub(kernel) / 2;
                vec![self.outputs, side(height), side(width)]
            }
            _ => vec![self.outputs],
        }
    }

    /// Returns the multiply-adds of a sample's forward pass, from the shape of its output.
    pub(crate) fn work(&self, output: &[usize]) -> usize {
        let pooled = if matches!(self.kind, Kind::Convolution { .. }) { 4 } else { 1 };
        let places: usize = output.iter().skip(1).product();
        self.weight().iter().product::<usize>() * places * pooled
    }
}

/// Computes the output of a convolution layer.
pub(crate) fn convolve(input: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<Tensor> {
    let bias = bias.reshape((1, (), 1, 1))?;
    input.conv2d(weight, 0, 1, 1, 1)?.broadcast_add(&bias)?.max_pool2d(2)?.relu()
}

impl Layer {
    /// Makes a layer with random weights of the variance 2 / (inputs of an output), as in He et al. 2015 (arXiv:1502.01852, section
    /// 2.2), uniform. The biases are 0.
    pub(crate) fn random(shape: Shape, random: &mut fastrand::Rng) -> Result<Self> {
        let dimensions = shape.weight();
        let inputs: usize = dimensions.iter().skip(1).product();
        let bound = (6.0 / inputs as f32).sqrt();
        let number = dimensions.iter().product();
        let weight: Vec<f32> = (0..number).map(|_| (random.f32() * 2.0 - 1.0) * bound).collect();
        Ok(Self {
            shape,
            weight: Var::from_vec(weight, dimensions, &Device::Cpu)?,
            bias: Var::from_vec(vec![0_f32; shape.outputs], shape.outputs, &Device::Cpu)?,
        })
    }

    /// Computes the output of the layer.
    pub(crate) fn forward(&self, input: &Tensor) -> Result<Tensor> {
        match self.shape.kind {
            Kind::Convolution { .. } => convolve(input, &self.weight, &self.bias),
            Kind::Linear { last } => {
                let output = input.flatten_from(1)?.matmul(&self.weight.t()?)?.broadcast_add(&self.bias)?;
                if last { Ok(output) } else { output.relu() }
            }
        }
    }
}
