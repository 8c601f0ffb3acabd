//! ONNX models, by the engine `tract`.
//!
//! ```text
//!  load        a file, checked; other lengths; seeded weights         → the engine's graph, optimised
//!  convert     the engine's graph                                     → Topology, in an order that is the same in all processes
//!              one node of the engine's graph                         → Kernel; finds the lengths of symbolic dimensions
//!              a tensor of the engine                                 → Value, without a copy
//! ```
//!
//! The whole model also runs in one process, by the engine's own executor. This module never splits a graph,
//! and never moves a tensor between processes.

mod convert;
mod load;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use fastrand::Rng;
use tract_onnx::prelude::*;
use tract_onnx::tract_core::internal::SymbolValues;
use tract_onnx::tract_core::model::{OutletId, TypedModel};
use tract_onnx::tract_core::plan;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use self::convert::{guarded, least, lengths};
use crate::dataflow::{Dim, Kernel, KernelError, NodeId, Outlet, Role, Topology, Value};
use crate::error::{GraphError, Problem};
use tonic_rdma_tensor::{Dtype, Shape, TensorSpec};

pub use self::convert::ModelValue;

/// The kernels of nodes. A node that is an input has none.
pub type Kernels = BTreeMap<NodeId, Box<dyn Kernel<ModelValue>>>;

/// An ONNX model, optimised for this machine.
#[derive(Clone, Debug)]
pub struct Model {
    path: PathBuf,
    engine: Arc<TypedModel>,
    topology: Arc<Topology>,
    /// The engine's number of each node of the topology.
    nodes: Arc<[usize]>,
    seeded: usize,
}

impl Model {
    /// Reads a model from a file as it is, and optimises it. The same file gives the same topology in all
    /// processes of a kind of machine.
    ///
    /// ```
    /// use std::path::Path;
    /// use tonic_rdma_graph::onnx::Model;
    ///
    /// let error = Model::load(Path::new("missing.onnx")).unwrap_err();
    /// assert!(error.reason().starts_with("the model missing.onnx: it can't be read"));
    /// ```
    ///
    /// # Errors
    /// [`InvalidGraph`](crate::GraphErrorKind::InvalidGraph): there is no such file, it is no ONNX, its
    /// shapes are not determined, the engine refuses it, or the engine does not know an operator.
    pub fn load(path: &Path) -> Result<Self, GraphError> {
        Self::builder().load(path)
    }

    /// Returns a builder, for other weights or dimensions than those in the file.
    pub fn builder() -> ModelBuilder {
        ModelBuilder::default()
    }

    /// Returns the nodes of the optimised model.
    pub fn topology(&self) -> &Arc<Topology> {
        &self.topology
    }

    /// Returns how many weights got seeded random values.
    pub fn seeded(&self) -> usize {
        self.seeded
    }

    /// Returns the symbols in the shapes of the inputs, in alphabetical order.
    pub fn symbols(&self) -> Vec<String> {
        let facts = self.engine.inputs.iter().filter_map(|input| self.engine.outlet_fact(*input).ok());
        let symbols: BTreeSet<String> = facts
            .flat_map(|fact| fact.shape.iter().flat_map(|dim| dim.symbols()))
            .map(|symbol| symbol.to_string())
            .collect();
        symbols.into_iter().collect()
    }

    /// Returns the kernels of `nodes`. They hold the weights of these nodes and no others, so a process that
    /// drops the model has only these in memory.
    ///
    /// # Errors
    /// The model has no such node.
    pub fn kernels(&self, nodes: impl IntoIterator<Item = NodeId>) -> Result<Kernels, GraphError> {
        let mut kernels = Kernels::new();
        for id in nodes {
            let (Some(node), Some(number)) = (self.topology.node(id), self.nodes.get(id.0)) else {
                let path = self.path.clone();
                return Err(Problem::Model { path, reason: format!("the model has no node {}", id.0) }.into());
            };
            if node.role != Role::Input {
                let inputs = node.inputs.iter().filter_map(|input| self.outlet(*input));
                kernels.insert(id, convert::kernel(&self.engine, *number, inputs));
            }
        }
        Ok(kernels)
    }

