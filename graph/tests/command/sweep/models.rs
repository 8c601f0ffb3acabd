//! The models of the sweep.

use tract_onnx::pb::tensor_proto::DataLocation;
use tract_onnx::pb::{GraphProto, ModelProto, StringStringEntryProto, TensorProto};

use crate::onnx::{constant, graph, list, model, node, of_graph, scalar, weights};

/// A model, and how it is run.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) model: ModelProto,
    /// The lengths of the symbols, in turn.
    pub(crate) lengths: Vec<u64>,
    /// The content of the file `data.bin` beside the model.
    pub(crate) data: Vec<u8>,
}

impl Case {
    fn new(name: &'static str, model: ModelProto) -> Self {
        Self { name, model, lengths: vec![2, 1, 3], data: Vec::new() }
    }
}

const FAR: i64 = i64::MAX;

/// The beginning of many models: `h` depends on `x:float[N,6]`.
const BEGIN: &str = "m = MatMul x w; h = Relu m;";
/// A number from 1 to 4 that the data determine: `k`, of shape `[1]`.
const COUNT: &str =
    "top = ReduceMax x keepdims=0; size = Abs top; large = Mul size three; within = Clip large least most;
    whole = Cast within to=int64; number = Add whole one; k = Reshape number single;";

fn after_begin(name: &'static str, outputs: &str, nodes: &str, constants: Vec<TensorProto>) -> Case {
    let constants = [vec![weights("w", &[6, 6])], constants].concat();
    Case::new(name, model(17, "x:float[N,6]", outputs, &format!("{BEGIN}{nodes}"), constants))
}

fn after_count(name: &'static str, outputs: &str, nodes: &str, constants: Vec<TensorProto>) -> Case {
    let numbers = vec![
        scalar("three", 3_f32),
        scalar("least", 0_f32),
        scalar("most", 3_f32),
        scalar("one", 1_i64),
        list("single", &[1_i64]),
    ];
    after_begin(name, outputs, &format!("{COUNT}{nodes}"), [numbers, constants].concat())
}

/// A dimension that only the data determine.
fn by_data() -> Vec<Case> {
    let boxes = vec![list("limit", &[3_i64]), list("overlap", &[0.5_f32]), list("least", &[0.1_f32])];
    let nodes =
        "boxes = Abs x; scores = Sigmoid s; places = NonMaxSuppression boxes scores limit overlap least;
        y = Cast places to=float";
    let suppression = model(17, "x:float[1,8,4] s:float[1,2,8]", "y", nodes, boxes);
    vec![
        after_begin(
            "nonzero",
            "y",
            "p = NonZero h; f = Cast p to=float; y = ReduceSum f last keepdims=0",
            vec![list("last", &[1_i64])],
        ),
        after_begin("nonzero-output", "y", "y = NonZero h", vec![]),
        after_begin(
            "gather-of-nonzero",
            "y",
            "r = ReduceMax h axes=1, keepdims=0; p = NonZero r; c = Squeeze p first; y = Gather h c axis=0",
            vec![list("first", &[0_i64])],
        ),
        after_begin(
            "nonzero-of-bools",
            "y",
            "b = Greater h half; n = Not b; p = NonZero n; y = Cast p to=float",
            vec![scalar("half", 0.1_f32)],
        ),
        after_begin("shape-of-nonzero", "y p", "p = NonZero h; s = Shape p; y = Cast s to=float", vec![]),
        after_begin(
            "ones-for-nonzero",
            "y",
            "p = NonZero h; s = Shape p; e = Expand half s; f = Cast p to=float; y = Add e f",
            vec![scalar("half", 0.5_f32)],
        ),
        after_begin(
            "two-nonzeros",
            "y z",
            "p = NonZero h; n = Neg h; q = NonZero n; f = Cast p to=float; g = Cast q to=float; y = Concat f g axis=1;
             z = Transpose p",
            vec![],
        ),
        Case::new("suppression", suppression),
        after_count("top-k-of-data", "y p", "y p = TopK h k axis=1", vec![]),
        after_count(
            "range-of-data",
            "y",
            "end = Cast number to=float; row = Range least end three; s = ReduceSum h keepdims=0; y = Add row s",
            vec![],
        ),
    ]
}

