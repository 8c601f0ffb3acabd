//! The passes of a recurrent network that predicts the next character of a text, for texts of varying length.
//!
//! ```text
//!  part of the table    rows: looks the rows of the characters up      (samples, length) → (samples, length, embedding)
//!  worker               LSTM, linear layer, cross entropy
//! ```
//!
//! The length of a worker's texts differs from step to step, so the numbers of the characters, the rows and the gradients of the rows
//! cross with shapes that are not known before the step.

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::rnn::{LSTM, LSTMConfig, RNN as _};
use candle_nn::{VarBuilder, lstm};
use tonic_rdma_graph::GraphError;
use tonic_rdma_graph::dataflow::{Dim, Fact, NodeId, Outlet};
use tonic_rdma_tensor::Dtype;

use super::builder::{Builder, Described, first, floats, output, tape, varying};
use super::embedding;
use super::gradient::WorkerGradient;
use super::kernels::{Recorded, cross_entropy, inputs, linear, variable};
use super::shape::{Feed, Recurrent, Shape};
use crate::array::{Array, Block, Tape};
use crate::data::fortunes::CHARACTERS;
use crate::variables::Variable;

/// The variable with a row for each character.
pub(super) const EMBEDDING: &str = "embedding";

/// The largest absolute value of an element of a gradient (Graves 2013, arXiv:1308.0850, section 2.1, clips LSTM derivatives to ±1 or ±10).
const CLIP: f32 = 1.0;

/// The variables of the LSTM: names here, and names of candle.
const LSTM_VARIABLES: [(&str, &str); 4] = [
    ("lstm.input", "weight_ih_l0"),
    ("lstm.state", "weight_hh_l0"),
    ("lstm.input-bias", "bias_ih_l0"),
    ("lstm.state-bias", "bias_hh_l0"),
];

/// Returns names and shapes of the variables.
pub(super) fn shapes(model: &Recurrent) -> Vec<(String, Vec<usize>)> {
    let Recurrent { embedding, hidden } = *model;
    let gates = 4 * hidden;
    [
        (EMBEDDING, vec![CHARACTERS, embedding]),
        ("lstm.input", vec![gates, embedding]),
        ("lstm.state", vec![gates, hidden]),
        ("lstm.input-bias", vec![gates]),
        ("lstm.state-bias", vec![gates]),
        ("output.weight", vec![CHARACTERS, hidden]),
        ("output.bias", vec![CHARACTERS]),
    ]
    .map(|(name, dims)| (name.to_owned(), dims))
    .to_vec()
}

/// Returns the variables with their first values: uniform within ±1 / √hidden, as in PyTorch's LSTM.
pub(super) fn variables(model: &Recurrent, seed: u64) -> Vec<Variable> {
    let mut random = fastrand::Rng::with_seed(seed);
    let bound = 1.0 / (model.hidden.max(1) as f32).sqrt();
    let mut values = |dims: &[usize]| -> Vec<f32> {
        (0..dims.iter().product()).map(|_| (random.f32() * 2.0 - 1.0) * bound).collect()
    };
    shapes(model).into_iter().map(|(name, dims)| Variable { values: values(&dims), name, dims }).collect()
}

