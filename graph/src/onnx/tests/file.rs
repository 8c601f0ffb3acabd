//! Writes small ONNX models, message by message. The engine's own messages can't be written with this
//! workspace's version of prost.

use prost::Message;

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Model {
    #[prost(int64, tag = "1")]
    pub(crate) ir_version: i64,
    #[prost(message, optional, tag = "7")]
    pub(crate) graph: Option<Graph>,
    #[prost(message, repeated, tag = "8")]
    pub(crate) opsets: Vec<Opset>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Opset {
    #[prost(string, tag = "1")]
    domain: String,
    #[prost(int64, tag = "2")]
    version: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Graph {
    #[prost(message, repeated, tag = "1")]
    pub(crate) nodes: Vec<Node>,
    #[prost(string, tag = "2")]
    name: String,
    #[prost(message, repeated, tag = "5")]
    pub(crate) constants: Vec<Tensor>,
    #[prost(message, repeated, tag = "11")]
    pub(crate) inputs: Vec<ValueInfo>,
    #[prost(message, repeated, tag = "12")]
    pub(crate) outputs: Vec<ValueInfo>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Node {
    #[prost(string, repeated, tag = "1")]
    pub(crate) inputs: Vec<String>,
    #[prost(string, repeated, tag = "2")]
    pub(crate) outputs: Vec<String>,
    #[prost(string, tag = "3")]
    pub(crate) name: String,
    #[prost(string, tag = "4")]
    pub(crate) operator: String,
    #[prost(message, repeated, tag = "5")]
    pub(crate) attributes: Vec<Attribute>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Attribute {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(int64, tag = "3")]
    i: i64,
    #[prost(int64, repeated, packed = "false", tag = "8")]
    ints: Vec<i64>,
    #[prost(int32, tag = "20")]
    kind: i32,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Tensor {
    #[prost(int64, repeated, tag = "1")]
    pub(crate) dims: Vec<i64>,
    #[prost(int32, tag = "2")]
    pub(crate) elements: i32,
    #[prost(string, tag = "8")]
    pub(crate) name: String,
    #[prost(bytes = "vec", tag = "9")]
    pub(crate) raw: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ValueInfo {
    #[prost(string, tag = "1")]
    pub(crate) name: String,
    #[prost(message, optional, tag = "2")]
    kind: Option<Type>,
}

#[derive(Clone, PartialEq, Message)]
struct Type {
    #[prost(message, optional, tag = "1")]
    tensor: Option<TensorType>,
}

#[derive(Clone, PartialEq, Message)]
struct TensorType {
    #[prost(int32, tag = "1")]
    elements: i32,
    #[prost(message, optional, tag = "2")]
    shape: Option<Shape>,
}

#[derive(Clone, PartialEq, Message)]
struct Shape {
    #[prost(message, repeated, tag = "1")]
    dims: Vec<Dim>,
}

#[derive(Clone, PartialEq, Message)]
struct Dim {
    #[prost(int64, optional, tag = "1")]
    length: Option<i64>,
}

const FLOAT: i32 = 1;
const INT64: i32 = 7;

/// A value of 32-bit floats. A length of -1 is not known.
pub(crate) fn floats(name: &str, dims: &[i64]) -> ValueInfo {
    let dims = dims.iter().map(|length| Dim { length: (*length >= 0).then_some(*length) }).collect();
    let tensor = TensorType { elements: FLOAT, shape: Some(Shape { dims }) };
    ValueInfo { name: name.to_owned(), kind: Some(Type { tensor: Some(tensor) }) }
}

/// A weight whose elements are all 0.02, as in the `light` models.
pub(crate) fn weight(name: &str, dims: &[i64]) -> Tensor {
    let raw = 0.02_f32.to_le_bytes().repeat(dims.iter().product::<i64>() as usize);
    Tensor { dims: dims.to_vec(), elements: FLOAT, name: name.to_owned(), raw }
}

pub(crate) fn shape(name: &str, lengths: &[i64]) -> Tensor {
    let raw = lengths.iter().flat_map(|length| length.to_le_bytes()).collect();
    Tensor { dims: vec![lengths.len() as i64], elements: INT64, name: name.to_owned(), raw }
}

pub(crate) fn node(operator: &str, inputs: &[&str], output: &str, attributes: Vec<Attribute>) -> Node {
    let inputs = inputs.iter().map(|input| (*input).to_owned()).collect();
    Node {
        inputs,
        outputs: vec![output.to_owned()],
        name: output.to_owned(),
        operator: operator.to_owned(),
        attributes,
    }
}

pub(crate) fn numbers(name: &str, ints: &[i64]) -> Attribute {
    Attribute { name: name.to_owned(), i: 0, ints: ints.to_vec(), kind: 7 }
}

pub(crate) fn number(name: &str, i: i64) -> Attribute {
    Attribute { name: name.to_owned(), i, ints: Vec::new(), kind: 2 }
}

pub(crate) fn model(
    inputs: Vec<ValueInfo>,
    outputs: Vec<ValueInfo>,
    constants: Vec<Tensor>,
    nodes: Vec<Node>,
) -> Model {
    let graph = Graph { nodes, name: "test".to_owned(), constants, inputs, outputs };
    Model { ir_version: 3, graph: Some(graph), opsets: vec![Opset { domain: String::new(), version: 9 }] }
}

/// A network of two convolutions with a way around the second one, a batch normalisation, and a matrix
/// product. It reshapes a batch of 1 to a constant shape, as the `light` models do.
pub(crate) fn residual() -> Model {
    let conv = |input, weights, output| {
        let attributes = vec![
            numbers("kernel_shape", &[3, 3]),
            numbers("pads", &[1, 1, 1, 1]),
            numbers("strides", &[1, 1]),
        ];
        node("Conv", &[input, weights, "bias"], output, attributes)
    };
    let normal = ["scale", "shift", "mean", "variance"];
    let mut constants = vec![
        weight("w1", &[8, 3, 3, 3]),
        weight("w2", &[8, 8, 3, 3]),
        weight("bias", &[8]),
        weight("w3", &[10, 8 * 4 * 4]),
    ];
    constants.extend(normal.map(|name| weight(name, &[8])));
    constants.extend([weight("b3", &[10]), shape("flat", &[1, 128])]);
    let pool = vec![numbers("kernel_shape", &[4, 4]), numbers("strides", &[4, 4])];
    let nodes = vec![
        conv("data", "w1", "conv1"),
        node("Relu", &["conv1"], "relu1", vec![]),
        conv("relu1", "w2", "conv2"),
        node("BatchNormalization", &["conv2", "scale", "shift", "mean", "variance"], "normal", vec![]),
        node("Sum", &["normal", "relu1"], "sum", vec![]),
        node("Relu", &["sum"], "relu2", vec![]),
        node("MaxPool", &["relu2"], "pool", pool),
        node("Reshape", &["pool", "flat"], "reshaped", vec![]),
        node("Gemm", &["reshaped", "w3", "b3"], "gemm", vec![number("transB", 1)]),
        node("Softmax", &["gemm"], "result", vec![]),
    ];
    model(vec![floats("data", &[1, 3, 16, 16])], vec![floats("result", &[1, 10])], constants, nodes)
}
