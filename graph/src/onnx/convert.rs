//! From the engine's graph to a topology and kernels, and the tensors of the engine.

use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;
use std::sync::Arc;

use bytes::Bytes;
use tract_onnx::prelude as tract;
use tract_onnx::prelude::*;
use tract_onnx::tract_core::internal::{SymbolScope, SymbolValues, TractErrorContext as _, bail, solve_for};
use tract_onnx::tract_core::ops::Cost;
use tract_onnx::tract_core::ops::konst::Const;
use tract_onnx::tract_core::plan::{SessionState, eval};

use crate::dataflow::{self, Dim, Kernel, KernelError, NodeId, Outlet, Role, Topology, Value};
use tonic_rdma_tensor::{Dtype, Shape, Tensor, TensorSpec};

/// Makes the topology of the engine's graph, and returns it with the engine's number of each node.
///
/// The order of the nodes follows from the edges alone: the inputs of the model, then each node after its
/// inputs, first input first. So it does not depend on the numbers of the engine, which numbers nodes as its
/// optimiser made them.
pub(super) fn convert(model: &TypedModel) -> TractResult<(Topology, Vec<usize>)> {
    let order = order(model)?;
    let mut topology = Topology::new();
    let mut ids = HashMap::new();
    let mut names = BTreeSet::new();
    for number in &order {
        let node = &model.nodes[*number];
        let mut name = node.name.clone();
        for copy in 2.. {
            if names.insert(name.clone()) {
                break;
            }
            name = format!("{}#{copy}", node.name);
        }
        let inputs = node
            .inputs
            .iter()
            .chain(&needs(model, *number))
            .map(|input| outlet(&ids, *input))
            .collect::<TractResult<_>>()?;
        let role = match () {
            () if model.inputs.iter().any(|input| input.node == *number) => Role::Input,
            () if node.op_is::<Const>() => Role::Constant,
            () => Role::Compute,
        };
        let id = topology.add(dataflow::Node {
            name,
            kind: node.op().name().into_owned(),
            role,
            inputs,
            outputs: node.outputs.iter().map(|output| fact(&output.fact)).collect(),
            work: if role == Role::Compute { work(model, node) } else { 0 },
            stays: node.outputs.iter().any(|output| dtype(output.fact.datum_type).is_none()),
        })?;
        ids.insert(*number, id);
    }
    for result in &model.outputs {
        topology.result(outlet(&ids, *result)?)?;
    }
    Ok((topology, order))
}

/// Returns outputs of other nodes that a node needs besides its inputs: they determine symbols in its outputs
/// that its inputs do not determine. Such a node is, for example, one that repeats a constant once for each
/// picture of a batch.
pub(super) fn needs(model: &TypedModel, number: usize) -> Vec<OutletId> {
    let node = &model.nodes[number];
    if node.op_is::<Const>()
        || node.inputs.is_empty() && model.inputs.iter().any(|input| input.node == number)
    {
        return Vec::new();
    }
    let inputs = node.inputs.iter().filter_map(|input| model.outlet_fact(*input).ok());
    let mut wanted = BTreeSet::new();
    let mut given = BTreeSet::new();
    for fact in inputs {
        given.extend(determines(fact));
        if fact.datum_type == TDim::datum_type() {
            // Its elements are expressions.
            wanted.extend(
                model.inputs.iter().filter_map(|input| model.outlet_fact(*input).ok()).flat_map(symbols),
            );
        }
        wanted.extend(symbols(fact));
    }
    wanted.extend(node.outputs.iter().flat_map(|output| symbols(&output.fact)));
    let mut more = Vec::new();
    for input in &model.inputs {
        let Ok(fact) = model.outlet_fact(*input) else { continue };
        let helps = determines(fact);
        if helps.iter().any(|symbol| wanted.contains(symbol) && !given.contains(symbol)) {
            given.extend(helps);
            more.push(*input);
        }
    }
    more
}

fn symbols(fact: &TypedFact) -> Vec<String> {
    fact.shape.iter().flat_map(|dim| dim.symbols()).map(|symbol| symbol.to_string()).collect()
}

