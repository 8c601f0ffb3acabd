//! What is known before any process starts: the model, its split, and what crosses.

use std::path::Path;

use bytes::Bytes;
use tonic_rdma_commands::Failure;
use tonic_rdma_graph::GraphError;
use tonic_rdma_graph::onnx::Model;
use tonic_rdma_graph::partition;
use tonic_rdma_graph::placement::{Partition, Placements, analyse};
use tonic_rdma_graph::transfer::Mode;

use crate::control::Job;
use crate::options::RunOptions;
use crate::set::settings;

/// The number of sets of inputs of a model without symbolic dimensions.
const INPUTS: u64 = 3;

/// A model and its split.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) name: String,
    pub(crate) file: Bytes,
    pub(crate) model: Model,
    pub(crate) placements: Placements,
    pub(crate) modes: Vec<Mode>,
    /// The number of sets of inputs. Micro-batches take them in turn.
    pub(crate) sets: u64,
}

impl Plan {
    /// Loads the model, and splits it.
    pub(crate) fn new(options: &RunOptions, parts: usize) -> Result<Self, Failure> {
        let (file, model) = load(options)?;
        let path = options.model.as_deref().unwrap_or(Path::new(""));
        let name = path.file_name().map_or_else(|| path.to_string_lossy(), |name| name.to_string_lossy());
        let partition = split(options, parts, &model)?;
        let placements = analyse(model.topology(), &partition).map_err(|error| Failure::refused(&error))?;
        let modes = options.mode.as_ref().map_or_else(|| Mode::ALL.to_vec(), |modes| modes.0.clone());
        let sets = if model.symbols().is_empty() { INPUTS } else { options.lengths.0.len() as u64 };
        Ok(Self { name: name.into_owned(), file: file.into(), model, placements, modes, sets })
    }

    /// Returns what a part has to know.
    pub(crate) fn job(&self, options: &RunOptions, part: usize) -> Job {
        let partition = self.placements.partition();
        Job {
            part,
            parts: partition.count(),
            model: self.name.clone(),
            symbols: options.symbols.clone(),
            lengths: options.lengths.0.clone(),
            sets: self.sets,
            seed: options.seed,
            assignment: partition.parts().iter().map(|part| part.0).collect(),
            modes: self.modes.clone(),
            receive: options.receive,
            window: options.micro_batches as usize,
            limit_ms: options.timeout.as_millis().try_into().unwrap_or(u64::MAX),
        }
    }
}

/// Reads the file of the model, and loads the model.
pub(crate) fn load(options: &RunOptions) -> Result<(Vec<u8>, Model), Failure> {
    let path = options.model.as_deref().unwrap_or(Path::new(""));
    let settings = settings(&options.symbols, options.seed)?;
    let file = std::fs::read(path).map_err(|error| {
        let path = path.display();
        Failure::usage(format!("can't read the model {path}: {error}; graph/prepare-models installs models"))
    })?;
    let model = Model::read(path, &file, &settings).map_err(|error| Failure::refused(&error))?;
    Ok((file, model))
}

fn split(options: &RunOptions, parts: usize, model: &Model) -> Result<Partition, Failure> {
    let graph = model.topology();
    let refused = |option: &str, error: GraphError| {
        let names = matches!(error, GraphError::UnknownNode { .. });
        let hint = if names { "; --nodes prints the names" } else { "" };
        Failure::usage(format!("{option}: {}{hint}", Failure::refused(&error)))
    };
    let partition = match (&options.cut, &options.assign) {
        (Some(cuts), _) => {
            let names: Vec<&str> = cuts.0.iter().map(String::as_str).collect();
            partition::at_cuts(graph, &names).map_err(|error| refused("--cut", error))?
        }
        (None, Some(path)) => {
            let list = std::fs::read_to_string(path).map_err(|error| {
                Failure::usage(format!("--assign: can't read {}: {error}", path.display()))
            })?;
            partition::named(graph, parts, &list).map_err(|error| refused("--assign", error))?
        }
        (None, None) => partition::balanced(graph, parts).map_err(|error| refused("--parts", error))?,
    };
    partition.check_pipeline(graph).map_err(|error| refused("--assign", error))?;
    Ok(partition)
}
