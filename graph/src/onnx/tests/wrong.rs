use std::collections::BTreeMap;

use tract_onnx::pb::{GraphProto, TensorProto};

use super::*;
use crate::onnx::self_contained;

fn refused(model: &ModelProto, settings: &ModelBuilder) -> String {
    load_file(model, settings).unwrap_err().to_string()
}

fn graph(model: &mut ModelProto) -> &mut GraphProto {
    model.graph.as_mut().unwrap()
}

#[test]
fn files_that_are_no_models() {
    for (bytes, reason) in [
        (&b""[..], "the file is empty"),
        (b"#!/bin/sh\necho no model\n", "it is no ONNX model"),
        (&[8, 3], "it has no graph"),
        (&[0xff; 4096], "it is no ONNX model"),
    ] {
        let (_folder, path) = written(bytes);
        let error = Model::load(&path).unwrap_err().to_string();
        assert!(error.contains("model.onnx") && error.contains(reason), "{error}");
    }
    let folder = tempfile::tempdir().unwrap();
    for (path, reason) in [
        (folder.path().to_owned(), "it is no file"),
        (folder.path().join("missing.onnx"), "it can't be read"),
    ] {
        let error = Model::load(&path).unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
    }
}

#[test]
fn a_file_that_ends_too_early() {
    let bytes = file::encoded(&file::residual());
    // Most of the file are weights, so few of these lengths are the end of a message.
    for length in (0..bytes.len()).step_by(97) {
        let (_folder, path) = written(&bytes[..length]);
        assert!(Model::load(&path).is_err(), "{length} of {} bytes", bytes.len());
    }
}

#[test]
fn an_operator_that_the_engine_does_not_know() {
    let mut model = file::residual();
    graph(&mut model).node[4].op_type = "Confuse".to_owned();
    let error = load_file(&model, &ModelBuilder::default()).unwrap_err();
    assert!(
        matches!(error.problem(), Problem::Operator { node, operator, .. } if node == "sum" && operator == "Confuse"),
        "{error}"
    );
    assert!(error.to_string().contains("node sum: the engine (tract) has no operator Confuse"), "{error}");
}

type Change = fn(&mut GraphProto);

#[test]
fn graphs_that_contradict_themselves() {
    let changes: [(Change, &str); 6] = [
        (
            |graph| graph.node[1].input[0] = "nothing".to_owned(),
            "node relu1: no node, input or constant is called nothing",
        ),
        (|graph| graph.output[0].name = "nothing".to_owned(), "nothing computes the output nothing"),
        (|graph| graph.initializer[0].raw_data.truncate(10), "the tensor w1 has 10 bytes for 216 elements"),
        (|graph| graph.initializer[0].data_type = 99, "the tensor w1 has elements of type 99"),
        (|graph| graph.initializer[1].dims[0] = -8, "the tensor w2 has the shape [-8, 8, 3, 3]"),
        (|graph| graph.input[0] = file::value("data:float[?,3,16,16]"), "give it one, or a symbol: data:0=N"),
    ];
    for (change, reason) in changes {
        let mut model = file::residual();
        change(graph(&mut model));
        let error = refused(&model, &ModelBuilder::default());
        assert!(error.contains(reason), "{error}");
    }
}

/// The content of a model that adds the constant `w`.
fn adds(w: TensorProto) -> Vec<u8> {
    file::encoded(&file::model(17, "x:float[4]", "y:float[4]", "y = Add x w", vec![w]))
}

#[test]
fn files_outside_the_folder_of_a_model() {
    let (folder, path) = written(b"");
    let above = tempfile::tempdir().unwrap();
    let outside = above.path().join("outside");
    std::fs::write(&outside, [7; 16]).unwrap();
    std::os::unix::fs::symlink(&outside, folder.path().join("link")).unwrap();
    let up = Path::new("..").join(above.path().file_name().unwrap()).join("outside");
    for location in [up.to_str().unwrap(), "link", outside.to_str().unwrap()] {
        let content = adds(file::in_file(file::weights("w", &[4]), location));
        std::fs::write(&path, &content).unwrap();
        let error = self_contained(&path, content.clone()).unwrap_err().to_string();
        assert!(error.contains("the tensor w is in another file") && error.contains(location), "{error}");
        let error = Model::load(&path).unwrap_err().to_string();
        assert!(error.contains("outside"), "{error}");
    }
    // A content without a folder may name no file at all.
    std::fs::write(folder.path().join("inside"), [7; 16]).unwrap();
    let content = adds(file::in_file(file::weights("w", &[4]), "inside"));
    let error = Model::builder().read(&path, &content).unwrap_err().to_string();
    assert!(error.contains("the tensor w is in another file (\"inside\")"), "{error}");
    std::fs::write(&path, &content).unwrap();
    Model::load(&path).unwrap();
    Model::builder().read(&path, &self_contained(&path, content).unwrap()).unwrap();
}

