use std::collections::BTreeMap;
use std::process::Command;
use std::sync::Arc;

use tract_onnx::tract_core::ops::konst::Const;

use super::*;
use crate::dataflow::{Dim, Value};
use crate::placement::{Partition, Placement, Placements};
use tonic_rdma_tensor::{Dtype, Shape, TensorSpec};

#[test]
fn kernels_give_the_values_of_the_whole_model() {
    check_kernels(&seeded(1, &[]), &[1, 1, 1]);
}

#[test]
fn batches_of_different_lengths_run_at_the_same_time() {
    let model = seeded(1, &["data:0=N"]);
    assert_eq!(model.symbols(), ["N"]);
    let fact = model.topology().fact(model.topology().results()[0]).unwrap();
    assert_eq!(fact.dims, [Dim::Symbolic("N".into()), Dim::Known(10)]);
    check_kernels(&model, &[1, 5, 2]);
}

#[test]
fn a_batch_of_a_constant_length() {
    let model = seeded(1, &["data:0=4"]);
    assert_eq!(model.topology().fact(model.topology().results()[0]).unwrap().to_string(), "float32[4, 10]");
    check_kernels(&model, &[1]);
}

#[test]
fn a_picture_gives_the_same_result_in_any_batch() {
    let (one, many) = (seeded(3, &[]), seeded(3, &["data:0=N"]));
    let inputs = one.inputs(0, 9, &BTreeMap::new()).unwrap();
    let of = |model: &Model| {
        let data = model.topology().node_called("data").unwrap();
        let outlet = model.topology().results()[0];
        numbers(&model.run_unsplit(&[(data, inputs[0].1.clone())], [outlet]).unwrap()[&outlet])
    };
    for (a, b) in of(&one).into_iter().zip(of(&many)) {
        assert!((a - b).abs() < 1e-5, "{a} is not {b}");
    }
}

#[test]
fn results_depend_on_weights_and_inputs() {
    let model = seeded(1, &[]);
    assert_eq!(model.seeded(), 9);
    check_results(&model, |seed| seeded(seed, &[]), 1);
}

#[test]
fn weights_of_the_file_are_kept_unless_asked_otherwise() {
    let plain = load_file(&file::residual(), &ModelBuilder::default()).unwrap();
    assert_eq!(plain.seeded(), 0);
    let first = result(&plain, 0, 5, 1);
    // All weights of the file are equal, so all results are.
    assert!(first.iter().all(|number| (number - first[0]).abs() < 1e-6), "{first:?}");
}

#[test]
fn each_kernel_holds_its_own_weights_only() {
    let model = seeded(1, &[]);
    let constants: Vec<NodeId> =
        model.topology().nodes().filter(|(_, node)| node.role == Role::Constant).map(|(id, _)| id).collect();
    let (kept, dropped) = (constants[0], constants[constants.len() - 1]);
    let weak =
        |id: NodeId| Arc::downgrade(model.engine.nodes[model.nodes[id.0]].op_as::<Const>().unwrap().val());
    let (weak_kept, weak_dropped) = (weak(kept), weak(dropped));
    let users = model
        .topology()
        .nodes()
        .filter(|(_, node)| !node.inputs.iter().any(|input| input.node == dropped))
        .map(|(id, _)| id);
    let kernels = model.kernels(users.filter(|id| *id != dropped)).unwrap();
    drop(model);
    assert!(weak_kept.upgrade().is_some() && weak_dropped.upgrade().is_none());
    drop(kernels);
    assert!(weak_kept.upgrade().is_none());
}

