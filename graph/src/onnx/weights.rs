//! Seeded random values in place of a model's weights.

use std::collections::HashMap;

use fastrand::Rng;
use tract_onnx::pb::tensor_proto::DataType;
use tract_onnx::pb::{GraphProto, NodeProto, TensorProto};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::lengths::{elements, integers};

/// What a weight is for.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Use {
    /// Multiplies this many inputs, whose products are added. The second number multiplies the scale.
    Product(i64, f32),
    /// Is added.
    Bias,
    /// Multiplies one input by about this number.
    Scale(f32),
    /// Is a variance: positive.
    Variance,
}

/// Puts random values in place of all weights, and returns how many weights there are. The values of a weight depend on the seed and
/// on its name alone.
///
/// # Errors
/// A weight has a shape that is not possible.
pub(super) fn seed(graph: &mut GraphProto, seed: u64) -> Result<usize, String> {
    let shapes = shapes(graph);
    let uses: HashMap<&String, Use> =
        shapes.iter().filter_map(|(name, dims)| Some((name, find_use(graph, name, dims, 0)?))).collect();
    for (name, found) in &uses {
        let dims = &shapes[*name];
        let bytes = elements(dims).and_then(|elements| elements.checked_mul(4));
        let bytes = bytes.filter(|bytes| *bytes <= i32::MAX as usize);
        let bytes = bytes.ok_or_else(|| format!("the weight {name} has the shape {dims:?}"))?;
        let values = TensorProto {
            name: (*name).clone(),
            dims: dims.clone(),
            data_type: DataType::Float as i32,
            raw_data: random(*found, bytes, Rng::with_seed(xxh3_64_with_seed(name.as_bytes(), seed))),
            ..TensorProto::default()
        };
        graph.initializer.retain(|constant| constant.name != **name);
        graph.initializer.push(values);
    }
    graph.node.retain(|node| {
        !node.output.first().is_some_and(|output| is_constant(node) && uses.contains_key(output))
    });
    Ok(uses.len())
}

fn is_constant(node: &NodeProto) -> bool {
    matches!(node.op_type.as_str(), "ConstantOfShape" | "Constant")
}

/// Returns the names and shapes of all constants of 32-bit floats.
fn shapes(graph: &GraphProto) -> HashMap<String, Vec<i64>> {
    let float = |tensor: &&TensorProto| tensor.data_type == DataType::Float as i32;
    let mut shapes: HashMap<String, Vec<i64>> = graph
        .initializer
        .iter()
        .filter(float)
        .map(|tensor| (tensor.name.clone(), tensor.dims.clone()))
        .collect();
    for node in graph.node.iter().filter(|node| is_constant(node)) {
        let Some(output) = node.output.first() else { continue };
        let value = node
            .attribute
            .iter()
            .find(|attribute| attribute.name == "value")
            .and_then(|attribute| attribute.t.as_ref());
        if node.op_type == "Constant" {
            shapes.extend(value.filter(float).map(|tensor| (output.clone(), tensor.dims.clone())));
        } else if value.is_none_or(|tensor| float(&tensor)) {
            let shape = node.input.first().and_then(|shape| integers(graph, shape));
            shapes.extend(shape.map(|shape| (output.clone(), shape)));
        }
    }
    shapes
}

