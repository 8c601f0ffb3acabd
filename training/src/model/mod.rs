//! A network, its backward pass layer by layer, and the step of its parameters.
//!
//! candle returns all gradients of a computation at once. So each layer is a computation of its own here: the backward pass goes
//! from the last layer to the first, and hands each layer's gradients over before it computes those of the layer below. This lets
//! the reduction of a gradient run while later ones are computed.

mod layer;
mod optimiser;

use candle_core::{Device, Result, Tensor, Var};
use candle_nn::ops::log_softmax;

use crate::data::{CLASSES, SIDE};
use layer::{Kind, Layer, Shape};

pub(crate) use layer::{Kind as LayerKind, Shape as LayerShape, convolve};
pub(crate) use optimiser::Optimiser;

/// The networks of this example.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Architecture {
    /// Two convolutions and two linear layers, 147 146 parameters: much computation for each gradient
    Cnn,
    /// Three linear layers, 669 706 parameters: little computation for each gradient
    Mlp,
    /// Three wide linear layers, 5 824 522 parameters: bound by the communication, with small batches
    Wide,
}

/// A network.
#[derive(Debug)]
pub(crate) struct Network {
    layers: Vec<Layer>,
}

/// A layer's part of a forward pass.
struct Pass {
    /// A variable, so that the backward pass computes its gradient. `None` for the first layer, whose input is the pictures.
    input: Option<Var>,
    output: Tensor,
}

impl Architecture {
    /// Returns the shapes of the layers.
    pub(crate) fn shapes(self) -> Vec<Shape> {
        let convolution = |inputs, outputs| Shape { kind: Kind::Convolution { kernel: 5 }, inputs, outputs };
        let linear =
            |inputs, outputs| Shape { kind: Kind::Linear { last: outputs == CLASSES }, inputs, outputs };
        match self {
            // 28 × 28 pixels, 12 × 12 after the first layer, 4 × 4 after the second.
            Self::Cnn => {
                vec![convolution(1, 16), convolution(16, 32), linear(32 * 4 * 4, 256), linear(256, CLASSES)]
            }
            Self::Mlp => vec![linear(SIDE * SIDE, 512), linear(512, 512), linear(512, CLASSES)],
            Self::Wide => vec![linear(SIDE * SIDE, 2048), linear(2048, 2048), linear(2048, CLASSES)],
        }
    }
}

impl Network {
    /// Makes a network with random weights.
    pub(crate) fn random(architecture: Architecture, seed: u64) -> Result<Self> {
        let mut random = fastrand::Rng::with_seed(seed);
        let layers = architecture.shapes().into_iter().map(|shape| Layer::random(shape, &mut random));
        Ok(Self { layers: layers.collect::<Result<_>>()? })
    }

    /// Returns the weight and the bias of each layer, from the first layer on.
    pub(crate) fn layers(&self) -> impl Iterator<Item = (&Var, &Var)> {
        self.layers.iter().map(|layer| (&layer.weight, &layer.bias))
    }

    /// Returns all parameters in the order in which the backward pass computes their gradients.
    pub(crate) fn parameters(&self) -> impl Iterator<Item = &Var> {
        self.layers.iter().rev().flat_map(|layer| [&layer.weight, &layer.bias])
    }

    /// Returns the number of elements of all parameters.
    pub(crate) fn elements(&self) -> usize {
        self.parameters().map(|parameter| parameter.elem_count()).sum()
    }

    /// Counts the pictures that the network puts into their class.
    pub(crate) fn correct(&self, pictures: &Tensor, classes: &Tensor) -> Result<u64> {
        Ok(self.test(pictures, classes)?.1)
    }

    /// Returns the sum of the losses of these pictures, and the number of those that the network puts into their class.
    pub(crate) fn test(&self, pictures: &Tensor, classes: &Tensor) -> Result<(f64, u64)> {
        let mut values = pictures.clone();
        for layer in &self.layers {
            values = layer.forward(&values)?.detach();
        }
        let losses = log_softmax(&values, 1)?.gather(&classes.unsqueeze(1)?, 1)?.sum_all()?.neg()?;
        let loss = f64::from(losses.to_scalar::<f32>()?);
        let found = values.argmax(1)?.eq(classes)?.to_dtype(candle_core::DType::U32)?;
        Ok((loss, u64::from(found.sum_all()?.to_scalar::<u32>()?)))
    }

    /// Computes the gradients of the losses of these pictures, added up and multiplied by `factor`. Passes each gradient to `ready`
    /// as soon as it is computed, with its index in [`parameters`](Self::parameters). Returns the sum of the losses, without the
    /// factor. The loss is the cross entropy.
    pub(crate) fn gradients<E: From<candle_core::Error>>(
        &self,
        pictures: &Tensor,
        classes: &Tensor,
        factor: f64,
        mut ready: impl FnMut(usize, &[f32]) -> std::result::Result<(), E>,
    ) -> std::result::Result<f64, E> {
        let passes = self.forward(pictures)?;
        let Some(last) = passes.last() else { return Ok(0.0) };
        let logits = Var::from_tensor(&last.output.detach())?;
        let losses = log_softmax(&logits, 1)?.gather(&classes.unsqueeze(1)?, 1)?.sum_all()?.neg()?;
        let loss = f64::from(losses.to_scalar::<f32>()?);
        let mut above = (losses * factor)?.backward()?.remove(&logits);
        for (index, (layer, pass)) in self.layers.iter().zip(passes).rev().enumerate() {
            let Some(gradient) = above.take() else {
                return Err(candle_core::Error::Msg("a layer has no gradient".to_owned()).into());
            };
            // The gradient of this sum is the product of `gradient` and the layer's derivative.
            let mut gradients = (&pass.output * gradient)?.sum_all()?.backward()?;
            // `rev` numbers the last layer 0.
            for (which, parameter) in [&layer.weight, &layer.bias].into_iter().enumerate() {
                let gradient = match gradients.remove(parameter) {
                    Some(gradient) => gradient.flatten_all()?.to_vec1::<f32>()?,
                    None => vec![0.0; parameter.elem_count()],
                };
                ready(2 * index + which, &gradient)?;
            }
            above = pass.input.as_ref().and_then(|input| gradients.remove(input));
        }
        Ok(loss)
    }

