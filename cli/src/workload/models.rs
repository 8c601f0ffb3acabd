//! The trainable variables of seven models, f32.
//!
//! ResNet-50 is the standard one (He et al., 2015). The other six are the benchmarks of Xue et al., "Fast
//! Distributed Deep Learning over RDMA" (EuroSys 2019). Its table gives only each model's size and number of
//! variables. The public architectures, with ten classes in the convolutional networks and a thousand in the
//! recurrent networks, have exactly these sizes and numbers, to the table's last digit. So this module takes
//! these architectures for the measured models. MB is MiB in that table.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use tonic_rdma_commands::Named;

/// A model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub(crate) enum Model {
    /// 53 convolutions, each with scale and offset of its batch normalisation, and one dense layer.
    Resnet50,
    /// The one-tower AlexNet of TensorFlow-Slim ("One weird trick", Krizhevsky 2014).
    Alexnet,
    /// Inception v3 of TensorFlow-Slim, including the auxiliary head. Its batch normalisation has an offset
    /// and no scale.
    InceptionV3,
    /// Configuration D of Simonyan and Zisserman (2014).
    Vgg16,
    /// One layer of 1024 LSTM units, each gate with variables of its own, and a dense layer.
    Lstm,
    /// One layer of 1024 gated recurrent units, each gate with variables of its own, and a dense layer.
    Gru,
    /// Five dense layers from 28 × 28 pixels over 4096 units to ten classes.
    Fcn5,
}

/// A trainable variable of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Variable {
    shape: Vec<u64>,
}

impl Variable {
    /// Returns the number of elements.
    pub(crate) fn elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Returns the length in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.elements() * size_of::<f32>() as u64
    }
}

impl Model {
    pub(crate) fn name(self) -> &'static str {
        Named::name(&self)
    }

    /// Returns the trainable variables, from the input to the output.
    pub(crate) fn variables(self) -> Vec<Variable> {
        let mut layers = Layers::default();
        match self {
            Self::Resnet50 => resnet50(&mut layers),
            Self::Alexnet => alexnet(&mut layers),
            Self::InceptionV3 => inception_v3(&mut layers),
            Self::Vgg16 => vgg16(&mut layers),
            Self::Lstm => recurrent(&mut layers, 4),
            Self::Gru => recurrent(&mut layers, 3),
            Self::Fcn5 => layers.dense_chain(&[28 * 28, 4096, 4096, 4096, 4096, 10]),
        }
        layers.variables
    }
}

fn resnet50(layers: &mut Layers) {
    layers.scaled_convolution([7, 7, 3, 64]);
    let mut input = 64;
    for (width, blocks) in [(64, 3), (128, 4), (256, 6), (512, 3)] {
        for block in 0..blocks {
            layers.scaled_convolution([1, 1, input, width]);
            layers.scaled_convolution([3, 3, width, width]);
            layers.scaled_convolution([1, 1, width, 4 * width]);
            if block == 0 {
                // The shortcut, where the number of channels changes.
                layers.scaled_convolution([1, 1, input, 4 * width]);
            }
            input = 4 * width;
        }
    }
    layers.dense_chain(&[2048, 1000]);
}

fn alexnet(layers: &mut Layers) {
    for shape in [[11, 11, 3, 64], [5, 5, 64, 192], [3, 3, 192, 384], [3, 3, 384, 384], [3, 3, 384, 256]] {
        layers.convolution(shape);
    }
    layers.dense_chain(&[5 * 5 * 256, 4096, 4096, 10]);
}

fn vgg16(layers: &mut Layers) {
    let mut input = 3;
    for (width, convolutions) in [(64, 2), (128, 2), (256, 3), (512, 3), (512, 3)] {
        for _ in 0..convolutions {
            layers.convolution([3, 3, input, width]);
            input = width;
        }
    }
    layers.dense_chain(&[7 * 7 * 512, 4096, 4096, 10]);
}

/// Adds for each gate a matrix for the input, one for the state, and a bias; then a dense layer.
fn recurrent(layers: &mut Layers, gates: usize) {
    const UNITS: u64 = 1024;
    for _ in 0..gates {
        layers.variable(&[UNITS, UNITS]);
        layers.variable(&[UNITS, UNITS]);
        layers.variable(&[UNITS]);
    }
    layers.dense_chain(&[UNITS, 1000]);
}

