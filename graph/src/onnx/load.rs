//! From a file to the engine's graph: the file is checked, dimensions get other lengths, and weights seeded
//! random values.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use fastrand::Rng;
// The version of the engine's messages.
use prost_of_tract::Message as _;
use tract_onnx::Onnx;
use tract_onnx::pb::attribute_proto::AttributeType;
use tract_onnx::pb::tensor_proto::{DataLocation, DataType};
use tract_onnx::pb::tensor_shape_proto::dimension;
use tract_onnx::pb::type_proto::Value;
use tract_onnx::pb::{GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto};
use tract_onnx::prelude::*;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::convert::guarded;
use super::{ModelBuilder, SymbolicDim, Weights};
use crate::dataflow::{Dim, KernelError};
use crate::error::{GraphError, Problem};

/// The engine's graph of a model.
pub(super) struct Loaded {
    pub(super) engine: TypedModel,
    /// How many weights are seeded.
    pub(super) seeded: usize,
}

/// The largest file. A message of protobuf is not larger.
const LARGEST: u64 = i32::MAX as u64;

/// Optimises the model that is the content of the file `path`. It may have tensors in other files of `folder`;
/// without a folder, no file is read.
pub(super) fn load(
    path: &Path,
    bytes: &[u8],
    folder: Option<&Path>,
    settings: &ModelBuilder,
) -> Result<Loaded, GraphError> {
    let wrong = |reason: String| GraphError::from(Problem::Model { path: path.to_owned(), reason });
    let engine = tract_onnx::onnx();
    let mut proto = decode(&engine, bytes).map_err(wrong)?;
    if let (None, Some(graph)) = (folder, &mut proto.graph) {
        let refuse = &mut |tensor: &mut TensorProto| match is_external(tensor) {
            true => Err(elsewhere(tensor) + ", and the content has to have all tensors"),
            false => Ok(()),
        };
        each_tensor(graph, refuse).map_err(wrong)?;
    }
    if let Some(graph) = &mut proto.graph {
        settings.dims.iter().try_for_each(|dim| set(graph, dim)).map_err(wrong)?;
    }
    check(&engine, &proto).map_err(|found| match found {
        Wrong::Reason(reason) => wrong(reason),
        Wrong::Operator { node, operator } => {
            GraphError::from(Problem::Operator { path: path.to_owned(), node, operator })
        }
    })?;
    let seeded = match (settings.weights, &mut proto.graph) {
        (Weights::Seeded(seed), Some(graph)) => seed_weights(graph, seed).map_err(wrong)?,
        _ => 0,
    };
    let open = proto.graph.as_ref().and_then(open_dimension);
    let engine = optimise(&engine, proto, folder).map_err(|error| {
        // The operators may tell the length of such a dimension. If they don't, the user has to.
        wrong(open.map_or_else(|| error.to_string(), |open| format!("{open} ({error})")))
    })?;
    Ok(Loaded { engine, seeded })
}

fn decode(engine: &Onnx, mut bytes: &[u8]) -> Result<ModelProto, String> {
    if bytes.is_empty() {
        return Err(no_model("the file is empty"));
    }
    guarded(|| engine.proto_model_for_read(&mut bytes)).map_err(no_model)
}

/// Puts the tensors that a model leaves to other files of its folder into the content, if there are any.
pub(super) fn self_contained(path: &Path, content: Vec<u8>) -> Result<Vec<u8>, GraphError> {
    let wrong = |reason: String| GraphError::from(Problem::Model { path: path.to_owned(), reason });
    let engine = tract_onnx::onnx();
    let mut proto = decode(&engine, &content).map_err(wrong)?;
    let folder = path.parent().and_then(Path::to_str);
    let mut found = false;
    let mut embed = |tensor: &mut TensorProto| {
        if !is_external(tensor) {
            return Ok(());
        }
        found = true;
        // The engine takes what is in the content before what is in another file.
        if tensor.raw_data.is_empty() {
            // The engine reserves memory for any shape.
            check_tensor(tensor)?;
            let data = guarded(|| tract_onnx::tensor::load_tensor(&*engine.provider, tensor, folder))
                .map_err(|error| format!("{}: {error}", elsewhere(tensor)))?;
            tensor.raw_data = data.as_bytes().to_vec();
        }
        tensor.external_data.clear();
        tensor.data_location = None;
        Ok(())
    };
    if let Some(graph) = &mut proto.graph {
        each_tensor(graph, &mut embed).map_err(wrong)?;
    }
    Ok(if found { proto.encode_to_vec() } else { content })
}

