//! ONNX models, by the engine `tract`.
//!
//! ```text
//!  load        a file, checked; other lengths; seeded weights         → the engine's graph, optimised
//!  convert     the engine's graph                                     → Topology, in an order that is the same in all processes
//!  kernel      one node of the engine's graph                         → Kernel; finds the lengths of symbolic dimensions
//!  value       a tensor of the engine                                 → Value, without a copy
//!  reference   the whole model in one process, by the engine's own executor
//! ```
//!
//! This module never splits a graph, and never moves a tensor between processes.

mod check;
mod convert;
mod kernel;
mod lengths;
mod load;
mod reference;
mod settings;
mod value;
mod weights;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tract_onnx::tract_core::model::{OutletId, TypedModel};

use crate::dataflow::{Kernel, NodeId, Outlet, Role, Topology};
use crate::error::GraphError;

pub use settings::{ModelSettings, SymbolicDim, Weights};
pub use value::ModelValue;

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
    /// Reads a model from a file, puts seeded weights in if `settings` asks for this, and optimises the model. The same file and the
    /// same settings give the same topology in all processes of a kind of machine.
    ///
    /// ```
    /// use std::path::Path;
    /// use tonic_rdma_graph::onnx::{Model, ModelSettings, Weights};
    ///
    /// let settings = ModelSettings { weights: Weights::Seeded(1), dims: vec!["data_0:0=N".parse()?] };
    /// let error = Model::load(Path::new("missing.onnx"), &settings).unwrap_err();
    /// assert!(error.to_string().starts_with("the model missing.onnx: it can't be read"));
    /// # Ok::<(), String>(())
    /// ```
    ///
    /// # Errors
    /// [`GraphError::Model`]: there is no such file, it is no ONNX, its shapes are not determined, or the engine refuses it.
    /// [`GraphError::Operator`]: the engine does not know an operator.
    pub fn load(path: &Path, settings: &ModelSettings) -> Result<Self, GraphError> {
        Self::read(path, &load::read(path)?, settings)
    }

    /// Makes a model of the content of a file. `path` is for messages, and its folder for tensors that the content leaves to other
    /// files.
    ///
    /// ```
    /// use std::path::Path;
    /// use tonic_rdma_graph::onnx::{Model, ModelSettings};
    ///
    /// let error = Model::read(Path::new("text.onnx"), b"no model", &ModelSettings::default()).unwrap_err();
    /// assert!(error.to_string().starts_with("the model text.onnx: "), "{error}");
    /// ```
    ///
    /// # Errors
    /// As for [`load`](Self::load).
    pub fn read(path: &Path, content: &[u8], settings: &ModelSettings) -> Result<Self, GraphError> {
        let wrong = |reason: String| GraphError::Model { path: path.to_owned(), reason };
        let loaded = load::load(path, content, settings)?;
        let (topology, nodes) =
            convert::convert(&loaded.engine).map_err(|error| wrong(format!("{error:#}")))?;
        Ok(Self {
            path: path.to_owned(),
            engine: Arc::new(loaded.engine),
            topology: Arc::new(topology),
            nodes: nodes.into(),
            seeded: loaded.seeded,
        })
    }

    /// Returns the file of the model.
    pub fn path(&self) -> &Path {
        &self.path
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
        self.inputs_symbols()
    }

    /// Returns the kernels of `nodes`. They hold the weights of these nodes and no others, so a process that drops the model has
    /// only these in memory.
    ///
    /// # Errors
    /// The model has no such node.
    pub fn kernels(&self, nodes: impl IntoIterator<Item = NodeId>) -> Result<Kernels, GraphError> {
        let mut kernels = Kernels::new();
        for id in nodes {
            let (Some(node), Some(number)) = (self.topology.node(id), self.nodes.get(id.0)) else {
                let path = self.path.clone();
                return Err(GraphError::Model { path, reason: format!("the model has no node {}", id.0) });
            };
            if node.role != Role::Input {
                kernels.insert(id, kernel::kernel(&self.engine, *number));
            }
        }
        Ok(kernels)
    }

    fn outlet(&self, outlet: Outlet) -> Option<OutletId> {
        self.topology.fact(outlet)?;
        Some(OutletId::new(*self.nodes.get(outlet.node.0)?, outlet.output))
    }
}

#[cfg(test)]
mod tests;
