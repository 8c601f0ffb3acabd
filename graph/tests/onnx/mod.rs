//! Writes small ONNX models, in the messages of the engine.
//!
//! ```text
//! model(17, "x:float[N,6]", "y", "m = MatMul x w; y = Relu m", vec![weights("w", &[6, 6])])
//! ```
//! A node is `OUTPUTS = OPERATOR INPUTS ATTRIBUTES`; `-` is an absent input. Its name is that of its first output.

use prost_of_tract::Message as _;
use tract_onnx::pb::attribute_proto::AttributeType;
use tract_onnx::pb::tensor_proto::{DataLocation, DataType};
use tract_onnx::pb::tensor_shape_proto::{Dimension, dimension};
use tract_onnx::pb::type_proto::{Tensor, Value};
use tract_onnx::pb::{
    AttributeProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, StringStringEntryProto,
    TensorProto, TensorShapeProto, TypeProto, ValueInfoProto,
};

/// Makes a model of a version of the operators. Inputs are words such as `x:float[N,6]`, outputs are names.
pub(crate) fn model(
    opset: i64,
    inputs: &str,
    outputs: &str,
    nodes: &str,
    constants: Vec<TensorProto>,
) -> ModelProto {
    ModelProto {
        ir_version: 8,
        graph: Some(graph(inputs, outputs, nodes, constants)),
        opset_import: vec![OperatorSetIdProto { domain: String::new(), version: opset }],
        ..ModelProto::default()
    }
}

/// Makes the graph of a model, or one within a node.
pub(crate) fn graph(inputs: &str, outputs: &str, nodes: &str, constants: Vec<TensorProto>) -> GraphProto {
    GraphProto {
        name: "test".to_owned(),
        input: inputs.split_whitespace().map(value).collect(),
        output: outputs.split_whitespace().map(value).collect(),
        node: nodes.split(';').filter(|node| !node.trim().is_empty()).map(node).collect(),
        initializer: constants,
        ..GraphProto::default()
    }
}