    fn forward(&self, pictures: &Tensor) -> Result<Vec<Pass>> {
        let mut passes: Vec<Pass> = Vec::new();
        for layer in &self.layers {
            let pass = match passes.last() {
                None => Pass { input: None, output: layer.forward(pictures)? },
                Some(below) => {
                    let input = Var::from_tensor(&below.output.detach())?;
                    let output = layer.forward(&input)?;
                    Pass { input: Some(input), output }
                }
            };
            passes.push(pass);
        }
        Ok(passes)
    }
}

/// Returns the elements of a parameter.
pub(crate) fn values(parameter: &Var) -> Result<Vec<f32>> {
    parameter.flatten_all()?.to_vec1()
}

/// Replaces the elements of a parameter.
pub(crate) fn set(parameter: &Var, values: &[f32]) -> Result<()> {
    parameter.set(&Tensor::from_slice(values, parameter.shape(), &Device::Cpu)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::tests::samples;

    fn gradients(network: &Network, range: std::ops::Range<usize>, factor: f64) -> (f64, Vec<Vec<f32>>) {
        let (pictures, classes) = samples(16).batch(range).unwrap();
        let mut all = Vec::new();
        let ready = |index: usize, gradient: &[f32]| {
            assert_eq!(index, all.len(), "gradients come in the order of the parameters");
            all.push(gradient.to_vec());
            Ok::<_, candle_core::Error>(())
        };
        let loss = network.gradients(&pictures, &classes, factor, ready).unwrap();
        (loss, all)
    }

    #[test]
    fn the_networks_have_the_stated_numbers_of_parameters() {
        for (architecture, elements) in
            [(Architecture::Cnn, 147_146), (Architecture::Mlp, 669_706), (Architecture::Wide, 5_824_522)]
        {
            let network = Network::random(architecture, 1).unwrap();
            assert_eq!(network.elements(), elements);
            let (_, gradients) = gradients(&network, 0..2, 1.0);
            let lengths: Vec<usize> = gradients.iter().map(Vec::len).collect();
            assert_eq!(lengths, network.parameters().map(|each| each.elem_count()).collect::<Vec<_>>());
        }
    }

    #[test]
    fn the_backward_pass_layer_by_layer_equals_that_of_candle() {
        for architecture in [Architecture::Cnn, Architecture::Mlp] {
            let network = Network::random(architecture, 2).unwrap();
            let (pictures, classes) = samples(16).batch(0..8).unwrap();
            let mut values = pictures;
            for layer in &network.layers {
                values = layer.forward(&values).unwrap();
            }
            let loss = candle_nn::loss::cross_entropy(&values, &classes).unwrap();
            let whole = loss.backward().unwrap();
            let (sum, by_layer) = gradients(&network, 0..8, 1.0 / 8.0);
            assert!((sum / 8.0 - f64::from(loss.to_scalar::<f32>().unwrap())).abs() < 1e-5);
            for (parameter, gradient) in network.parameters().zip(by_layer) {
                let expected = whole.get(parameter).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
                assert!(expected.iter().any(|value| *value != 0.0));
                for (one, other) in expected.iter().zip(&gradient) {
                    assert!((one - other).abs() <= 1e-6 + 1e-4 * one.abs(), "{one} {other}");
                }
            }
        }
    }

    #[test]
    fn the_gradients_of_shards_add_up_to_those_of_the_batch() {
        let network = Network::random(Architecture::Cnn, 3).unwrap();
        let (loss, whole) = gradients(&network, 0..9, 1.0);
        let parts = [0..5, 5..9].map(|range| gradients(&network, range, 1.0));
        assert!((loss - parts[0].0 - parts[1].0).abs() < 1e-4);
        for (index, gradient) in whole.iter().enumerate() {
            for (at, value) in gradient.iter().enumerate() {
                let sum = parts[0].1[index][at] + parts[1].1[index][at];
                assert!((sum - value).abs() <= 1e-5 + 1e-4 * value.abs(), "{sum} {value}");
            }
        }
    }

    #[test]
    fn steps_of_the_parameters_make_the_loss_smaller() {
        let network = Network::random(Architecture::Mlp, 4).unwrap();
        let mut optimiser = Optimiser::new(&network, 0.01, 0.9).unwrap();
        let (first, _) = gradients(&network, 0..16, 1.0);
        for _ in 0..10 {
            let (_, all) = gradients(&network, 0..16, 1.0 / 16.0);
            for (index, gradient) in all.iter().enumerate() {
                optimiser.step(&network, index, gradient).unwrap();
            }
        }
        let (last, _) = gradients(&network, 0..16, 1.0);
        assert!(last < first / 2.0, "{first} {last}");
        let (pictures, classes) = samples(16).batch(0..16).unwrap();
        assert!(network.correct(&pictures, &classes).unwrap() >= 12);
    }
}