/// Adds the passes of a worker, and the lookup in the part of the table.
pub(super) fn add(
    builder: &mut Builder,
    shape: &Shape,
    model: &Recurrent,
    worker: usize,
    values: &HashMap<String, Outlet>,
) -> Result<Vec<(String, WorkerGradient)>, GraphError> {
    let of = |name: &str| match values.get(name) {
        Some(outlet) => Ok(*outlet),
        None => Err(GraphError::Node {
            node: name.to_owned(),
            reason: "the graph has no such variable".to_owned(),
        }),
    };
    let pass = Pass { model: *model, worker, samples: shape.share(worker).len(), batch: shape.batch };
    let characters = builder.feed(worker, Feed::Samples, pass.varying(Dtype::U32, &[]))?;
    let targets = builder.feed(worker, Feed::Targets, pass.varying(Dtype::U32, &[]))?;
    let rows = pass.rows(builder, shape.chief(), of(EMBEDDING)?, characters)?;
    let lstm_variables = LSTM_VARIABLES.iter().map(|(name, _)| of(name)).collect::<Result<Vec<_>, _>>()?;
    let states = pass.states(builder, rows, &lstm_variables)?;
    let logits = pass.logits(builder, first(states), [of("output.weight")?, of("output.bias")?])?;
    let loss = pass.loss(builder, first(logits), targets)?;
    let above = pass.backward(builder, "output", output(logits, 1), output(loss, 1), pass.of_output())?;
    let mut gradients = Vec::new();
    for (place, name) in ["output.weight", "output.bias"].into_iter().enumerate() {
        gradients
            .push((name.to_owned(), WorkerGradient::Dense(pass.clip(builder, name, output(above, place))?)));
    }
    let below = pass.backward(builder, "lstm", output(states, 1), output(above, 2), pass.of_lstm())?;
    for (place, (name, _)) in LSTM_VARIABLES.iter().enumerate() {
        gradients.push((
            (*name).to_owned(),
            WorkerGradient::Dense(pass.clip(builder, name, output(below, place))?),
        ));
    }
    let of_rows = pass.clip(builder, EMBEDDING, output(below, LSTM_VARIABLES.len()))?;
    gradients.push((EMBEDDING.to_owned(), WorkerGradient::Rows { rows: characters, gradients: of_rows }));
    Ok(gradients)
}

/// Returns the mean cross entropy of each next character, and the share that is predicted right.
pub(crate) fn test(
    model: &Recurrent,
    variables: &[(String, Block<f32>)],
    batches: impl Iterator<Item = (Block<u32>, Block<u32>)>,
) -> Result<(f64, f64), tonic_rdma_graph::dataflow::KernelError> {
    let of = |name: &str| {
        let found = variables.iter().find(|(known, _)| known == name);
        found
            .map(|(_, values)| Array::Floats(values.clone()))
            .ok_or_else(|| format!("there is no variable {name}"))
    };
    let table = of(EMBEDDING)?;
    let (mut sum, mut correct, mut number) = (0.0, 0, 0);
    for (characters, targets) in batches {
        let rows = embedding::rows(table.as_floats()?, &characters)?;
        let of_lstm = LSTM_VARIABLES
            .iter()
            .map(|(name, _)| Ok(of(name)?.into_tensor()?))
            .collect::<Result<Vec<Tensor>, tonic_rdma_graph::dataflow::KernelError>>()?;
        let steps = steps_of(&rows.into_tensor()?)?;
        let states = run(model, &of_lstm, &steps)?.detach();
        let (weight, bias) = (of("output.weight")?.into_tensor()?, of("output.bias")?.into_tensor()?);
        let (logits, _) = linear(&states, weight, &bias, false, true)?;
        let targets = Array::Words(targets).into_tensor()?.flatten_all()?;
        let mask = targets.gt(0_u32)?.to_dtype(DType::F32)?;
        sum += f64::from(cross_entropy(&logits, &targets, &mask)?.0);
        let found = logits.argmax(1)?.eq(&targets)?.to_dtype(DType::F32)?;
        correct += (found * &mask)?.sum_all()?.to_scalar::<f32>()? as u64;
        number += mask.sum_all()?.to_scalar::<f32>()? as u64;
    }
    let number = number.max(1) as f64;
    Ok((sum / number, correct as f64 / number))
}

/// Returns the input of each time step.
fn steps_of(rows: &Tensor) -> candle_core::Result<Vec<Tensor>> {
    (0..rows.dim(1)?).map(|step| rows.narrow(1, step, 1)?.squeeze(1)?.contiguous()).collect()
}

