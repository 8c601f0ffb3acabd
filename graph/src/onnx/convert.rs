//! From the engine's graph to a topology and kernels, and the tensors of the engine.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::Rc;
use std::sync::Arc;

use bytes::Bytes;
use tract_onnx::prelude as tract;
use tract_onnx::prelude::*;
use tract_onnx::tract_core::internal::{SymbolScope, SymbolValues, TractErrorContext as _, bail, solve_for};
use tract_onnx::tract_core::ops::Cost;
use tract_onnx::tract_core::ops::array::Slice;
use tract_onnx::tract_core::ops::konst::Const;
use tract_onnx::tract_core::plan::{SessionState, eval};

use crate::dataflow::{self, Dim, Hosted, Kernel, KernelError, NodeId, Outlet, Role, Topology, Value};
use tonic_rdma_tensor::{Dtype, Shape, Tensor, TensorSpec};
use tonic_rdma_verbs::unstable::{HostedTensor, RegionPool};

/// Makes the topology of the engine's graph, and returns it with the engine's number of each node.
///
/// The order of the nodes follows from the edges alone: the inputs of the model, then each node after its
/// inputs, first input first. So it does not depend on the numbers of the engine, which numbers nodes as its
/// optimiser made them.
pub(super) fn convert(model: &TypedModel) -> TractResult<(Topology, Vec<usize>)> {
    let sources = sources(model);
    let inputs: Vec<Vec<OutletId>> = model
        .nodes
        .iter()
        .map(|node| node.inputs.iter().copied().chain(needs(model, &sources, node)).collect())
        .collect();
    let order = order(model, &inputs);
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
        let inputs: Vec<Outlet> =
            inputs[*number].iter().map(|input| outlet(&ids, *input)).collect::<TractResult<_>>()?;
        let role = match () {
            () if model.inputs.iter().any(|input| input.node == *number) => Role::Input,
            // A result with the lengths of an input is no constant for those that use it.
            () if node.op_is::<Const>() && inputs.is_empty() => Role::Constant,
            () => Role::Compute,
        };
        let crosses = |datum| dtype(datum).is_some_and(|dtype| dtype.size().is_some());
        let id = topology.add(dataflow::Node {
            name,
            kind: node.op().name().into_owned(),
            role,
            inputs,
            outputs: node.outputs.iter().map(|output| fact(&output.fact)).collect(),
            work: if role == Role::Compute { work(model, node) } else { 0 },
            stays: node.outputs.iter().any(|output| !crosses(output.fact.datum_type)),
        })?;
        ids.insert(*number, id);
    }
    for result in &model.outputs {
        topology.result(outlet(&ids, *result)?)?;
    }
    Ok((topology, order))
}

/// Returns the output that tells the value of each symbol: an input of the model, or the result of a node
/// whose length the data determine.
fn sources(model: &TypedModel) -> BTreeMap<String, OutletId> {
    let by_data = model.nodes.iter().filter(|node| {
        let ops = ["NonZero", "NonMaxSuppression", "Topk", "Range", "DynSlice", "DynTile"];
        ops.contains(&&*node.op().name())
    });
    let outlets = by_data.flat_map(|node| (0..node.outputs.len()).map(|slot| OutletId::new(node.id, slot)));
    let mut sources = BTreeMap::new();
    for outlet in model.inputs.iter().copied().chain(outlets) {
        for symbol in model.outlet_fact(outlet).map(determines).unwrap_or_default() {
            sources.entry(symbol).or_insert(outlet);
        }
    }
    sources
}

/// Returns outputs of other nodes that a node needs besides its inputs: they determine symbols that its inputs
/// do not determine. Such a node is, for example, one that repeats a constant once for each picture of a
/// batch.
fn needs(model: &TypedModel, sources: &BTreeMap<String, OutletId>, node: &TypedNode) -> Vec<OutletId> {
    if model.inputs.iter().any(|input| input.node == node.id) {
        return Vec::new();
    }
    let mut wanted = BTreeSet::new();
    let mut given = BTreeSet::new();
    match node.op_as::<Const>() {
        // Other nodes ask for the symbols of a constant themselves.
        Some(constant) if model.outputs.iter().any(|result| result.node == node.id) => {
            wanted.extend(elements(constant));
        }
        Some(_) => {}
        None => wanted.extend(node.outputs.iter().flat_map(|output| symbols(output.fact.shape.iter()))),
    }
    for input in &node.inputs {
        let Ok(fact) = model.outlet_fact(*input) else { continue };
        given.extend(determines(fact));
        wanted.extend(symbols(fact.shape.iter()));
        wanted.extend(model.nodes[input.node].op_as::<Const>().into_iter().flat_map(elements));
    }
    if let Some(slice) = node.op_as::<Slice>() {
        wanted.extend(symbols([&slice.start, &slice.end].into_iter()));
    }
    let mut more = Vec::new();
    for symbol in wanted {
        if given.contains(&symbol) {
            continue;
        }
        if let Some(source) = sources.get(&symbol).filter(|source| source.node != node.id) {
            given.extend(model.outlet_fact(*source).map(determines).unwrap_or_default());
            more.push(*source);
        }
    }
    more
}