    fn outlet(&self, outlet: Outlet) -> Option<OutletId> {
        self.topology.fact(outlet)?;
        Some(OutletId::new(*self.nodes.get(outlet.node.0)?, outlet.output))
    }

    /// Makes random inputs of a step: numbers from -1 to 1, or whole numbers from 0 to 7, also as strings. They
    /// depend on `seed`, on `step` and on the name of the input. `lengths` gives the length of each symbol.
    ///
    /// # Errors
    /// `lengths` lacks a symbol.
    pub fn inputs(
        &self,
        step: u64,
        seed: u64,
        lengths: &BTreeMap<String, u64>,
    ) -> Result<Vec<(NodeId, ModelValue)>, GraphError> {
        let mut values = SymbolValues::default();
        for (name, length) in lengths {
            if let Some(symbol) = self.engine.symbols.get(name) {
                values.set(&symbol, *length as i64);
            }
        }
        let mut inputs = Vec::new();
        for (id, node) in self.topology.nodes().filter(|(_, node)| node.role == Role::Input) {
            let wrong = |reason: String| GraphError::of_node(&node.name, reason);
            let fact = self
                .engine
                .outlet_fact(OutletId::new(self.nodes[id.0], 0))
                .map_err(|error| wrong(error.to_string()))?;
            let mut dims = Vec::new();
            for dim in fact.shape.iter() {
                let length = dim.eval(&values).to_i64().ok().and_then(|length| u64::try_from(length).ok());
                dims.push(
                    length
                        .ok_or_else(|| wrong(format!("the symbols of the dimension {dim} need a length")))?,
                );
            }
            let random = Rng::with_seed(xxh3_64_with_seed(node.name.as_bytes(), seed).wrapping_add(step));
            let value = random_value(node.outputs[0].dtype, &dims, random)
                .map_err(|error| wrong(error.to_string()))?;
            inputs.push((id, value));
        }
        Ok(inputs)
    }

    /// Runs the model in this process, by the engine's own executor, and returns the values of `wanted`.
    ///
    /// # Errors
    /// An input is missing or has a wrong shape, the model has no such output, or the engine failed.
    pub fn run_unsplit(
        &self,
        inputs: &[(NodeId, ModelValue)],
        wanted: impl IntoIterator<Item = Outlet>,
    ) -> Result<HashMap<Outlet, ModelValue>, GraphError> {
        let wrong = |reason: String| GraphError::from(Problem::Model { path: self.path.clone(), reason });
        let mut outlets = HashMap::new();
        for outlet in wanted {
            let engine = self
                .outlet(outlet)
                .ok_or_else(|| wrong(format!("node {} has no output {}", outlet.node.0, outlet.output)))?;
            outlets.insert(engine, outlet);
        }
        let fed: HashMap<usize, &ModelValue> =
            inputs.iter().filter_map(|(id, value)| Some((*self.nodes.get(id.0)?, value))).collect();
        let mut feeds = TVec::new();
        for input in &self.engine.inputs {
            let node = &self.engine.nodes[input.node];
            let value =
                fed.get(&input.node).ok_or_else(|| wrong(format!("the input {} is missing", node.name)))?;
            let value = ModelValue::clone(value).into_engine(node.outputs[input.slot].fact.datum_type);
            feeds.push(value.map_err(|error| wrong(error.to_string()))?);
        }
        let values = guarded(|| self.run(feeds, &outlets)).map_err(|error| wrong(error.to_string()))?;
        match outlets.values().find(|outlet| !values.contains_key(outlet)) {
            Some(missing) => {
                Err(wrong(format!("the engine did not compute {}", self.topology.outlet_name(*missing))))
            }
            None => Ok(values),
        }
    }