/// Tensors without elements.
fn empty() -> Vec<Case> {
    let ints = vec![
        list("zero", &[0_i64]),
        list("one", &[1_i64]),
        list("last", &[-1_i64]),
        list("far", &[FAR]),
        list("none", &[0_i64, 4]),
        weights("w", &[4, 4]),
        constant::<f32>("nothing", &[0, 4], &[]),
    ];
    let rows = |name, outputs: &str, nodes: &str| {
        Case::new(name, model(17, "x:float[N,4]", outputs, nodes, ints.clone()))
    };
    let steps = |name, outputs: &str, nodes: &str| {
        Case::new(name, model(17, "x:float[2,S,4]", outputs, nodes, ints.clone()))
    };
    let fixed = |name, inputs: &str, outputs: &str, nodes: &str| {
        Case::new(name, model(17, inputs, outputs, nodes, ints.clone()))
    };
    let mut batch = rows("empty-batch", "y", "m = MatMul x w; h = Relu m; y = Softmax h");
    batch.lengths = vec![0, 2, 0];
    vec![
        rows("rest", "y", "h = Relu x; t = Slice h one far zero; m = MatMul t w; y = Sigmoid m"),
        rows(
            "rest-and-whole",
            "y",
            "h = MatMul x w; t = Slice h one far zero; b = Concat t h axis=0; y = Relu b",
        ),
        rows(
            "sum-of-rest",
            "y",
            "h = MatMul x w; t = Slice h one far zero; s = ReduceSum t zero keepdims=0; y = Add s s",
        ),
        steps(
            "differences",
            "y",
            "h = MatMul x w; l = Slice h one far one; s = Slice h zero last one; y = Sub l s",
        ),
        steps(
            "history",
            "y past",
            "h = Relu x; past = Slice h zero last one; now = Slice h last far one; all = Concat past now axis=1;
             y = MatMul all w",
        ),
        batch,
        fixed("empty-input", "x:float[0,4] z:float[2,4]", "y", "h = Relu x; b = Concat h z axis=0; y = MatMul b w"),
        fixed("empty-all-along", "x:float[0,4]", "y", "h = Relu x; m = MatMul h w; s = Sigmoid m; y = Add s h"),
        fixed("empty-constant", "x:float[2,4]", "y", "h = Relu x; b = Concat h nothing axis=0; y = MatMul b w"),
        fixed("empty-sum", "x:float[4,0] z:float[0,3]", "y", "h = Relu x; g = Relu z; m = MatMul h g; y = Relu m"),
        rows("empty-of-a-fixed-slice", "y e", "h = Relu x; e = Slice h zero zero one; y = Concat e h axis=1"),
    ]
}

/// Each type of elements, as an input and across cuts.
fn types() -> Vec<Case> {
    let arithmetic = |name, kind: &str| {
        let nodes = "s = Add x z; d = Mul s z; c = Concat d x axis=0; y = Transpose c perm=1,0";
        Case::new(name, model(17, &format!("x:{kind}[N,4] z:{kind}[N,4]"), "y", nodes, vec![]))
    };
    vec![
        arithmetic("float", "float"),
        arithmetic("double", "double"),
        arithmetic("float16", "float16"),
        arithmetic("int8", "int8"),
        arithmetic("int16", "int16"),
        arithmetic("int32", "int32"),
        arithmetic("int64", "int64"),
        arithmetic("uint8", "uint8"),
        arithmetic("uint16", "uint16"),
        arithmetic("uint32", "uint32"),
        arithmetic("uint64", "uint64"),
        Case::new(
            "bool-input",
            model(17, "x:float[N,4] b:bool[N,4]", "y n", "h = Relu x; n = Not b; y = Where n h x", vec![]),
        ),
        Case::new(
            "bool-across",
            model(
                17,
                "x:float[N,4] z:float[N,4]",
                "y",
                "g = Greater x z; n = Not g; l = Less x z; a = And n l; o = Or a g; y = Xor o n",
                vec![],
            ),
        ),
        Case::new(
            "string-input",
            model(17, "s:string[N] x:float[N]", "y", "f = Cast s to=float; h = Relu x; y = Add f h", vec![]),
        ),
        Case::new(
            "string-across",
            model(17, "s:string[N] t:string[N]", "y", "j = Concat s t axis=0; y = Concat j s axis=0", vec![]),
        ),
        Case::new(
            "numbers-of-many-types",
            model(
                17,
                "x:float[N,4]",
                "y",
                "a = Cast x to=int8; b = Cast a to=double; c = Cast b to=uint16; d = Cast c to=float16;
                 e = Cast d to=int64; y = Cast e to=bool",
                vec![],
            ),
        ),
    ]
}