/// Runs the LSTM over all time steps. Returns its states, of shape (samples · length, hidden).
fn run(model: &Recurrent, variables: &[Tensor], steps: &[Tensor]) -> candle_core::Result<Tensor> {
    let named =
        LSTM_VARIABLES.iter().zip(variables).map(|((_, name), tensor)| ((*name).to_owned(), tensor.clone()));
    let variables = VarBuilder::from_tensors(named.collect(), DType::F32, &Device::Cpu);
    let network: LSTM = lstm(model.embedding, model.hidden, LSTMConfig::default(), variables)?;
    let samples = steps.first().map_or(Ok(0), |step| step.dim(0))?;
    let mut state = network.zero_state(samples)?;
    let mut states = Vec::with_capacity(steps.len());
    for step in steps {
        state = network.step(step, &state)?;
        states.push(state.h.clone());
    }
    Tensor::stack(&states, 1)?.reshape((samples * steps.len(), model.hidden))
}

/// The passes of one worker.
struct Pass {
    model: Recurrent,
    worker: usize,
    samples: usize,
    batch: usize,
}

impl Pass {
    /// Returns the name of the length of this worker's texts.
    fn length(&self) -> String {
        format!("L{}", self.worker)
    }

    fn varying(&self, dtype: Dtype, rest: &[usize]) -> Fact {
        varying(dtype, self.samples, &self.length(), rest)
    }

    /// Returns the fact of a value for each character.
    fn flat(&self, columns: usize) -> Fact {
        let rows = Dim::Symbolic(format!("{}*{}", self.samples, self.length()).into());
        Fact { dtype: Dtype::F32, dims: vec![rows, Dim::Known(columns as u64)] }
    }

    fn of_lstm(&self) -> Vec<Fact> {
        let shapes = shapes(&self.model);
        let of = |(name, _): &(&str, &str)| {
            let dims = shapes.iter().find(|(known, _)| known == name).map_or(&[][..], |(_, dims)| dims);
            floats(dims)
        };
        let rows = self.varying(Dtype::F32, &[self.model.embedding]);
        LSTM_VARIABLES.iter().map(of).chain([rows]).collect()
    }

    fn of_output(&self) -> Vec<Fact> {
        let hidden = self.model.hidden;
        vec![floats(&[CHARACTERS, hidden]), floats(&[CHARACTERS]), self.flat(hidden)]
    }

    fn node(
        &self,
        name: &str,
        kind: &'static str,
        inputs: Vec<Outlet>,
        outputs: Vec<Fact>,
        stays: bool,
    ) -> Described {
        let name = format!("{name}@{}", self.worker);
        // The length is not known. All nodes of a worker have the same one.
        let work = outputs.iter().map(|fact| fact.bytes(1) as usize).sum::<usize>() * self.samples;
        Described { part: self.worker, name, kind, inputs, outputs, work, stays }
    }

    fn rows(
        &self,
        builder: &mut Builder,
        part: usize,
        table: Outlet,
        characters: Outlet,
    ) -> Result<Outlet, GraphError> {
        let facts = vec![self.varying(Dtype::F32, &[self.model.embedding])];
        let node = Described { part, ..self.node("rows", "Lookup", vec![table, characters], facts, false) };
        Ok(first(builder.node(node, |_, arrays| {
            let [table, characters] = inputs(arrays)?;
            Ok(vec![embedding::rows(table.as_floats()?, characters.as_words()?)?])
        })?))
    }

    fn states(
        &self,
        builder: &mut Builder,
        rows: Outlet,
        variables: &[Outlet],
    ) -> Result<NodeId, GraphError> {
        let model = self.model;
        let inputs = [rows].iter().chain(variables).copied().collect();
        let node = self.node("forward.lstm", "LSTM", inputs, vec![self.flat(model.hidden), tape()], true);
        builder.node(node, move |_, arrays| {
            let mut arrays = arrays.into_iter();
            let rows = arrays.next().ok_or("the LSTM has no input")?.into_tensor()?;
            let mut variables = arrays.map(variable).collect::<Result<Vec<Var>, _>>()?;
            let tensors: Vec<Tensor> =
                variables.iter().map(|variable| variable.as_tensor().clone()).collect();
            let steps =
                steps_of(&rows)?.iter().map(Var::from_tensor).collect::<candle_core::Result<Vec<Var>>>()?;
            let inputs: Vec<Tensor> = steps.iter().map(|step| step.as_tensor().clone()).collect();
            let output = run(&model, &tensors, &inputs)?;
            variables.extend(steps);
            let states = Array::Tensor(output.detach());
            let tape = LstmTape { recorded: Recorded { variables, output }, of_steps: LSTM_VARIABLES.len() };
            Ok(vec![states, Array::Tape(Arc::new(tape))])
        })
    }