/// Returns the symbols that the shape of a tensor determines.
fn determines(fact: &TypedFact) -> Vec<String> {
    let determined = fact.shape.iter().filter_map(|dim| {
        let symbols = dim.symbols();
        let symbol = symbols.iter().next().filter(|_| symbols.len() == 1)?;
        // The engine solves linear expressions. Each of these has a length for this value of the symbol.
        let example = dim.eval(&SymbolValues::default().with(symbol, 1 << 20));
        solve_for(symbol, dim, &example).map(|_| symbol.to_string())
    });
    determined.collect()
}

/// Returns the nodes that results need, and all inputs of the model, each node after its inputs.
fn order(model: &TypedModel) -> TractResult<Vec<usize>> {
    let mut order: Vec<usize> = Vec::new();
    let mut seen = vec![false; model.nodes.len()];
    for input in &model.inputs {
        if !std::mem::replace(&mut seen[input.node], true) {
            order.push(input.node);
        }
    }
    for result in &model.outputs {
        // Nodes on the way to a result, each with the number of its next input. A deep model would fill the
        // stack of a recursion.
        let mut way = vec![(result.node, 0)];
        while let Some((node, next)) = way.pop() {
            if next == 0 && std::mem::replace(&mut seen[node], true) {
                continue;
            }
            match model.nodes[node].inputs.get(next) {
                Some(input) => {
                    way.push((node, next + 1));
                    if !seen[input.node] {
                        way.push((input.node, 0));
                    }
                }
                None => order.push(node),
            }
        }
    }
    Ok(order)
}

fn outlet(ids: &HashMap<usize, NodeId>, outlet: OutletId) -> TractResult<Outlet> {
    let node =
        ids.get(&outlet.node).with_context(|| format!("node {} comes before its input", outlet.node))?;
    Ok(Outlet { node: *node, output: outlet.slot })
}

/// Returns what the engine knows of a tensor. A type that is private to the engine becomes a string of bytes:
/// it never crosses.
fn fact(fact: &TypedFact) -> dataflow::Fact {
    let dim = |dim: &TDim| match dim.to_i64() {
        Ok(length) => Dim::Known(length.max(0) as u64),
        Err(_) => Dim::Symbolic(dim.to_string().into()),
    };
    dataflow::Fact {
        dtype: dtype(fact.datum_type).unwrap_or(Dtype::String),
        dims: fact.shape.iter().map(dim).collect(),
    }
}

/// Estimates the work of a node: multiply-adds as the engine counts them, and one for each element of the
/// outputs. Each symbol counts as 1.
fn work(model: &TypedModel, node: &TypedNode) -> u64 {
    let one = |dim: &TDim| {
        let ones =
            dim.symbols().iter().fold(SymbolValues::default(), |values, symbol| values.with(symbol, 1));
        dim.eval(&ones).to_i64().map_or(0, |count| count.max(0) as u64)
    };
    let written =
        node.outputs.iter().map(|output| one(&output.fact.shape.volume())).fold(0, u64::saturating_add);
    let facts: TVec<&TypedFact> =
        node.inputs.iter().filter_map(|input| model.outlet_fact(*input).ok()).collect();
    let costs = node.op.cost(&facts).unwrap_or_default();
    let counted = costs.iter().filter(|(cost, _)| matches!(cost, Cost::FMA(_) | Cost::Div(_)));
    counted.map(|(_, count)| one(count)).fold(written, u64::saturating_add)
}

/// Returns the kernel of a node of the engine's graph.
pub(super) fn kernel(model: &TypedModel, number: usize) -> Box<dyn Kernel<ModelValue>> {
    let node = &model.nodes[number];
    let facts = node
        .inputs
        .iter()
        .chain(&needs(model, number))
        .map(|input| fact_without_value(model, *input))
        .collect();
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
    /// Keeps the names of the symbols alive, because the symbols in `facts` do not.
    _symbols: SymbolScope,
}