/// Lengths as tensors.
fn lengths() -> Vec<Case> {
    let constants = || {
        vec![
            list("one", &[1_i64]),
            list("zero", &[0_i64]),
            list("four", &[4_i64]),
            list("minus", &[-1_i64]),
            scalar("first", 0_i64),
            scalar("from", 0_f32),
            scalar("by", 1_f32),
            weights("w", &[4, 4]),
            weights("table", &[16, 4]),
        ]
    };
    let of = |name, inputs: &str, outputs: &str, nodes: &str| {
        Case::new(name, model(17, inputs, outputs, nodes, constants()))
    };
    vec![
        of("shape-output", "x:float[N,4]", "s y", "m = MatMul x w; y = Relu m; s = Shape y"),
        of(
            "length-across",
            "x:float[N,4] z:float[M,4]",
            "y d",
            "s = Shape x; n = Gather s first axis=0; h = Relu z; t = Shape h; k = Gather t first axis=0;
             d = Mul n k; f = Cast d to=float; y = Add h f",
        ),
        of("length-doubled", "x:float[N,4]", "d", "h = Relu x; s = Shape h; d = Add s s"),
        of("count-of-elements", "x:float[N,4]", "y", "h = Relu x; s = Size h; f = Cast s to=float; y = Div h f"),
        of(
            "positions",
            "x:float[N,4]",
            "y",
            "s = Shape x; n = Gather s first axis=0; f = Cast n to=float; r = Range from f by; i = Cast r to=int64;
             e = Gather table i axis=0; y = Add x e",
        ),
        of(
            "rows-of-a-table",
            "x:float[N,4]",
            "y",
            "s = Shape x; n = Slice s zero one zero; d = Add n n; t = Slice table n d zero; h = Relu t; y = MatMul h w",
        ),
        of("as-another", "x:float[N,4] z:float[1,4]", "y", "s = Shape x; h = Relu z; e = Expand h s; y = Sub e x"),
        of(
            "reshaped",
            "x:float[N,4]",
            "y",
            "s = Shape x; n = Slice s zero one zero; t = Concat n four minus axis=0; r = Reshape x t; y = Relu r",
        ),
        of("an-expression", "x:float[2*N,4] z:float[N,4]", "y", "a = Relu x; b = Relu z; y = Concat a b axis=0"),
        of("ones-of-a-shape", "x:float[N,4]", "y", "s = Shape x; o = ConstantOfShape s; h = Relu x; y = Add o h"),
    ]
}

/// Graphs of few nodes.
fn few_nodes() -> Vec<Case> {
    let two = || vec![weights("a", &[2, 3]), weights("b", &[2, 3])];
    let of = |name, inputs: &str, outputs: &str, nodes: &str| {
        Case::new(name, model(17, inputs, outputs, nodes, two()))
    };
    vec![
        of("one-node", "x:float[N,4]", "y", "y = Relu x"),
        of("folds-to-a-constant", "", "y", "s = Add a b; y = Relu s"),
        of("folds-beside-an-input", "x:float[N,4]", "y z", "y = Add a b; z = Relu x"),
        of("folds-and-ignores-its-input", "x:float[2,4]", "y", "y = Add a b"),
        of("no-node-but-an-input", "x:float[2,4]", "y", "y = Identity x"),
        of("one-of-two-folds", "x:float[2,3]", "y z", "s = Add a b; y = Mul s a; m = Mul x s; z = Relu m"),
        of("the-same-result-twice", "x:float[2,3]", "y y z", "m = Mul x a; y = Add m b; z = Relu y"),
        of("an-input-without-use", "x:float[2,3] u:float[7]", "z", "m = Sigmoid x; n = Tanh m; z = Relu n"),
    ]
}

