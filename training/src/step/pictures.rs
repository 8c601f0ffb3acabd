//! The passes of networks for pictures, layer by layer.

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::{Device, Tensor, Var};
use tonic_rdma_graph::GraphError;
use tonic_rdma_graph::dataflow::{NodeId, Outlet};
use tonic_rdma_tensor::Dtype;

use super::builder::{Builder, Described, first, floats, known, output, tape};
use super::gradient::WorkerGradient;
use super::kernels::{Recorded, cross_entropy, inputs, linear, variable};
use super::shape::{Feed, Shape};
use crate::array::{Array, Tape};
use crate::data::{CLASSES, SIDE};
use crate::model::{Architecture, LayerKind, LayerShape, Network, convolve, values};
use crate::variables::Variable;

/// Returns the variables with their first values: weight and bias of each layer, from the first layer on.
pub(super) fn variables(architecture: Architecture, seed: u64) -> candle_core::Result<Vec<Variable>> {
    let network = Network::random(architecture, seed)?;
    let parameters = network.layers().flat_map(|(weight, bias)| [weight, bias]);
    let variable = |((name, dims), parameter)| Ok(Variable { name, dims, values: values(parameter)? });
    shapes(architecture).into_iter().zip(parameters).map(variable).collect()
}

/// Returns names and shapes of the variables.
pub(super) fn shapes(architecture: Architecture) -> Vec<(String, Vec<usize>)> {
    let of_layer = |(index, layer): (usize, LayerShape)| {
        [(format!("weight.{index}"), layer.weight()), (format!("bias.{index}"), vec![layer.outputs])]
    };
    architecture.shapes().into_iter().enumerate().flat_map(of_layer).collect()
}

/// Adds the passes of a worker.
pub(super) fn add(
    builder: &mut Builder,
    shape: &Shape,
    architecture: Architecture,
    worker: usize,
    values: &HashMap<String, Outlet>,
) -> Result<Vec<(String, WorkerGradient)>, GraphError> {
    let samples = shape.share(worker).len();
    let mut above = builder.feed(worker, Feed::Samples, floats(&[samples, 1, SIDE, SIDE]))?;
    let targets = builder.feed(worker, Feed::Targets, known(Dtype::U32, &[samples]))?;
    let mut tapes = Vec::new();
    let mut of_sample = vec![1, SIDE, SIDE];
    for (index, layer) in architecture.shapes().into_iter().enumerate() {
        let variables = variables_of(values, index)?;
        let below = of_sample.clone();
        of_sample = layer.output(&below);
        let forward = forward(builder, worker, samples, (index, layer), above, variables, &of_sample)?;
        above = first(forward);
        tapes.push((index, layer, output(forward, 1), below));
    }
    let loss = loss(builder, worker, samples, shape.batch, above, targets)?;
    let mut gradient = output(loss.node, 1);
    let mut gradients = Vec::new();
    for (index, layer, tape, below) in tapes.into_iter().rev() {
        let outputs = backward(builder, worker, samples, (index, layer), tape, gradient, &below)?;
        for (place, name) in [format!("weight.{index}"), format!("bias.{index}")].into_iter().enumerate() {
            gradients.push((name, WorkerGradient::Dense(output(outputs, place))));
        }
        gradient = output(outputs, 2);
    }
    Ok(gradients)
}

fn variables_of(values: &HashMap<String, Outlet>, layer: usize) -> Result<[Outlet; 2], GraphError> {
    let of = |name: String| match values.get(&name) {
        Some(outlet) => Ok(*outlet),
        None => Err(GraphError::Node { node: name, reason: "the graph has no such variable".to_owned() }),
    };
    Ok([of(format!("weight.{layer}"))?, of(format!("bias.{layer}"))?])
}

