//! The networks, their variables, and their test.

use candle_core::{DType, Tensor};
use serde::{Deserialize, Serialize};

use crate::array::{Array, Block, Error};
use crate::data::{CHARACTERS, CLASSES, SIDE, Samples};
use crate::layer::{Gradients, Kind, Layer, cross_entropy};

/// The variable with a row for each character.
pub(crate) const TABLE: &str = "embedding";

/// The length of a character's row, and the number of states of the LSTM. Tests have a small one, which is
/// trained soon.
pub(crate) const EMBEDDING: usize = if cfg!(test) { 8 } else { 64 };
pub(crate) const HIDDEN: usize = if cfg!(test) { 6 } else { 128 };

/// Samples of one forward pass of a test.
const TEST_BATCH: usize = 250;

/// The networks of this program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Model {
    /// Two convolutions and two linear layers, 147 146 parameters: much computation for each gradient
    Cnn,
    /// Three linear layers, 669 706 parameters: little computation for each gradient
    Mlp,
    /// Three wide linear layers, 5 824 522 parameters: bound by the communication, with small batches
    Wide,
    /// An LSTM that predicts the next character of texts of varying length
    Lstm,
}

/// Names and values of variables.
pub(crate) type Values = Vec<(String, Block<f32>)>;

/// A variable between two steps.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Variable {
    pub(crate) name: String,
    pub(crate) dims: Vec<usize>,
    pub(crate) values: Vec<f32>,
    /// The momentum of each value.
    pub(crate) velocities: Vec<f32>,
}

impl Model {
    /// Returns the name, for people to read.
    pub(crate) fn title(self) -> String {
        if self.reads_texts() { format!("LSTM with {HIDDEN} states") } else { format!("{self:?}") }
    }

    /// Returns whether the samples are texts.
    pub(crate) fn reads_texts(self) -> bool {
        self == Self::Lstm
    }

    /// Returns the layers, from the input on.
    pub(crate) fn layers(self) -> Vec<Layer> {
        const CONVOLUTION: Kind = Kind::Convolution;
        const RELU: Kind = Kind::Linear { relu: true };
        const LAST: Kind = Kind::Linear { relu: false };
        const PIXELS: usize = SIDE * SIDE;
        let layer = |kind, name: &str, variables: &[(&str, Vec<usize>)]| {
            let variables = variables.iter().map(|(name, dims)| ((*name).to_owned(), dims.clone()));
            Layer { kind, name: name.to_owned(), variables: variables.collect() }
        };
        let of_pictures = |layers: &[(Kind, usize, usize)]| {
            let layer = |(index, (kind, inputs, outputs)): (usize, &(Kind, usize, usize))| {
                let kernel: &[usize] = if *kind == CONVOLUTION { &[5, 5] } else { &[] };
                let dims = [&[*outputs, *inputs], kernel].concat();
                let (weight, bias) = (format!("weight.{index}"), format!("bias.{index}"));
                layer(*kind, &index.to_string(), &[(&weight, dims), (&bias, vec![*outputs])])
            };
            layers.iter().enumerate().map(layer).collect()
        };
        match self {
            // 28 × 28 pixels, 12 × 12 after the first layer, 4 × 4 after the second.
            Self::Cnn => of_pictures(&[
                (CONVOLUTION, 1, 16),
                (CONVOLUTION, 16, 32),
                (RELU, 32 * 4 * 4, 256),
                (LAST, 256, CLASSES),
            ]),
            Self::Mlp => of_pictures(&[(RELU, PIXELS, 512), (RELU, 512, 512), (LAST, 512, CLASSES)]),
            Self::Wide => of_pictures(&[(RELU, PIXELS, 2048), (RELU, 2048, 2048), (LAST, 2048, CLASSES)]),
            Self::Lstm => {
                let gates = 4 * HIDDEN;
                let lstm = [
                    ("lstm.input", vec![gates, EMBEDDING]),
                    ("lstm.state", vec![gates, HIDDEN]),
                    ("lstm.input-bias", vec![gates]),
                    ("lstm.state-bias", vec![gates]),
                ];
                let output = [("output.weight", vec![CHARACTERS, HIDDEN]), ("output.bias", vec![CHARACTERS])];
                vec![layer(Kind::Lstm, "lstm", &lstm), layer(LAST, "output", &output)]
            }
        }
    }

    /// Returns names and shapes of all variables: those of the layers, after the table of characters.
    pub(crate) fn shapes(self) -> Vec<(String, Vec<usize>)> {
        let table = self.reads_texts().then(|| (TABLE.to_owned(), vec![CHARACTERS, EMBEDDING]));
        table.into_iter().chain(self.layers().into_iter().flat_map(|layer| layer.variables)).collect()
    }

    /// Returns the number of elements of all variables.
    pub(crate) fn parameters(self) -> usize {
        self.shapes().iter().map(|(_, dims)| dims.iter().product::<usize>()).sum()
    }

