//! Models of many kinds: what the engine runs whole, runs split, with the same bits.
//!
//! The control is the engine alone: the same file, whole, in this process, without any code of ours.

mod models;

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use tonic_rdma::{Config, EagerThreshold};
use tonic_rdma_graph::dataflow::{KernelError, NodeId, Outlet, Role, Value as _};
use tonic_rdma_graph::onnx::{Model, ModelValue, self_contained};
use tonic_rdma_graph::placement::{Part, Partition, Placements};
use tonic_rdma_graph::schedule::{Executor, Program, Transfers};
use tonic_rdma_graph::session::{Listener, Peering};
use tonic_rdma_graph::sites::NodeSites;
use tonic_rdma_graph::transfer::TransferMode;
use tonic_rdma_tensor::{Dtype, Shape, Tensor, TensorSpec};
use tract_onnx::prelude::{DatumType, Framework as _, InferenceModelExt as _, TDim, TValue, TVec};
use tract_onnx::prelude::{IntoTValue as _, tract_ndarray::ArrayD};
use tract_onnx::tract_core::internal::SymbolValues;

use self::models::Case;
use crate::onnx::encoded;
use crate::{command, run, stderr, stdout};

type Failed = Box<dyn std::error::Error + Send + Sync>;

/// Type, shape and bytes of a tensor.
type Content = (String, Vec<u8>);

/// The results of each set of inputs, in the order of the model.
type Outcome = Vec<Vec<Content>>;

/// The sets of inputs, which are steps too.
const SETS: u64 = 3;

type Inputs = Vec<(NodeId, ModelValue)>;

/// A model of ours, and its inputs.
struct Loaded {
    model: Model,
    inputs: Vec<Inputs>,
    lengths: Vec<Vec<(String, u64)>>,
}

/// Writes the files of a case into a folder, and loads the model.
fn load(case: &Case, folder: &Path) -> Result<Loaded, Failed> {
    let path = folder.join("model.onnx");
    std::fs::write(&path, encoded(&case.model))?;
    std::fs::write(folder.join("data.bin"), &case.data)?;
    // As the parts of a command get it: without a folder.
    let content = self_contained(&path, std::fs::read(&path)?)?;
    let model = Model::builder().read(Path::new("elsewhere/model.onnx"), &content)?;
    let symbols = model.symbols();
    let lengths: Vec<Vec<(String, u64)>> = (0..SETS as usize)
        .map(|set| {
            let length = |place: usize| case.lengths[(place + set) % case.lengths.len()];
            symbols.iter().enumerate().map(|(place, name)| (name.clone(), length(place))).collect()
        })
        .collect();
    let inputs = lengths
        .iter()
        .zip(0..)
        .map(|(lengths, set)| Ok(model.inputs(set, 7, &lengths.iter().cloned().collect())?));
    let inputs = inputs.collect::<Result<_, Failed>>()?;
    Ok(Loaded { model, inputs, lengths })
}

/// Runs the file by the engine alone.
fn control(path: &Path, loaded: &Loaded) -> Result<Outcome, Failed> {
    let model = tract_onnx::onnx().model_for_path(path)?.into_typed()?.into_optimized()?;
    let names: Vec<String> = model.inputs.iter().map(|input| model.nodes[input.node].name.clone()).collect();
    let symbols = model.symbols.clone();
    let plan = model.into_runnable()?;
    let mut outcome = Vec::new();
    for (inputs, lengths) in loaded.inputs.iter().zip(&loaded.lengths) {
        let graph = loaded.model.topology();
        let of = |name: &String| {
            let id = graph.node_called(name).ok_or("no such input")?;
            let value = inputs.iter().find(|(input, _)| *input == id).ok_or("no such input")?;
            of_engine(&value.1)
        };
        let mut values = SymbolValues::default();
        for (name, length) in lengths {
            values.set(&symbols.sym(name), *length as i64);
        }
        let outputs = plan.run(names.iter().map(of).collect::<Result<TVec<TValue>, Failed>>()?)?;
        outcome.push(outputs.iter().map(|output| content_of(output, &values)).collect::<Result<_, _>>()?);
    }
    Ok(outcome)
}

/// The types of the engine, and ours.
const TYPES: [(DatumType, Dtype); 13] = [
    (DatumType::Bool, Dtype::Bool),
    (DatumType::U8, Dtype::U8),
    (DatumType::U16, Dtype::U16),
    (DatumType::U32, Dtype::U32),
    (DatumType::U64, Dtype::U64),
    (DatumType::I8, Dtype::I8),
    (DatumType::I16, Dtype::I16),
    (DatumType::I32, Dtype::I32),
    (DatumType::I64, Dtype::I64),
    (DatumType::F16, Dtype::F16),
    (DatumType::F32, Dtype::F32),
    (DatumType::F64, Dtype::F64),
    (DatumType::String, Dtype::String),
];