    fn logits(
        &self,
        builder: &mut Builder,
        states: Outlet,
        [weight, bias]: [Outlet; 2],
    ) -> Result<NodeId, GraphError> {
        let node = self.node(
            "forward.output",
            "Linear",
            vec![states, weight, bias],
            vec![self.flat(CHARACTERS), tape()],
            true,
        );
        builder.node(node, |_, arrays| {
            let [states, weight, bias] = inputs(arrays)?;
            let (weight, bias) = (weight.into_tensor()?, bias.into_tensor()?);
            let (logits, tape) = linear(&states.into_tensor()?, weight, &bias, false, false)?;
            Ok(vec![Array::Tensor(logits), Array::Tape(Arc::new(tape))])
        })
    }

    fn loss(&self, builder: &mut Builder, logits: Outlet, targets: Outlet) -> Result<NodeId, GraphError> {
        let share = self.samples as f32 / self.batch as f32;
        let facts = vec![floats(&[1]), self.flat(CHARACTERS)];
        let node = self.node("loss", "CrossEntropy", vec![logits, targets], facts, true);
        let node = builder.node(node, move |_, arrays| {
            let [logits, targets] = inputs(arrays)?;
            let targets = targets.into_tensor()?.flatten_all()?;
            // The worker's mean over its characters, by its share of the samples. Number 0 is no character.
            let mask = targets.gt(0_u32)?.to_dtype(DType::F32)?;
            let number = mask.sum_all()?.to_scalar::<f32>()?.max(1.0);
            let weights = mask.affine(f64::from(share / number), 0.0)?;
            let (loss, gradient) = cross_entropy(&logits.into_tensor()?, &targets, &weights)?;
            Ok(vec![Array::floats(&[1], vec![loss])?, Array::Tensor(gradient)])
        })?;
        builder.loss(first(node))?;
        Ok(node)
    }

    /// Adds a backward pass. Its outputs are made in a varying number of allocations, so they don't cross: those of the clips do.
    fn backward(
        &self,
        builder: &mut Builder,
        name: &str,
        tape: Outlet,
        gradient: Outlet,
        outputs: Vec<Fact>,
    ) -> Result<NodeId, GraphError> {
        let number = outputs.len();
        let node = self.node(&format!("backward.{name}"), "Backward", vec![tape, gradient], outputs, true);
        builder.node(node, move |_, arrays| {
            let [tape, gradient] = inputs(arrays)?;
            let Array::Tape(tape) = tape else { return Err("the forward pass kept nothing".into()) };
            let gradients = tape.backward(&gradient.into_tensor()?)?;
            Ok(gradients.into_iter().take(number).map(Array::Tensor).collect())
        })
    }

    fn clip(&self, builder: &mut Builder, name: &str, gradient: Outlet) -> Result<Outlet, GraphError> {
        let fact = builder.graph.fact(gradient).cloned().unwrap_or_else(tape);
        let node = self.node(&format!("clip.{name}"), "Clip", vec![gradient], vec![fact], false);
        Ok(first(builder.node(node, |_, arrays| {
            let [gradient] = inputs(arrays)?;
            Ok(vec![Array::mapped(&gradient.into_tensor()?, |value| value.clamp(-CLIP, CLIP))?])
        })?))
    }
}

/// What the backward pass of the LSTM needs.
#[derive(Debug)]
struct LstmTape {
    recorded: Recorded,
    /// The place of the first time step among the variables.
    of_steps: usize,
}

impl Tape for LstmTape {
    /// Returns the gradients of the variables, and that of the input of all time steps.
    fn backward(&self, gradient: &Tensor) -> candle_core::Result<Vec<Tensor>> {
        let mut gradients = self.recorded.backward(gradient)?;
        let steps = gradients.split_off(self.of_steps.min(gradients.len()));
        gradients.push(Tensor::stack(&steps, 1)?);
        Ok(gradients)
    }
}