    /// Returns the variables with their first values, and velocities of 0. Weights of networks for pictures are uniform, with the
    /// variance 2 / (inputs of an output), as in He et al. 2015 (arXiv:1502.01852, section 2.2), and biases
    /// are 0. All variables of the LSTM are uniform within ±1 / √states, as in PyTorch's LSTM.
    pub(crate) fn variables(self, seed: u64) -> Vec<Variable> {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut variable = |(name, dims): (String, Vec<usize>)| {
            let bound = match dims.as_slice() {
                _ if self.reads_texts() => 1.0 / (HIDDEN as f32).sqrt(),
                [_, inputs @ ..] if !inputs.is_empty() => {
                    (6.0 / inputs.iter().product::<usize>() as f32).sqrt()
                }
                _ => 0.0,
            };
            let mut value = || if bound == 0.0 { 0.0 } else { (random.f32() * 2.0 - 1.0) * bound };
            let values: Vec<f32> = (0..dims.iter().product()).map(|_| value()).collect();
            Variable { velocities: vec![0.0; values.len()], values, name, dims }
        };
        self.shapes().into_iter().map(&mut variable).collect()
    }

    /// Returns the weight of each target in the loss. They add up to `share`.
    pub(crate) fn weights(self, targets: &Tensor, share: f32) -> candle_core::Result<Tensor> {
        // Number 0 is no character.
        let counted = if self.reads_texts() { targets.gt(0_u32)? } else { targets.ones_like()? };
        let counted = counted.to_dtype(DType::F32)?;
        let number = counted.sum_all()?.to_scalar::<f32>()?.max(1.0);
        counted.affine(f64::from(share / number), 0.0)
    }

    /// Returns the sum of the losses of some samples, the number of targets that are predicted right, and the
    /// number of all targets.
    pub(crate) fn test(
        self,
        variables: &Values,
        samples: &Samples,
        mut which: impl Iterator<Item = usize>,
    ) -> Result<[f64; 3], Error> {
        let of = |name: &str| {
            let found = variables.iter().find(|(known, _)| known == name);
            found.map(|(_, values)| values).ok_or_else(|| format!("there is no variable {name}"))
        };
        let layers = self.layers();
        let mut sums = [0.0; 3];
        loop {
            let batch: Vec<usize> = which.by_ref().take(TEST_BATCH).collect();
            if batch.is_empty() {
                return Ok(sums);
            }
            let (input, targets) = samples.batch(batch.into_iter())?;
            let mut values = match self.reads_texts() {
                true => rows(of(TABLE)?, input.as_words()?)?.into_tensor()?,
                false => input.into_tensor()?,
            };
            for layer in &layers {
                let of_layer = layer.variables.iter().map(|(name, _)| of(name)?.clone().into_tensor());
                values = layer.forward(&values, of_layer.collect::<Result<_, _>>()?, Gradients::None)?.0;
            }
            let targets = targets.into_tensor()?.flatten_all()?;
            let mask = self.weights(&targets, 1.0)?.gt(0.0)?.to_dtype(DType::F32)?;
            let found = (values.argmax(1)?.eq(&targets)?.to_dtype(DType::F32)? * &mask)?;
            let of_batch = [
                cross_entropy(&values, &targets, &mask)?.0,
                found.sum_all()?.to_scalar()?,
                mask.sum_all()?.to_scalar()?,
            ];
            sums.iter_mut().zip(of_batch).for_each(|(sum, value)| *sum += f64::from(value));
        }
    }
}

