#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests; skips are for people")]

#[allow(dead_code, reason = "other tests use the rest")]
#[path = "../../../tests/onnx/mod.rs"]
mod file;
mod light;
mod small;
mod wrong;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use tract_onnx::pb::ModelProto;

use super::{Model, ModelBuilder, ModelValue, Weights};
use crate::dataflow::{NodeId, Outlet, Role, Topology};
use crate::error::{GraphError, Problem};

/// Writes the model into a new folder, and returns the folder and the file.
fn written(bytes: &[u8]) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    std::fs::write(&path, bytes).unwrap();
    (folder, path)
}

fn load_file(model: &ModelProto, settings: &ModelBuilder) -> Result<Model, GraphError> {
    let (_folder, path) = written(&file::encoded(model));
    settings.load(&path)
}

fn settings(seed: u64, dims: &[&str]) -> ModelBuilder {
    let dims = dims.iter().map(|dim| dim.parse().unwrap()).collect();
    ModelBuilder { weights: Weights::Seeded(seed), dims }
}

fn seeded(seed: u64, dims: &[&str]) -> Model {
    load_file(&file::residual(), &settings(seed, dims)).unwrap()
}

/// All outputs that can cross, of nodes that compute.
fn outlets(topology: &Topology) -> Vec<Outlet> {
    let computed = topology.nodes().filter(|(_, node)| node.role == Role::Compute && !node.stays);
    computed
        .flat_map(|(id, node)| (0..node.outputs.len()).map(move |output| Outlet { node: id, output }))
        .collect()
}

/// Runs several steps at once by the model's kernels: each node runs all steps before the next node runs. A
/// value goes to its last consumer without another owner, so that kernels that can change it in place do so.
/// Returns all values that can cross, in binary form.
fn run_kernels(model: &Model, steps: &[Vec<(NodeId, ModelValue)>]) -> Vec<HashMap<Outlet, Vec<u8>>> {
    let topology = model.topology();
    let mut kernels = model.kernels(topology.nodes().map(|(id, _)| id)).unwrap();
    let mut left: BTreeMap<Outlet, usize> = BTreeMap::new();
    for input in topology.nodes().flat_map(|(_, node)| &node.inputs) {
        *left.entry(*input).or_default() += 1;
    }
    let mut live: Vec<BTreeMap<Outlet, ModelValue>> = Vec::new();
    for inputs in steps {
        live.push(
            inputs.iter().map(|(id, value)| (Outlet { node: *id, output: 0 }, value.clone())).collect(),
        );
    }
    let mut seen = vec![HashMap::new(); steps.len()];
    for (id, node) in topology.nodes().filter(|(_, node)| node.role != Role::Input) {
        for input in &node.inputs {
            *left.get_mut(input).unwrap() -= 1;
        }
        for (step, live) in live.iter_mut().enumerate() {
            let inputs: Vec<ModelValue> = node
                .inputs
                .iter()
                .map(|input| if left[input] == 0 { live.remove(input).unwrap() } else { live[input].clone() })
                .collect();
            let outputs = kernels.get_mut(&id).unwrap().run(step as u64, inputs).unwrap();
            for (output, value) in outputs.into_iter().enumerate() {
                let outlet = Outlet { node: id, output };
                seen[step].insert(outlet, value.bytes().to_vec());
                live.insert(outlet, value);
            }
        }
    }
    seen
}

/// Checks that steps at once by kernels give each value of the model's own run, bit by bit, and that all
/// numbers are finite.
fn check_kernels(model: &Model, lengths: &[u64]) {
    let symbols = model.symbols();
    let lengths =
        lengths.iter().map(|length| symbols.iter().map(|symbol| (symbol.clone(), *length)).collect());
    let steps: Vec<_> =
        lengths.enumerate().map(|(step, lengths)| model.inputs(step as u64, 5, &lengths).unwrap()).collect();
    let split = run_kernels(model, &steps);
    for (inputs, split) in steps.iter().zip(&split) {
        let whole = model.run_unsplit(inputs, outlets(model.topology())).unwrap();
        assert_eq!(whole.len(), outlets(model.topology()).len());
        for (outlet, value) in &whole {
            let name = model.topology().outlet_name(*outlet);
            assert!(value.bytes() == split[outlet], "{name} differs");
            assert!(
                numbers(value).iter().all(|number| number.is_finite()),
                "{name} has numbers that are not finite"
            );
        }
    }
}

fn result(model: &Model, step: u64, seed: u64, length: u64) -> Vec<f32> {
    let lengths = model.symbols().into_iter().map(|symbol| (symbol, length)).collect();
    let inputs = model.inputs(step, seed, &lengths).unwrap();
    let outlet = model.topology().results()[0];
    numbers(&model.run_unsplit(&inputs, [outlet]).unwrap()[&outlet])
}

/// Checks that another load gives the same nodes and the same result, that the result is not the same for all
/// inputs and weights, and that no number dominates it.
fn check_results(model: &Model, load: impl Fn(u64) -> Model, length: u64) {
    let first = result(model, 0, 5, length);
    let again = load(1);
    assert!(described(model) == described(&again), "another load has other nodes");
    assert!(first == result(&again, 0, 5, length), "another load has other weights");
    drop(again);
    for (different, what) in [
        (result(model, 1, 5, length), "another step"),
        (result(model, 0, 6, length), "another seed of the inputs"),
        (result(&load(2), 0, 5, length), "another seed of the weights"),
    ] {
        let changed = first.iter().zip(&different).filter(|(a, b)| a != b).count();
        assert!(changed * 10 > first.len() * 9, "{what} changes {changed} of {} numbers", first.len());
    }
    let largest = first.iter().copied().fold(f32::MIN, f32::max);
    assert!(
        first.iter().filter(|number| **number > largest * 1e-6).count() > first.len() / 10,
        "one number dominates: {largest}"
    );
}

fn numbers(value: &ModelValue) -> Vec<f32> {
    if value.spec().unwrap().dtype() != tonic_rdma_tensor::Dtype::F32 {
        return Vec::new();
    }
    value.bytes().chunks_exact(4).map(|bytes| f32::from_ne_bytes(bytes.try_into().unwrap())).collect()
}

/// Describes all nodes.
fn described(model: &Model) -> String {
    let topology = model.topology();
    topology.nodes().map(|(_, node)| format!("{node:?}\n")).collect::<String>()
        + &format!("{:?}", topology.results())
}

/// Returns the file of a `light` model, or says why the test is skipped.
fn light_file(name: &str) -> Option<PathBuf> {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.or_else(|| Some(Path::new(&std::env::var_os("HOME")?).join(".cache")))?;
    let models = std::fs::read_dir(cache.join("tonic-rdma-models"))
        .into_iter()
        .flatten()
        .flatten()
        .map(|folder| folder.path());
    let found = models.map(|folder| folder.join(format!("light_{name}.onnx"))).find(|file| file.is_file());
    if found.is_none() {
        println!("skipped: the ONNX models are not installed (graph/prepare-models)");
    }
    found
}