/// Tells what a constant is for, by the first node that uses it as a weight. Nodes that only change its shape are followed.
fn find_use(graph: &GraphProto, name: &str, dims: &[i64], depth: usize) -> Option<Use> {
    // A chain of nodes that only change the shape is short.
    if depth > 4 {
        return None;
    }
    let several = dims.iter().product::<i64>() > 1;
    let last = *dims.last().unwrap_or(&1);
    let before_last = *dims.iter().nth_back(1).unwrap_or(&last);
    graph.node.iter().find_map(|node| {
        let input = node.input.iter().position(|input| input == name)?;
        let gain = share(graph, node);
        let product = |inputs: i64| {
            let rectified = node.output.first().is_some_and(|output| rectified(graph, output, 0));
            Use::Product(inputs, if rectified { gain } else { gain / f32::sqrt(2.0) })
        };
        match (node.op_type.as_str(), input) {
            ("Conv", 1) => Some(product(dims.iter().skip(1).product())),
            ("ConvTranspose", 1) => Some(product(dims.first()? * dims.iter().skip(2).product::<i64>())),
            ("Gemm", 1) if flag(node, "transB") => Some(product(last)),
            ("Gemm" | "MatMul", 1) => Some(product(before_last)),
            ("MatMul", 0) | ("LSTM" | "GRU" | "RNN", 1 | 2) => Some(product(last)),
            ("Gather", 0) if several => Some(product(1)),
            ("Conv" | "ConvTranspose" | "Gemm" | "LayerNormalization" | "InstanceNormalization", 2) => {
                Some(Use::Bias)
            }
            ("LSTM" | "GRU" | "RNN", 3) | ("BatchNormalization", 2 | 3) => Some(Use::Bias),
            ("BatchNormalization" | "LayerNormalization" | "InstanceNormalization", 1) => {
                Some(Use::Scale(gain))
            }
            ("BatchNormalization", 4) => Some(Use::Variance),
            ("Mul", _) if several => Some(Use::Scale(gain)),
            ("Add", _) if several => Some(Use::Bias),
            ("Reshape" | "Unsqueeze" | "Squeeze" | "Flatten" | "Identity", 0) => {
                find_use(graph, node.output.first()?, dims, depth + 1)
            }
            _ => None,
        }
    })
}

/// Returns what a node's weights must be multiplied by, so that a sum that its output goes into is not much larger than the output.
/// Without this, activations grow by half with each block of a residual network, and its results become 0 or 1 for any input.
fn share(graph: &GraphProto, node: &NodeProto) -> f32 {
    let Some(output) = node.output.first() else { return 1.0 };
    let sums = |sum: &&NodeProto| {
        matches!(sum.op_type.as_str(), "Sum" | "Add") && sum.input.len() > 1 && sum.input.contains(output)
    };
    let Some(sum) = graph.node.iter().find(sums) else { return 1.0 };
    let weighted = |name: &String| {
        let producer = graph.node.iter().find(|node| node.output.first() == Some(name));
        producer.is_some_and(|node| {
            matches!(
                node.op_type.as_str(),
                "BatchNormalization" | "Conv" | "ConvTranspose" | "Gemm" | "MatMul" | "Mul"
            )
        })
    };
    let constant = |name: &String| {
        let made = |node: &NodeProto| {
            node.output.first() == Some(name) && (is_constant(node) || node.op_type == "Unsqueeze")
        };
        graph.initializer.iter().any(|constant| constant.name == *name) || graph.node.iter().any(made)
    };
    match () {
        // This is a bias.
        () if sum.input.iter().any(constant) => 1.0,
        () if sum.input.iter().all(weighted) => (1.0 / sum.input.len() as f32).sqrt(),
        () => 0.3,
    }
}

/// Tells whether a rectifier follows, which makes every other number 0.
fn rectified(graph: &GraphProto, output: &String, depth: usize) -> bool {
    let mut users = graph.node.iter().filter(|node| node.input.contains(output));
    users.any(|user| match user.op_type.as_str() {
        "Relu" | "LeakyRelu" | "PRelu" | "Clip" => true,
        "BatchNormalization" | "Mul" | "Add" if depth < 4 => {
            user.output.first().is_some_and(|output| rectified(graph, output, depth + 1))
        }
        _ => false,
    })
}

fn flag(node: &NodeProto, name: &str) -> bool {
    node.attribute.iter().any(|attribute| attribute.name == name && attribute.i != 0)
}

/// Makes random numbers, in binary form. Products keep the variance of their inputs where every other input is 0, as it is after a
/// rectifier (He et al., *Delving Deep into Rectifiers*, 2015, §2.2).
fn random(of: Use, bytes: usize, mut random: Rng) -> Vec<u8> {
    let (middle, spread) = match of {
        // The variance of evenly distributed numbers from -a to a is a²/3.
        Use::Product(inputs, gain) => (0.0, gain * (6.0 / inputs.max(1) as f32).sqrt()),
        Use::Bias => (0.0, 0.1),
        Use::Scale(gain) => (gain, 0.2 * gain),
        Use::Variance => (1.0, 0.2),
    };
    let mut values = vec![0; bytes];
    for value in values.chunks_exact_mut(4) {
        let number: f32 = middle + spread * (2.0 * random.f32() - 1.0);
        value.copy_from_slice(&number.to_le_bytes());
    }
    values
}