/// Absent inputs, and constants that are inputs.
fn optional() -> Vec<Case> {
    let mut given =
        model(9, "x:float[N,4] w:float[4,4]", "y", "m = MatMul x w; y = Relu m", vec![weights("w", &[4, 4])]);
    given.ir_version = 3;
    let cells = || {
        vec![
            weights("w4", &[1, 12, 4]),
            weights("r4", &[1, 12, 3]),
            weights("w3", &[1, 9, 4]),
            weights("r3", &[1, 9, 3]),
            weights("w1", &[1, 3, 4]),
            weights("r1", &[1, 3, 3]),
            weights("h0", &[1, 2, 3]),
        ]
    };
    let recurrent = |name, outputs: &str, nodes: &str| {
        Case::new(name, model(14, "x:float[T,2,4]", outputs, nodes, cells()))
    };
    let clip = vec![scalar("most", 0.5_f32)];
    let scales = vec![list("scales", &[1.0_f32, 1.0, 2.0, 2.0])];
    vec![
        Case::new("an-initializer-that-is-an-input", given),
        Case::new("clip-without-least", model(17, "x:float[N,4]", "y", "c = Clip x - most; y = Exp c", clip)),
        Case::new(
            "resize-without-region",
            model(
                13,
                "x:float[1,2,3,3]",
                "y",
                "h = Relu x; r = Resize h - scales mode=nearest coordinate_transformation_mode=asymmetric
                 nearest_mode=floor; y = Sigmoid r",
                scales,
            ),
        ),
        recurrent("lstm", "y h", "a = Relu x; y h = LSTM a w4 r4 hidden_size=3; z = Relu y"),
        recurrent(
            "gru",
            "z",
            "a = Relu x; y = GRU a w3 r3 - - h0 hidden_size=3 linear_before_reset=1; z = Tanh y",
        ),
        recurrent("rnn", "z", "a = Relu x; y = RNN a w1 r1 hidden_size=3; z = Tanh y"),
        Case::new(
            "dropout-without-mask",
            model(13, "x:float[N,4]", "y", "h = Relu x; d = Dropout h; y = Sigmoid d", vec![]),
        ),
        Case::new("sum-of-all-axes", model(13, "x:float[N,4]", "y", "h = Relu x; y = ReduceSum h", vec![])),
    ]
}

/// Numbers with a scale and a zero point.
fn quantized() -> Vec<Case> {
    let bytes = |count: i64| (0..count).map(|it| (it * 37 % 251) as u8).collect::<Vec<u8>>();
    let small = |count: i64| (0..count).map(|it| (it * 37 % 251) as u8 as i8).collect::<Vec<i8>>();
    let constants = || {
        vec![
            scalar("xs", 0.02_f32),
            scalar("xz", 128_u8),
            scalar("ws", 0.01_f32),
            scalar("wz", 0_i8),
            scalar("wu", 120_u8),
            scalar("ys", 0.05_f32),
            scalar("yz", 100_u8),
            constant("wq", &[4, 4], &small(16)),
            constant("wb", &[4, 4], &bytes(16)),
            constant("k", &[3, 2, 3, 3], &bytes(54)),
            list("bias", &[10_i32, -20, 30]),
        ]
    };
    let of = |name, opset, inputs: &str, outputs: &str, nodes: &str| {
        Case::new(name, model(opset, inputs, outputs, nodes, constants()))
    };
    vec![
        of(
            "quantize-and-back",
            13,
            "x:float[N,4]",
            "y",
            "h = Relu x; q = QuantizeLinear h xs xz; d = DequantizeLinear q xs xz; y = Sigmoid d",
        ),
        of("quantized-output", 13, "x:float[N,4]", "y", "h = Relu x; y = QuantizeLinear h xs xz"),
        of(
            "quantized-weights",
            13,
            "x:float[N,4]",
            "y",
            "w = DequantizeLinear wq ws wz; h = Relu x; m = MatMul h w; y = Relu m",
        ),
        of(
            "quantized-product",
            13,
            "x:float[2,4]",
            "y",
            "q = QuantizeLinear x xs xz; p = QLinearMatMul q xs xz wq ws wz ys yz; y = DequantizeLinear p ys yz",
        ),
        of(
            "quantized-convolution",
            13,
            "x:float[1,2,6,6]",
            "y",
            "q = QuantizeLinear x xs xz; c = QLinearConv q xs xz k ws wu ys yz bias; y = DequantizeLinear c ys yz",
        ),
        of(
            "product-of-integers",
            13,
            "x:uint8[N,4]",
            "y",
            "p = MatMulInteger x wb xz wu; f = Cast p to=float; y = Relu f",
        ),
        of(
            "dynamic-scale",
            13,
            "x:float[2,4]",
            "y",
            "q s z = DynamicQuantizeLinear x; p = MatMulInteger q wb z wu; f = Cast p to=float; y = Mul f s",
        ),
        of(
            "quantized-opset-21",
            21,
            "x:float[N,4]",
            "y",
            "h = Relu x; q = QuantizeLinear h xs xz; d = DequantizeLinear q xs xz; w = DequantizeLinear wq ws wz;
             m = MatMul d w; y = Tanh m",
        ),
    ]
}

