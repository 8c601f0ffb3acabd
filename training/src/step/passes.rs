//! The passes of a worker, layer by layer.
//!
//! Texts have varying lengths. So the numbers of the characters, their rows in the table and the gradients of the rows cross with shapes
//! that are not known before the step:
//!
//! ```text
//!  part of the table    rows: looks the rows of the characters up      (samples, length) → (samples, length, embedding)
//!  worker               LSTM, linear layer, cross entropy
//! ```

use std::sync::Arc;

use tonic_rdma_graph::GraphError;
use tonic_rdma_graph::dataflow::{Dim, Fact, Outlet};
use tonic_rdma_tensor::Dtype;

use super::{Builder, Feed, Shape, first, inputs, known, output};
use crate::array::Array;
use crate::data::SIDE;
use crate::layer::{Gradients, cross_entropy};
use crate::network::{EMBEDDING, TABLE, rows};

/// The largest absolute value of an element of a gradient of texts (Graves 2013, arXiv:1308.0850, section 2.1, clips LSTM derivatives to
/// ±1 or ±10).
const CLIP: f32 = 1.0;

impl Shape {
    /// Adds the passes of a worker. `values` returns the output that gives a variable out. Returns what the worker hands in for each
    /// variable, in the order in which it is computed.
    pub(super) fn add_worker(
        &self,
        builder: &mut Builder,
        worker: usize,
        values: &impl Fn(&str) -> Result<Outlet, GraphError>,
    ) -> Result<Vec<(String, Vec<Outlet>)>, GraphError> {
        let (model, samples, texts) = (self.model, self.share(worker).len(), self.model.reads_texts());
        let varying = |dtype, rest: &[usize]| {
            let length = Dim::Symbolic(format!("L{worker}").into());
            let rest = rest.iter().map(|length| Dim::Known(*length as u64));
            Fact { dtype, dims: [Dim::Known(samples as u64), length].into_iter().chain(rest).collect() }
        };
        // What is not known before the step, and never crosses.
        let inner = || known(Dtype::U8, &[0]);
        let (of_samples, of_targets) = match texts {
            true => (varying(Dtype::U32, &[]), varying(Dtype::U32, &[])),
            false => (known(Dtype::F32, &[samples, 1, SIDE, SIDE]), known(Dtype::U32, &[samples])),
        };
        let fed = builder.feed(worker, Feed::Samples, of_samples)?;
        let targets = builder.feed(worker, Feed::Targets, of_targets)?;
        let of_rows = varying(Dtype::F32, &[EMBEDDING]);
        let mut value = fed;
        if texts {
            let name = format!("rows@{worker}");
            let look_up = |_, arrays| {
                let [table, characters] = inputs(arrays)?;
                Ok(vec![rows(table.as_floats()?, characters.as_words()?)?])
            };
            let facts = vec![of_rows.clone()];
            value =
                first(builder.node(self.chief(), name, vec![values(TABLE)?, fed], facts, false, look_up)?);
        }
        let layers = model.layers();
        let mut tapes = Vec::new();
        for (index, layer) in layers.iter().enumerate() {
            // The gradient of the pictures is not needed.
            let gradients = if index == 0 && !texts { Gradients::Variables } else { Gradients::All };
            let variables = layer.variables.iter().map(|(name, _)| values(name));
            let of_node = [Ok(value)].into_iter().chain(variables).collect::<Result<_, _>>()?;
            let of_layer = layer.clone();
            let forward = move |_, arrays: Vec<Array>| {
                let mut tensors = arrays.into_iter().map(Array::into_tensor);
                let input = tensors.next().ok_or("a layer has no input")??;
                let (output, tape) =
                    of_layer.forward(&input, tensors.collect::<Result<_, _>>()?, gradients)?;
                Ok(vec![Array::Tensor(output), Array::Tape(Arc::new(tape))])
            };
            let name = format!("forward.{}@{worker}", layer.name);
            let node = builder.node(worker, name, of_node, vec![inner(), inner()], true, forward)?;
            value = first(node);
            tapes.push(output(node, 1));
        }
        // Each worker has its share of the batch's mean, so that the gradients of all workers add up to that of the mean.
        let share = samples as f32 / self.batch as f32;
        let loss = move |_, arrays| {
            let [logits, targets] = inputs(arrays)?;
            let targets = targets.into_tensor()?.flatten_all()?;
            let weights = model.weights(&targets, share)?;
            let (loss, gradient) = cross_entropy(&logits.into_tensor()?, &targets, &weights)?;
            Ok(vec![Array::floats(&[1], vec![loss])?, Array::Tensor(gradient)])
        };
        let facts = vec![known(Dtype::F32, &[1]), inner()];
        let loss = builder.node(worker, format!("loss@{worker}"), vec![value, targets], facts, true, loss)?;
        builder.graph.result(first(loss))?;
        let mut gradient = output(loss, 1);
        let mut handed = Vec::new();
        for (index, (layer, tape)) in layers.iter().zip(tapes).enumerate().rev() {
            let number = layer.variables.len();
            let mut facts: Vec<Fact> =
                layer.variables.iter().map(|(_, dims)| known(Dtype::F32, dims)).collect();
            if index > 0 || texts {
                facts.push(if index == 0 { of_rows.clone() } else { inner() });
            }
            let backward = move |_, arrays| {
                let [tape, gradient] = inputs(arrays)?;
                let Array::Tape(tape) = tape else { return Err("the forward pass kept nothing".into()) };
                let gradients = tape.backward(&gradient.into_tensor()?)?.into_iter().enumerate();
                let crosses = |place| !texts && place < number;
                let array = |(place, gradient)| match crosses(place) {
                    true => Array::take(gradient),
                    false => Ok(Array::Tensor(gradient)),
                };
                gradients.map(array).collect()
            };
            let name = format!("backward.{}@{worker}", layer.name);
            // The gradients of texts are made in a varying number of allocations, so they don't cross: those of the clips do.
            let node = builder.node(worker, name, vec![tape, gradient], facts, texts, backward)?;
            for (place, (name, _)) in layer.variables.iter().enumerate() {
                handed.push((name.clone(), vec![self.add_clip(builder, worker, name, output(node, place))?]));
            }
            gradient = output(node, number);
        }
        if texts {
            handed.push((TABLE.to_owned(), vec![fed, self.add_clip(builder, worker, TABLE, gradient)?]));
        }
        Ok(handed)
    }

    /// Adds the clip of a gradient of texts.
    fn add_clip(
        &self,
        builder: &mut Builder,
        worker: usize,
        name: &str,
        gradient: Outlet,
    ) -> Result<Outlet, GraphError> {
        if !self.model.reads_texts() {
            return Ok(gradient);
        }
        let facts = builder.graph.fact(gradient).cloned().into_iter().collect();
        let clip = |_, arrays| {
            let [gradient] = inputs(arrays)?;
            Ok(vec![Array::clipped(&gradient.into_tensor()?, CLIP)?])
        };
        builder.node(worker, format!("clip.{name}@{worker}"), vec![gradient], facts, false, clip).map(first)
    }
}
