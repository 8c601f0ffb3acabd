//! Inputs, and the whole model in one process.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use fastrand::Rng;
use tonic_rdma_tensor::{Dtype, Shape, TensorSpec};
use tract_onnx::prelude::*;
use tract_onnx::tract_core::internal::SymbolValues;
use tract_onnx::tract_core::plan;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::kernel::{guarded, lengths};
use super::{Model, ModelValue};
use crate::dataflow::{KernelError, NodeId, Outlet, Role, Value};
use crate::error::GraphError;

impl Model {
    pub(super) fn inputs_symbols(&self) -> Vec<String> {
        let facts = self.engine.inputs.iter().filter_map(|input| self.engine.outlet_fact(*input).ok());
        let symbols: BTreeSet<String> = facts
            .flat_map(|fact| fact.shape.iter().flat_map(|dim| dim.symbols()))
            .map(|symbol| symbol.to_string())
            .collect();
        symbols.into_iter().collect()
    }

    /// Makes random inputs of a step: numbers from -1 to 1, or small whole numbers. They depend on `seed`, on `step` and on the name
    /// of the input. `lengths` gives the length of each symbol.
    ///
    /// # Errors
    /// `lengths` lacks a symbol, or the engine has no random numbers for the type of an input.
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
            let wrong = |reason: String| GraphError::Node { node: node.name.clone(), reason };
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
        let wrong = |reason: String| GraphError::Model { path: self.path.clone(), reason };
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
            let name = &self.engine.nodes[input.node].name;
            let value = fed.get(&input.node).ok_or_else(|| wrong(format!("the input {name} is missing")))?;
            feeds.push(ModelValue::clone(value).into_engine());
        }
        let values = guarded(|| self.run(feeds, &outlets)).map_err(|error| wrong(error.to_string()))?;
        let values: HashMap<_, _> =
            values.into_iter().map(|(outlet, value)| (outlet, ModelValue::from_engine(value))).collect();
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
    ) -> TractResult<HashMap<Outlet, TValue>> {
        let mut values = HashMap::new();
        for (engine, outlet) in wanted {
            // The engine's executor does not run constants.
            if let Some(constant) = &self.engine.outlet_fact(*engine)?.konst {
                values.insert(*outlet, TValue::Const(Arc::clone(constant)));
            }
        }
        let plan = SimplePlan::new(Arc::clone(&self.engine))?;
        let mut state = SimpleState::new(plan)?;
        state.run_plan_with_eval(feeds, |session, state, node, inputs| {
            lengths(&session.resolved_symbols, node)?;
            let outputs = plan::eval(session, state, node, inputs)?;
            for (slot, output) in outputs.iter().enumerate() {
                if let Some(outlet) = wanted.get(&OutletId::new(node.id, slot)) {
                    // A copy, so that the engine may change the original in place as it would without this run's question.
                    values.insert(*outlet, TValue::from(Tensor::clone(output)));
                }
            }
            TractResult::Ok(outputs)
        })?;
        Ok(values)
    }
}

fn random_value(dtype: Dtype, dims: &[u64], mut random: Rng) -> Result<ModelValue, KernelError> {
    let spec = TensorSpec::new(dtype, Shape::new(dims)?)?;
    let size = dtype.size().ok_or("strings can't be inputs")?;
    ModelValue::filled(&spec, &mut |bytes| {
        for element in bytes.chunks_exact_mut(size) {
            match dtype {
                Dtype::F32 => element.copy_from_slice(&(2.0 * random.f32() - 1.0).to_ne_bytes()),
                Dtype::F64 => element.copy_from_slice(&(2.0 * random.f64() - 1.0).to_ne_bytes()),
                Dtype::F16 => element.copy_from_slice(&half(&mut random).to_ne_bytes()),
                Dtype::Bool => element.fill(random.u8(0..2)),
                // Whole numbers from 0 to 7. This works as long as the machine is little-endian, which the engine's kernels are for.
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