    fn run(
        &self,
        feeds: TVec<TValue>,
        wanted: &HashMap<OutletId, Outlet>,
    ) -> TractResult<HashMap<Outlet, ModelValue>> {
        let mut values = HashMap::new();
        for (engine, outlet) in wanted {
            // The engine's executor runs no constants, and no inputs of which only the shape counts.
            if let Some(constant) = &self.engine.outlet_fact(*engine)?.konst {
                values.insert(*outlet, TValue::Const(Arc::clone(constant)));
            } else if let Some(input) = self.engine.inputs.iter().position(|input| input == engine) {
                values.insert(*outlet, feeds[input].clone());
            }
        }
        let plan = SimplePlan::new(Arc::clone(&self.engine))?;
        let mut state = SimpleState::new(plan)?;
        state.set_inputs(feeds)?;
        state.exec_plan_with_eval(|session, state, node, inputs| {
            lengths(&session.resolved_symbols, node, least(&self.engine, node))?;
            let outputs = plan::eval(session, state, node, inputs)?;
            for (slot, output) in outputs.iter().enumerate() {
                if let Some(outlet) = wanted.get(&OutletId::new(node.id, slot)) {
                    values.insert(*outlet, output.clone());
                }
            }
            TractResult::Ok(outputs)
        })?;
        // Now all lengths are known.
        let symbols = &state.session_state.resolved_symbols;
        let value = |(outlet, value)| (outlet, ModelValue::from_engine(value, symbols));
        Ok(values.into_iter().map(value).collect())
    }
}

#[cfg(test)]
mod tests;

/// How a model is loaded.
#[derive(Clone, Debug, Default)]
pub struct ModelBuilder {
    weights: Weights,
    dims: Vec<SymbolicDim>,
}

impl ModelBuilder {
    /// Sets where the weights come from. The default is the file.
    pub fn weights(mut self, weights: Weights) -> Self {
        self.weights = weights;
        self
    }

    /// Sets the dimensions of inputs that get another length, or a symbol. The default is none.
    pub fn dims(mut self, dims: impl IntoIterator<Item = SymbolicDim>) -> Self {
        self.dims = dims.into_iter().collect();
        self
    }

    /// Reads a model from a file, puts seeded weights in if they were asked for, and optimises the model. The
    /// same file and the same settings give the same topology in all processes of a kind of machine.
    ///
    /// ```
    /// use std::path::Path;
    /// use tonic_rdma_graph::onnx::{Model, Weights};
    ///
    /// let builder = Model::builder().weights(Weights::Seeded(1)).dims(["data_0:0=N".parse()?]);
    /// assert!(builder.load(Path::new("missing.onnx")).is_err());
    /// # Ok::<(), tonic_rdma_graph::GraphError>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Model::load`].
    pub fn load(&self, path: &Path) -> Result<Model, GraphError> {
        self.optimised(path, &load::read(path)?, path.parent())
    }

    /// Makes a model of the content of a file. `path` is for messages; no file is read, so the content may come
    /// from anyone. [`self_contained`] makes a content that needs no other file.
    ///
    /// ```
    /// use std::path::Path;
    /// use tonic_rdma_graph::onnx::Model;
    ///
    /// let error = Model::builder().read(Path::new("text.onnx"), b"no model").unwrap_err();
    /// assert!(error.reason().starts_with("the model text.onnx: "), "{error}");
    /// ```
    ///
    /// # Errors
    /// As for [`Model::load`], or the content leaves a tensor to another file.
    pub fn read(&self, path: &Path, content: &[u8]) -> Result<Model, GraphError> {
        self.optimised(path, content, None)
    }

    /// Makes a model of a content that may leave tensors to other files of `folder`, if there is one.
    fn optimised(&self, path: &Path, content: &[u8], folder: Option<&Path>) -> Result<Model, GraphError> {
        let wrong = |reason: String| GraphError::from(Problem::Model { path: path.to_owned(), reason });
        let loaded = load::load(path, content, folder, self)?;
        let (topology, nodes) =
            convert::convert(&loaded.engine).map_err(|error| wrong(format!("{error:#}")))?;
        Ok(Model {
            path: path.to_owned(),
            engine: Arc::new(loaded.engine),
            topology: Arc::new(topology),
            nodes: nodes.into(),
            seeded: loaded.seeded,
        })
    }
}