fn of_engine(value: &ModelValue) -> Result<TValue, Failed> {
    let tensor = value.share()?;
    let dims: Vec<usize> = tensor.shape().dims().iter().map(|length| *length as usize).collect();
    Ok(match tensor.dtype() {
        Dtype::String => {
            let strings =
                tensor.strings()?.map(|it| String::from_utf8(it.to_vec())).collect::<Result<_, _>>()?;
            tract_onnx::prelude::Tensor::from(ArrayD::from_shape_vec(dims, strings)?)
        }
        Dtype::Bool => {
            let bools = tensor.bytes()?.iter().map(|byte| *byte == 1).collect();
            tract_onnx::prelude::Tensor::from(ArrayD::from_shape_vec(dims, bools)?)
        }
        dtype => {
            let (datum, _) = TYPES.iter().find(|(_, ours)| *ours == dtype).ok_or("no such type")?;
            let mut made = tract_onnx::prelude::Tensor::zero_dt(*datum, &dims)?;
            made.as_bytes_mut().copy_from_slice(tensor.bytes()?);
            made
        }
    }
    .into_tvalue())
}

fn content_of(value: &TValue, symbols: &SymbolValues) -> Result<Content, Failed> {
    let dims: Vec<u64> = value.shape().iter().map(|length| *length as u64).collect();
    let shape = Shape::new(&dims)?;
    if value.datum_type() == DatumType::TDim {
        let dims = value.as_slice::<TDim>()?.iter();
        let numbers = dims.map(|dim| dim.eval(symbols).to_i64()).collect::<Result<Vec<_>, _>>()?;
        let bytes = numbers.iter().flat_map(|number| number.to_ne_bytes()).collect();
        return Ok((TensorSpec::new(Dtype::I64, shape)?.to_string(), bytes));
    }
    let (_, dtype) =
        TYPES.iter().find(|(datum, _)| *datum == value.datum_type().unquantized()).ok_or("no such type")?;
    let bytes = match dtype {
        Dtype::String => {
            let strings = value.as_slice::<String>()?.iter().cloned();
            Tensor::from_strings(shape, strings)?.serialize()?.1.to_vec()
        }
        _ => value.as_bytes().to_vec(),
    };
    Ok((TensorSpec::new(*dtype, shape)?.to_string(), bytes))
}

fn content(value: &ModelValue) -> Result<Content, KernelError> {
    Ok((value.spec()?.to_string(), value.share()?.serialize()?.1.to_vec()))
}

/// Feeds the inputs of a part, and keeps its results.
struct Kept<'a> {
    inputs: &'a [Inputs],
    first: u64,
    results: &'a Mutex<HashMap<(u64, Outlet), Content>>,
}

impl Program<ModelValue> for Kept<'_> {
    fn feed(&mut self, step: u64, input: NodeId) -> Result<ModelValue, KernelError> {
        let inputs = &self.inputs[(step - self.first) as usize];
        let value = &inputs.iter().find(|(id, _)| *id == input).ok_or("no such input")?.1;
        let spec = value.spec()?;
        if spec.dtype() == Dtype::String {
            return Ok(value.clone());
        }
        ModelValue::filled(&spec, &mut |bytes| {
            bytes.copy_from_slice(value.bytes());
            Ok(())
        })
    }

    fn result(&mut self, step: u64, outlet: Outlet, value: ModelValue) -> Result<(), KernelError> {
        self.results.lock().unwrap().insert((step - self.first, outlet), content(&value)?);
        Ok(())
    }
}

/// Runs all parts, each in a thread, and returns the results. `transfers` makes what a part sends by.
fn run_parts(
    loaded: &Loaded,
    placements: &Arc<Placements>,
    first: u64,
    transfers: impl Fn(Part) -> Result<Transfers<ModelValue>, Failed> + Sync,
    traced: bool,
) -> Result<Outcome, Failed> {
    let graph = loaded.model.topology();
    let results = Mutex::default();
    thread::scope(|scope| {
        let parts: Vec<_> = (0..placements.partition().count())
            .map(|part| {
                let (results, transfers) = (&results, &transfers);
                scope.spawn(move || -> Result<(), Failed> {
                    let part = Part(part);
                    let kernels = loaded.model.kernels(placements.nodes_of(part).iter().copied())?;
                    let transfers = transfers(part)?;
                    let mut executor =
                        Executor::new(Arc::clone(graph), Arc::clone(placements), part, kernels, transfers)?
                            .deadline(Duration::from_secs(20));
                    if traced {
                        executor = executor.sites(Arc::new(NodeSites::new(graph, 1 << 30)));
                    }
                    let mut program = Kept { inputs: &loaded.inputs, first, results };
                    executor.run(first..first + SETS, &mut program)?;
                    Ok(())
                })
            })
            .collect();
        parts.into_iter().try_for_each(|part| part.join().unwrap())
    })?;
    let results = results.into_inner().unwrap();
    let of = |set, outlet: &Outlet| results.get(&(set, *outlet)).cloned().ok_or("a result is missing");
    let sets =
        (0..SETS).map(|set| graph.results().iter().map(|outlet| of(set, outlet)).collect::<Result<_, _>>());
    Ok(sets.collect::<Result<_, _>>()?)
}