fn forward(
    builder: &mut Builder,
    worker: usize,
    samples: usize,
    (index, layer): (usize, LayerShape),
    above: Outlet,
    [weight, bias]: [Outlet; 2],
    of_sample: &[usize],
) -> Result<NodeId, GraphError> {
    let dims: Vec<usize> = [samples].iter().chain(of_sample).copied().collect();
    let node = Described {
        part: worker,
        name: format!("forward.{index}@{worker}"),
        kind: kind(layer.kind),
        inputs: vec![above, weight, bias],
        outputs: vec![floats(&dims), tape()],
        work: samples * layer.work(of_sample),
        stays: true,
    };
    builder.node(node, move |_, arrays| {
        let [input, weight, bias] = inputs(arrays)?;
        let input = input.into_tensor()?;
        let (output, tape): (_, Arc<dyn Tape>) = match layer.kind {
            LayerKind::Linear { last } => {
                let (weight, bias) = (weight.into_tensor()?, bias.into_tensor()?);
                let (output, tape) = linear(&input, weight, &bias, !last, index == 0)?;
                (output, Arc::new(tape))
            }
            LayerKind::Convolution { .. } => {
                let (weight, bias) = (variable(weight)?, variable(bias)?);
                // The gradient of the pictures is not needed.
                let of_input = if index == 0 { None } else { Some(Var::from_tensor(&input)?) };
                let input = of_input.as_ref().map_or(&input, Var::as_tensor);
                let output = convolve(input, &weight, &bias)?;
                let variables = [Some(weight), Some(bias), of_input].into_iter().flatten().collect();
                (output.detach(), Arc::new(Recorded { variables, output }))
            }
        };
        Ok(vec![Array::Tensor(output), Array::Tape(tape)])
    })
}

fn loss(
    builder: &mut Builder,
    worker: usize,
    samples: usize,
    batch: usize,
    logits: Outlet,
    targets: Outlet,
) -> Result<Outlet, GraphError> {
    let node = Described {
        part: worker,
        name: format!("loss@{worker}"),
        kind: "CrossEntropy",
        inputs: vec![logits, targets],
        outputs: vec![floats(&[1]), floats(&[samples, CLASSES])],
        work: samples * CLASSES,
        stays: true,
    };
    let node = builder.node(node, move |_, arrays| {
        let [logits, targets] = inputs(arrays)?;
        let (logits, targets) = (logits.into_tensor()?, targets.into_tensor()?);
        // Each sample has its share of the batch's mean, so that the gradients of all workers add up to that of the mean.
        let weights = Tensor::full(1.0 / batch as f32, samples, &Device::Cpu)?;
        let (loss, gradient) = cross_entropy(&logits, &targets, &weights)?;
        Ok(vec![Array::floats(&[1], vec![loss])?, Array::Tensor(gradient)])
    })?;
    builder.loss(first(node))?;
    Ok(first(node))
}

fn backward(
    builder: &mut Builder,
    worker: usize,
    samples: usize,
    (index, layer): (usize, LayerShape),
    tape: Outlet,
    gradient: Outlet,
    below: &[usize],
) -> Result<NodeId, GraphError> {
    let mut outputs = vec![floats(&layer.weight()), floats(&[layer.outputs])];
    if index > 0 {
        let dims: Vec<usize> = [samples].iter().chain(below).copied().collect();
        outputs.push(floats(&dims));
    }
    let node = Described {
        part: worker,
        name: format!("backward.{index}@{worker}"),
        kind: kind(layer.kind),
        inputs: vec![tape, gradient],
        outputs,
        work: 2 * samples * layer.work(&layer.output(below)),
        stays: false,
    };
    builder.node(node, move |_, arrays| {
        let [tape, gradient] = inputs(arrays)?;
        let Array::Tape(tape) = tape else { return Err("the forward pass kept nothing".into()) };
        let mut gradients = tape.backward(&gradient.into_tensor()?)?.into_iter();
        let mut taken = |what: &str| {
            let gradient =
                gradients.next().ok_or_else(|| format!("the layer has no gradient of its {what}"))?;
            Array::take(gradient)
        };
        let mut outputs = vec![taken("weight")?, taken("bias")?];
        if index > 0 {
            outputs.push(Array::Tensor(gradients.next().ok_or("the layer has no gradient of its input")?));
        }
        Ok(outputs)
    })
}

fn kind(kind: LayerKind) -> &'static str {
    match kind {
        LayerKind::Convolution { .. } => "Convolution",
        LayerKind::Linear { .. } => "Linear",
    }
}