/// Graphs within nodes.
fn nested() -> Vec<Case> {
    let constants = || vec![scalar("zero", 0_f32), weights("w", &[4, 4])];
    let branch = |nodes: &str, output: &str| -> GraphProto { graph("", output, nodes, vec![]) };
    let mut choose = node("c = If b");
    choose.attribute = vec![
        of_graph("then_branch", branch("t = MatMul h w", "t")),
        of_graph("else_branch", branch("e = Neg h", "e")),
    ];
    let mut conditional = model(
        17,
        "x:float[2,4]",
        "y",
        "h = Relu x; s = ReduceSum h keepdims=0; b = Greater s zero",
        constants(),
    );
    let mut by_input = model(17, "x:float[2,4] b:bool[]", "y", "h = Relu x", constants());
    for model in [&mut conditional, &mut by_input] {
        let graph = model.graph.as_mut().unwrap();
        graph.node.extend([choose.clone(), node("y = Sigmoid c")]);
    }
    let mut scan = node("last all = Scan start x num_scan_inputs=1");
    let body =
        graph("state:float[4] row:float[4]", "next out", "next = Add state row; out = Identity next", vec![]);
    scan.attribute.push(of_graph("body", body));
    let mut sums = model(11, "x:float[T,4]", "y last", "", vec![list("start", &[0_f32; 4])]);
    let graph = sums.graph.as_mut().unwrap();
    graph.node.extend([scan, node("y = Relu all")]);
    vec![Case::new("if", conditional), Case::new("if-of-an-input", by_input), Case::new("scan", sums)]
}

/// Constants in a file beside the model.
fn external() -> Vec<Case> {
    let constants = vec![
        weights("w", &[6, 6]),
        list("chosen", &[3_i64, 0, 2]),
        constant("mask", &[3], &[1_u8, 0, 1]),
        list("more", &[1_f32, 2.0, 3.0]),
    ];
    let nodes =
        "h = MatMul x w; g = Gather h chosen axis=1; s = Sub g more; b = Cast mask to=bool; y = Where b s g";
    let mut case = Case::new("external-data", model(17, "x:float[N,6]", "y", nodes, constants));
    let graph = case.model.graph.as_mut().unwrap();
    for tensor in graph.initializer.iter_mut().filter(|tensor| tensor.name != "more") {
        let entry = |key: &str, value: String| StringStringEntryProto { key: key.to_owned(), value };
        tensor.external_data = vec![
            entry("location", "data.bin".to_owned()),
            entry("offset", case.data.len().to_string()),
            entry("length", tensor.raw_data.len().to_string()),
        ];
        tensor.data_location = Some(DataLocation::External as i32);
        case.data.append(&mut tensor.raw_data);
    }
    vec![case]
}