/// Runs the whole model by our code, which also has to know all tensors that may cross.
fn unsplit(loaded: &Loaded) -> Result<Outcome, Failed> {
    let graph = loaded.model.topology();
    let crossing = graph.nodes().filter(|(_, node)| node.role != Role::Constant && !node.stays);
    let crossing = crossing
        .flat_map(|(id, node)| (0..node.outputs.len()).map(move |output| Outlet { node: id, output }));
    let wanted: Vec<Outlet> = graph.results().iter().copied().chain(crossing).collect();
    let mut outcome = Vec::new();
    for inputs in &loaded.inputs {
        let values = loaded.model.run_unsplit(inputs, wanted.iter().copied())?;
        outcome
            .push(graph.results().iter().map(|outlet| content(&values[outlet])).collect::<Result<_, _>>()?);
    }
    Ok(outcome)
}

/// Runs the model with each cut in two, within the process. Returns the number of cuts.
fn each_cut(loaded: &Loaded, expected: &Outcome) -> Result<usize, Failed> {
    let graph = loaded.model.topology();
    let mut cuts = 0;
    for (_, node) in graph.nodes().filter(|(_, node)| node.role == Role::Compute) {
        // Some nodes end no part, because all that follows belongs to them.
        let Ok(partition) = Partition::at_cuts(graph, &[&node.name]) else { continue };
        let placements = Arc::new(Placements::new(graph, &partition)?);
        let transfers: Vec<_> = Transfers::in_memory(&placements, 1)?.into_iter().map(Some).collect();
        let transfers = Mutex::new(transfers);
        let take = |part: Part| transfers.lock().unwrap()[part.0].take().ok_or_else(|| "taken".into());
        let found = run_parts(loaded, &placements, 0, take, false)
            .map_err(|error| format!("cut after {}: {}", node.name, causes(&*error)))?;
        same(&found, expected).map_err(|difference| format!("cut after {}: {difference}", node.name))?;
        cuts += 1;
    }
    Ok(cuts)
}

/// Runs the model in this number of parts, or in one if it can't be split, over connections.
fn over_connections(
    loaded: &Loaded,
    parts: usize,
    modes: &[TransferMode],
    expected: &Outcome,
) -> Result<(), Failed> {
    let graph = loaded.model.topology();
    let partition = (1..=parts).rev().find_map(|parts| Partition::balanced(graph, parts).ok());
    let placements = Arc::new(Placements::new(graph, &partition.ok_or("no partition")?)?);
    let config = || Config::default().eager_threshold(EagerThreshold::Bytes(32 << 10));
    let listeners: Vec<Listener> = (0..placements.partition().count())
        .map(|_| Listener::builder().config(config()).threads(1).bind("127.0.0.1:0"))
        .collect::<Result<_, _>>()?;
    let addresses: Vec<String> = listeners.iter().map(|listener| listener.address().to_string()).collect();
    let sessions = thread::scope(|scope| {
        let connect = |(part, listener): (usize, Listener)| {
            let peering = Peering::new(Part(part), addresses.clone(), graph, &placements);
            let peering = peering.modes(modes.iter().copied());
            scope.spawn(move || listener.connect(peering))
        };
        let connecting: Vec<_> = listeners.into_iter().enumerate().map(connect).collect();
        connecting.into_iter().map(|part| part.join().unwrap()).collect::<Result<Vec<_>, _>>()
    })?;
    for (mode, number) in modes.iter().zip(0..) {
        let take = |part: Part| Ok(sessions[part.0].transfers(*mode)?);
        let traced = matches!(mode, TransferMode::RdmaZerocp | TransferMode::RdmaInPlace);
        let found = run_parts(loaded, &placements, number * SETS, take, traced)
            .map_err(|error| format!("{mode}: {}", causes(&*error)))?;
        same(&found, expected).map_err(|difference| format!("{mode}: {difference}"))?;
    }
    Ok(())
}