impl Kernel<ModelValue> for NodeKernel {
    fn run(&mut self, _step: u64, inputs: Vec<ModelValue>) -> Result<Vec<ModelValue>, KernelError> {
        if inputs.len() != self.facts.len() {
            return Err(format!("{} inputs came, the node has {}", inputs.len(), self.facts.len()).into());
        }
        // The state of a node lasts for one step only, as in the engine's own executor. So steps can't
        // disturb one another.
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

/// Checks the shapes of a node's outputs. The engine does not: where a picture is smaller than the filter, it
/// computes with addresses outside the picture.
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

fn fact_without_value(model: &TypedModel, outlet: OutletId) -> TypedFact {
    model.nodes[outlet.node].outputs[outlet.slot].fact.without_value()
}

/// Calls the engine. A panic of the engine becomes an error.
pub(super) fn guarded<T>(call: impl FnOnce() -> TractResult<T>) -> Result<T, KernelError> {
    dataflow::guarded("the engine", || call().map_err(|error| format!("{error:#}").into()))
}

/// A tensor of the engine. Clones share its content.
#[derive(Clone, Debug)]
pub struct ModelValue(Arc<tract::Tensor>);

impl ModelValue {
    /// Returns type and shape.
    ///
    /// # Errors
    /// The type of the elements is private to the engine.
    pub fn spec(&self) -> Result<TensorSpec, KernelError> {
        let dtype = dtype(self.0.datum_type())
            .ok_or_else(|| format!("a tensor of {:?} can't cross", self.0.datum_type()))?;
        let dims: Vec<u64> = self.0.shape().iter().map(|length| *length as u64).collect();
        Ok(TensorSpec::new(dtype, Shape::new(&dims)?)?)
    }

    /// Returns the content, row-major.
    pub fn bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }

    pub(super) fn tensor(&self) -> &tract::Tensor {
        &self.0
    }

    /// Takes a result of the engine, without a copy unless the engine still uses it.
    pub(super) fn from_engine(value: tract::TValue) -> Self {
        Self(tract::IntoArcTensor::into_arc_tensor(value))
    }

    /// Gives the tensor to the engine, which may change it in place if it is used nowhere else.
    pub(super) fn into_engine(self) -> tract::TValue {
        match Arc::try_unwrap(self.0) {
            Ok(tensor) => tract::TValue::Var(Rc::new(tensor)),
            Err(shared) => tract::TValue::Const(shared),
        }
    }
}

impl Value for ModelValue {
    fn share(&self) -> Result<Tensor, KernelError> {
        Ok(Tensor::from_bytes(self.spec()?, Bytes::from_owner(Owner(Arc::clone(&self.0))))?)
    }

    fn filled(
        spec: &TensorSpec,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), KernelError>,
    ) -> Result<Self, KernelError> {
        let datum =
            datum(spec.dtype()).ok_or_else(|| format!("the engine has no tensors of {}", spec.dtype()))?;
        let dims: Vec<usize> = spec.shape().dims().iter().map(|length| *length as usize).collect();
        // The engine's only way to a tensor without zeros is unsafe.
        let mut tensor = tract::Tensor::zero_dt(datum, &dims)?;
        fill(tensor.as_bytes_mut())?;
        Ok(Self(Arc::new(tensor)))
    }
}

/// Keeps a tensor in memory, and keeps the engine from changing it in place.
struct Owner(Arc<tract::Tensor>);

impl AsRef<[u8]> for Owner {
    fn as_ref(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

/// The types of elements that both the engine and tensors have.
const TYPES: [(tract::DatumType, Dtype); 12] = [
    (tract::DatumType::Bool, Dtype::Bool),
    (tract::DatumType::U8, Dtype::U8),
    (tract::DatumType::U16, Dtype::U16),
    (tract::DatumType::U32, Dtype::U32),
    (tract::DatumType::U64, Dtype::U64),
    (tract::DatumType::I8, Dtype::I8),
    (tract::DatumType::I16, Dtype::I16),
    (tract::DatumType::I32, Dtype::I32),
    (tract::DatumType::I64, Dtype::I64),
    (tract::DatumType::F16, Dtype::F16),
    (tract::DatumType::F32, Dtype::F32),
    (tract::DatumType::F64, Dtype::F64),
];

/// Returns the type of elements that cross, or `None` if the engine's type is private to it.
pub(super) fn dtype(datum: tract::DatumType) -> Option<Dtype> {
    TYPES.iter().find(|(known, _)| *known == datum).map(|(_, dtype)| *dtype)
}

fn datum(dtype: Dtype) -> Option<tract::DatumType> {
    TYPES.iter().find(|(_, known)| *known == dtype).map(|(datum, _)| *datum)
}