fn is_external(tensor: &TensorProto) -> bool {
    tensor.data_location == Some(DataLocation::External as i32)
}

/// Names a tensor that is in another file, and the file.
fn elsewhere(tensor: &TensorProto) -> String {
    let location = tensor.external_data.iter().find(|entry| entry.key == "location");
    let location = location.map_or("", |entry| &entry.value);
    format!("the tensor {} is in another file ({location:?})", tensor.name)
}

/// Calls `visit` with each constant of a graph and of the graphs in it.
fn each_tensor(
    graph: &mut GraphProto,
    visit: &mut dyn FnMut(&mut TensorProto) -> Result<(), String>,
) -> Result<(), String> {
    graph.initializer.iter_mut().try_for_each(&mut *visit)?;
    for attribute in graph.node.iter_mut().flat_map(|node| &mut node.attribute) {
        attribute.t.iter_mut().chain(&mut attribute.tensors).try_for_each(&mut *visit)?;
        for inner in attribute.g.iter_mut().chain(&mut attribute.graphs) {
            each_tensor(inner, visit)?;
        }
    }
    Ok(())
}

/// Reads the file of a model.
pub(super) fn read(path: &Path) -> Result<Vec<u8>, GraphError> {
    let wrong = |reason: String| GraphError::from(Problem::Model { path: path.to_owned(), reason });
    let io = |error: std::io::Error| wrong(format!("it can't be read: {error}"));
    let mut file = File::open(path).map_err(io)?;
    let metadata = file.metadata().map_err(io)?;
    if !metadata.is_file() || metadata.len() > LARGEST {
        return Err(wrong(format!("it is no file of at most {LARGEST} bytes")));
    }
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).map_err(io)?;
    Ok(bytes)
}

/// Parses and optimises the model. Consumes `proto`, so that the weights are in memory twice as briefly as
/// possible.
fn optimise(
    engine: &tract_onnx::Onnx,
    proto: ModelProto,
    folder: Option<&Path>,
) -> Result<TypedModel, KernelError> {
    guarded(|| {
        let parsed = engine.parse(&proto, folder.and_then(Path::to_str))?;
        drop(proto);
        parsed.model.into_typed()?.into_optimized()
    })
}

/// What is wrong with a model.
pub(super) enum Wrong {
    /// The engine has no such operator.
    Operator { node: String, operator: String },
    /// Anything else.
    Reason(String),
}

impl From<String> for Wrong {
    fn from(reason: String) -> Self {
        Self::Reason(reason)
    }
}

/// Says that a file is no model, and what to do.
fn no_model(reason: impl fmt::Display) -> String {
    format!("it is no ONNX model: {reason}; name a file that a framework has exported as ONNX")
}

/// Checks names, types and lengths, and that the engine knows all operators, before the engine parses the
/// model: it panics on some models that are wrong.
pub(super) fn check(engine: &Onnx, model: &ModelProto) -> Result<(), Wrong> {
    let Some(graph) = &model.graph else {
        return Err(no_model("it has no graph").into());
    };
    if graph.output.is_empty() {
        return Err(no_model("its graph has no outputs").into());
    }
    check_graph(engine, graph, &HashSet::new())
}

/// Returns the name of a node: its own, or that of its first output.
pub(super) fn name(node: &NodeProto) -> &str {
    match node.output.first() {
        Some(output) if node.name.is_empty() => output,
        _ => &node.name,
    }
}

fn check_graph(engine: &Onnx, graph: &GraphProto, outer: &HashSet<&str>) -> Result<(), Wrong> {
    let mut values = outer.clone();
    for constant in &graph.initializer {
        check_tensor(constant)?;
        values.insert(&constant.name);
    }
    for input in &graph.input {
        check_type(input)?;
        values.insert(&input.name);
    }
    values.extend(graph.node.iter().flat_map(|node| &node.output).map(String::as_str));
    for node in &graph.node {
        if !engine.op_register.0.contains_key(&node.op_type) {
            return Err(Wrong::Operator { node: name(node).to_owned(), operator: node.op_type.clone() });
        }
        if let Some(missing) =
            node.input.iter().find(|input| !input.is_empty() && !values.contains(input.as_str()))
        {
            return Err(format!("node {}: no node, input or constant is called {missing}", name(node)).into());
        }
        for attribute in &node.attribute {
            if AttributeType::from_i32(attribute.r#type).is_none() {
                return Err(format!(
                    "node {}: the attribute {} has an unknown type",
                    name(node),
                    attribute.name
                )
                .into());
            }
            attribute.t.iter().chain(&attribute.tensors).try_for_each(check_tensor)?;
            attribute
                .g
                .iter()
                .chain(&attribute.graphs)
                .try_for_each(|inner| check_graph(engine, inner, &values))?;
        }
    }
    for output in &graph.output {
        if !values.contains(output.name.as_str()) {
            return Err(format!("nothing computes the output {}", output.name).into());
        }
    }
    // The engine does not read what is no tensor here.
    let is_tensor = |info: &&ValueInfoProto| info.r#type.as_ref().is_some_and(|kind| kind.value.is_some());
    graph.value_info.iter().filter(is_tensor).try_for_each(check_type)
}