fn same(found: &Outcome, expected: &Outcome) -> Result<(), String> {
    for (set, (found, expected)) in found.iter().zip(expected).enumerate() {
        for (result, (found, expected)) in found.iter().zip(expected).enumerate() {
            if found.0 != expected.0 {
                return Err(format!(
                    "set {set}, result {result} is {}, and should be {}",
                    found.0, expected.0
                ));
            }
            if found.1 != expected.1 {
                return Err(format!(
                    "set {set}, result {result} differs: {found:?}, and should be {expected:?}"
                ));
            }
        }
    }
    if found.len() == expected.len() { Ok(()) } else { Err("sets are missing".to_owned()) }
}

fn causes(error: &(dyn std::error::Error + 'static)) -> String {
    let all = std::iter::successors(Some(error), |error| error.source());
    all.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

/// Sweeps all models, and fails with all that differ.
fn sweep(what: impl Fn(&Case, &Path, &Loaded, &Outcome) -> Result<(), Failed>) {
    let mut wrong = Vec::new();
    let all = models::all();
    for case in &all {
        let folder = tempfile::tempdir().unwrap();
        let outcome = load(case, folder.path()).and_then(|loaded| {
            let expected = control(&folder.path().join("model.onnx"), &loaded)
                .map_err(|error| format!("the engine alone fails: {}", causes(&*error)))?;
            what(case, folder.path(), &loaded, &expected)
        });
        if let Err(error) = outcome {
            wrong.push(format!("{}: {}", case.name, causes(&*error)));
        }
    }
    assert!(wrong.is_empty(), "{} of {} models:\n{}", wrong.len(), all.len(), wrong.join("\n"));
    assert_eq!(all.len(), 91, "docs/book/src/graphs.md names the number of models");
}

#[test]
fn what_the_engine_runs_whole_runs_with_each_cut_and_over_connections_with_the_same_bits() {
    sweep(|_, _, loaded, expected| {
        same(&unsplit(loaded)?, expected)?;
        each_cut(loaded, expected)?;
        over_connections(loaded, 2, &[TransferMode::RdmaZerocp, TransferMode::GrpcTcp], expected)
    });
}

#[test]
#[ignore = "takes long; the nightly checks run it"]
fn all_modes_and_processes_give_the_same_bits() {
    sweep(|case, folder, loaded, expected| {
        over_connections(loaded, 3, &TransferMode::ALL, expected)?;
        let model = folder.join("model.onnx");
        let lengths = case.lengths.iter().map(u64::to_string).collect::<Vec<_>>().join(",");
        let arguments = ["--mode", "rdma-zerocp", "--steps", "2", "--rounds", "1", "--lengths", &lengths];
        let output = run(&[&[model.to_str().unwrap()], &arguments[..]].concat());
        let shown = stdout(&output);
        assert_eq!(shown.contains("in one part"), Partition::balanced(loaded.model.topology(), 2).is_err());
        if output.status.success() { Ok(()) } else { Err(stderr(&output).into()) }
    });
}

#[test]
fn a_file_beside_the_model_is_found_from_any_folder() {
    let case = models::all().into_iter().find(|case| case.name == "external-data").unwrap();
    let above = tempfile::tempdir().unwrap();
    let folder = above.path().join("model");
    std::fs::create_dir(&folder).unwrap();
    load(&case, &folder).unwrap();
    let path = folder.join("model.onnx");
    for (from, model) in [
        (&*folder, "model.onnx"),
        (Path::new("/"), path.to_str().unwrap()),
        (above.path(), "model/model.onnx"),
    ] {
        let mut command = command(&[model, "--mode", "rdma-zerocp", "--steps", "1", "--rounds", "1"]);
        let output = command.current_dir(from).output().unwrap();
        assert!(output.status.success(), "from {from:?}: {}", stderr(&output));
    }
    std::fs::remove_file(folder.join("data.bin")).unwrap();
    let output = run(&[path.to_str().unwrap()]);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("the tensor w is in another file") && text.contains("data.bin"), "{text}");
}

#[test]
fn a_model_of_one_node_runs_in_one_part_and_says_so() {
    let (folder, path) = crate::file(&crate::onnx::operator("Relu"));
    let json = folder.path().join("rows.json");
    let arguments =
        [path.to_str().unwrap(), "--steps", "1", "--rounds", "1", "--json", json.to_str().unwrap()];
    let output = run(&[&arguments[..], &["--parts", "4", "--mode", "rdma-zerocp"]].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stdout(&output).contains("It runs in one part instead of 4"), "{}", stdout(&output));
    let rows: serde_json::Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    assert_eq!((&rows["parts"], &rows["parts_asked"]), (&1.into(), &4.into()));
}
