//! From a file to the engine's graph.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use tract_onnx::pb::ModelProto;
use tract_onnx::prelude::*;

use super::check::{Wrong, check, no_model};
use super::kernel::guarded;
use super::settings::{ModelSettings, Weights};
use super::{lengths, weights};
use crate::dataflow::KernelError;
use crate::error::GraphError;

/// The engine's graph of a model.
pub(super) struct Loaded {
    pub(super) engine: TypedModel,
    /// How many weights are seeded.
    pub(super) seeded: usize,
}

/// The largest file. A message of protobuf is not larger.
const LARGEST: u64 = i32::MAX as u64;

/// Optimises the model that is the content of the file `path`.
pub(super) fn load(path: &Path, mut bytes: &[u8], settings: &ModelSettings) -> Result<Loaded, GraphError> {
    let wrong = |reason: String| GraphError::Model { path: path.to_owned(), reason };
    if bytes.is_empty() {
        return Err(wrong(no_model("the file is empty")));
    }
    let engine = tract_onnx::onnx();
    let mut proto =
        guarded(|| engine.proto_model_for_read(&mut bytes)).map_err(|error| wrong(no_model(error)))?;
    if let Some(graph) = &mut proto.graph {
        settings.dims.iter().try_for_each(|dim| lengths::set(graph, dim)).map_err(wrong)?;
    }
    check(&engine, &proto).map_err(|found| match found {
        Wrong::Reason(reason) => wrong(reason),
        Wrong::Operator { node, operator } => GraphError::Operator { path: path.to_owned(), node, operator },
    })?;
    let seeded = match (settings.weights, &mut proto.graph) {
        (Weights::Seeded(seed), Some(graph)) => weights::seed(graph, seed).map_err(wrong)?,
        _ => 0,
    };
    let engine = optimise(&engine, proto, path.parent()).map_err(|error| wrong(error.to_string()))?;
    Ok(Loaded { engine, seeded })
}

/// Reads the file of a model.
pub(super) fn read(path: &Path) -> Result<Vec<u8>, GraphError> {
    let wrong = |reason: String| GraphError::Model { path: path.to_owned(), reason };
    let io = |error: std::io::Error| wrong(format!("it can't be read: {error}"));
    let mut file = File::open(path).map_err(io)?;
    let metadata = file.metadata().map_err(io)?;
    if !metadata.is_file() || metadata.len() > LARGEST {
        return Err(wrong(format!("it is no file of at most {LARGEST} bytes")));
    }
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).map_err(io)?;
    Ok(bytes)
}

/// Parses the model. Consumes it, so that its weights are not in memory twice for longer than necessary.
fn optimise(
    engine: &tract_onnx::Onnx,
    proto: ModelProto,
    folder: Option<&Path>,
) -> Result<TypedModel, KernelError> {
    guarded(|| {
        let parsed = engine.parse(&proto, folder.and_then(Path::to_str))?;
        drop(proto);
        parsed.model.into_typed()?.into_optimized()
    })
}
