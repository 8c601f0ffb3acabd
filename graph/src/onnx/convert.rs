//! From the engine's graph to a topology.

use std::collections::{BTreeSet, HashMap};

use tract_onnx::prelude::*;
use tract_onnx::tract_core::internal::{SymbolValues, TractErrorContext as _, solve_for};
use tract_onnx::tract_core::ops::Cost;
use tract_onnx::tract_core::ops::konst::Const;

use super::value::dtype;
use crate::dataflow::{self, Dim, NodeId, Outlet, Role, Topology};
use tonic_rdma_tensor::Dtype;

/// Makes the topology of the engine's graph, and returns it with the engine's number of each node.
///
/// The order of the nodes follows from the edges alone: the inputs of the model, then each node after its inputs, first input first.
/// So it does not depend on the numbers of the engine, which numbers nodes as its optimiser made them.
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

/// Returns outputs of other nodes that a node needs besides its inputs: they determine symbols in its outputs that its inputs do not
/// determine. Such a node is, for example, one that repeats a constant once for each picture of a batch.
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
        // Nodes on the way to a result, each with the number of its next input. A deep model would fill the stack of a recursion.
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

/// Tells what the engine knows of a tensor. A type that is private to the engine becomes a string of bytes: it never crosses.
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

/// Estimates the work of a node: multiply-adds as the engine counts them, and one for each element of the outputs. Each symbol counts
/// as 1.
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