fn check_type(value: &ValueInfoProto) -> Result<(), Wrong> {
    let Some(Value::TensorType(tensor)) =
        value.r#type.as_ref().and_then(|described| described.value.as_ref())
    else {
        return Err(format!("{} is no tensor, and only tensors are supported", value.name).into());
    };
    check_elements(&value.name, tensor.elem_type).map_err(Wrong::Reason)
}

fn check_elements(name: &str, number: i32) -> Result<(), String> {
    match DataType::from_i32(number) {
        None
        | Some(DataType::Undefined | DataType::Complex64 | DataType::Complex128 | DataType::Bfloat16) => {
            Err(format!("the tensor {name} has elements of type {number}, which is not supported"))
        }
        Some(_) => Ok(()),
    }
}

/// Returns what is wrong with a dimension of an input that has neither a length nor a symbol.
fn open_dimension(graph: &GraphProto) -> Option<String> {
    let constants: HashSet<&str> = graph.initializer.iter().map(|constant| constant.name.as_str()).collect();
    let mut inputs = graph.input.iter().filter(|input| !constants.contains(input.name.as_str()));
    inputs.find_map(|input| {
        let name = &input.name;
        let Value::TensorType(tensor) = input.r#type.as_ref()?.value.as_ref()?;
        let Some(shape) = &tensor.shape else { return Some(format!("the input {name} has no shape")) };
        let is_open = |dim: &tract_onnx::pb::tensor_shape_proto::Dimension| match &dim.value {
            Some(dimension::Value::DimValue(length)) => *length < 0,
            Some(dimension::Value::DimParam(symbol)) => symbol == "?",
            None => true,
        };
        let axis = shape.dim.iter().position(is_open)?;
        Some(format!(
            "dimension {axis} of the input {name} has no length; give it one, or a symbol: {name}:{axis}=N"
        ))
    })
}

fn check_tensor(tensor: &TensorProto) -> Result<(), String> {
    check_elements(&tensor.name, tensor.data_type)?;
    // No element of the engine has more bytes than this, so that the bytes of all have a number.
    let possible = |count: &usize| *count <= isize::MAX as usize / 64;
    let Some(count) = elements(&tensor.dims).filter(possible) else {
        return Err(format!("the tensor {} has the shape {:?}", tensor.name, tensor.dims));
    };
    if tensor.raw_data.is_empty() {
        return Ok(());
    }
    let size = match DataType::from_i32(tensor.data_type) {
        Some(DataType::Bool | DataType::Int8 | DataType::Uint8) => 1,
        Some(DataType::Float16 | DataType::Int16 | DataType::Uint16) => 2,
        Some(DataType::Float | DataType::Int32 | DataType::Uint32) => 4,
        Some(DataType::Double | DataType::Int64 | DataType::Uint64) => 8,
        _ => return Err(format!("the tensor {} has strings in binary form", tensor.name)),
    };
    if count.checked_mul(size) != Some(tensor.raw_data.len()) {
        return Err(format!(
            "the tensor {} has {} bytes for {count} elements",
            tensor.name,
            tensor.raw_data.len()
        ));
    }
    Ok(())
}