/// Returns the symbols in the elements of a constant.
fn elements(constant: &Const) -> Vec<String> {
    constant.val().as_slice::<TDim>().map(|dims| symbols(dims.iter())).unwrap_or_default()
}

fn symbols<'a>(dims: impl Iterator<Item = &'a TDim>) -> Vec<String> {
    dims.flat_map(|dim| dim.symbols()).map(|symbol| symbol.to_string()).collect()
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

/// Returns the nodes that results need, and all inputs of the model, each node after its `inputs`.
fn order(model: &TypedModel, inputs: &[Vec<OutletId>]) -> Vec<usize> {
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
            match inputs[node].get(next) {
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
    order
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

/// Returns the kernel of a node of the engine's graph. `inputs` are those of the node, and those that determine
/// symbols.
pub(super) fn kernel(
    model: &TypedModel,
    number: usize,
    inputs: impl Iterator<Item = OutletId>,
) -> Box<dyn Kernel<ModelValue>> {
    let facts = inputs.map(|input| fact_without_value(model, input)).collect();
    let mut node = model.nodes[number].clone();
    // The facts of the outputs may hold constants of the model.
    for output in &mut node.outputs {
        output.fact = output.fact.without_value();
    }
    let (own, least) = (node.inputs.len(), least(model, &node));
    Box::new(NodeKernel { facts, own, least, node, _symbols: model.symbols.clone() })
}

struct NodeKernel {
    node: TypedNode,
    facts: Vec<TypedFact>,
    /// The number of inputs that the node computes with. The inputs after these determine symbols.
    own: usize,
    /// The least length of a dimension.
    least: i64,
    /// Keeps the names of the symbols alive, because the symbols in `facts` do not.
    _symbols: SymbolScope,
}

impl Kernel<ModelValue> for NodeKernel {
    fn run(&mut self, _step: u64, inputs: Vec<ModelValue>) -> Result<Vec<ModelValue>, KernelError> {
        if inputs.len() != self.facts.len() {
            return Err(format!("{} inputs came, the node has {}", inputs.len(), self.facts.len()).into());
        }
        let mut inputs: TVec<TValue> = inputs
            .into_iter()
            .zip(&self.facts)
            .map(|(input, fact)| input.into_engine(fact.datum_type))
            .collect::<TractResult<_>>()?;
        // The state of a node lasts for one step only, as in the engine's own executor. So steps can't
        // disturb one another.
        let mut session = SessionState::default();
        resolve(&mut session.resolved_symbols, &self.facts, &inputs)?;
        for (index, (fact, input)) in self.facts.iter().zip(&inputs).enumerate() {
            if !fact.matches(input, Some(&session.resolved_symbols))? {
                return Err(format!("input {index} is {:?}, the node needs {fact:?}", input.shape()).into());
            }
        }
        lengths(&session.resolved_symbols, &self.node, self.least)?;
        // What the node does not compute with has no other owner than the rest of the graph.
        inputs.truncate(self.own);
        let node = &self.node;
        let outputs = guarded(|| {
            let op = node.op();
            let mut state = if op.is_stateless() { None } else { op.state(&mut session, node.id)? };
            eval(&mut session, state.as_deref_mut(), node, inputs)
        })?;
        let symbols = &session.resolved_symbols;
        Ok(outputs.into_iter().map(|output| ModelValue::from_engine(output, symbols)).collect())
    }
}

/// Finds the lengths of symbolic dimensions in the shapes of the inputs.
fn resolve(symbols: &mut SymbolValues, facts: &[TypedFact], inputs: &[TValue]) -> TractResult<()> {
    // A symbol that one dimension determines may be needed by the dimension before it.
    for _ in 0..2 {
        for (fact, input) in facts.iter().zip(inputs) {
            for (expression, length) in fact.shape.iter().zip(input.shape()) {
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

/// Returns the least length of a dimension of a node's outputs: 0, or 1 if the node reads pictures by a filter.
/// Where a picture is smaller than the filter, the engine computes with addresses outside the picture.
pub(super) fn least(model: &TypedModel, node: &TypedNode) -> i64 {
    let ops = [
        "Conv",
        "Deconv",
        "DeconvSum",
        "DepthWiseConv",
        "Im2col",
        "LazyIm2col",
        "MaxPool",
        "OptMaxPool",
        "OptSumPool",
        "SumPool",
    ];
    let reads = |node: &TypedNode| ops.contains(&&*node.op().name());
    // Im2col only arranges the picture for the product that follows.
    let arranges = |input: &OutletId| model.nodes[input.node].op().name().ends_with("Im2col");
    i64::from(reads(node) || node.inputs.iter().any(arranges))
}

/// Checks what is known of the shapes of a node's outputs before it runs, because the engine does not
/// check them. A dimension that the data determine is known when the node has run.
pub(super) fn lengths(symbols: &SymbolValues, node: &TypedNode, least: i64) -> TractResult<()> {
    for dim in node.outputs.iter().flat_map(|output| output.fact.shape.iter()) {
        let length = if matches!(dim, TDim::Val(_)) { None } else { dim.eval(symbols).to_i64().ok() };
        if let Some(length) = length.filter(|length| *length < least) {
            bail!("{}: the dimension {dim} would be {length}; the inputs are too small", node.name);
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
    /// The type of the elements is private to the engine, or the tensor has lengths without a value.
    pub fn spec(&self) -> Result<TensorSpec, KernelError> {
        let datum = self.0.datum_type();
        let dtype = dtype(datum).filter(|_| datum != TDim::datum_type());
        let dtype = dtype.ok_or_else(|| format!("a tensor of {datum:?} can't cross"))?;
        let dims: Vec<u64> = self.0.shape().iter().map(|length| *length as u64).collect();
        Ok(TensorSpec::new(dtype, Shape::new(&dims)?)?)
    }

    /// Makes a tensor of strings, row-major: an input of a model.
    ///
    /// ```
    /// use tonic_rdma_graph::onnx::ModelValue;
    /// use tonic_rdma_tensor::Shape;
    ///
    /// let words = ModelValue::from_strings(Shape::new(&[2])?, ["remote", "memory"].map(String::from).to_vec())?;
    /// assert_eq!(words.spec()?.to_string(), "string[2]");
    /// # Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
    /// ```
    ///
    /// # Errors
    /// The number of strings is not the number of elements.
    pub fn from_strings(shape: Shape, strings: Vec<String>) -> Result<Self, KernelError> {
        let dims: Vec<usize> = shape.dims().iter().map(|length| *length as usize).collect();
        let array = tract::tract_ndarray::ArrayD::from_shape_vec(dims, strings)?;
        Ok(Self(Arc::new(tract::IntoTensor::into_tensor(array))))
    }

    /// Returns the content, row-major. Strings have none: their content is that of [`share`](Value::share).
    pub fn bytes(&self) -> &[u8] {
        match self.0.datum_type() {
            tract::DatumType::String => &[],
            _ => self.0.as_bytes(),
        }
    }

    /// Takes a result of the engine, without a copy unless the engine still uses it. Lengths that the engine
    /// computes with, which may be expressions, become whole numbers. Only a constant may hold expressions
    /// without a value: the nodes that use it know the values.
    pub(super) fn from_engine(value: tract::TValue, symbols: &SymbolValues) -> Self {
        let tensor = tract::IntoArcTensor::into_arc_tensor(value);
        if tensor.datum_type() == TDim::datum_type()
            && let Ok(numbers) = whole_numbers(&tensor, symbols)
        {
            return Self(Arc::new(numbers));
        }
        Self(tensor)
    }

    /// Gives the tensor to the engine, which may change it in place if it is used nowhere else. `wanted` is the
    /// type that the engine has for it: lengths, and numbers with a scale, cross as plain numbers.
    pub(super) fn into_engine(self, wanted: tract::DatumType) -> TractResult<tract::TValue> {
        let own = self.0.datum_type();
        if wanted != own && wanted.unquantized() == own {
            let mut tensor = tract::Tensor::zero_dt(wanted, self.0.shape())?;
            tensor.as_bytes_mut().copy_from_slice(self.0.as_bytes());
            return Ok(tensor.into_tvalue());
        }
        if let (tract::DatumType::I64, tract::DatumType::TDim) = (own, wanted) {
            let mut tensor = tract::Tensor::zero::<TDim>(self.0.shape())?;
            for (dim, number) in tensor.as_slice_mut::<TDim>()?.iter_mut().zip(self.0.as_slice::<i64>()?) {
                *dim = number.to_dim();
            }
            return Ok(tensor.into_tvalue());
        }
        Ok(match Arc::try_unwrap(self.0) {
            Ok(tensor) => tract::TValue::Var(Rc::new(tensor)),
            Err(shared) => tract::TValue::Const(shared),
        })
    }
}

/// Returns the values of lengths.
///
/// # Errors
/// A symbol has no value.
fn whole_numbers(tensor: &tract::Tensor, symbols: &SymbolValues) -> TractResult<tract::Tensor> {
    let mut numbers = tract::Tensor::zero::<i64>(tensor.shape())?;
    for (number, dim) in numbers.as_slice_mut::<i64>()?.iter_mut().zip(tensor.as_slice::<TDim>()?) {
        *number = dim.eval(symbols).to_i64()?;
    }
    Ok(numbers)
}

impl Value for ModelValue {
    fn share(&self) -> Result<Tensor, KernelError> {
        let spec = self.spec()?;
        match spec.dtype() {
            Dtype::String => {
                Ok(Tensor::from_strings(*spec.shape(), self.0.as_slice::<String>()?.iter().cloned())?)
            }
            _ => Ok(Tensor::from_bytes(spec, Bytes::from_owner(Owner(Arc::clone(&self.0))))?),
        }
    }

    fn filled(
        spec: &TensorSpec,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), KernelError>,
    ) -> Result<Self, KernelError> {
        let datum =
            datum(spec.dtype()).ok_or_else(|| format!("the engine has no tensors of {}", spec.dtype()))?;
        let dims: Vec<usize> = spec.shape().dims().iter().map(|length| *length as usize).collect();
        if datum == tract::DatumType::Bool {
            // Any byte may arrive, and a `bool` is 0 or 1.
            let mut bytes = vec![0; dims.iter().product()];
            fill(&mut bytes)?;
            let bools: Vec<bool> = bytes.into_iter().map(|byte| byte != 0).collect();
            return Ok(Self(Arc::new(tract::Tensor::from_shape(&dims, &bools)?)));
        }
        // The engine's only way to a tensor without zeros is unsafe.
        let mut tensor = tract::Tensor::zero_dt(datum, &dims)?;
        fill(tensor.as_bytes_mut())?;
        Ok(Self(Arc::new(tensor)))
    }

    fn hosted(spec: &TensorSpec, pool: &RegionPool) -> Result<Option<Hosted<Self>>, KernelError> {
        // A bool has to be checked.
        let Some(datum) = datum(spec.dtype()).filter(|datum| *datum != tract::DatumType::Bool) else {
            return Ok(None);
        };
        let dims: Vec<usize> = spec.shape().dims().iter().map(|length| *length as usize).collect();
        let Some((memory, tensor)) = HostedTensor::new(pool, datum, &dims)? else { return Ok(None) };
        let finish = |region| {
            let tensor = tensor.with_content(region).map_err(|_| "the content is in other memory")?;
            Ok(Self(Arc::new(tensor)))
        };
        Ok(Some(Hosted { memory, finish: Box::new(finish) }))
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

/// Returns the type of elements as others see them, or `None` if the engine's type is private to it. Lengths are
/// whole numbers to others, and a number with a scale is its number.
pub(super) fn dtype(datum: tract::DatumType) -> Option<Dtype> {
    match datum.unquantized() {
        tract::DatumType::TDim => Some(Dtype::I64),
        tract::DatumType::String => Some(Dtype::String),
        datum => TYPES.iter().find(|(known, _)| *known == datum).map(|(_, dtype)| *dtype),
    }
}

fn datum(dtype: Dtype) -> Option<tract::DatumType> {
    TYPES.iter().find(|(_, known)| *known == dtype).map(|(datum, _)| *datum)
}
