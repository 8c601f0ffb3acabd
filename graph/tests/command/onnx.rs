//! Small ONNX files, written field by field.

/// The kinds of fields of a protobuf message.
fn number(field: u32, value: u64) -> Vec<u8> {
    let mut bytes = varint(u64::from(field) << 3);
    bytes.extend(varint(value));
    bytes
}

fn field(field: u32, content: &[u8]) -> Vec<u8> {
    let mut bytes = varint(u64::from(field) << 3 | 2);
    bytes.extend(varint(content.len() as u64));
    bytes.extend(content);
    bytes
}

fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

fn node(kind: &str, name: &str, inputs: &[&str], attributes: &[Vec<u8>]) -> Vec<u8> {
    let mut node: Vec<u8> = inputs.iter().flat_map(|input| field(1, input.as_bytes())).collect();
    node.extend(field(2, name.as_bytes()));
    node.extend(field(3, name.as_bytes()));
    node.extend(field(4, kind.as_bytes()));
    node.extend(attributes.iter().flat_map(|attribute| field(5, attribute)));
    field(1, &node)
}

fn ints(name: &str, values: &[u64]) -> Vec<u8> {
    let mut attribute = field(1, name.as_bytes());
    attribute.extend(values.iter().flat_map(|value| number(8, *value)));
    attribute.extend(number(20, 7));
    attribute
}

fn weights(name: &str, dims: &[u64]) -> Vec<u8> {
    let mut tensor: Vec<u8> = dims.iter().flat_map(|dim| number(1, *dim)).collect();
    tensor.extend(number(2, 1));
    tensor.extend(field(8, name.as_bytes()));
    let count = dims.iter().product::<u64>() as usize;
    tensor.extend(field(9, &vec![0; 4 * count]));
    field(5, &tensor)
}

fn value(number_of_field: u32, name: &str, dims: &[u64]) -> Vec<u8> {
    let dims: Vec<u8> = dims.iter().flat_map(|dim| field(1, &number(1, *dim))).collect();
    let mut tensor = number(1, 1);
    tensor.extend(field(2, &dims));
    let mut value = field(1, name.as_bytes());
    value.extend(field(2, &field(1, &tensor)));
    field(number_of_field, &value)
}

fn model(graph: &[u8]) -> Vec<u8> {
    let mut model = number(1, 7);
    model.extend(field(7, graph));
    model.extend(field(8, &number(2, 13)));
    model
}

/// Writes a model of four convolutions and a matrix product. Each convolution makes a tensor of 16 KiB.
pub(crate) fn convolutions() -> Vec<u8> {
    let mut graph = field(2, b"convolutions");
    let mut last = "image".to_owned();
    for layer in 0..4 {
        let (conv, relu, weight) = (format!("conv{layer}"), format!("relu{layer}"), format!("weight{layer}"));
        let channels = if layer == 0 { 1 } else { 16 };
        graph.extend(weights(&weight, &[16, channels, 3, 3]));
        let attributes = [ints("kernel_shape", &[3, 3]), ints("pads", &[1, 1, 1, 1])];
        graph.extend(node("Conv", &conv, &[&last, &weight], &attributes));
        graph.extend(node("Relu", &relu, &[&conv], &[]));
        last = relu;
    }
    graph.extend(weights("classes", &[16 * 16 * 16, 10]));
    graph.extend(node("Flatten", "flat", &[&last], &[]));
    graph.extend(node("MatMul", "scores", &["flat", "classes"], &[]));
    graph.extend(value(11, "image", &[1, 1, 16, 16]));
    graph.extend(value(12, "scores", &[1, 10]));
    model(&graph)
}

/// Writes a model of one operator, which takes and makes a vector.
pub(crate) fn operator(kind: &str) -> Vec<u8> {
    let mut graph = field(2, b"operator");
    graph.extend(node(kind, "only", &["vector"], &[]));
    graph.extend(value(11, "vector", &[4]));
    graph.extend(value(12, "only", &[4]));
    model(&graph)
}
