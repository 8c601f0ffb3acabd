//! Runs kernels, and other code of engines and programs. Code that fails or panics is a named error.

use super::plan::PlannedNode;
use crate::dataflow::{self, Kernel, KernelError, NodeId, Topology};
use crate::error::GraphError;

/// Runs the kernel of a constant.
pub(super) fn constant<V>(
    graph: &Topology,
    id: NodeId,
    kernel: &mut dyn Kernel<V>,
) -> Result<Vec<V>, GraphError> {
    let Some(node) = graph.node(id) else { return Ok(Vec::new()) };
    let outputs = guarded(|| kernel.run(0, Vec::new()));
    counted(outputs, node.outputs.len()).map_err(|source| failed(&node.name, &node.kind, source))
}

/// Runs what computes the outputs of a node.
pub(super) fn outputs<V>(
    node: &PlannedNode,
    run: impl FnOnce() -> Result<Vec<V>, KernelError>,
) -> Result<Vec<V>, GraphError> {
    counted(guarded(run), node.outputs).map_err(|source| failed(&node.name, &node.kind, source))
}

/// Makes the error of a node.
pub(super) fn failed(node: &str, kind: &str, source: KernelError) -> GraphError {
    GraphError::Kernel { node: node.to_owned(), kind: kind.to_owned(), source }
}

fn counted<V>(outputs: Result<Vec<V>, KernelError>, expected: usize) -> Result<Vec<V>, KernelError> {
    match outputs {
        Ok(outputs) if outputs.len() != expected => {
            Err(format!("it returned {} outputs instead of {expected}", outputs.len()).into())
        }
        outputs => outputs,
    }
}

/// Calls an engine or the program. After a panic the executor runs no more, so that a kernel in a broken state is not used.
pub(super) fn guarded<R>(run: impl FnOnce() -> Result<R, KernelError>) -> Result<R, KernelError> {
    dataflow::guarded("it", run)
}
