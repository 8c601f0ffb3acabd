//! Checks a model before the engine parses it, because the engine panics on some models that are wrong.

use std::collections::HashSet;
use std::fmt;

use tract_onnx::Onnx;
use tract_onnx::pb::attribute_proto::AttributeType;
use tract_onnx::pb::tensor_proto::{DataLocation, DataType};
use tract_onnx::pb::tensor_shape_proto::dimension;
use tract_onnx::pb::type_proto::Value;
use tract_onnx::pb::{GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto};

use super::lengths::elements;

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
pub(super) fn no_model(reason: impl fmt::Display) -> String {
    format!("it is no ONNX model: {reason}; name a file that a framework has exported as ONNX")
}

/// Checks names, types and lengths, and that the engine knows all operators.
pub(super) fn check(engine: &Onnx, model: &ModelProto) -> Result<(), Wrong> {
    let Some(graph) = &model.graph else {
        return Err(no_model("it has no graph").into());
    };
    if graph.node.is_empty() || graph.output.is_empty() {
        return Err(no_model("its graph has no nodes or no outputs").into());
    }
    check_graph(engine, graph, &HashSet::new())?;
    let constants: HashSet<&str> = graph.initializer.iter().map(|constant| constant.name.as_str()).collect();
    for input in graph.input.iter().filter(|input| !constants.contains(input.name.as_str())) {
        check_lengths(input)?;
    }
    Ok(())
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
    graph.value_info.iter().filter(|value| value.r#type.is_some()).try_for_each(check_type)
}

fn check_type(value: &ValueInfoProto) -> Result<(), Wrong> {
    let Some(Value::TensorType(tensor)) =
        value.r#type.as_ref().and_then(|described| described.value.as_ref())
    else {
        return Err(format!("{} is no tensor, and only tensors are supported", value.name).into());
    };
    check_elements(&value.name, tensor.elem_type)
}

fn check_elements(name: &str, number: i32) -> Result<(), Wrong> {
    match DataType::from_i32(number) {
        None
        | Some(DataType::Undefined | DataType::Complex64 | DataType::Complex128 | DataType::Bfloat16) => {
            Err(format!("the tensor {name} has elements of type {number}, which is not supported").into())
        }
        Some(_) => Ok(()),
    }
}

/// Checks that each dimension of an input has a length or a symbol.
fn check_lengths(input: &ValueInfoProto) -> Result<(), Wrong> {
    let Some(Value::TensorType(tensor)) =
        input.r#type.as_ref().and_then(|described| described.value.as_ref())
    else {
        return Ok(());
    };
    let Some(shape) = &tensor.shape else {
        return Err(format!("the input {} has no shape", input.name).into());
    };
    for (axis, dim) in shape.dim.iter().enumerate() {
        match &dim.value {
            Some(dimension::Value::DimValue(length)) if *length > 0 => {}
            Some(dimension::Value::DimParam(symbol)) if symbol != "?" => {}
            _ => {
                let name = &input.name;
                return Err(format!("dimension {axis} of the input {name} has no length; give it one, or a symbol: {name}:{axis}=N").into());
            }
        }
    }
    Ok(())
}

fn check_tensor(tensor: &TensorProto) -> Result<(), Wrong> {
    check_elements(&tensor.name, tensor.data_type)?;
    let Some(count) = elements(&tensor.dims) else {
        return Err(format!("the tensor {} has the shape {:?}", tensor.name, tensor.dims).into());
    };
    if tensor.raw_data.is_empty() || tensor.data_location == Some(DataLocation::External as i32) {
        return Ok(());
    }
    let size = match DataType::from_i32(tensor.data_type) {
        Some(DataType::Bool | DataType::Int8 | DataType::Uint8) => 1,
        Some(DataType::Float16 | DataType::Int16 | DataType::Uint16) => 2,
        Some(DataType::Float | DataType::Int32 | DataType::Uint32) => 4,
        Some(DataType::Double | DataType::Int64 | DataType::Uint64) => 8,
        _ => return Err(format!("the tensor {} has strings in binary form", tensor.name).into()),
    };
    if count.checked_mul(size) != Some(tensor.raw_data.len()) {
        return Err(format!(
            "the tensor {} has {} bytes for {count} elements",
            tensor.name,
            tensor.raw_data.len()
        )
        .into());
    }
    Ok(())
}