/// Makes an input or an output of `name:type[dims]`, or of a name alone. A `?` is a dimension that is not known.
pub(crate) fn value(text: &str) -> ValueInfoProto {
    let described = text.split_once(':').map(|(_, kind)| {
        let (kind, dims) = kind.trim_end_matches(']').split_once('[').unwrap();
        let dim = |text: &str| Dimension {
            value: match text.parse() {
                Ok(length) => Some(dimension::Value::DimValue(length)),
                Err(_) if text == "?" => None,
                Err(_) => Some(dimension::Value::DimParam(text.to_owned())),
            },
            ..Dimension::default()
        };
        let dim = dims.split(',').filter(|dim| !dim.is_empty()).map(dim).collect();
        let tensor = Tensor { elem_type: kind_of(kind) as i32, shape: Some(TensorShapeProto { dim }) };
        TypeProto { value: Some(Value::TensorType(tensor)), ..TypeProto::default() }
    });
    let name = text.split(':').next().unwrap_or_default().to_owned();
    ValueInfoProto { name, r#type: described, ..ValueInfoProto::default() }
}

fn kind_of(name: &str) -> DataType {
    match name {
        "float" => DataType::Float,
        "double" => DataType::Double,
        "float16" => DataType::Float16,
        "bool" => DataType::Bool,
        "string" => DataType::String,
        "uint8" => DataType::Uint8,
        "uint16" => DataType::Uint16,
        "uint32" => DataType::Uint32,
        "uint64" => DataType::Uint64,
        "int8" => DataType::Int8,
        "int16" => DataType::Int16,
        "int32" => DataType::Int32,
        "int64" => DataType::Int64,
        other => panic!("no type {other}"),
    }
}

/// Makes a node of `y z = Operator a b name=1`.
pub(crate) fn node(text: &str) -> NodeProto {
    let (outputs, rest) = text.split_once(" = ").unwrap_or_else(|| panic!("no node: {text}"));
    let mut words = rest.split_whitespace();
    let operator = words.next().unwrap();
    let (attributes, inputs): (Vec<&str>, Vec<&str>) = words.partition(|word| word.contains('='));
    let output: Vec<String> = outputs.split_whitespace().map(str::to_owned).collect();
    NodeProto {
        name: output[0].clone(),
        output,
        op_type: operator.to_owned(),
        input: inputs.iter().map(|input| if *input == "-" { "" } else { input }.to_owned()).collect(),
        attribute: attributes.into_iter().map(attribute).collect(),
        ..NodeProto::default()
    }
}

/// Makes an attribute of `name=1`, `name=0.5`, `name=1,2`, `name=float` (the number of a type) or `name=text`.
fn attribute(text: &str) -> AttributeProto {
    let (name, value) = text.split_once('=').unwrap();
    let mut attribute = AttributeProto { name: name.to_owned(), ..AttributeProto::default() };
    let kind = if name == "equation" {
        attribute.s = value.as_bytes().to_vec();
        AttributeType::String
    } else if let Ok(number) = value.parse() {
        attribute.i = number;
        AttributeType::Int
    } else if let Ok(number) = value.parse() {
        attribute.f = number;
        AttributeType::Float
    } else if value.contains(',') {
        attribute.ints = value.split(',').filter(|it| !it.is_empty()).map(|it| it.parse().unwrap()).collect();
        AttributeType::Ints
    } else if name == "to" {
        attribute.i = kind_of(value) as i64;
        AttributeType::Int
    } else {
        attribute.s = value.as_bytes().to_vec();
        AttributeType::String
    };
    attribute.r#type = kind as i32;
    attribute
}

/// Makes an attribute that is a graph.
pub(crate) fn of_graph(name: &str, graph: GraphProto) -> AttributeProto {
    AttributeProto {
        name: name.to_owned(),
        r#type: AttributeType::Graph as i32,
        g: Some(graph),
        ..AttributeProto::default()
    }
}

/// Makes an attribute that is a constant.
pub(crate) fn of_tensor(name: &str, tensor: TensorProto) -> AttributeProto {
    AttributeProto {
        name: name.to_owned(),
        r#type: AttributeType::Tensor as i32,
        t: Some(tensor),
        ..AttributeProto::default()
    }
}

/// Says that the elements of a constant are in the file `location`.
pub(crate) fn in_file(mut tensor: TensorProto, location: &str) -> TensorProto {
    tensor.raw_data.clear();
    let (key, value) = ("location".to_owned(), location.to_owned());
    tensor.external_data = vec![StringStringEntryProto { key, value }];
    tensor.data_location = Some(DataLocation::External as i32);
    tensor
}

/// A type of elements of a constant.
pub(crate) trait Element: Copy {
    const KIND: DataType;
    fn bytes(self) -> Vec<u8>;
}

macro_rules! elements {
    ($($kind:ident = $rust:ty),*) => {
        $(impl Element for $rust {
            const KIND: DataType = DataType::$kind;

            fn bytes(self) -> Vec<u8> {
                self.to_le_bytes().to_vec()
            }
        })*
    };
}
elements!(Float = f32, Int64 = i64, Int32 = i32, Int8 = i8, Uint8 = u8);

/// Makes a constant.
pub(crate) fn constant<T: Element>(name: &str, dims: &[i64], elements: &[T]) -> TensorProto {
    TensorProto {
        name: name.to_owned(),
        dims: dims.to_vec(),
        data_type: T::KIND as i32,
        raw_data: elements.iter().flat_map(|element| element.bytes()).collect(),
        ..TensorProto::default()
    }
}

/// Makes a constant of one dimension.
pub(crate) fn list<T: Element>(name: &str, elements: &[T]) -> TensorProto {
    constant(name, &[elements.len() as i64], elements)
}

/// Makes a constant without dimensions.
pub(crate) fn scalar<T: Element>(name: &str, element: T) -> TensorProto {
    constant(name, &[], &[element])
}

/// Makes weights from -1/2 to 1/2 that differ, and depend on the name.
pub(crate) fn weights(name: &str, dims: &[i64]) -> TensorProto {
    let mut random = fastrand::Rng::with_seed(name.bytes().map(u64::from).sum());
    let elements: Vec<f32> = (0..dims.iter().product()).map(|_| random.f32() - 0.5).collect();
    constant(name, dims, &elements)
}

/// Makes weights whose elements are all 0.02, as in the `light` models.
pub(crate) fn light(name: &str, dims: &[i64]) -> TensorProto {
    constant(name, dims, &vec![0.02_f32; dims.iter().product::<i64>() as usize])
}

/// Makes the content of a file.
pub(crate) fn encoded(model: &ModelProto) -> Vec<u8> {
    model.encode_to_vec()
}

/// A network of two convolutions with a way around the second one, a batch normalisation, and a matrix
/// product. It reshapes a batch of 1 to a constant shape, as the `light` models do.
pub(crate) fn residual() -> ModelProto {
    let mut constants = vec![
        light("w1", &[8, 3, 3, 3]),
        light("w2", &[8, 8, 3, 3]),
        light("bias", &[8]),
        light("w3", &[10, 8 * 4 * 4]),
    ];
    constants.extend(["scale", "shift", "mean", "variance"].map(|name| light(name, &[8])));
    constants.extend([light("b3", &[10]), list("flat", &[1_i64, 128])]);
    let nodes = "
        conv1 = Conv data w1 bias kernel_shape=3,3 pads=1,1,1,1 strides=1,1;
        relu1 = Relu conv1;
        conv2 = Conv relu1 w2 bias kernel_shape=3,3 pads=1,1,1,1 strides=1,1;
        normal = BatchNormalization conv2 scale shift mean variance;
        sum = Sum normal relu1;
        relu2 = Relu sum;
        pool = MaxPool relu2 kernel_shape=4,4 strides=4,4;
        reshaped = Reshape pool flat;
        gemm = Gemm reshaped w3 b3 transB=1;
        result = Softmax gemm";
    model(9, "data:float[1,3,16,16]", "result:float[1,10]", nodes, constants)
}

/// The file of a model of four convolutions and a matrix product. Each convolution makes a tensor of 16 KiB.
pub(crate) fn convolutions() -> Vec<u8> {
    let mut nodes = String::new();
    let mut constants = vec![light("classes", &[16 * 16 * 16, 10])];
    let mut last = "image".to_owned();
    for layer in 0..4 {
        let channels = if layer == 0 { 1 } else { 16 };
        constants.push(light(&format!("weight{layer}"), &[16, channels, 3, 3]));
        nodes += &format!("conv{layer} = Conv {last} weight{layer} kernel_shape=3,3 pads=1,1,1,1;");
        nodes += &format!("relu{layer} = Relu conv{layer};");
        last = format!("relu{layer}");
    }
    nodes += &format!("flat = Flatten {last}; scores = MatMul flat classes");
    encoded(&model(13, "image:float[1,1,16,16]", "scores:float[1,10]", &nodes, constants))
}

/// The file of a model of one operator, which takes and makes a vector.
pub(crate) fn operator(kind: &str) -> Vec<u8> {
    encoded(&model(13, "vector:float[4]", "only:float[4]", &format!("only = {kind} vector"), Vec::new()))
}