/// Versions of operators, names, and operators of many kinds.
fn others() -> Vec<Case> {
    let mlp = |name, opset| {
        let constants = vec![weights("w", &[6, 8]), weights("v", &[8, 3]), weights("b", &[8])];
        let nodes = "m = MatMul x w; a = Add m b; h = Relu a; n = MatMul h v; y = Softmax n axis=1";
        Case::new(name, model(opset, "x:float[N,6]", "y", nodes, constants))
    };
    let mut names = mlp("names", 17);
    let graph = names.model.graph.as_mut().unwrap();
    graph.node[0].name.clear();
    graph.node[1].name = "a node / with, signs=1".to_owned();
    graph.node[2].name = "h.0".to_owned();
    graph.node[3].name = "h".to_owned();
    let pictures = |name, inputs: &str, outputs: &str, nodes: &str| {
        let constants = vec![
            weights("k", &[4, 3, 3, 3]),
            weights("d", &[4, 1, 3, 3]),
            weights("t", &[4, 2, 2, 2]),
            weights("scale", &[4]),
        ];
        let mut case = Case::new(name, model(17, inputs, outputs, nodes, constants));
        case.lengths = vec![6, 7, 9];
        case
    };
    let of = |name, inputs: &str, outputs: &str, nodes: &str, constants: Vec<TensorProto>| {
        Case::new(name, model(17, inputs, outputs, nodes, constants))
    };
    let rows = vec![constant("rows", &[2, 1], &[0_i64, 1]), weights("fresh", &[2, 4])];
    let hot = vec![scalar("depth", 8_i64), list("values", &[0_f32, 1.0])];
    vec![
        mlp("opset-9", 9),
        mlp("opset-13", 13),
        mlp("opset-21", 21),
        names,
        pictures(
            "pictures-of-any-size",
            "x:float[1,3,H,W]",
            "y",
            "c = Conv x k; r = Relu c; y = GlobalAveragePool r",
        ),
        pictures(
            "a-batch-of-pictures",
            "x:float[N,3,8,8]",
            "y",
            "c = Conv x k pads=1,1,1,1; r = Relu c; p = MaxPool r kernel_shape=2,2 strides=2,2;
             d2 = Conv p d group=4; u = ConvTranspose d2 t strides=2,2; y = AveragePool u kernel_shape=2,2",
        ),
        pictures(
            "channels-by-the-weights",
            "x:float[1,?,8,8]",
            "y",
            "c = Conv x k; r = Relu c; y = Sigmoid r",
        ),
        of(
            "normalised",
            "x:float[N,6]",
            "y",
            "h = Relu x; n = LayerNormalization h s b; y = Tanh n",
            vec![weights("s", &[6]), weights("b", &[6])],
        ),
        of(
            "einsum",
            "x:float[N,4] z:float[N,5]",
            "y",
            "h = Relu x; e = Einsum h z equation=ni,nj->ij; y = Relu e",
            vec![],
        ),
        of(
            "scattered",
            "x:float[N,4]",
            "y",
            "h = Relu x; c = Concat h fresh axis=0; s = ScatterND c rows fresh; g = GatherND s rows; y = Add g fresh",
            rows,
        ),
        of("one-hot", "i:int64[N]", "y", "o = OneHot i depth values; n = Neg o; y = Exp n", hot),
        of(
            "sums-and-triangles",
            "x:float[N,4]",
            "y",
            "h = Relu x; t = Trilu h; y = CumSum t axis",
            vec![scalar("axis", 1_i64)],
        ),
        of(
            "random",
            "x:float[2,3]",
            "y",
            "r = RandomUniform shape=2,3 seed=3.0; h = Relu x; y = Add h r",
            vec![],
        ),
        of(
            "arg-max",
            "x:float[N,4]",
            "y i",
            "h = Sigmoid x; i = ArgMax h axis=1 keepdims=0; f = Cast i to=float; y = Exp f",
            vec![],
        ),
        of(
            "two-ways",
            "x:float[N,4] z:float[M,4]",
            "y w",
            "a = Relu x; b = Relu z; c = Transpose b perm=1,0; m = MatMul a c; y = Tanh m; w = Concat a b axis=0",
            vec![],
        ),
        of(
            "split-and-joined",
            "x:float[N,6]",
            "y",
            "a b c = Split x sizes axis=1; d = Mul b c; y = Concat d a axis=1",
            vec![list("sizes", &[2_i64, 2, 2])],
        ),
    ]
}

/// Returns all models.
pub(crate) fn all() -> Vec<Case> {
    let groups = [
        by_data(),
        empty(),
        types(),
        lengths(),
        few_nodes(),
        optional(),
        quantized(),
        nested(),
        external(),
        others(),
    ];
    groups.into_iter().flatten().collect()
}
