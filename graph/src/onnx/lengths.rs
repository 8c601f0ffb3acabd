//! Other lengths, or symbols, for dimensions of a model's inputs.

use std::collections::HashSet;

use tract_onnx::pb::tensor_shape_proto::dimension;
use tract_onnx::pb::type_proto::Value;
use tract_onnx::pb::{GraphProto, NodeProto, TensorProto};

use super::settings::SymbolicDim;
use crate::dataflow::Dim;

/// Changes a dimension of an input. If it is the first one, the batch, then it changes nodes that reshape with the old batch as well.
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

/// Changes nodes that reshape a batch of pictures to a constant shape, `[1, 2048]`. The batch becomes `0`, which means: as it is.
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
pub(super) fn integers(graph: &GraphProto, name: &str) -> Option<Vec<i64>> {
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
