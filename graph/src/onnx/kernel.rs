//! The computation of one node of the engine's graph.

use tract_onnx::prelude::*;
use tract_onnx::tract_core::internal::{SymbolScope, SymbolValues, bail, solve_for};
use tract_onnx::tract_core::plan::{SessionState, eval};

use super::convert::needs;
use super::value::ModelValue;
use crate::dataflow::{self, Kernel, KernelError};

/// Returns the kernel of a node of the engine's graph.
pub(super) fn kernel(model: &TypedModel, number: usize) -> Box<dyn Kernel<ModelValue>> {
    let node = &model.nodes[number];
    let facts = node.inputs.iter().chain(&needs(model, number)).map(|input| fact(model, *input)).collect();
    let mut node = node.clone();
    // The facts of the outputs may hold constants of the model.
    for output in &mut node.outputs {
        output.fact = output.fact.without_value();
    }
    Box::new(NodeKernel { facts, own: node.inputs.len(), node, _symbols: model.symbols.clone() })
}

struct NodeKernel {
    node: TypedNode,
    facts: Vec<TypedFact>,
    /// The number of inputs that the node computes with. The inputs after these determine symbols.
    own: usize,
    /// A symbol does not keep its name alive.
    _symbols: SymbolScope,
}

impl Kernel<ModelValue> for NodeKernel {
    fn run(&mut self, _step: u64, inputs: Vec<ModelValue>) -> Result<Vec<ModelValue>, KernelError> {
        if inputs.len() != self.facts.len() {
            return Err(format!("{} inputs came, the node has {}", inputs.len(), self.facts.len()).into());
        }
        // The state of a node lasts for one step only, as in the engine's own executor. So steps can't disturb one another.
        let mut session = SessionState::default();
        resolve(&mut session.resolved_symbols, &self.facts, &inputs)?;
        for (index, (fact, input)) in self.facts.iter().zip(&inputs).enumerate() {
            if !fact.matches(input.tensor(), Some(&session.resolved_symbols))? {
                let tensor = input.tensor();
                return Err(format!("input {index} is {:?}, the node needs {fact:?}", tensor.shape()).into());
            }
        }
        lengths(&session.resolved_symbols, &self.node)?;
        let inputs: TVec<TValue> = inputs.into_iter().take(self.own).map(ModelValue::into_engine).collect();
        let node = &self.node;
        let outputs = guarded(|| {
            let op = node.op();
            let mut state = if op.is_stateless() { None } else { op.state(&mut session, node.id)? };
            eval(&mut session, state.as_deref_mut(), node, inputs)
        })?;
        Ok(outputs.into_iter().map(ModelValue::from_engine).collect())
    }
}

/// Finds the lengths of symbolic dimensions in the shapes of the inputs.
fn resolve(
    symbols: &mut SymbolValues,
    facts: &[TypedFact],
    inputs: &[ModelValue],
) -> Result<(), KernelError> {
    // A symbol that one dimension determines may be needed by the dimension before it.
    for _ in 0..2 {
        for (fact, input) in facts.iter().zip(inputs) {
            for (expression, length) in fact.shape.iter().zip(input.tensor().shape()) {
                let open = expression.eval(symbols);
                let mut unknown = open.symbols().into_iter();
                let (Some(symbol), None) = (unknown.next(), unknown.next()) else { continue };
                if let Some(value) = solve_for(&symbol, &open, &(*length as i64).to_dim()) {
                    symbols.set(&symbol, value.to_i64()?);
                }
            }
        }
    }
    Ok(())
}

/// Checks the shapes of a node's outputs. The engine does not: where a picture is smaller than the filter, it computes with addresses
/// outside the picture.
pub(super) fn lengths(symbols: &SymbolValues, node: &TypedNode) -> TractResult<()> {
    for dim in node.outputs.iter().flat_map(|output| output.fact.shape.iter()) {
        if matches!(dim, TDim::Val(_)) {
            continue;
        }
        match dim.eval(symbols).to_i64() {
            Ok(length) if length > 0 => {}
            Ok(length) => {
                bail!("{}: the dimension {dim} would be {length}; the inputs are too small", node.name)
            }
            Err(_) => bail!("{}: the shapes of the inputs do not determine the dimension {dim}", node.name),
        }
    }
    Ok(())
}

fn fact(model: &TypedModel, outlet: OutletId) -> TypedFact {
    model.nodes[outlet.node].outputs[outlet.slot].fact.without_value()
}

/// Calls the engine. A panic of the engine becomes an error.
pub(super) fn guarded<T>(call: impl FnOnce() -> TractResult<T>) -> Result<T, KernelError> {
    dataflow::guarded("the engine", || call().map_err(|error| format!("{error:#}").into()))
}