#[test]
fn a_node_without_inputs_of_its_length_learns_the_length_from_the_models_input() {
    // Expand makes N rows from a constant: nothing but the length of the batch ties it to the input.
    let nodes = "
        shape = Shape data;
        rows = Expand row shape;
        soft = Softmax rows;
        product = MatMul data w;
        result = Concat soft product axis=1";
    let constants = vec![file::light("row", &[1, 4]), file::light("w", &[4, 4])];
    let model = file::model(9, "data:float[1,4]", "result:float[1,8]", nodes, constants);
    let model = load_file(&model, &settings(1, &["data:0=N"])).unwrap();
    let topology = model.topology();
    let data = topology.node_called("data").unwrap();
    let constant = |outlet: &Outlet| topology.node(outlet.node).unwrap().role == Role::Constant;
    let repeats = |inputs: &[Outlet]| inputs.len() == 2 && constant(&inputs[0]) && inputs[1].node == data;
    assert!(
        topology.nodes().any(|(_, node)| node.kind.contains("Broadcast") && repeats(&node.inputs)),
        "{}",
        described(&model)
    );
    check_kernels(&model, &[3, 1, 7]);
    assert_eq!(result(&model, 0, 1, 3).len(), 24);
}

#[test]
fn sharing_copies_nothing_and_keeps_the_content() {
    let model = seeded(1, &[]);
    let inputs = model.inputs(0, 1, &BTreeMap::new()).unwrap();
    let value = inputs[0].1.clone();
    let shared = value.share().unwrap();
    assert_eq!(shared.bytes().unwrap().as_ptr(), value.bytes().as_ptr());
    let before = shared.bytes().unwrap().to_vec();
    drop((value, run_kernels(&model, &[inputs])));
    assert!(shared.bytes().unwrap() == before, "a kernel changed a tensor that is shared");
    let copy = ModelValue::filled(shared.spec(), &mut |bytes| {
        bytes.copy_from_slice(&before);
        Ok(())
    });
    assert!(copy.unwrap().bytes() == before);
}

#[test]
fn a_length_that_the_data_determine_makes_a_tensor_dynamic() {
    let nodes = "h = Relu x; p = NonZero h; y = Cast p to=float";
    let model = file::model(17, "x:float[2,3]", "y", nodes, vec![]);
    let model = load_file(&model, &ModelBuilder::default()).unwrap();
    let partition = Partition::at_cuts(model.topology(), &["p"]).unwrap();
    let placements = Placements::new(model.topology(), &partition).unwrap();
    let [crossing] = placements.crossings() else { panic!("{placements:?}") };
    let Placement::Dynamic { fact, why } = &crossing.placement else { panic!("{crossing:?}") };
    assert!(fact.dims[0] == Dim::Known(2) && why.contains("node p (NonZero)"), "{fact}: {why}");
    check_kernels(&model, &[1, 1, 1]);
}

#[test]
fn any_byte_that_arrives_is_a_bool() {
    let spec = TensorSpec::new(Dtype::Bool, Shape::new(&[3]).unwrap()).unwrap();
    let value = ModelValue::filled(&spec, &mut |bytes| {
        bytes.copy_from_slice(&[0, 1, 2]);
        Ok(())
    });
    assert_eq!(value.unwrap().bytes(), [0, 1, 1]);
}

const ASKED: &str = "TONIC_RDMA_TEST_DESCRIBE_MODEL";

#[test]
fn other_processes_see_the_same_nodes() {
    let (_folder, path) = written(&file::encoded(&file::residual()));
    if let Some(path) = std::env::var_os(ASKED) {
        println!("{}", described(&settings(1, &["data:0=N"]).load(Path::new(&path)).unwrap()));
        return;
    }
    let here = described(&settings(1, &["data:0=N"]).load(&path).unwrap());
    for _ in 0..3 {
        let name = "onnx::tests::small::other_processes_see_the_same_nodes";
        let mut other = Command::new(std::env::current_exe().unwrap());
        let output = other.args([name, "--exact", "--nocapture"]).env(ASKED, &path).output().unwrap();
        let printed = String::from_utf8(output.stdout).unwrap();
        assert!(printed.contains(&here), "another process sees\n{printed}\nhere it is\n{here}");
    }
}