/// Returns a content of the model `path` that needs no other file: the tensors that `content` leaves to files of
/// the model's folder become part of it. [`ModelBuilder::read`] reads it in any folder and on any host.
///
/// ```
/// use std::path::Path;
/// use tonic_rdma_graph::onnx::self_contained;
///
/// let error = self_contained(Path::new("text.onnx"), b"no model".to_vec()).unwrap_err();
/// assert!(error.reason().starts_with("the model text.onnx: "), "{error}");
/// ```
///
/// # Errors
/// [`InvalidGraph`](crate::GraphErrorKind::InvalidGraph): it is no ONNX, or a file is missing, is too short or is
/// outside the folder.
pub fn self_contained(path: &Path, content: Vec<u8>) -> Result<Vec<u8>, GraphError> {
    load::self_contained(path, content)
}

/// Where the weights of a model come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Weights {
    /// From the file.
    #[default]
    File,
    /// From a generator with this seed. Weights of convolutions, matrix products, normalisations and
    /// recurrent layers get random values of a scale that keeps activations finite and different from zero.
    /// All other constants stay as they are in the file. The model is then good for comparing results, and
    /// for nothing else. In the `light` models of ONNX all weights are equal, so without seeded values a
    /// comparison would miss most errors.
    Seeded(u64),
}

/// The length of a dimension of an input. Written as `input:0=N`, or `input:0=8`.
///
/// ```
/// use tonic_rdma_graph::dataflow::Dim;
/// use tonic_rdma_graph::onnx::SymbolicDim;
///
/// let batch: SymbolicDim = "data:0=N".parse()?;
/// assert_eq!((batch.input.as_str(), batch.axis, batch.dim), ("data", 0, Dim::Symbolic("N".into())));
/// # Ok::<(), tonic_rdma_graph::GraphError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SymbolicDim {
    /// The name of the input.
    pub input: String,
    /// The number of the dimension, from 0.
    pub axis: usize,
    /// The length.
    pub dim: Dim,
}

impl FromStr for SymbolicDim {
    type Err = GraphError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let hint = "write INPUT:AXIS=SYMBOL, such as data:0=N";
        let wrong =
            || GraphError::from(Problem::Value(format!("{text:?} is no dimension of an input; {hint}")));
        // Names of ONNX may hold colons.
        let (dimension, length) = text.rsplit_once('=').ok_or_else(wrong)?;
        let (input, axis) = dimension.rsplit_once(':').ok_or_else(wrong)?;
        let axis = axis.parse().map_err(|_| wrong())?;
        let symbol = |text: &str| {
            text.starts_with(|c: char| c.is_ascii_alphabetic())
                && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
        };
        let dim = match length.parse() {
            Ok(length) if length > 0 => Dim::Known(length),
            Err(_) if symbol(length) => Dim::Symbolic(length.into()),
            _ => return Err(wrong()),
        };
        if input.is_empty() {
            return Err(wrong());
        }
        Ok(Self { input: input.to_owned(), axis, dim })
    }
}

impl fmt::Display for SymbolicDim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}={}", self.input, self.axis, self.dim)
    }
}

fn random_value(dtype: Dtype, dims: &[u64], mut random: Rng) -> Result<ModelValue, KernelError> {
    let spec = TensorSpec::new(dtype, Shape::new(dims)?)?;
    let Some(size) = dtype.size() else {
        let digits = (0..spec.shape().elements()).map(|_| random.u8(0..8).to_string());
        return ModelValue::from_strings(*spec.shape(), digits.collect());
    };
    ModelValue::filled(&spec, &mut |bytes| {
        for element in bytes.chunks_exact_mut(size) {
            match dtype {
                Dtype::F32 => element.copy_from_slice(&(2.0 * random.f32() - 1.0).to_ne_bytes()),
                Dtype::F64 => element.copy_from_slice(&(2.0 * random.f64() - 1.0).to_ne_bytes()),
                Dtype::F16 => element.copy_from_slice(&half(&mut random).to_ne_bytes()),
                Dtype::Bool => element.fill(random.u8(0..2)),
                // Whole numbers from 0 to 7, in the lowest byte.
                _ => {
                    element.fill(0);
                    let low = if cfg!(target_endian = "little") { 0 } else { size - 1 };
                    element[low] = random.u8(0..8);
                }
            }
        }
        Ok(())
    })
}

/// Makes a random number of 16 bits from 1/4 to 1, with a random sign.
fn half(random: &mut Rng) -> u16 {
    (random.u16(..) & 0x8000) | random.u16(0x3400..0x3c00)
}