/// Changes a dimension of an input. If it is the first one, the batch, then it changes nodes that reshape
/// with the old batch as well.
///
/// # Errors
/// The model has no such input, or the input has no such dimension.
pub(super) fn set(graph: &mut GraphProto, asked: &SymbolicDim) -> Result<(), String> {
    let constants: HashSet<&str> = graph.initializer.iter().map(|constant| constant.name.as_str()).collect();
    let inputs: Vec<&str> = graph
        .input
        .iter()
        .map(|input| input.name.as_str())
        .filter(|name| !constants.contains(name))
        .collect();
    if !inputs.contains(&asked.input.as_str()) {
        return Err(format!(
            "{asked}: the model has no input of this name; its inputs are {}",
            inputs.join(", ")
        ));
    }
    let input = graph.input.iter_mut().find(|input| input.name == asked.input);
    let described =
        input.and_then(|input| input.r#type.as_mut()).and_then(|described| described.value.as_mut());
    let Some(Value::TensorType(tensor)) = described else {
        return Err(format!("{asked}: this input is no tensor"));
    };
    let dims = tensor.shape.as_mut().map_or(&mut [][..], |shape| &mut shape.dim);
    let rank = dims.len();
    let dim = dims.get_mut(asked.axis).ok_or_else(|| format!("{asked}: this input has {rank} dimensions"))?;
    let new = match &asked.dim {
        Dim::Known(length) => {
            dimension::Value::DimValue(i64::try_from(*length).map_err(|_| format!("{asked} is too long"))?)
        }
        Dim::Symbolic(symbol) => dimension::Value::DimParam(symbol.to_string()),
    };
    let old = dim.value.replace(new);
    // What the file says of other shapes may be wrong now.
    graph.value_info.clear();
    if let (0, Some(dimension::Value::DimValue(old))) = (asked.axis, old) {
        keep_batch(graph, &asked.input, old);
    }
    Ok(())
}

/// Changes nodes that reshape a batch of pictures to a constant shape, `[1, 2048]`. The batch becomes `0`,
/// which means: as it is.
fn keep_batch(graph: &mut GraphProto, input: &str, old: i64) {
    let mut depend = HashSet::from([input.to_owned()]);
    let mut shapes = Vec::new();
    for index in 0..graph.node.len() {
        let node = &graph.node[index];
        if !node.input.iter().any(|name| depend.contains(name)) {
            continue;
        }
        depend.extend(node.output.iter().cloned());
        let data_depends = node.input.first().is_some_and(|name| depend.contains(name));
        if node.op_type != "Reshape" || !data_depends {
            continue;
        }
        let Some(mut shape) = node.input.get(1).and_then(|name| integers(graph, name)) else { continue };
        if shape.first() != Some(&old) {
            continue;
        }
        shape[0] = 0;
        let name = format!("{}#batch", node.output.first().map_or("", String::as_str));
        graph.node[index].input[1].clone_from(&name);
        shapes.push(TensorProto {
            name,
            dims: vec![shape.len() as i64],
            data_type: tract_onnx::pb::tensor_proto::DataType::Int64 as i32,
            int64_data: shape,
            ..TensorProto::default()
        });
    }
    graph.initializer.extend(shapes);
}

/// Returns the whole numbers of a constant.
fn integers(graph: &GraphProto, name: &str) -> Option<Vec<i64>> {
    let of_node = |node: &&NodeProto| {
        node.op_type == "Constant" && node.output.first().is_some_and(|output| output == name)
    };
    let initializer = graph.initializer.iter().find(|constant| constant.name == name);
    let tensor = initializer.or_else(|| {
        graph.node.iter().find(of_node)?.attribute.iter().find_map(|attribute| attribute.t.as_ref())
    })?;
    if tensor.raw_data.is_empty() {
        return Some(tensor.int64_data.clone());
    }
    tensor.raw_data.chunks(8).map(|bytes| Some(i64::from_le_bytes(bytes.try_into().ok()?))).collect()
}

/// Returns the number of elements of a tensor, if the shape has one.
pub(super) fn elements(dims: &[i64]) -> Option<usize> {
    dims.iter().try_fold(1_usize, |count, length| count.checked_mul(usize::try_from(*length).ok()?))
}

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

/// Puts random values in place of all weights, and returns how many weights there are. The values of a weight
/// depend on the seed and on its name alone.
///
/// # Errors
/// A weight has a shape that is not possible.
fn seed_weights(graph: &mut GraphProto, seed: u64) -> Result<usize, String> {
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

/// Returns what a constant is for, by the first node that uses it as a weight. Nodes that only change its
/// shape are followed.
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
        let gain = residual_gain(graph, node);
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

/// Returns what a node's weights must be multiplied by, so that a sum that its output goes into is not much
/// larger than the output. Without this, activations grow by half with each block of a residual network, and
/// its results become 0 or 1 for any input.
fn residual_gain(graph: &GraphProto, node: &NodeProto) -> f32 {
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

/// Returns whether a rectifier follows, which makes every other number 0.
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

/// Makes random numbers, in binary form. Products keep the variance of their inputs where every other input
/// is 0, as it is after a rectifier (He et al., *Delving Deep into Rectifiers*, 2015, §2.2).
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