/// Adds the blocks, under their names in TensorFlow-Slim.
fn inception_v3(layers: &mut Layers) {
    // Stem.
    layers.branch(3, &[(3, 3, 32), (3, 3, 32), (3, 3, 64), (1, 1, 80), (3, 3, 192)]);
    // Mixed_5b, 5c, 5d.
    for (input, pooled) in [(192, 32), (256, 64), (288, 64)] {
        layers.branch(input, &[(1, 1, 64)]);
        layers.branch(input, &[(1, 1, 48), (5, 5, 64)]);
        layers.branch(input, &[(1, 1, 64), (3, 3, 96), (3, 3, 96)]);
        layers.branch(input, &[(1, 1, pooled)]);
    }
    // Mixed_6a.
    layers.branch(288, &[(3, 3, 384)]);
    layers.branch(288, &[(1, 1, 64), (3, 3, 96), (3, 3, 96)]);
    // Mixed_6b to 6e.
    for width in [128, 160, 160, 192] {
        layers.branch(768, &[(1, 1, 192)]);
        layers.branch(768, &[(1, 1, width), (1, 7, width), (7, 1, 192)]);
        layers.branch(768, &[(1, 1, width), (7, 1, width), (1, 7, width), (7, 1, width), (1, 7, 192)]);
        layers.branch(768, &[(1, 1, 192)]);
    }
    // Auxiliary head.
    layers.branch(768, &[(1, 1, 128), (5, 5, 768)]);
    layers.dense_chain(&[768, 10]);
    // Mixed_7a.
    layers.branch(768, &[(1, 1, 192), (3, 3, 320)]);
    layers.branch(768, &[(1, 1, 192), (1, 7, 192), (7, 1, 192), (3, 3, 192)]);
    // Mixed_7b, 7c.
    for input in [1280, 2048] {
        layers.branch(input, &[(1, 1, 320)]);
        layers.branch(input, &[(1, 1, 384)]);
        layers.branch(384, &[(1, 3, 384)]);
        layers.branch(384, &[(3, 1, 384)]);
        layers.branch(input, &[(1, 1, 448), (3, 3, 384)]);
        layers.branch(384, &[(1, 3, 384)]);
        layers.branch(384, &[(3, 1, 384)]);
        layers.branch(input, &[(1, 1, 192)]);
    }
    layers.dense_chain(&[2048, 10]);
}

/// Collects variables layer by layer. Convolutions are height, width, input and output channels.
#[derive(Debug, Default)]
struct Layers {
    variables: Vec<Variable>,
}

impl Layers {
    fn variable(&mut self, shape: &[u64]) {
        self.variables.push(Variable { shape: shape.to_vec() });
    }

    /// Adds a convolution with a bias, or with the offset of its batch normalisation instead.
    fn convolution(&mut self, shape: [u64; 4]) {
        self.variable(&shape);
        self.variable(&shape[3..]);
    }

    /// Adds a convolution with scale and offset of its batch normalisation.
    fn scaled_convolution(&mut self, shape: [u64; 4]) {
        self.convolution(shape);
        self.variable(&shape[3..]);
    }

    /// Adds convolutions one after the other: height, width and output channels of each.
    fn branch(&mut self, mut input: u64, convolutions: &[(u64, u64, u64)]) {
        for (height, width, output) in convolutions {
            self.convolution([*height, *width, input, *output]);
            input = *output;
        }
    }

    /// Adds dense layers with biases between vectors of these lengths.
    fn dense_chain(&mut self, lengths: &[u64]) {
        for pair in lengths.windows(2) {
            self.variable(pair);
            self.variable(&pair[1..]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn elements(model: Model) -> u64 {
        model.variables().iter().map(Variable::elements).sum()
    }

    #[test]
    fn the_models_match_the_paper_s_table() {
        for (model, mebibytes, variables) in [
            (Model::Alexnet, 176.42, 16),
            (Model::InceptionV3, 92.90, 196),
            (Model::Vgg16, 512.32, 32),
            (Model::Lstm, 35.93, 14),
            (Model::Gru, 27.92, 11),
            (Model::Fcn5, 204.47, 10),
        ] {
            assert_eq!(model.variables().len(), variables, "{model:?}");
            let size = (elements(model) * 4) as f64 / (1 << 20) as f64;
            // Half of the table's last digit.
            assert!((size - mebibytes).abs() <= 0.005, "{model:?} has {size} MiB, not {mebibytes}");
        }
    }

    #[test]
    fn resnet_50_has_the_standard_variables() {
        let variables = Model::Resnet50.variables();
        assert_eq!((variables.len(), elements(Model::Resnet50)), (161, 25_557_032));
        assert_eq!(variables[0].shape, [7, 7, 3, 64]);
        assert_eq!(variables[160].shape, [1000]);
    }

    #[test]
    fn the_largest_variables_match_the_architectures() {
        let largest = |model: Model| model.variables().iter().map(Variable::bytes).max();
        assert_eq!(largest(Model::Vgg16), Some(392 << 20));
        assert_eq!(largest(Model::Alexnet), Some(100 << 20));
        assert_eq!(largest(Model::Fcn5), Some(64 << 20));
        assert_eq!(largest(Model::Lstm), Some(4 << 20));
    }
}