/// Returns the rows of `table` with these numbers, which have the shape (samples, length), as an array of
/// shape (samples, length, columns).
pub(crate) fn rows(table: &Block<f32>, numbers: &Block<u32>) -> Result<Array, Error> {
    let [height, columns] = table.dims() else {
        return Err(format!("a table has two dimensions, found {:?}", table.dims()).into());
    };
    let mut rows = Vec::with_capacity(numbers.values().len() * columns);
    for number in numbers.values() {
        let from = *number as usize * columns;
        let row = table.values().get(from..from + columns);
        rows.extend_from_slice(row.ok_or_else(|| format!("a table of {height} rows has no row {number}"))?);
    }
    Array::floats(&[numbers.dims(), &[*columns]].concat(), rows)
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;
    use crate::data::tests::samples;

    /// Returns the loss of samples, and the gradients from the last layer to the first, computed layer by
    /// layer.
    fn by_layer(model: Model, variables: &[Tensor], range: std::ops::Range<usize>) -> (f32, Vec<Vec<f32>>) {
        let (pictures, classes) = samples(16).batch(range.clone()).unwrap();
        let (mut value, classes) = (pictures.into_tensor().unwrap(), classes.into_tensor().unwrap());
        let mut tapes = Vec::new();
        for (index, pair) in variables.chunks(2).enumerate() {
            let gradients = if index == 0 { Gradients::Variables } else { Gradients::All };
            let (output, tape) = model.layers()[index].forward(&value, pair.to_vec(), gradients).unwrap();
            tapes.push(tape);
            value = output;
        }
        let weights = model.weights(&classes, range.len() as f32).unwrap();
        let (loss, mut gradient) = cross_entropy(&value, &classes, &weights).unwrap();
        let mut all = Vec::new();
        for tape in tapes.iter().rev() {
            let mut gradients = tape.backward(&gradient).unwrap();
            gradient = gradients.get(2).cloned().unwrap_or(gradient);
            gradients.truncate(2);
            all.extend(gradients.iter().map(|each| each.flatten_all().unwrap().to_vec1::<f32>().unwrap()));
        }
        (loss, all)
    }

    fn tensors(model: Model, seed: u64) -> Vec<Tensor> {
        let tensor = |of: Variable| Tensor::from_vec(of.values, of.dims, &Device::Cpu).unwrap();
        model.variables(seed).into_iter().map(tensor).collect()
    }

    #[test]
    fn the_networks_have_the_stated_numbers_of_parameters() {
        for (model, elements) in [(Model::Cnn, 147_146), (Model::Mlp, 669_706), (Model::Wide, 5_824_522)] {
            assert_eq!(model.parameters(), elements);
            let values: usize = model.variables(1).iter().map(|variable| variable.values.len()).sum();
            assert_eq!(values, elements);
        }
    }

    #[test]
    fn the_backward_pass_layer_by_layer_equals_that_of_candle() {
        for model in [Model::Cnn, Model::Mlp] {
            let variables: Vec<Var> =
                tensors(model, 2).iter().map(|tensor| Var::from_tensor(tensor).unwrap()).collect();
            let plain: Vec<Tensor> = variables.iter().map(|each| each.as_detached_tensor()).collect();
            let (pictures, classes) = samples(16).batch(0..8).unwrap();
            let (mut values, classes) = (pictures.into_tensor().unwrap(), classes.into_tensor().unwrap());
            for (index, pair) in variables.chunks(2).enumerate() {
                let (weight, bias) = (pair[0].as_tensor(), pair[1].as_tensor());
                let last = 2 * index + 2 == variables.len();
                values = match model.layers()[index].kind {
                    Kind::Convolution => {
                        let bias = bias.reshape((1, (), 1, 1)).unwrap();
                        let sums = values.conv2d(weight, 0, 1, 1, 1).unwrap().broadcast_add(&bias).unwrap();
                        sums.relu().unwrap().max_pool2d(2).unwrap()
                    }
                    _ => {
                        let product = values.flatten_from(1).unwrap().matmul(&weight.t().unwrap()).unwrap();
                        let sums = product.broadcast_add(bias).unwrap();
                        if last { sums } else { sums.relu().unwrap() }
                    }
                };
            }
            let loss = candle_nn::loss::cross_entropy(&values, &classes).unwrap();
            let whole = loss.backward().unwrap();
            let (sum, by_layer) = by_layer(model, &plain, 0..8);
            assert!((sum / 8.0 - loss.to_scalar::<f32>().unwrap()).abs() < 1e-5);
            let ordered = variables.chunks(2).rev().flatten();
            for (variable, gradient) in ordered.zip(by_layer) {
                let expected = whole.get(variable).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
                assert!(expected.iter().any(|value| *value != 0.0));
                assert_eq!(expected.len(), gradient.len());
                for (one, other) in expected.iter().zip(&gradient) {
                    assert!((one - other / 8.0).abs() <= 1e-6 + 1e-4 * one.abs(), "{one} {other}");
                }
            }
        }
    }

    #[test]
    fn the_gradients_of_shards_add_up_to_those_of_the_batch() {
        let variables = tensors(Model::Cnn, 3);
        let (loss, whole) = by_layer(Model::Cnn, &variables, 0..9);
        let parts = [0..5, 5..9].map(|range| by_layer(Model::Cnn, &variables, range));
        assert!((loss - parts[0].0 - parts[1].0).abs() < 1e-4);
        for (index, gradient) in whole.iter().enumerate() {
            for (at, value) in gradient.iter().enumerate() {
                let sum = parts[0].1[index][at] + parts[1].1[index][at];
                assert!((sum - value).abs() <= 1e-5 + 1e-4 * value.abs(), "{sum} {value}");
            }
        }
    }

    #[test]
    fn rows_are_looked_up_or_named() {
        let table = Block::new(&[3, 2], vec![0.0, 1.0, 2.0, 3.0, 4.0, 5.0]).unwrap();
        let numbers = |numbers: &[u32]| Block::new(&[1, numbers.len()], numbers.to_vec()).unwrap();
        let found = rows(&table, &numbers(&[2, 0, 2])).unwrap();
        assert_eq!(found.as_floats().unwrap().dims(), [1, 3, 2]);
        assert_eq!(found.as_floats().unwrap().values(), [4.0, 5.0, 0.0, 1.0, 4.0, 5.0]);
        assert!(rows(&table, &numbers(&[3])).unwrap_err().to_string().contains("no row 3"));
    }
}