#[test]
fn impossible_tensors_in_other_files() {
    let (folder, path) = written(b"");
    std::fs::write(folder.path().join("data"), [7; 16]).unwrap();
    type OfTensor = fn(&mut TensorProto);
    let changes: [(OfTensor, &str); 4] = [
        (|tensor| tensor.dims = vec![-1], "the tensor w has the shape [-1]"),
        (|tensor| tensor.dims = vec![1 << 61], "the tensor w has the shape [2305843009213693952]"),
        (|tensor| tensor.dims = vec![5], "the tensor w is in another file"),
        (|tensor| tensor.data_type = 99, "the tensor w has elements of type 99"),
    ];
    for (change, reason) in changes {
        let mut tensor = file::in_file(file::weights("w", &[4]), "data");
        change(&mut tensor);
        let error = self_contained(&path, adds(tensor)).unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
    }
}

#[test]
fn shapes_that_do_not_fit() {
    let mut model = file::residual();
    graph(&mut model).initializer[3] = file::light("w3", &[10, 77]);
    let error = refused(&model, &ModelBuilder::default());
    assert!(error.contains("gemm"), "{error}");
}

#[test]
fn dimensions_that_do_not_exist() {
    for (dim, reason) in [
        ("picture:0=N", "its inputs are data"),
        ("data:4=N", "this input has 4 dimensions"),
        ("w1:0=N", "its inputs are data"),
    ] {
        let error = refused(&file::residual(), &settings(1, &[dim]));
        assert!(error.contains(reason) && error.contains(dim), "{error}");
    }
    for text in ["data", "data:0", "data:x=N", "data:0=", "data:0=0", "data:0=N+1", ":0=N", "data:0=9x"] {
        assert!(text.parse::<super::super::SymbolicDim>().unwrap_err().reason().contains(text));
    }
}

#[test]
fn pictures_that_are_too_small() {
    let nodes = "result = Conv data w kernel_shape=5,5";
    let constants = vec![file::light("w", &[4, 3, 5, 5])];
    let model = file::model(9, "data:float[1,3,16,16]", "result", nodes, constants);
    let model = load_file(&model, &settings(1, &["data:2=H"])).unwrap();
    check_kernels(&model, &[5, 9]);
    let lengths = BTreeMap::from([("H".to_owned(), 4)]);
    let inputs = model.inputs(0, 1, &lengths).unwrap();
    let error = model.run_unsplit(&inputs, model.topology().results().to_vec()).unwrap_err().to_string();
    assert!(error.contains("would be 0; the inputs are too small"), "{error}");
}

#[test]
fn inputs_that_do_not_fit() {
    let model = seeded(1, &["data:0=N"]);
    let result = model.topology().results()[0];
    let error = model.inputs(0, 1, &BTreeMap::new()).unwrap_err().to_string();
    assert!(error.contains("the dimension N need a length"), "{error}");
    let error = model.run_unsplit(&[], [result]).unwrap_err().to_string();
    assert!(error.contains("the input data is missing"), "{error}");
    let missing = Outlet { node: NodeId(100_000), output: 0 };
    assert!(model.run_unsplit(&[], [missing]).is_err());
    assert!(model.kernels([missing.node]).is_err());
    // The input of another model.
    let other = load_file(&file::residual(), &settings(1, &["data:1=3", "data:2=17"])).unwrap();
    let inputs = other.inputs(0, 1, &BTreeMap::new()).unwrap();
    assert!(model.run_unsplit(&inputs, [result]).is_err());
    let first = model
        .topology()
        .nodes()
        .find(|(_, node)| node.role == Role::Compute && node.inputs[0].node == inputs[0].0)
        .unwrap()
        .0;
    let mut kernel = model.kernels([first]).unwrap().remove(&first).unwrap();
    assert!(kernel.run(0, Vec::new()).unwrap_err().to_string().contains("0 inputs came"));
    let wrong = vec![inputs[0].1.clone(); model.topology().node(first).unwrap().inputs.len()];
    assert!(kernel.run(0, wrong).is_err());
}
